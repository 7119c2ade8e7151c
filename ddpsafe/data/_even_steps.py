"""Loops in which ranks may have different numbers of batches, without a hang."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable

from ddpsafe._errors import Explanation, ranks_text
from ddpsafe.data._replica import has_group
from ddpsafe.data.errors import DataConfigError, UnevenStepsError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

logger = logging.getLogger(__name__)

T = TypeVar("T")
Policy = Literal["min", "dummy", "join", "error"]


class EvenSteps(Generic[T]):
    """What `even_steps` returns: iterate over it once per epoch.

    Attributes:
        weight: With ``policy="dummy"``: what to multiply this step's mean loss by, so that the
            gradient that DDP averages is the mean over all samples of all ranks. 1.0 otherwise.
        dropped: With ``policy="min"``: whether this rank had a batch left at the stop.
    """

    def __init__(
        self,
        loader: Iterable[T],
        *,
        policy: Policy,
        model: Joinable | None,
        size: Callable[[T], int],
        group: ProcessGroup | None,
    ) -> None:
        self.weight = 1.0
        self.dropped = False
        self._loader = loader
        self._policy: Policy = policy
        self._model = model
        self._size = size
        self._group = group

    def __iter__(self) -> Iterator[T]:
        self.weight, self.dropped = 1.0, False
        if not has_group() or dist.get_world_size(self._group) == 1:
            return iter(self._loader)
        if self._policy == "join":
            return self._joined()
        return self._agreed()

    def _joined(self) -> Iterator[T]:
        # torch shadows the collectives of ranks that ran out (torch.distributed.algorithms.Join).
        with Join([_require_model(self._model)]):
            yield from self._loader

    def _agreed(self) -> Iterator[T]:
        """Look one batch ahead, and ask whether every rank has one while the step runs."""
        source = iter(self._loader)
        last: T | None = None
        for step in itertools.count():
            try:
                batch, has_batch = next(source), True
            except StopIteration:
                batch, has_batch = None, False
            # Positions are equal on all ranks: each counts the steps, whatever it has fetched.
            getattr(source, "count_as_used", _ignore)(step)
            count = self._size(batch) if has_batch else -1  # type: ignore[arg-type]  # a batch
            own = torch.tensor([count], dtype=torch.int64)
            every = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
            # A group of its own: votes must not queue behind gradients, or wait for the device.
            if self._group is None:
                self._group = dist.new_group(backend="gloo")
            votes = _Votes(every, dist.all_gather(every, own, group=self._group, async_op=True))
            if step > 0:
                yield last  # type: ignore[misc]  # set by the step before
            counts = votes.counts()
            if not self._goes_on(counts, step):
                self.dropped = has_batch
                getattr(source, "finish", _ignore)()
                return
            last = batch if has_batch else last
            # The batch of the next step is decided; its weight holds while it is used.
            if self._policy == "dummy":
                total = sum(count for count in counts if count > 0)
                mine = max(0, counts[dist.get_rank(self._group)]) if has_batch else 0
                self.weight = len(counts) * mine / max(1, total)

    def _goes_on(self, counts: list[int], step: int) -> bool:
        finished = [rank for rank, count in enumerate(counts) if count < 0]
        if len(finished) in {0, len(counts)}:
            return not finished
        if self._policy == "dummy":
            if step == 0:
                have = "has" if len(finished) == 1 else "have"
                raise UnevenStepsError(
                    Explanation(
                        f"{ranks_text(finished)} (world_size {len(counts)}) {have} no batch at all "
                        "that could be repeated.",
                        cause="the dataset is smaller than the world, or its files are divided unevenly.",
                        fix="use fewer ranks, or policy='join'.",
                    ),
                    finished_ranks=finished,
                    step=0,
                )
            return True
        if self._policy == "error":
            raise UnevenStepsError(
                Explanation(
                    f"{ranks_text(finished)} (world_size {len(counts)}) ran out of batches after "
                    f"{step} steps; the others have more.",
                    cause="a stream or its files are divided unevenly, or drop_last differs.",
                    fix="policy='min' stops all ranks here, 'dummy' lets the others finish.",
                ),
                finished_ranks=finished,
                step=step,
            )
        logger.warning(
            "stopped after %d steps: %d of %d ranks have no further batch",
            step,
            len(finished),
            len(counts),
        )
        return False


class _Votes:
    """An answer that is under way: how many samples each rank has, -1 for no batch."""

    def __init__(self, every: list[torch.Tensor], work: Work | None) -> None:
        self._every = every
        self._work = work

    def counts(self) -> list[int]:
        if self._work is not None:
            self._work.wait()
        return [int(count) for count in self._every]


def even_steps(
    loader: Iterable[T],
    *,
    policy: Policy = "min",
    model: Joinable | None = None,
    size: Callable[[T], int] | None = None,
    group: ProcessGroup | None = None,
) -> EvenSteps[T]:
    """Make all ranks take equally many steps; needed only where their batches differ in number.

    Map-style datasets with `DistributedSampler` never need it. Every rank makes it, and
    iterates over it once per epoch.

    Args:
        loader: Where batches come from.
        policy: ``"min"`` stops all ranks when one runs out. ``"dummy"`` goes on until all have:
            a rank without a batch gets its last one again; multiply the loss by ``weight``.
            ``"join"`` lets torch's `Join` answer for ranks that ran out. ``"error"`` raises on
            every rank, naming who ran out.
        model: The DDP model, for ``policy="join"``.
        size: Number of samples of a batch, for ``policy="dummy"``; the length of its first
            tensor by default.
        group: A group with a CPU backend for the votes; one of its own by default.

    Raises:
        DataConfigError: The policy is unknown, or ``"join"`` without a model or with SyncBatchNorm.
    """
    if policy not in get_args(Policy):
        raise _bad(f"there is no policy {policy!r}", f"choose one of {get_args(Policy)}")
    if policy == "join":
        modules: Callable[[], Iterable[object]] = getattr(_require_model(model), "modules", list)
        if any(isinstance(module, torch.nn.SyncBatchNorm) for module in modules()):
            raise _bad(
                "policy='join' cannot answer for SyncBatchNorm, which would hang",
                "use policy='min' or 'dummy'",
            )
    return EvenSteps(loader, policy=policy, model=model, size=size or batch_length, group=group)


def batch_length(batch: object) -> int:
    """Return the number of samples of a batch: the length of the first tensor in it."""
    if isinstance(batch, torch.Tensor):
        return len(batch)
    parts: Iterable[object] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    for part in parts:
        if isinstance(part, torch.Tensor | Mapping | list | tuple):
            return batch_length(part)
    return len(batch) if isinstance(batch, list | tuple) else 1


def _require_model(model: Joinable | None) -> Joinable:
    if not isinstance(model, Joinable):
        raise _bad("policy='join' needs the DDP model", "pass model=ddp_model")
    return model


def _ignore(*_: int) -> None:
    """Stand for what an iterator that is not ddpsafe's does not have."""


def _bad(what: str, fix: str) -> DataConfigError:
    return DataConfigError(
        Explanation(f"even_steps: {what}.", cause="the arguments do not fit.", fix=f"{fix}.")
    )
