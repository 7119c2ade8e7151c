"""The few collectives behind `RankContext`, each a no-op in a world of one."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ddpsafe._errors import ConfigError, Explanation, MismatchError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ddpsafe._world import World

    Reducible = float | torch.Tensor | Mapping[str, float | torch.Tensor]

T = TypeVar("T")


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


def unwrap(model: nn.Module) -> nn.Module:
    """Return what is inside DDP and `torch.compile` wrappers."""
    from torch import nn

    while True:
        inner: nn.Module | None
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        else:
            inner = getattr(model, "_orig_mod", None)  # what torch.compile wraps
        if inner is None:
            return model
        model = inner


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
    _require_same_form(x, device)
    return _mean(x, weight, device)


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
    dist.all_reduce(total)
    if total[-1] == 0:
        msg = "reduce_mean: the weights of all ranks sum to zero; pass the number of samples."
        raise ValueError(msg)
    mean = (total[:-1] / total[-1]).reshape(values.shape)
    if not isinstance(x, torch.Tensor):
        return mean.item()
    return mean.to(device=values.device, dtype=values.dtype)


def _require_same_form(x: Reducible, device: torch.device) -> None:
    """Compare keys and shapes first: others would be other collectives, a hang or a wrong mean."""
    import torch
    import torch.distributed as dist

    form = _form_of(x)
    digest = zlib.crc32(form.encode())
    highest = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    most, least = highest.tolist()
    if most != -least:
        what = f"reduce_mean: the ranks passed different keys or shapes; this one has {form}."
        cause = "the ranks computed different metrics, or one of them is in another collective."
        fix = "pass the same keys and shapes on every rank, in the same order of calls."
        raise MismatchError(Explanation(what, cause=cause, fix=fix))


def _form_of(x: Reducible) -> str:
    import torch

    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{str(key)!r}: {_form_of(x[key])}" for key in sorted(x)) + "}"
    if isinstance(x, torch.Tensor) and x.numel() != 1:
        return f"shape {list(x.shape)}"
    return "one number"


def gather(obj: T) -> list[T]:
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
