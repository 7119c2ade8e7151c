"""How samples are read: a failing one is named, and workers follow the epoch of the main process.

Persistent workers hold a copy of the dataset from before the first epoch: ``dataset.set_epoch()`` in
the main process does not reach them. A few integers in shared memory do; through them, a worker also
reports what it is reading, so that its death can be explained.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import Subset

from ddpsafe.data._loader.machine_limits import add_note, note_limits
from ddpsafe.data._loader.position import Skip
from ddpsafe.data._replica import current_replica
from ddpsafe.data._samplers.base import Resumable, epoch_targets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpsafe.data._loader.position import Tracker

# Places in the shared cells: the epoch, the offset, and one cell for each worker from here on.
_EPOCH: Final = 0
_OFFSET: Final = 1
_FIRST_WORKER: Final = 2
# A worker's cell: the index it reads (from 0), or one of these.
_NOTHING: Final = -1  # it has read nothing in this epoch
_UNKNOWN: Final = -2
_BATCH: Final = -3  # minus the first index, of a batch that the dataset reads with __getitems__
_LARGEST_INDEX: Final = 1 << 62  # so that `_BATCH - index` fits into an int64 cell
_SHOWN_INDICES: Final = 3
PATH_ATTRIBUTES: Final = ("samples", "imgs", "files", "paths")
"""Where datasets list their paths, as torchvision's do."""


class SharedProgress:
    """Shared integers: the epoch, the offset in it, and the index each worker reads."""

    def __init__(self, num_workers: int) -> None:
        self._cells = torch.full((_FIRST_WORKER + num_workers,), _NOTHING, dtype=torch.int64)
        self._cells.share_memory_()  # type: ignore[no-untyped-call]  # torch has no types here
        self._view: memoryview | None = None

    def cells(self) -> memoryview:
        """Return the integers as a memoryview."""
        if self._view is None:  # ten times faster than indexing the tensor
            self._view = memoryview(self._cells.numpy())  # type: ignore[arg-type]  # has the buffer protocol
        return self._view

    def announce(self, epoch: int, offset: int) -> None:
        """Publish to the workers which epoch begins, and at which offset it resumes."""
        self._cells.fill_(_NOTHING)
        self.cells()[_EPOCH], self.cells()[_OFFSET] = epoch, offset

    def epoch(self) -> int | None:
        """Return the announced epoch; ``None`` before the first."""
        value = int(self.cells()[_EPOCH])
        return None if value < 0 else value

    def offset(self) -> int:
        """Return how many samples of the epoch were read before it was resumed."""
        return int(self.cells()[_OFFSET])

    def report(self, worker: int, reads: int) -> None:
        """Publish what a worker reads; it runs in the worker."""
        self.cells()[_FIRST_WORKER + worker] = reads

    def has_begun(self, worker: int) -> bool:
        """Return whether a worker has read anything in this epoch."""
        return int(self.cells()[_FIRST_WORKER + worker]) != _NOTHING

    def reading(self, worker: int) -> int | None:
        """Return the index that a worker is reading; ``None`` if it reads none or it is unknown."""
        value = int(self.cells()[_FIRST_WORKER + worker])
        return None if value < 0 else value

    def describe(self, worker: int, dataset: object) -> str:
        """Describe what a worker is reading; empty if that is unknown."""
        value = int(self.cells()[_FIRST_WORKER + worker])
        if value <= _BATCH:  # only the dataset knows which sample of the batch
            return f"the batch that begins with index {_BATCH - value}"
        return describe_index(dataset, value) if value >= 0 else ""

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the shared tensor only."""
        return {**self.__dict__, "_view": None}


class NamingDataset:
    """Wraps the user's dataset where samples are read, and names the sample that fails.

    The traceback's frames do not show which one it was: ``index`` may have changed in the user's
    frame, and since Python 3.12 (PEP 709) torch's comprehension has no frame of its own.
    """

    def __init__(self, dataset: Any, tracker: Tracker | None = None) -> None:
        self.dataset = dataset
        self._tracker = tracker
        inner = dataset
        while type(inner) is Subset:  # it has __getitems__, and reads singly from a dataset without
            inner = inner.dataset
        self._reads_batches = callable(getattr(inner, "__getitems__", None))

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset) if self._tracker is None else self._tracker.open(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._read([index])[0]

    def __getitems__(self, indices: Any) -> Any:
        if not self._reads_batches:
            return self._read(indices)
        try:
            return self._read_batch(indices)
        except Exception as error:
            self._annotate(error, _describe_batch(indices))
            raise

    def _read_batch(self, indices: Any) -> Any:
        return self.dataset.__getitems__(indices)

    def _read(self, indices: Any) -> list[Any]:
        rest, dataset = iter(indices), self.dataset
        try:
            return [dataset[index] for index in self._reported(rest)]
        except Exception as error:
            # How many are left tells which one it was, which costs nothing while all goes well.
            what = "a batch"
            with contextlib.suppress(TypeError):
                what = describe_index(
                    dataset, indices[len(indices) - operator.length_hint(rest) - 1]
                )
            self._annotate(error, what)
            raise

    def _reported(self, indices: Iterator[Any]) -> Iterator[Any]:
        return indices

    def _annotate(self, error: Exception, what: str) -> None:
        add_note(error, f"While reading {what} in rank {current_replica().rank}.")


class FollowedDataset(NamingDataset):
    """Wraps the user's dataset in a worker: follows the epoch of the main process, and reports each index."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: object,
        progress: SharedProgress,
        tracker: Tracker | None = None,
    ) -> None:
        super().__init__(dataset, tracker)
        self._targets = epoch_targets(dataset, collate_fn)
        self._progress = progress
        self._epoch = progress.epoch()
        self._worker = -1
        self._rank = 0
        self._reseed: Callable[[int], None] | None = None

    def enter_worker(self, worker_id: int, reseed: Callable[[int], None], rank: int) -> None:
        """Record which worker this is; runs in the worker."""
        self._worker = worker_id
        self._rank = rank
        self._reseed = reseed
        self._epoch = self._progress.epoch()
        if self._tracker is not None:
            self._tracker.enter(self.dataset)

    def _follow(self) -> None:
        epoch = self._progress.epoch()
        if epoch == self._epoch or epoch is None:
            return
        self._epoch = epoch
        if self._reseed is not None:
            self._reseed(epoch)
        for target in self._targets:
            target.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        self._follow()
        self._progress.report(self._worker, _UNKNOWN)
        if isinstance(self.dataset, Resumable):
            self.dataset.start = self._progress.offset()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        return Skip if index is Skip else super().__getitem__(index)

    def __getitems__(self, indices: Any) -> Any:
        # A batch sampler may yield arrays and tensors, whose truth value raises.
        is_skipped = type(indices) is list and indices and indices[0] is Skip
        return [Skip] if is_skipped else super().__getitems__(indices)

    def _read_batch(self, indices: Any) -> Any:
        self._follow()
        first = _number_of(next(iter(indices), None)) if isinstance(indices, Sequence) else _UNKNOWN
        self._progress.report(self._worker, _BATCH - first if first >= 0 else _UNKNOWN)
        batch = super()._read_batch(indices)
        self._progress.report(self._worker, _UNKNOWN)
        return batch

    def _reported(self, indices: Iterator[Any]) -> Iterator[Any]:
        self._follow()
        cells, cell = self._progress.cells(), _FIRST_WORKER + self._worker
        for index in indices:
            # Nearly all are plain integers, for which a call would cost more than reading a small sample.
            is_plain = type(index) is int and 0 <= index <= _LARGEST_INDEX
            cells[cell] = index if is_plain else _number_of(index)
            yield index
        cells[cell] = _UNKNOWN  # the worker collates, or waits for indices

    def _annotate(self, error: Exception, what: str) -> None:
        where = f"DataLoader worker {self._worker} of rank {self._rank}"
        add_note(error, f"While reading {what} in {where}.")
        note_limits(error)


