"""What can be wrong with the data of a distributed run, one class per kind.

::

    DDPSafeError
      ConfigError                              bad arguments: n = 0, rank outside, NaN weights
      DataError
        MissingDistributedSamplerError         every rank would read everything
        UndividedStreamError                   two ranks or workers read the same samples
        StateMismatchError (also ValueError)   the state belongs to other data, or is damaged
        DatasetChangedError                    the length of the dataset is not the sampler's
        LateSetEpochError                      set_epoch() came after iter()
        UnsafeWorkersError                     the dataset cannot be passed to worker processes
        WorkerDiedError (also RuntimeError)    a DataLoader worker process died
        WorkerTimeoutError (also RuntimeError) no batch came within the loader's timeout
        DatasetInconsistencyError              the ranks do not have the same data
        UnevenStepsError                       a rank ran out of batches before the others
        IncompleteGatherError                  results lack samples or have them twice
      DataWarning (a UserWarning)              something you would want to know
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpsafe._errors import DDPSafeError

if TYPE_CHECKING:
    from ddpsafe._errors import Explanation


class DataError(DDPSafeError):
    """Base of the errors of ``ddpsafe.data``, except for bad arguments: those are `ConfigError`."""


class MissingDistributedSamplerError(DataError):
    """The sampler does not divide the data over the ranks of this world."""


@dataclass(eq=False, repr=False, kw_only=True)
class UndividedStreamError(DataError):
    """Two ranks, or two workers of a rank, have read the same first samples of a stream.

    Attributes:
        ranks: The ranks that read the same samples; one rank if two of its workers did.
        workers: The two workers, from 0; 0 for a rank without workers.
    """

    ranks: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()


@dataclass(eq=False, repr=False, kw_only=True)
class StateMismatchError(DataError, ValueError):
    """A saved position belongs to another dataset or sampler, or is damaged.

    Attributes:
        differences: What differs, by key: ``(saved, current)``.
    """

    differences: dict[str, tuple[object, object]] = field(default_factory=dict)


class DatasetChangedError(DataError):
    """The length of the dataset differs from what the sampler was made for."""


class LateSetEpochError(DataError):
    """``set_epoch()`` was called while an iteration was under way and cannot take effect."""


@dataclass(eq=False, repr=False, kw_only=True)
class UnsafeWorkersError(DataError):
    """The dataset holds something that must not cross into a worker process.

    Attributes:
        paths: Where in the dataset, e.g. ``dataset.reader.file``.
    """

    paths: tuple[str, ...] = ()


@dataclass(eq=False, repr=False, kw_only=True)
class WorkerDiedError(DataError, RuntimeError):
    """A DataLoader worker process died without an exception of its own.

    Attributes:
        rank: The rank that owned the worker, from 0.
        worker: The worker's id, from 0.
        pid: Its process id.
        exitcode: As `multiprocessing` gives it: negative for a signal.
        index: The dataset index it was reading; ``None`` if unknown.
    """

    rank: int
    worker: int
    pid: int | None
    exitcode: int | None
    index: int | None

    def __post_init__(self, said: Explanation | str) -> None:
        super().__post_init__(said)
        self.kind = "out-of-memory" if self.exitcode == -signal.SIGKILL else "killed"


@dataclass(eq=False, repr=False, kw_only=True)
class WorkerTimeoutError(DataError, RuntimeError):
    """A rank received no batch within the loader's ``timeout``, though its workers are alive.

    Attributes:
        rank: The rank that waited, from 0.
        worker: The worker that has not delivered the batch, from 0; ``None`` if unknown.
        index: The dataset index it is reading; ``None`` if unknown.
        timeout_s: How long the rank waited.
    """

    rank: int
    worker: int | None
    index: int | None
    timeout_s: float


@dataclass(eq=False, repr=False, kw_only=True)
class DatasetInconsistencyError(DataError):
    """The ranks do not hold the same dataset, order, seed or batch size.

    Attributes:
        ranks: The ranks that differ from the majority, or that could not read the dataset.
        index: The first item that differs; ``None`` if the difference is not in one item.
    """

    ranks: tuple[int, ...] = ()
    index: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class UnevenStepsError(DataError):
    """Some ranks ran out of batches while others still have some.

    Attributes:
        finished_ranks: The ranks that have no further batch.
        step: The first step for which they had none, from 0.
    """

    finished_ranks: tuple[int, ...]
    step: int


@dataclass(eq=False, repr=False, kw_only=True)
class IncompleteGatherError(DataError):
    """The gathered results do not cover the dataset exactly once.

    Attributes:
        missing: The first indices that were not delivered.
        duplicated: The first indices that were delivered more than once.
    """

    missing: tuple[int, ...] = ()
    duplicated: tuple[int, ...] = ()


class DataWarning(UserWarning):
    """No data is lost, but the call probably does not do what was meant."""
