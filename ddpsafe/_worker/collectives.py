"""The collectives behind `RankContext`, each a no-op if the group has one rank."""

from __future__ import annotations

import contextlib
import difflib
import math
import numbers
import pickle
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast, get_args

from ddpsafe._errors import ConfigError, Explanation, MismatchError
from ddpsafe._garbage import exempt_from_gc
from ddpsafe._torch_private import uncompiled
from ddpsafe._wire.exception_facts import clip
from ddpsafe._wire.payload import find_unpicklable
from ddpsafe._worker import environment, model_check, torch_hooks

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from ddpsafe._world import World

    Reducible = float | torch.Tensor | Mapping[str, float | torch.Tensor]

M = TypeVar("M", bound="nn.Module")
T = TypeVar("T")

ReduceOp = Literal["sum", "mean", "min", "max", "product"]
"""The operations of `RankContext.all_reduce`."""

_SHOWN_CHARS: Final = 80


def wrap(
    model: nn.Module, device: torch.device, *, sync_batchnorm: bool, ddp_kwargs: Mapping[str, Any]
) -> nn.Module:
    """Move to the device, convert BatchNorm on request, compare over the ranks, and wrap in DDP."""
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
    torch_hooks.before_ddp(prepare_ddp)  # under another launcher, the first time
    with exempt_from_gc(after_script=True):  # DDP imports torch._dynamo
        return nn.parallel.DistributedDataParallel(model, **options)


