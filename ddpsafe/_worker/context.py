"""`RankContext`: the rank's place in the job, and the operations over all ranks."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TextIO, TypeVar, cast, overload

from ddpsafe._clock import Deadline
from ddpsafe._errors import Explanation, LaunchTimeoutError, RankRaisedError
from ddpsafe._job.agreement import RankGroup
from ddpsafe._text import ranks_text
from ddpsafe._wire.exception_facts import clip, text_of
from ddpsafe._worker import collectives, pending_exception
from ddpsafe._worker.rank import this_rank
from ddpsafe._worker.stop_agreement import NoAgreementError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from datetime import timedelta
    from pathlib import Path

    import torch
    from torch import nn
    from torch.utils.data import Dataset

    from ddpsafe._config.durations import DurationLike
    from ddpsafe._job.agreement import Absence
    from ddpsafe._job.control import Control, Departure
    from ddpsafe._worker.collectives import ReduceOp
    from ddpsafe._world import World
    from ddpsafe.data import DataLoader


def barrier_timeout_error(
    context: RankContext, label: str, missing: list[int], deadline: Deadline, *, lost: str = ""
) -> LaunchTimeoutError:
    """Return the error of a rank whose barrier ended before all ranks had reached it.

    `lost` says why the first missing rank will never reach it, if that is known.
    """
    waited_s = deadline.waited_s()
    names = ranks_text(missing)
    what = (
        f"{context.world} waited {waited_s:.1f} s at the barrier {label!r} "
        f"in attempt {context.attempt}: {names} did not reach it."
    )
    if context.rank in missing:
        what = (
            f"{context.world} reached the barrier {label!r} in attempt {context.attempt} only after the "
            f"others had given up: {names} did not reach it in time."
        )
    departure = None if context.control is None else context.control.departure()
    if departure is None and lost:
        cause = f"rank {missing[0]} is lost: {lost}"
        fix = f"look at the last lines of rank {missing[0]}'s output."
    elif departure is None:
        verb = "is slower, hangs," if len(missing) == 1 else "are slower, hang,"
        cause = f"{names} {verb} or took another branch of the script."
        fix = "let every rank call the same barriers in the same order, or raise timeouts.barrier."
    else:
        cause, fix = _after_departure(departure)
    return LaunchTimeoutError(
        Explanation(what, cause=cause, fix=fix),
        setting="barrier",
        waited_s=waited_s,
        missing_ranks=tuple(missing),
        attempt=context.attempt,
    )


def peer_failure_line(departure: Departure) -> str:
    """Return a line that names the rank that failed first, for a rank that fails because of it."""
    if departure.origin in ("peer-lost", "timeout"):
        return f"rank {departure.rank} failed earlier, because of another rank: {departure.error}"
    return f"rank {departure.rank} failed first: {departure.error}"


def peer_failed_error(context: RankContext, departure: Departure) -> RankRaisedError:
    """Return the error for a rank that itself returned, in a job that failed."""
    what = f"{peer_failure_line(departure)} ({context.world} itself returned)."
    cause, fix = _after_departure(departure)
    error = RankRaisedError(
        Explanation(what, cause=cause, fix=fix),
        rank=departure.rank,
        local_rank=0,
        hostname="",
        attempt=context.attempt,
    )
    error.origin = "peer-lost"
    return error


def _after_departure(departure: Departure) -> tuple[str, str]:
    """Return cause and fix for a wait for a rank that had failed."""
    rank, origin, error, _ = departure
    if origin not in ("peer-lost", "timeout"):
        cause = f"rank {rank} has failed: {error}"
        fix = f"look at rank {rank}'s own error; this one is only a consequence."
        return cause, fix
    # A killed rank reports nothing: the first report is of a rank that was connected to it.
    what = "lost" if origin == "peer-lost" else "waited without success for"
    cause = f"rank {rank} failed too, because it {what} another rank: {error}"
    fix = "find the rank whose output ends without such an error; the other errors follow from its end."
    return cause, fix


_MAX_MESSAGE: Final = 1_000


class _Followers(RankGroup):
    """The ranks that one of them precedes; see `RankContext.rank_zero_first`."""

    def __init__(self, context: RankContext, control: Control, *, local: bool) -> None:
        ranks = context.world.ranks_of_node if local else range(context.world_size)
        # By its leader: a launcher that numbers ranks in turns may give no node ranks.
        use = control.next_use(f"rank-zero-first/{ranks[0] if local else 'all'}")
        name, _, number = use.rpartition("/")
        super().__init__(control, name, context.world, ranks, first=int(number))
        self._attempt = context.attempt

    def as_own_error(self, error: BaseException) -> RankRaisedError:
        """Return the error of the other ranks for whatever the first one has raised."""
        return RankRaisedError(
            Explanation(
                f"rank_zero_first has failed with {type(error).__name__}: "
                f"{clip(text_of(error), _MAX_MESSAGE)}",
                cause=f"the error of rank {self.rank} above.",
                fix=f"see the error of rank {self.rank} itself; this rank only waited for it.",
            ),
            rank=self.rank,
            local_rank=0,
            hostname="",
            attempt=self._attempt,
        )


@contextlib.contextmanager
def following(context: RankContext, *, local: bool) -> Iterator[None]:
    """Run the body on the leading rank first, then on the others; see `RankContext.rank_zero_first`."""
    if context.control is None:
        collectives.require_group(context.world)
        yield
        return
    deadline = Deadline.after(context.barrier_timeout)

    def absence_error(absence: Absence) -> LaunchTimeoutError:
        return barrier_timeout_error(
            context, "rank_zero_first", absence.ranks, deadline, lost=absence.lost
        )

    group = _Followers(context, context.control, local=local)
    exchange = group.begin("rank_zero_first")
    if group.leads:
        with exchange.leading():
            yield
        return
    exchange.receive(deadline, absence_error)
    yield


P = ParamSpec("P")
M = TypeVar("M", bound="nn.Module")
T = TypeVar("T")
X = TypeVar("X", bound="float | torch.Tensor | Mapping[str, float | torch.Tensor]")


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """One rank's place in the job, and the operations over all ranks.

    All ranks must call every method that communicates, in the same order. With a world_size of 1 it is
    a no-op that returns its argument, `all_gather` in a list. In a larger world it raises
    `ConfigError` until the rank has a process group.

    Attributes:
        world: Ranks and sizes, see the properties.
        device: The rank's device. If it is a GPU, it is CUDA's current device.
        backend: Backend of the process group, e.g. ``gloo``.
        attempt: This attempt, counted from 1.
        run_dir: Where the launch keeps its logs; ``None`` if ddpsafe did not launch this rank.
        barrier_timeout: Default timeout of `barrier` and `rank_zero_first`.
    """

    world: World
    device: torch.device
    backend: str
    attempt: int
    run_dir: Path | None
    barrier_timeout: timedelta
    control: Control | None = field(repr=False)

    @property
    def rank(self) -> int:
        """This process among all processes of the job, from 0."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """This process among those of its node, from 0."""
        return self.world.local_rank

    @property
    def node_rank(self) -> int:
        """This node among all nodes, from 0."""
        return self.world.node_rank

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        return self.world.world_size

    @property
    def local_world_size(self) -> int:
        """Number of processes on this node."""
        return self.world.local_world_size

    @property
    def nnodes(self) -> int:
        """Number of nodes."""
        return self.world.nnodes

    @property
    def is_main(self) -> bool:
        """True on rank 0 of the job only: the one that saves and reports."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """True on local rank 0 of each node: the one that prepares the node's disk."""
        return self.local_rank == 0

    def wrap(self, model: M, *, sync_batchnorm: bool = False, **ddp_kwargs: object) -> M:
        """Move a model to the rank's device and wrap it in DistributedDataParallel.

        Args:
            model: The model, on any device; moved in place, as ``model.to`` does.
            sync_batchnorm: Convert BatchNorm layers to SyncBatchNorm, which works on GPUs only; on
                the CPU the layers stay as they are.
            **ddp_kwargs: Passed to ``torch.nn.parallel.DistributedDataParallel``.

        Returns:
            The wrapped model, or the model itself if none of its parameters requires a gradient.
            For type checkers it has the type of `model`, so that calls are checked. Use
            ``ctx.unwrap(wrapped)`` for the model's own methods and attributes.
        """
        collectives.require_group(self.world)
        wrapped = collectives.wrap(
            model, self.device, sync_batchnorm=sync_batchnorm, ddp_kwargs=ddp_kwargs
        )
        return cast("M", wrapped)

    def unwrap(self, model: M) -> M:
        """Return the model inside the DDP wrapper, for saving and for rank-0-only evaluation."""
        return collectives.unwrap(model)

    def barrier(self, name: str | None = None, timeout: DurationLike | None = None) -> None:
        """Wait until every rank has called this. The CPU waits; no collective is queued.

        Args:
            name: Name of the barrier; shown when a rank is missing.
            timeout: How long to wait: a timedelta, a number of seconds, or a string such as
                ``"5min"``. The default is the launch's ``timeouts.barrier``.

        Raises:
            ConfigError: `timeout` is not a duration.
            LaunchTimeoutError: On every rank that waited; it names the ranks that did not call this.
        """
        limit = self.barrier_timeout
        if timeout is not None:
            # Imports pydantic, which few ranks need.
            from ddpsafe._config.durations import require_wait

            limit = require_wait(timeout, name="barrier(timeout=…)")
        if self.control is None:
            collectives.require_group(self.world)
            return
        deadline = Deadline.after(limit)
        label = name or "barrier"
        # A wait with a limit of its own may be meant to run out.
        text = f"barrier {label!r}" if timeout is None else ""
        with pending_exception.waiting():
            missing = self.control.barrier(f"barrier/{label}", deadline=deadline, text=text)
        if missing:
            raise barrier_timeout_error(self, label, missing, deadline)

    @overload
    def rank_zero_first(self, /, *, local: bool = False) -> AbstractContextManager[None]: ...

    @overload
    def rank_zero_first(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    def rank_zero_first(  # type: ignore[misc]  # `local` is never passed on to `fn`
        self, fn: Any = None, /, *args: Any, local: bool = False, **kwargs: Any
    ) -> Any:
        """Run on rank 0 first, e.g. a download; the other ranks follow when it is done.

        As a context manager, ``with ctx.rank_zero_first(): …``; as a call,
        ``ctx.rank_zero_first(download, url)``, which returns each rank's own result.

        Args:
            fn: The function to call; leave it out to get the context manager.
            *args: Its arguments.
            local: Run on local rank 0 of every node first; for a disk that nodes do not share.
            **kwargs: Its keyword arguments.

        Raises:
            RankRaisedError: On the other ranks, as soon as rank 0 has failed.
            LaunchTimeoutError: Rank 0 was not done within ``timeouts.barrier``, or has ended.
        """
        if fn is None:
            return following(self, local=local)
        with following(self, local=local):
            return fn(*args, **kwargs)

    def print(
        self,
        *values: object,
        sep: str | None = " ",
        end: str | None = "\n",
        file: TextIO | None = None,
        flush: bool = True,
    ) -> None:
        """Print on rank 0 only. Takes the arguments of Python's ``print``, but flushes by default."""
        if self.is_main:
            stream = sys.stdout if file is None else file
            stream.write((" " if sep is None else sep).join(map(str, values)))
            stream.write("\n" if end is None else end)
            if flush:
                stream.flush()

    def reduce_mean(self, x: X, weight: float | None = None) -> X:
        """Average over ranks, never in place. A small all-reduce compares keys and shapes first.

        Args:
            x: A number, a tensor (any shape, floating dtype; the result keeps both), or a dict of
                them, with the same keys and shapes on every rank.
            weight: This rank's weight, e.g. its number of samples. Without it, the mean of the
                ranks' means is wrong if they have different numbers of samples.

        Returns:
            The mean, of the type of `x`, the same on every rank.

        Raises:
            ConfigError: `x` or `weight` is of another type, or `weight` is negative or not finite.
            MismatchError: The ranks passed different keys or shapes.
            ValueError: The weights sum to zero.
        """
        collectives.require_group(self.world)
        with pending_exception.waiting():
            return cast("X", collectives.reduce_mean(x, weight, self.device))

    def all_reduce(self, x: X, op: ReduceOp = "sum") -> X:
        """Reduce over ranks, never in place. A small all-reduce compares keys and shapes first.

        Args:
            x: A number, a tensor (any shape; the result keeps its dtype), or a dict of them, with the
                same keys and shapes on every rank.
            op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"product"``.

        Returns:
            The result, of the type of `x`, the same on every rank. The mean of integers is a
            float; for a tensor of integers, ``"mean"`` is refused. The sum of booleans is the number
            of true ones.

        Raises:
            ConfigError: There is no such operation, `x` is of another type, or the operation does
                not support its dtype.
            MismatchError: The ranks passed different keys, shapes or operations.
        """
        collectives.require_group(self.world)
        with pending_exception.waiting():
            return cast("X", collectives.all_reduce(x, op, self.device))

    def all_gather(self, obj: T) -> list[T]:
        """Return every rank's object, ordered by rank, on every rank.

        Objects are pickled, as by ``torch.distributed.all_gather_object``.

        Raises:
            ConfigError: This rank's object cannot be pickled; the error names the part of it.
        """
        collectives.require_group(self.world)
        return collectives.all_gather(obj)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return rank `src`'s object on every rank; pickled, as by `all_gather`.

        Raises:
            ConfigError: There is no such rank, or its object cannot be pickled.
        """
        collectives.require_group(self.world)
        return collectives.broadcast(obj, src, self.device)

    def loader(
        self, dataset: Dataset[T], *, batch_size: int | None = 1, train: bool = True, **options: Any
    ) -> DataLoader[T]:
        """Make this rank's data loader: sampler, seeds, workers, and a check of the dataset.

        Args:
            dataset: The dataset. If it differs between ranks, every rank raises.
            batch_size: Samples per batch and rank.
            train: ``True`` shuffles; ``False`` reads each sample exactly once, for evaluation.
            **options: ``shuffle``, ``seed``, ``check`` (compare the dataset between ranks, and keep
                its fingerprint in the state), and the options of `ddpsafe.data.DataLoader`.
        """
        from ddpsafe.data._loader.loader import build_loader

        collectives.require_group(self.world)
        return build_loader(dataset, batch_size=batch_size, train=train, **options)

    def stop_requested(self) -> bool:
        """Return whether the job should stop; the same call returns the same on all ranks.

        SIGTERM or SIGUSR1, to the launcher or to any rank, asks the job to stop. Ranks that have
        called this method then have ``timeouts.stop`` to save and return. A job that never calls it
        is ended at once.

        A call takes about a microsecond, with no collective and no access to the store: call it in
        every step.

        Raises:
            LaunchTimeoutError: The job should stop, but some ranks did not take part in agreeing on
                the call at which to do so.
        """
        collectives.require_group(self.world)
        stop = this_rank.stopping
        if stop is None:
            return False
        try:
            return stop.answer()
        except NoAgreementError as error:
            missing = stop.others.missing()
            raise barrier_timeout_error(self, "stop_requested", missing, error.deadline) from None
