"""`RankContext`'s methods as functions of the package, for code without a ``ctx``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, TextIO, TypeVar, overload

from ddpsafe._worker.collectives import unwrap
from ddpsafe._worker.environment import seed_all
from ddpsafe._worker.join.attached import current

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from ddpsafe._config.durations import DurationLike
    from ddpsafe._worker.collectives import ReduceOp


P = ParamSpec("P")
M = TypeVar("M", bound="nn.Module")
T = TypeVar("T")
X = TypeVar("X", bound="float | torch.Tensor | Mapping[str, float | torch.Tensor]")

__all__ = [
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "is_main",
    "print",
    "rank_zero_first",
    "reduce_mean",
    "seed_all",
    "stop_requested",
    "unwrap",
    "wrap",
]


def is_main() -> bool:
    """Return whether this is rank 0 of the job; true in a process that is not a rank."""
    return current().is_main


def wrap(model: M, *, sync_batchnorm: bool = False, **ddp_kwargs: object) -> M:
    """Do what `RankContext.wrap` does."""
    return current().wrap(model, sync_batchnorm=sync_batchnorm, **ddp_kwargs)


def barrier(name: str | None = None, timeout: DurationLike | None = None) -> None:
    """Do what `RankContext.barrier` does."""
    current().barrier(name, timeout)


@overload
def rank_zero_first(*, local: bool = False) -> AbstractContextManager[None]: ...


@overload
def rank_zero_first(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...


def rank_zero_first(fn: Callable[..., Any] | None = None, /, *args: Any, **kwargs: Any) -> Any:
    """Do what `RankContext.rank_zero_first` does."""
    if fn is None:
        return current().rank_zero_first(**kwargs)
    return current().rank_zero_first(fn, *args, **kwargs)


def print(  # noqa: A001 - ctx.print
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: TextIO | None = None,
    flush: bool = True,
) -> None:
    """Print on rank 0 only. Takes the arguments of Python's ``print``, but flushes by default."""
    current().print(*values, sep=sep, end=end, file=file, flush=flush)


def reduce_mean(x: X, weight: float | None = None) -> X:
    """Do what `RankContext.reduce_mean` does."""
    return current().reduce_mean(x, weight)


def all_reduce(x: X, op: ReduceOp = "sum") -> X:
    """Do what `RankContext.all_reduce` does."""
    return current().all_reduce(x, op)


def all_gather(obj: T) -> list[T]:
    """Do what `RankContext.all_gather` does."""
    return current().all_gather(obj)


def broadcast(obj: T, src: int = 0) -> T:
    """Do what `RankContext.broadcast` does."""
    return current().broadcast(obj, src)


def stop_requested() -> bool:
    """Do what `RankContext.stop_requested` does."""
    return current().stop_requested()