def prepare_ddp(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Compare a model over the ranks before DDP copies it, and let the ranks' random numbers differ."""
    model_check.check_before_ddp(module, options)
    # Ranks outside of DDP's group may hold parts of one model, and need the same numbers.
    if options.get("process_group") is None and options.get("device_mesh") is None:
        environment.seed_apart()


def unwrap(model: M) -> M:
    """Return the module inside DDP and `torch.compile` wrappers."""
    from torch import nn

    module: nn.Module = model
    while True:
        inner: nn.Module | None
        if isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        else:
            inner = uncompiled(module)
        if inner is None:
            return cast("M", module)
        module = inner


def require_group(world: World) -> None:
    """Check that this rank can reach its peers; without a group, it would act as if it were alone.

    Raises:
        ConfigError: The world has several ranks, and there is no process group.
    """
    import torch.distributed as dist

    if world.world_size > 1 and not dist.is_initialized():
        what = f"{world} has no process group yet."
        cause = "a method that communicates was called before setup() or after cleanup()."
        fix = "call it inside ddpsafe.process_group(), or between setup() and cleanup()."
        raise ConfigError(Explanation(what, cause=cause, fix=fix))


def group_size() -> int:
    """Return the size of the default group; 1 without a group."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def reduce_mean(x: Reducible, weight: float | None, device: torch.device) -> object:
    """Average a number, a tensor or a dict over the ranks; see `RankContext.reduce_mean`."""
    values = _require_values(x, "reduce_mean")
    share = 1.0
    if weight is not None:
        try:
            share = float(weight)
        except (TypeError, ValueError):
            share = math.nan
        if not 0 <= share < math.inf:
            weight_text = clip(repr(weight), _SHOWN_CHARS)
            what = f"reduce_mean(weight={weight_text}): the weight is not a finite number >= 0."
            fix = "pass this rank's number of samples."
            raise ConfigError(Explanation(what, cause="the weight that this rank passed.", fix=fix))
    if group_size() == 1:
        return values
    _require_same_form(values, device, call="reduce_mean")
    return _mean(values, share, device)


def all_reduce(x: Reducible, op: ReduceOp, device: torch.device) -> object:
    """Reduce a number, a tensor or a dict over the ranks; see `RankContext.all_reduce`."""
    if op not in get_args(ReduceOp):
        names = get_args(ReduceOp)
        name = str(op).rpartition(".")[2].lower()  # also "AVG" of torch's ReduceOp.AVG
        near = (
            [_OTHER_NAMES[name]] if name in _OTHER_NAMES else difflib.get_close_matches(name, names)
        )
        choice = f"one of {', '.join(map(repr, names))}"
        fix = f"did you mean {near[0]!r}? Write {choice}." if near else f"write {choice}."
        what = f"all_reduce(op={op!r}): there is no such operation."
        raise ConfigError(Explanation(what, cause="a typo, or a name of torch or numpy.", fix=fix))
    values = _require_values(x, "all_reduce", op)
    has_float = _require_same_form(values, device, call="all_reduce", op=op)
    return _reduced(values, op, device, has_float=has_float)


_OTHER_NAMES: Final = {
    "avg": "mean",
    "average": "mean",
    "add": "sum",
    "prod": "product",
    "mul": "product",
    "minimum": "min",
    "maximum": "max",
}


def _require_values(x: Any, call: str, op: str = "", path: str = "x") -> Any:
    """Return `x` ready to reduce: numbers of other libraries as Python numbers, dicts sorted by key.

    Anything else is refused here, on the rank that passed it and before any rank waits for it.

    Raises:
        ConfigError: `x` cannot be reduced; the error names the value, and its place in a dict.
    """
    import torch

    if isinstance(x, Mapping):
        try:
            keys = sorted(x)
        except TypeError as exc:
            fix = "use one type of key, such as str."
            raise _not_reducible(call, path, x, "its keys have no order", fix) from exc
        return {key: _require_values(x[key], call, op, f"{path}[{key!r}]") for key in keys}
    if not isinstance(x, torch.Tensor):
        number = x.item() if getattr(x, "ndim", None) == 0 else x  # numpy's; booleans stay booleans
        if not isinstance(number, (int, float, numbers.Real)):
            why = "it is not a number, a tensor or a dict of them"
            fix = "pass torch.as_tensor(x), or gather objects with ddpsafe.current().all_gather(x)."
            raise _not_reducible(call, path, x, why, fix)
        number = number if isinstance(number, (int, float)) else float(number)
        share = group_size() if op == "sum" else 1
        if isinstance(number, int) and abs(number) >= 2**63 // share:
            why = f"reduced over {group_size()} ranks, it may not fit 64 bits"
            fix = "pass a float, or gather the numbers: sum(ddpsafe.current().all_gather(x))."
            raise _not_reducible(call, path, x, why, fix)
        return number
    if x.is_complex():
        why, fix = "complex numbers are not supported", "pass torch.view_as_real(x)."
    elif x.layout != torch.strided:
        why, fix = f"its layout is {x.layout}", "pass x.to_dense()."
    elif x.device.type == "meta":
        why, fix = "it is on device 'meta', without values", "pass a tensor that has values."
    elif op == "mean" and not x.is_floating_point():
        why, fix = f"its mean cannot be of dtype {x.dtype}", "pass x.double()."
    else:
        return x
    raise _not_reducible(call, path, x, why, fix)


def _not_reducible(call: str, path: str, x: object, why: str, fix: str) -> ConfigError:
    import torch

    value_text = (
        f"a tensor of {x.dtype}" if isinstance(x, torch.Tensor) else clip(repr(x), _SHOWN_CHARS)
    )
    what = f"{call}: {path} is {value_text}, of type {type(x).__qualname__}, and {why}."
    cause = f"{call} takes numbers, dense real tensors, and dicts of them."
    return ConfigError(Explanation(what, cause=cause, fix=fix))


def _reduced(x: Reducible, op: ReduceOp, device: torch.device, *, has_float: bool) -> object:
    import torch
    import torch.distributed as dist

    if isinstance(x, Mapping):
        return {key: _reduced(x[key], op, device, has_float=has_float) for key in sorted(x)}
    if op == "mean":
        return _mean(x, 1.0, device)
    is_tensor = isinstance(x, torch.Tensor)
    widest = torch.int64 if isinstance(x, int) else torch.float64
    values = (
        x.detach() if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=widest, device="cpu")
    )
    # 64 bits, so that partial results do not overflow or lose precision; the result has the caller's
    # dtype again. All ranks must send the same dtype, but a number may be 0 on one and 0.5 on another.
    is_number = not is_tensor or values.numel() == 1
    is_float = values.is_floating_point() or (has_float and is_number)
    wide = torch.float64 if is_float else torch.int64
    total = values.to(device=device, dtype=wide, copy=True)
    if group_size() > 1:
        dist.all_reduce(total, op=getattr(dist.ReduceOp, op.upper()))
    if is_tensor:
        return total.to(device=values.device, dtype=values.dtype)
    result = total.item()
    if not isinstance(x, int) or not float(result).is_integer():
        return result
    is_truth = isinstance(x, bool) and op != "sum" and result in (0, 1)
    return bool(result) if is_truth else int(result)


def _mean(x: Reducible, share: float, device: torch.device) -> object:
    import torch
    import torch.distributed as dist

    if isinstance(x, Mapping):
        return {key: _mean(x[key], share, device) for key in sorted(x)}
    values = (
        x.detach()
        if isinstance(x, torch.Tensor)
        else torch.tensor(x, dtype=torch.float64, device="cpu")
    )
    if not values.is_floating_point():
        values = values.to(torch.float64)
    # float64, so that counts and sums are exact; the result has the caller's dtype again.
    total = torch.zeros(values.numel() + 1, dtype=torch.float64, device=values.device)
    total[-1] = share
    if share:  # with a weight of 0, values may be nan (the mean of no samples), and nan * 0 is nan
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
    """Compare keys and shapes over the ranks: with different ones they would hang, or reduce wrongly.

    Returns whether some rank passed a number that is a float.
    """
    import torch
    import torch.distributed as dist

    has_float = any(
        value.numel() == 1 and value.is_floating_point()
        if isinstance(value, torch.Tensor)
        else isinstance(value, float)
        for value in (x.values() if isinstance(x, Mapping) else [x])
    )
    if group_size() == 1:
        return has_float
    form = f"{_form_of(x, with_kind=bool(op))} for {op}" if op else _form_of(x, with_kind=False)
    digest = zlib.crc32(f"{call} {form}".encode())
    # MAX of the digest and of its negative: equal amounts only if all ranks have the same digest.
    highest = torch.tensor([digest, -digest, has_float], dtype=torch.int64, device=device)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    largest, negated_smallest, is_float = highest.tolist()
    if largest != -negated_smallest:
        what = f"{call}: the ranks passed different keys or shapes; this one has {form}."
        cause = "the ranks computed different metrics, or one of them is in another collective."
        fix = "pass the same keys and shapes on every rank, in the same order of calls."
        raise MismatchError(Explanation(what, cause=cause, fix=fix))
    return bool(is_float)


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
    """Return every rank's object, ordered by rank."""
    import torch.distributed as dist

    if group_size() == 1:
        return [obj]
    gathered: list[T] = [obj] * group_size()
    with _explained_pickling(obj, "all_gather"):
        dist.all_gather_object(gathered, obj)
    return gathered


def broadcast(obj: T, src: int, device: torch.device) -> T:
    """Return rank `src`'s object."""
    import torch.distributed as dist

    size = group_size()
    if not isinstance(cast("object", src), int) or src not in range(size):
        what = f"broadcast(src={src!r}): there is no such rank; world_size is {size}."
        fix = f"pass a rank from 0 to {size - 1}." if size > 1 else "pass src=0."
        raise ConfigError(Explanation(what, cause="ranks count from 0.", fix=fix))
    if size == 1:
        return obj
    box = [obj]
    with _explained_pickling(obj if dist.get_rank() == src else None, "broadcast"):
        dist.broadcast_object_list(box, src=src, device=device)
    return box[0]


@contextlib.contextmanager
def _explained_pickling(obj: object, call: str) -> Iterator[None]:
    """Explain an error of pickling this rank's object; torch pickles before any rank waits.

    Raises:
        ConfigError: The object cannot be pickled; the error names the part of it.
    """
    try:
        yield
    except Exception as exc:
        culprit = find_unpicklable(obj, "obj", dumps=pickle.dumps)
        if culprit is None:
            raise
        path, reason = culprit
        what = f"{call}: {path} cannot be pickled ({clip(str(reason), _SHOWN_CHARS)})."
        cause = "objects are sent to other ranks as pickles; lambdas, open files and locks cannot."
        fix = "pass plain data: numbers, strings, tensors, and dicts or lists of them."
        raise ConfigError(Explanation(what, cause=cause, fix=fix)) from exc
