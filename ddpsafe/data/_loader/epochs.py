"""How workers that outlive an epoch learn of the next one, and say what they are reading.

Persistent workers hold a copy of the dataset from before the first epoch:
``dataset.set_epoch()`` in the main process does not reach them. A few integers in shared
memory do.
"""

from __future__ import annotations

import errno
import sys
from typing import TYPE_CHECKING, Any, Final

import torch

from ddpsafe.data._loader.limits import describe_open_files
from ddpsafe.data._loader.replay import Skip
from ddpsafe.data._replica import current_replica

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddpsafe.data._loader.replay import Tracker

_EPOCH: Final = 0
_OFFSET: Final = 1
_FIRST_WORKER: Final = 2
_NOTES_IN_EXCEPTIONS: Final = sys.version_info >= (3, 11)


class EpochBoard:
    """Shared integers: the epoch, the offset in it, and the index each worker reads."""

    def __init__(self, num_workers: int) -> None:
        self._cells = torch.full((_FIRST_WORKER + num_workers,), -1, dtype=torch.int64)
        self._cells.share_memory_()  # type: ignore[no-untyped-call]  # torch has no types here
        self._view: memoryview | None = None

    def cells(self) -> memoryview:
        """Return the integers as a memoryview: an order faster than indexing the tensor."""
        if self._view is None:
            self._view = memoryview(self._cells.numpy())  # type: ignore[arg-type]  # has the buffer protocol
        return self._view

    def announce(self, epoch: int, offset: int) -> None:
        """Tell the workers which epoch comes, and where it is resumed."""
        self.cells()[_EPOCH] = epoch
        self.cells()[_OFFSET] = offset
        for worker in range(len(self._cells) - _FIRST_WORKER):
            self.cells()[_FIRST_WORKER + worker] = -1

    def epoch(self) -> int | None:
        """Return the announced epoch; ``None`` before the first."""
        value = int(self.cells()[_EPOCH])
        return None if value < 0 else value

    def offset(self) -> int:
        """Return how many samples of the epoch were read before it was resumed."""
        return int(self.cells()[_OFFSET])

    def reading(self, worker: int) -> int | None:
        """Return the index that a worker was reading last."""
        value = int(self.cells()[_FIRST_WORKER + worker])
        return None if value < 0 else value

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the shared tensor only."""
        return {**self.__dict__, "_view": None}


def epoch_targets(*items: object) -> list[Any]:
    """Find what wants to know the epoch: the dataset, what it wraps, the collate function."""
    found: list[Any] = []
    waiting = list(items)
    while waiting:
        item = waiting.pop(0)
        if callable(getattr(item, "set_epoch", None)):
            found.append(item)
            continue
        inner = getattr(item, "dataset", None)
        waiting.extend([inner] if inner is not None else [])
        parts = getattr(item, "datasets", None)
        waiting.extend(parts if isinstance(parts, list | tuple) else [])
    return found


def tell_epoch(*items: object, epoch: int, but: object) -> list[Any]:
    """Call ``set_epoch()`` of the targets in `items`, except `but`.

    Returns:
        Those that keep what they were given: if they hold another epoch later, the user set it.
    """
    told = []
    for target in epoch_targets(*items):
        if target is but:
            continue
        target.set_epoch(epoch)
        if getattr(target, "epoch", None) is epoch:
            told.append(target)
    return told


class FollowedDataset:
    """Stands before the user's dataset inside a worker, and follows the board."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: object,
        board: EpochBoard,
        tracker: Tracker | None = None,
    ) -> None:
        self.dataset = dataset
        self._tracker = tracker
        self._targets = epoch_targets(dataset, collate_fn)
        self._board = board
        self._epoch = board.epoch()
        self._cell = -1
        self._rank = 0
        self._reseed: Callable[[int], None] | None = None

    def enter_worker(self, worker_id: int, reseed: Callable[[int], None], rank: int) -> None:
        """Learn which worker this is; runs in the worker."""
        self._cell = _FIRST_WORKER + worker_id
        self._rank = rank
        self._reseed = reseed
        self._epoch = self._board.epoch()
        if self._tracker is not None and not self._tracker.is_stream:
            self._tracker.enter(self.dataset)

    def _follow(self) -> None:
        epoch = self._board.epoch()
        if epoch == self._epoch or epoch is None:
            return
        self._epoch = epoch
        if self._reseed is not None:
            self._reseed(epoch)
        for target in self._targets:
            target.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        self._follow()
        if hasattr(self.dataset, "seek_consumed"):
            self.dataset.seek_consumed(self._board.offset())
        return iter(self.dataset) if self._tracker is None else self._tracker.open(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if index is Skip:
            return Skip
        return self._read([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        if indices and indices[0] is Skip:
            return [Skip]
        many = getattr(self.dataset, "__getitems__", None)
        if many is None:
            return self._read(indices)
        self._follow()
        first = indices[0] if indices else -1
        self._board.cells()[self._cell] = first if type(first) is int else -1
        try:
            return many(indices)
        except Exception as error:
            self._annotate(error, f"{list(indices[:3])}...")
            raise

    def _read(self, indices: Sequence[Any]) -> list[Any]:
        self._follow()
        cells, cell, dataset = self._board.cells(), self._cell, self.dataset
        items = []
        index = None
        try:
            for index in indices:
                cells[cell] = index if type(index) is int else -1
                items.append(dataset[index])
        except Exception as error:
            self._annotate(error, index)
            raise
        return items

    def _annotate(self, error: Exception, index: object) -> None:
        path = sample_path(self.dataset, index)
        where = f"index {index}" + (f" ({path})" if path else "")
        note = (
            f"While reading {where} in DataLoader worker {self._cell - _FIRST_WORKER} "
            f"of rank {self._rank}."
        )
        add_note(error, "\n".join([note, *limit_notes(error)]))


def name_index(error: BaseException) -> None:
    """Note which sample was read when an error was raised in this process.

    From the frames of torch's fetcher, so that reading costs nothing more. Since Python 3.12 its
    comprehension has no frame of its own that would keep the index; the dataset's has.
    """
    trace, index, dataset = error.__traceback__, None, None
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_filename.endswith("torch/utils/data/_utils/fetch.py"):
            known = frame.f_locals
            index = known.get("idx", index)
            dataset = getattr(known.get("self"), "dataset", dataset)
            if index is None and frame.f_code.co_name == "fetch":
                many = known.get("possibly_batched_index")
                index = many if isinstance(many, int) else None
        elif index is None and dataset is not None and frame.f_code.co_name == "__getitem__":
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            index = frame.f_locals.get(names[-1]) if len(names) == len(("self", "index")) else None
            break
        trace = trace.tb_next
    if index is not None:
        path = sample_path(dataset, index)
        rank = current_replica().rank
        add_note(
            error, f"While reading index {index}{f' ({path})' if path else ''} in rank {rank}."
        )


def sample_path(dataset: object, index: object) -> str | None:
    """Return the path of a sample where the dataset lists paths, as torchvision's do."""
    if not isinstance(index, int):
        return None
    for name in ("samples", "imgs", "files", "paths"):
        listed = getattr(dataset, name, None)
        try:
            entry = listed[index] if listed is not None else None
        except Exception:  # noqa: BLE001, S112 - describing a failure must not fail
            continue
        if isinstance(entry, tuple | list) and entry:
            entry = entry[0]
        if entry is not None:
            return str(entry)
    return None


def limit_notes(error: Exception) -> list[str]:
    """Say which limit of the machine an OSError hit, if it hit one."""
    if not isinstance(error, OSError):
        return []
    return [describe_open_files()] if error.errno in {errno.EMFILE, errno.ENFILE} else []


def add_note(error: BaseException, note: str) -> None:
    """Append a note to an exception without changing its type."""
    if _NOTES_IN_EXCEPTIONS:
        error.add_note(note)  # type: ignore[attr-defined]  # since Python 3.11
    elif len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}",)