def _number_of(index: object) -> int:
    """Return an index as a number from 0, also one of numpy or torch; else `_UNKNOWN`."""
    try:
        number = operator.index(index)  # type: ignore[arg-type]  # raises TypeError for others
    except (TypeError, ValueError, RuntimeError):
        return _UNKNOWN
    return number if 0 <= number <= _LARGEST_INDEX else _UNKNOWN


def _describe_batch(indices: Any) -> str:
    """Describe a batch by its first indices, if it can be iterated a second time."""
    try:
        more = ", …" * (len(indices) > _SHOWN_INDICES)
        listed = ", ".join(map(str, itertools.islice(indices, _SHOWN_INDICES)))
    except Exception:  # noqa: BLE001 - describing a failure must not fail
        return "a batch"
    return f"a batch of indices [{listed}{more}]"


def describe_index(dataset: object, index: object) -> str:
    """Describe an index, with its path if the dataset lists paths, as torchvision's do."""
    number = _number_of(index)
    if isinstance(dataset, Subset) and number >= 0:
        with contextlib.suppress(Exception):
            inner = describe_index(dataset.dataset, dataset.indices[number])
            return f"index {index} of a Subset, which is {inner}"
    for name in PATH_ATTRIBUTES if number >= 0 else ():
        with contextlib.suppress(Exception):  # describing a failure must not fail
            entry = getattr(dataset, name)[number]
            if isinstance(entry, tuple | list) and entry:
                entry = entry[0]
            if isinstance(entry, str | os.PathLike):
                return f"index {index} ({name}[{index}] is {entry})"
    return f"index {index}"
