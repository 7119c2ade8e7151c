"""The few collectives behind `RankContext`, each a no-op in a world of one."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from ddpsafe._errors import ConfigError, Explanation, MismatchError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ddpsafe._world import World

    Reducible = float | torch.Tensor | Mapping[str, float | torch.Tensor]

M = TypeVar("M", bound="nn.Module")
T = TypeVar("T")

ReduceOp = Literal["sum", "mean", "min", "max", "product"]
"""What `RankContext.all_reduce` can do with the ranks' values."""


def wrap(
    model: nn.Module,
    device: torch.device,
    *,
    sync_batchnorm: bool,
    ddp_kwargs: Mapping[str, Any],
) -> nn.Module:
    """Move to the device, convert BatchNorm on request, wrap in DDP where there is a group."""
    import torch.distributed as dist
    from torch import nn

    model = model.to(device)
    if not dist.is_initialized():
        return model
    if sync_batchnorm and device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    options: dict[str, Any] = {"device_ids": None if device.type == "cpu" else [device]}
    options.update(ddp_kwargs)
    return nn.parallel.DistributedDataParallel(model, **options)


def unwrap(model: M) -> M:
    """Return what is inside DDP and `torch.compile` wrappers."""
    from torch import nn

    found: nn.Module = model
    while True:
        inner: nn.Module | None
        if isinstance(found, nn.parallel.DistributedDataParallel):
            inner = found.module
        else:
            inner = getattr(found, "_orig_mod", None)  # what torch.compile wraps
        if inner is None:
            return cast("M", found)
        found = inner


def require_group(world: World) -> None:
    """Refuse to act as if alone in a rank that has peers but no group yet.

    Raises:
        ConfigError: The world has several ranks and no process group was made.
    """
    import torch.distributed as dist

    if world.world_size > 1 and not dist.is_initialized():
        what = f"{world} has no process group yet."
        cause = "a method that needs the other ranks was called before setup(), or after cleanup()."
        fix = "call it inside ddpsafe.process_group(), or between setup() and cleanup()."
        raise ConfigError(Explanation(what, cause=cause, fix=fix))


