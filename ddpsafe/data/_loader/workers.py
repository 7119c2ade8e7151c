"""How a loader starts its worker processes: safely, and following its epochs."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from typing import TYPE_CHECKING, TypeVar

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from ddpsafe.data._loader.epochs import (
    EpochBoard,
    FollowedDataset,
    NamingDataset,
    add_note,
    limit_notes,
)
from ddpsafe.data._loader.replay import ParcelCollate, Replay, TrackedStream
from ddpsafe.data._loader.worker_safety import WorkerSafety, explain_pickling, refuse_unsafe_workers
from ddpsafe.data._seeding import WorkerInit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data.dataloader import _BaseDataLoaderIter

T_co = TypeVar("T_co", covariant=True)


class WorkerLoader(TorchDataLoader[T_co]):
    """The part of `DataLoader` that has to do with worker processes.

    Attributes:
        worker_safety: What to do if workers would share an open handle.
    """

    worker_safety: WorkerSafety
    _board: EpochBoard | None
    _replay: Replay | None

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self.num_workers == 0:
            with self._read_here():
                return super()._get_iterator()
        init = self.worker_init_fn
        parts: dict[str, object] = {
            "dataset": self.dataset,
            "collate_fn": self.collate_fn,
            "worker_init_fn": init.user_fn if isinstance(init, WorkerInit) else init,
        }
        refuse_unsafe_workers(
            parts, requested=self.multiprocessing_context, safety=self.worker_safety
        )
        try:
            with self._followed(), warnings.catch_warnings():
                # torch recommends fork here, which is what made the dataset unsafe.
                warnings.filterwarnings("ignore", message="Got pickle error when attempting")
                return super()._get_iterator()
        except Exception as error:
            for note in limit_notes(error):
                add_note(error, note)
            # What pickle raises depends on the object, the protocol and the version of Python.
            kinds = (pickle.PicklingError, TypeError, AttributeError, ValueError)
            explanation = explain_pickling(error, parts) if isinstance(error, kinds) else None
            if explanation is None:
                raise
            raise explanation from error

    @contextlib.contextmanager
    def _followed(self) -> Iterator[None]:
        """Let the workers receive the dataset behind its follower; `self.dataset` stays."""
        if not isinstance(self.worker_init_fn, WorkerInit) or self._board is None:
            yield
            return
        dataset, collate_fn = self.dataset, self.collate_fn
        tracker = None if self._replay is None else self._replay.tracker
        self.worker_init_fn.board = self._board
        if not isinstance(dataset, IterDataPipe | MapDataPipe):
            self.__dict__["dataset"] = FollowedDataset(dataset, collate_fn, self._board, tracker)
        if tracker is not None and tracker.is_pipe:
            tracker = None
        if tracker is not None and (tracker.is_stream or tracker.is_stateful):
            self.__dict__["collate_fn"] = ParcelCollate(collate_fn, tracker)
        try:
            yield
        finally:
            self.__dict__.update(dataset=dataset, collate_fn=collate_fn)
            self.worker_init_fn.board = None

    @contextlib.contextmanager
    def _read_here(self) -> Iterator[None]:
        """Let torch read the dataset here: from where its state says, and naming a sample that fails."""
        tracker = None if self._replay is None else self._replay.tracker
        dataset = self.dataset
        if isinstance(dataset, IterDataPipe | MapDataPipe):
            yield
            return
        if not isinstance(dataset, IterableDataset):
            if tracker is not None and tracker.is_stateful:
                tracker.enter(dataset)
            self.__dict__["dataset"] = NamingDataset(dataset)
        elif tracker is not None:
            self.__dict__["dataset"] = TrackedStream(dataset, tracker)
        try:
            yield
        finally:
            self.__dict__["dataset"] = dataset
