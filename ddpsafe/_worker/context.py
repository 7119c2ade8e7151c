"""`RankContext`: what the user's function knows and can do in its rank."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TextIO, TypeVar, cast, overload

from ddpsafe._clock import Deadline
from ddpsafe._errors import BarrierTimeoutError, Explanation, RankRaisedError, ranks_text
from ddpsafe._wire.exception_facts import clip, text_of
from ddpsafe._worker import collectives, pending_exception, stop_agreement
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
    from ddpsafe._worker.collectives import ReduceOp
    from ddpsafe._worker.store_sync import Control, Departure
    from ddpsafe._world import World
    from ddpsafe.data import DataLoader


def barrier_timeout_error(
    context: RankContext, label: str, missing: list[int], deadline: Deadline
) -> BarrierTimeoutError:
    """Return the error of a wait that ended without all ranks.

    Args:
        context: The rank that waited.
        label: What the ranks met for.
        missing: The ranks that did not come.
        deadline: How long it was waited.
    """
    waited_s = deadline.waited_s()
    names = ranks_text(missing)
    what = (
        f"{context.world} waited {waited_s:.1f} s at the barrier {label!r} "
        f"in attempt {context.attempt}: {names} did not come."
    )
    departure = None if context.control is None else context.control.departure()
    if departure is None:
        verb = "is slower, hangs," if len(missing) == 1 else "are slower, hang,"
        cause = f"{names} {verb} or took another branch of the script."
        fix = "let every rank call the same barriers in the same order, or raise timeouts.barrier."
    else:
        cause, fix = _after_departure(departure)
    return BarrierTimeoutError(
        Explanation(what, cause=cause, fix=fix),
        waited_s=waited_s,
        missing_ranks=missing,
        attempt=context.attempt,
    )


def peer_failure_line(departure: Departure) -> str:
    """Say in a line which rank failed first, for a rank that fails because of it."""
    if departure.origin in ("peer-lost", "timeout"):
        return f"rank {departure.rank} failed before, because of another rank: {departure.error}"
    return f"rank {departure.rank} failed first: {departure.error}"


def peer_failed_error(context: RankContext, departure: Departure) -> RankRaisedError:
    """Return the error for a rank that returned although the job failed."""
    what = f"{peer_failure_line(departure)} ({context.world} itself had returned)."
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
    """Say why a rank that has failed did not come, and where to look."""
    rank, origin, error, _ = departure
    if origin not in ("peer-lost", "timeout"):
        cause = f"rank {rank} has failed: {error}"
        fix = f"look at rank {rank}'s own error; this one only follows from it."
        return cause, fix
    # A rank that is killed cannot report: the first report comes from one that was in touch with it.
    what = "lost" if origin == "peer-lost" else "waited without success for"
    cause = f"rank {rank} has failed as well, since it {what} another rank: {error}"
    fix = "find the rank whose output ends without such an error; the others only follow from it."
    return cause, fix


_MAX_MESSAGE: Final = 1_000


@contextlib.contextmanager
def following(context: RankContext, *, local: bool) -> Iterator[None]:
    """Run the body in the leading rank first; see `RankContext.rank_zero_first`."""
    control = context.control
    if control is None:
        collectives.require_group(context.world)
        yield
        return
    name = f"rank-zero-first/{context.node_rank if local else 'all'}"
    leads = context.is_local_main if local else context.is_main
    if not leads:
        # torchrun, Slurm's default and we number ranks node by node.
        leader = context.rank - context.local_rank if local else 0
        deadline = Deadline.after(context.barrier_timeout)
        came, failure = control.result_of(name, deadline=deadline)
        if not came:
            raise barrier_timeout_error(context, "rank_zero_first", [leader], deadline)
        if failure is not None:
            failed = failure.rank
            what = f"rank {failed} failed in rank_zero_first: {failure.error} (seen by {context.world})."
            fix = f"see the error of rank {failed} itself; this rank only waited for it."
            error = RankRaisedError(
                Explanation(what, cause=f"the error of rank {failed} above.", fix=fix),
                rank=failed,
                local_rank=0,
                hostname="",
                attempt=context.attempt,
            )
            error.origin = "peer-lost"
            raise error
        yield
        return
    try:
        yield
    except BaseException as exc:
        control.publish(name, f"{type(exc).__name__}: {clip(text_of(exc), _MAX_MESSAGE)}")
        raise
    control.publish(name, None)


P = ParamSpec("P")
M = TypeVar("M", bound="nn.Module")
T = TypeVar("T")
X = TypeVar("X", bound="float | torch.Tensor | Mapping[str, float | torch.Tensor]")


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """One rank's place in the job, and what ranks do together.

    Every method that talks to other ranks has to be called by all of them, in the same order. It
    is a no-op that returns its argument in a world of one, and a `ConfigError` in a rank of more
    that has no process group yet.

    Attributes:
        world: Ranks and sizes, see the properties.
        device: The rank's device; the current one where it is a GPU.
        backend: Backend of the process group, e.g. ``gloo``.
        attempt: This attempt, counted from 1.
        run_dir: Where the launch keeps its logs; ``None`` when ddpsafe did not launch it.
        barrier_timeout: Default deadline of `barrier` and of `rank_zero_first`.
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
            model: The model, on any device. On a GPU it is moved in place, as ``model.to`` does.
            sync_batchnorm: Convert BatchNorm layers to SyncBatchNorm. It needs GPUs; on the CPU
                the layers stay as they are.
            **ddp_kwargs: Passed to ``torch.nn.parallel.DistributedDataParallel``.

        Returns:
            The wrapped model; the model itself where it has nothing to train. For a type checker
            it is what `model` is, so that calls are checked; its own methods and attributes
            are on ``ctx.unwrap(wrapped)``.
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
        """Wait until every rank has come here; the CPU waits, no collective is queued.

        Args:
            name: What ranks meet for; shown when one is missing.
            timeout: How long to wait: a timedelta, a number of seconds, or a text such as
                ``"5min"``; the launch's ``timeouts.barrier`` by default.

        Raises:
            ConfigError: `timeout` is not a duration.
            BarrierTimeoutError: On every rank that waited, naming the ranks that did not come.
        """
        limit = self.barrier_timeout
        if timeout is not None:
            from ddpsafe._config.durations import require_wait  # pydantic, which few ranks need

            limit = require_wait(timeout, name="barrier(timeout=…)")
        if self.control is None:
            collectives.require_group(self.world)
            return
        deadline = Deadline.after(limit)
        label = name or "barrier"
        with pending_exception.waiting():
            missing = self.control.barrier(f"barrier/{label}", deadline=deadline)
        if missing:
            raise barrier_timeout_error(self, label, missing, deadline)

    @overload
    def rank_zero_first(self, /, *, local: bool = False) -> AbstractContextManager[None]: ...

    @overload
    def rank_zero_first(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    def rank_zero_first(  # type: ignore[misc]  # a `local` of the function's own is taken by us
        self,
        fn: Any = None,
        /,
        *args: Any,
        local: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Let rank 0 go first, e.g. to download, and the others follow when it is done.

        As a context, ``with ctx.rank_zero_first(): …``; as a call,
        ``ctx.rank_zero_first(download, url)``, which returns each rank's own result.

        Args:
            fn: The function of the call form.
            *args: Its arguments.
            local: Let local rank 0 of every node go first; for a disk that nodes do not share.
            **kwargs: Its keyword arguments.

        Raises:
            RankRaisedError: On the other ranks, when rank 0 failed; they do not wait for it.
            BarrierTimeoutError: Rank 0 did not come within the barrier's timeout.
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
        """Print on rank 0 only; same arguments as Python's ``print``, but flushes by default."""
        if self.is_main:
            stream = sys.stdout if file is None else file
            stream.write((" " if sep is None else sep).join(map(str, values)))
            stream.write("\n" if end is None else end)
            if flush:
                stream.flush()

    def reduce_mean(self, x: X, weight: float | None = None) -> X:
        """Average over ranks, never in place; a small all-reduce compares keys and shapes first.

        Args:
            x: A number, a tensor (any shape, floating dtype; the result keeps both), or a dict of
                them; keys and shapes are the same on every rank.
            weight: This rank's share, e.g. its number of samples: a mean of means over ranks
                with different counts is wrong without it.

        Returns:
            The mean, of the type of `x`, the same on every rank.

        Raises:
            ConfigError: `x` or `weight` is not such a value.
            MismatchError: The ranks passed different keys or shapes.
            ValueError: The weights sum to zero.
        """
        collectives.require_group(self.world)
        with pending_exception.waiting():
            return cast("X", collectives.reduce_mean(x, weight, self.device))

    def all_reduce(self, x: X, op: ReduceOp = "sum") -> X:
        """Reduce over ranks, never in place; a small all-reduce compares keys and shapes first.

        Args:
            x: A number, a tensor (any shape; the result keeps its dtype), or a dict of them; keys
                and shapes are the same on every rank.
            op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"product"``.

        Returns:
            The result, of the type of `x`, the same on every rank. The mean of integers is a
            float; a tensor of integers is refused. The sum of booleans is their number.

        Raises:
            ConfigError: There is no such operation, `x` is not such a value, or it is of a dtype
                that the operation does not fit.
            MismatchError: The ranks passed different keys, shapes or operations.
        """
        collectives.require_group(self.world)
        with pending_exception.waiting():
            return cast("X", collectives.all_reduce(x, op, self.device))

    def all_gather(self, obj: T) -> list[T]:
        """Return every rank's object, by rank, on every rank.

        Objects travel by pickle between the ranks, as ``torch.distributed.all_gather_object``
        does it.

        Raises:
            ConfigError: This rank's object cannot be pickled; it says which part of it.
        """
        collectives.require_group(self.world)
        return collectives.all_gather(obj)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return rank `src`'s object on every rank (pickle, as `all_gather`).

        Raises:
            ConfigError: There is no such rank, or its object cannot be pickled.
        """
        collectives.require_group(self.world)
        return collectives.broadcast(obj, src, self.device)

    def loader(
        self, dataset: Dataset[T], *, batch_size: int | None = 1, train: bool = True, **options: Any
    ) -> DataLoader[T]:
        """Make this rank's loader of a dataset: sampler, seeds, workers, and a check of the data.

        Args:
            dataset: The same on every rank, or every rank raises.
            batch_size: Samples per batch of one rank.
            train: ``True`` shuffles; ``False`` reads each sample exactly once, for evaluation.
            **options: ``shuffle``, ``seed``, ``check`` (compare the dataset over the ranks, keep its
                fingerprint in the state), and those of `ddpsafe.data.DataLoader`.
        """
        from ddpsafe.data._loader.build import build_loader

        collectives.require_group(self.world)
        return build_loader(dataset, batch_size=batch_size, train=train, **options)

    def stop_requested(self) -> bool:
        """Tell whether the job was asked to stop; all ranks get the same answer at the same call.

        SIGTERM or SIGUSR1, to the launcher or to any rank, is such a request. Ranks that have
        called this are given ``timeouts.stop`` to save and return; a job that never calls it is
        ended at once.

        Costs about a microsecond: no collective, no word with the store. Ask in every step.

        Raises:
            BarrierTimeoutError: A request came, and some ranks could not be asked for their part.
        """
        collectives.require_group(self.world)
        stop = stop_agreement.find_current()
        if stop is None:
            return False
        try:
            return stop.answer()
        except NoAgreementError as error:
            missing = stop.missing()
            raise barrier_timeout_error(self, "stop_requested", missing, error.deadline) from None