def group_size() -> int:
    """Return the size of the default group; 1 where there is none."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def reduce_mean(x: Reducible, weight: float | None, device: torch.device) -> object:
    """Average a number, a tensor or a dict over the ranks; see `RankContext.reduce_mean`."""
    if group_size() == 1:
        return dict(sorted(x.items())) if isinstance(x, Mapping) else x
    _require_same_form(x, device, call="reduce_mean")
    return _mean(x, weight, device)


def all_reduce(x: Reducible, op: ReduceOp, device: torch.device) -> object:
    """Reduce a number, a tensor or a dict over the ranks; see `RankContext.all_reduce`."""
    if op not in get_args(ReduceOp):
        what = f"all_reduce(op={op!r}): there is no such operation."
        names = ", ".join(map(repr, get_args(ReduceOp)))
        raise ConfigError(Explanation(what, cause="a typing error.", fix=f"write one of {names}."))
    _require_reducible(x, op)
    has_float = _require_same_form(x, device, call="all_reduce", op=op)
    return _reduced(x, op, device, has_float=has_float)


def _require_reducible(x: Reducible, op: ReduceOp) -> None:
    import torch

    for value in x.values() if isinstance(x, Mapping) else [x]:
        if not isinstance(value, torch.Tensor):
            share = group_size() if op == "sum" else 1
            if isinstance(value, int) and abs(value) >= 2**63 // share:
                what = (
                    f"all_reduce: {value} may not fit 64 bits, reduced over {group_size()} ranks."
                )
                fix = "pass a float, or gather the numbers: sum(ctx.all_gather(x))."
                raise ConfigError(Explanation(what, cause="the size of an integer.", fix=fix))
            continue
        if value.is_complex():
            what = "all_reduce: a complex tensor has no order, and backends differ in what they do."
            fix = "reduce torch.view_as_real(x)."
        elif op == "mean" and not value.is_floating_point():
            what = f"all_reduce(op='mean'): the mean of {value.dtype} is not of that dtype."
            fix = "pass x.double()."
        else:
            continue
        raise ConfigError(Explanation(what, cause="the dtype of a tensor.", fix=fix))


def _reduced(x: Reducible, op: ReduceOp, device: torch.device, *, has_float: bool) -> object:
    import torch
    import torch.distributed as dist

    if isinstance(x, Mapping):
        return {key: _reduced(x[key], op, device, has_float=has_float) for key in sorted(x)}
    if op == "mean":
        return _mean_of_tensor(x, None, device)
    is_tensor = isinstance(x, torch.Tensor)
    values = x.detach() if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=_wide(x))
    # Wide enough that no partial result overflows or rounds; given back in the caller's dtype. A
    # number may be 0 on one rank and 0.5 on another, and all ranks have to send one dtype.
    is_float = values.is_floating_point() or (has_float and _is_number(x))
    wide = torch.float64 if is_float else torch.int64
    total = values.to(device=device, dtype=wide, copy=True)
    if group_size() > 1:
        dist.all_reduce(total, op=getattr(dist.ReduceOp, op.upper()))
    if is_tensor:
        return total.to(device=values.device, dtype=values.dtype)
    result = total.item()
    return int(result) if isinstance(x, int) and float(result).is_integer() else result


def _wide(x: float) -> torch.dtype:
    import torch

    return torch.int64 if isinstance(x, int) else torch.float64


def _is_number(x: float | torch.Tensor) -> bool:
    """Tell whether ranks may pass an integer or a float in one place: a number of either kind."""
    import torch

    return not isinstance(x, torch.Tensor) or x.numel() == 1


def _mean(x: Reducible, weight: float | None, device: torch.device) -> object:
    if isinstance(x, Mapping):
        return {key: _mean(x[key], weight, device) for key in sorted(x)}
    return _mean_of_tensor(x, weight, device)


def _mean_of_tensor(x: float | torch.Tensor, weight: float | None, device: torch.device) -> object:
    import torch
    import torch.distributed as dist

    share = 1.0 if weight is None else float(weight)
    values = x.detach() if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float64)
    if not values.is_floating_point():
        values = values.to(torch.float64)
    # float64 carries counts and sums exactly; the result is given back in the caller's dtype.
    total = torch.zeros(values.numel() + 1, dtype=torch.float64, device=values.device)
    total[-1] = share
    if share:  # the mean of no samples is nan, and counts for nothing
        total[:-1] = values.to(torch.float64).flatten() * share
    total = total.to(device)
    if group_size() > 1:
        dist.all_reduce(total)
    if total[-1] == 0:
        msg = "reduce_mean: the weights of all ranks sum to zero; pass the number of samples."
        raise ValueError(msg)
    mean = (total[:-1] / total[-1]).reshape(values.shape)
    if not isinstance(x, torch.Tensor):
        return mean.item()
    return mean.to(device=values.device, dtype=values.dtype)


def _require_same_form(x: Reducible, device: torch.device, *, call: str, op: str = "") -> bool:
    """Compare keys and shapes first: others would be other collectives, a hang or a wrong mean.

    Returns:
        Whether a number is a float on some rank.
    """
    import torch
    import torch.distributed as dist

    has_float = any(_is_float(value) for value in (x.values() if isinstance(x, Mapping) else [x]))
    if group_size() == 1:
        return has_float
    form = f"{_form_of(x, with_kind=bool(op))} for {op}" if op else _form_of(x, with_kind=False)
    digest = zlib.crc32(f"{call} {form}".encode())
    highest = torch.tensor([digest, -digest, has_float], dtype=torch.int64, device=device)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    most, least, is_float = highest.tolist()
    if most != -least:
        what = f"{call}: the ranks passed different keys or shapes; this one has {form}."
        cause = "the ranks computed different metrics, or one of them is in another collective."
        fix = "pass the same keys and shapes on every rank, in the same order of calls."
        raise MismatchError(Explanation(what, cause=cause, fix=fix))
    return bool(is_float)


def _is_float(x: float | torch.Tensor) -> bool:
    import torch

    if isinstance(x, torch.Tensor):
        return x.numel() == 1 and x.is_floating_point()
    return isinstance(x, float)


def _form_of(x: Reducible, *, with_kind: bool) -> str:
    import torch

    if isinstance(x, Mapping):
        parts = (f"{str(key)!r}: {_form_of(x[key], with_kind=with_kind)}" for key in sorted(x))
        return "{" + ", ".join(parts) + "}"
    if isinstance(x, torch.Tensor) and x.numel() != 1:
        kind = " of integers" if with_kind and not x.is_floating_point() else ""
        return f"shape {list(x.shape)}{kind}"
    return "one number"


def all_gather(obj: T) -> list[T]:
    """Return every rank's object, by rank."""
    import torch.distributed as dist

    if group_size() == 1:
        return [obj]
    gathered: list[T] = [obj] * group_size()
    dist.all_gather_object(gathered, obj)
    return gathered


def broadcast(obj: T, src: int, device: torch.device) -> T:
    """Return rank `src`'s object."""
    import torch.distributed as dist

    if group_size() == 1:
        return obj
    box = [obj]
    dist.broadcast_object_list(box, src=src, device=device)
    return box[0]
