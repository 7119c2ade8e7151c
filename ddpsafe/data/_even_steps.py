"""Loops that do not hang if ranks have different numbers of batches."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable

from ddpsafe._errors import Explanation
from ddpsafe._text import ranks_text
from ddpsafe.data._arguments import bad_arguments, require_choice
from ddpsafe.data._replica import current_replica
from ddpsafe.data.errors import UnevenStepsError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")
Policy = Literal["min", "dummy", "join", "error"]


class EvenSteps(Generic[T]):
    """What `even_steps` returns: iterate over it once per epoch.

    Attributes:
        weight: With ``policy="dummy"``: the factor for this step's mean loss that makes the
            gradient averaged by DDP the mean over all samples of all ranks. 1.0 otherwise.
        dropped: With ``policy="min"``: whether this rank had a batch left when all stopped.
    """

    def __init__(self, loader: Iterable[T], *, policy: Policy, model: Joinable | None) -> None:
        self.weight = 1.0
        self.dropped = False
        self._loader = loader
        self._policy: Policy = policy
        self._model = model
        self._group: ProcessGroup | None = None

    def __iter__(self) -> Iterator[T]:
        self.weight = 1.0
        self.dropped = False
        if current_replica().num_replicas == 1:
            return iter(self._loader)
        if self._policy == "join":
            return self._joined()
        return self._agreed()

    def _joined(self) -> Iterator[T]:
        # torch shadows the collectives of ranks that ran out (torch.distributed.algorithms.Join).
        with Join([_require_model(self._model)]):
            yield from self._loader

    def _agreed(self) -> Iterator[T]:
        """Read one batch ahead; during each step, gather whether every rank has the next one."""
        source = iter(self._loader)
        last: T | None = None
        for step in itertools.count():
            try:
                batch, has_batch = next(source), True
            except StopIteration:
                batch, has_batch = None, False
            # Count steps, not fetched batches, so that the saved position is equal on all ranks.
            getattr(source, "count_as_used", _ignore)(step)
            count = batch_length(batch) if has_batch else -1
            own = torch.tensor([count], dtype=torch.int64)
            every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            # A separate group: the counts must not queue behind gradients or wait for the device.
            if self._group is None:
                self._group = dist.new_group(backend="gloo")
            work = dist.all_gather(every, own, group=self._group, async_op=True)
            if step > 0:
                yield last  # type: ignore[misc]  # set by the step before
            if work is not None:
                work.wait()
            counts = [int(count) for count in every]  # samples of each rank; -1: no batch
            if not self._continues(counts, step):
                self.dropped = has_batch
                getattr(source, "finish", _ignore)()
                return
            last = batch if has_batch else last
            # Set only now: until here, the weight of the step before was in use.
            if self._policy == "dummy":
                total = sum(count for count in counts if count > 0)
                mine = max(0, counts[dist.get_rank()]) if has_batch else 0
                self.weight = len(counts) * mine / max(1, total)

    def _continues(self, counts: list[int], step: int) -> bool:
        finished = [rank for rank, count in enumerate(counts) if count < 0]
        if len(finished) in {0, len(counts)}:
            return not finished
        have = "has" if len(finished) == 1 else "have"
        steps = "1 step" if step == 1 else f"{step} steps"
        if self._policy == "dummy":
            if step == 0:
                raise UnevenStepsError(
                    Explanation(
                        f"{ranks_text(finished)} (world_size {len(counts)}) {have} no batch at all "
                        "that could be repeated.",
                        cause="there are fewer samples than ranks, or files are divided unevenly.",
                        fix="use fewer ranks, or policy='join'.",
                    ),
                    finished_ranks=tuple(finished),
                    step=0,
                )
            return True
        if self._policy == "error":
            raise UnevenStepsError(
                Explanation(
                    f"{ranks_text(finished)} (world_size {len(counts)}) ran out of batches after "
                    f"{steps}; the others have more.",
                    cause="a stream or its files are divided unevenly, or drop_last differs.",
                    fix="policy='min' stops all ranks here, 'dummy' lets the others finish.",
                ),
                finished_ranks=tuple(finished),
                step=step,
            )
        logger.warning(
            "stopped after %s: %s (world_size %d) %s no more batches",
            steps,
            ranks_text(finished),
            len(counts),
            have,
        )
        return False


def even_steps(
    loader: Iterable[T], *, policy: Policy = "min", model: Joinable | None = None
) -> EvenSteps[T]:
    """Make all ranks take the same number of steps; needed only if their numbers of batches differ.

    Map-style datasets with `DistributedSampler` never need it. Every rank makes it, and
    iterates over it once per epoch.

    Args:
        loader: Where batches come from.
        policy: ``"min"`` stops all ranks when one runs out. ``"dummy"`` continues until all have
            run out: a rank without a batch gets its last one again; multiply the loss by
            ``weight``. ``"join"`` lets torch's `Join` take part in collectives for ranks that ran
            out. ``"error"`` raises on every rank, naming the ranks that ran out.
        model: The DDP model, for ``policy="join"``.

    Raises:
        ConfigError: The policy is unknown, or ``"join"`` without a model or with SyncBatchNorm.
    """
    require_choice(policy, "policy", get_args(Policy))
    if policy == "join":
        modules: Callable[[], Iterable[object]] = getattr(_require_model(model), "modules", list)
        if any(isinstance(module, torch.nn.SyncBatchNorm) for module in modules()):
            raise _bad(
                "policy='join' does not cover the collectives of SyncBatchNorm, which would hang",
                "use policy='min' or 'dummy'",
            )
    return EvenSteps(loader, policy=policy, model=model)


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
    """Do nothing: other libraries' iterators do not count used batches."""


_bad: Final = functools.partial(bad_arguments, "even_steps")
