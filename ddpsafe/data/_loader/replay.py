"""The position of a loader whose sampler or dataset is not ddpsafe's: saved states, or replay.

A part with ``state_dict()`` and ``load_state_dict()`` (a dataset, its iterator, a sampler, its
iterator) gives its state after each delivered batch. A part without them is replayed. A sampler
draws its indices again, from the restored generators, and must draw the same ones. A stream is
read again up to the position. Unlike ddpsafe's own positions, these fit only the same rank,
world size, batch size and number of workers.
"""

from __future__ import annotations

import base64
import collections
import collections.abc
import contextlib
import copy
import itertools
import weakref
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import BatchSampler, IterableDataset, IterDataPipe, get_worker_info

from ddpsafe._errors import Explanation
from ddpsafe.data._loader.equal_readers import EqualReaders, checksum
from ddpsafe.data._loader.torchs_loader import pinned
from ddpsafe.data._replica import current_replica
from ddpsafe.data._samplers.base import VERSION, Resumable, compare_identity, parse_state
from ddpsafe.data.errors import DataConfigError, StateMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.utils.data import DataLoader

_KEPT_POSITIONS: Final = 64  # of the last batches: what ``state_dict(batches=)`` can go back to


def is_stateful(item: object) -> bool:
    """Return whether an object can save and load its state."""
    return callable(getattr(item, "state_dict", None)) and callable(
        getattr(item, "load_state_dict", None)
    )


class Skip:
    """Placeholder for a sample of a batch that will be dropped."""


@dataclass(slots=True)
class WorkerBatch:
    """A batch on its way from a worker, with the state of that worker's data after it."""

    batch: Any
    worker: int
    state: dict[str, Any] | None

    def pin_memory(self, device: Any = None) -> WorkerBatch:
        """Pin the batch; torch's pinning thread calls it."""
        self.batch = pinned(self.batch, device)
        return self


class Tracker:
    """Opens a dataset at a saved state, and returns its state; in a worker or without workers."""

    def __init__(self, dataset: Any, batch_size: int | None) -> None:
        self.is_stream = isinstance(dataset, IterableDataset)
        # torch shards and seeds data pipes by their type, so they must not be wrapped.
        self.is_pipe = isinstance(dataset, IterDataPipe)
        self.is_stateful = is_stateful(dataset) and not self.is_pipe
        self.resume: dict[int, dict[str, Any]] = {}
        self.first_worker = 0
        self._batch_size = batch_size
        self._iterator: Any = None
        self._dataset: Any = None
        self._count = 0

    def enter(self, dataset: Any) -> None:
        """Load the saved state into a dataset that has one and is not a stream."""
        if self.is_stream or not self.is_stateful:
            return
        self._dataset = dataset
        saved = self.resume.pop(_worker(), None)
        if saved is not None and saved["dataset"] is not None:
            dataset.load_state_dict(saved["dataset"])

    def leave(self) -> None:
        """Drop the dataset and iterator of the previous pass."""
        self._dataset = self._iterator = None

    def has_entered(self) -> bool:
        """Return whether this pass has loaded its state into the dataset."""
        return self._dataset is not None

    def open(self, dataset: Any) -> Iterator[Any]:
        """Iterate over a stream from its saved state on."""
        worker = _worker()
        saved = self.resume.pop(worker, None)
        self._dataset = dataset
        self._count = 0
        state = saved["dataset"] if saved is not None and self.is_stateful else None
        if state is not None and saved is not None and saved.get("is_iterator"):
            # A stream that is its own iterator. Some apply a loaded state at the next iter().
            # Others start over at iter(), so they need the state after it, and may raise before.
            with contextlib.suppress(Exception):
                dataset.load_state_dict(copy.deepcopy(state))
            iterator = iter(dataset)
            if checksum(dataset.state_dict(), 0) != checksum(state, 0):
                dataset.load_state_dict(state)
        else:
            if state is not None:
                dataset.load_state_dict(state)
            iterator = iter(dataset)
        self._iterator = iterator
        if saved is not None:
            self._count = saved["count"]
            if saved["iterator"] is not None and is_stateful(iterator):
                if iterator is not dataset:
                    iterator.load_state_dict(saved["iterator"])
            elif saved["dataset"] is None:
                collections.deque(itertools.islice(iterator, self._count), maxlen=0)
        skipped = (self._batch_size or 1) if worker < self.first_worker else 0
        self.first_worker = 0
        return self._counted(iterator, skipped)

    def _counted(self, iterator: Iterator[Any], skipped: int) -> Iterator[Any]:
        yield from (Skip for _ in range(skipped))
        while True:  # a for loop would call iter() again, which restarts some streams
            try:
                item = next(iterator)
            except StopIteration:
                return
            self._count += 1
            yield item

    def has_state(self) -> bool:
        """Return whether the data have a state that differs from worker to worker."""
        return (self.is_stream or self.is_stateful) and not self.is_pipe

    def state(self) -> dict[str, Any] | None:
        """Return the state of the data now; ``None`` if there is none to save."""
        if not self.has_state():
            return None
        iterator, dataset = self._iterator, self._dataset
        own = iterator if iterator is not dataset and is_stateful(iterator) else None
        return {
            "count": self._count,
            "iterator": None if own is None else copy.deepcopy(own.state_dict()),
            "is_iterator": iterator is dataset,
            "dataset": copy.deepcopy(dataset.state_dict()) if self.is_stateful else None,
        }


def _worker() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


class CollateWithState:
    """Collates with the user's function, and sends the worker's state along with each batch."""

    def __init__(self, collate_fn: Callable[[Any], Any], tracker: Tracker) -> None:
        self._collate_fn = collate_fn
        self._tracker = tracker

    def __call__(self, samples: Any) -> WorkerBatch:
        """Collate, in the worker."""
        if samples is Skip or (isinstance(samples, list) and samples and samples[0] is Skip):
            return WorkerBatch(None, -1, None)
        return WorkerBatch(self._collate_fn(samples), _worker(), self._tracker.state())


@dataclass(slots=True)
class _Position:
    """The position after a batch: checksum of all indices, state of the sampler and the workers."""

    checksum: int | None = 0
    sampler: Any = None
    workers: dict[int, dict[str, Any]] = field(default_factory=dict)
    last_worker: int = -1


class Replay:
    """The position of one loader whose sampler or dataset is not ddpsafe's."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        # Weak: a reference cycle would keep the loader's persistent workers alive until the garbage
        # collector runs. An iteration holds its loader, so the loader exists whenever it is needed.
        self._loader_ref: weakref.ref[DataLoader[Any]] | None = weakref.ref(loader)
        self.tracker = Tracker(loader.dataset, loader.batch_size)
        self.finished = False
        self._loaded: dict[str, Any] | None = None
        self._readers = EqualReaders(loader)
        self._begin()

    @property
    def _loader(self) -> DataLoader[Any]:
        loader = None if self._loader_ref is None else self._loader_ref()
        assert loader is not None, "used without its loader"  # noqa: S101 - our own invariant
        return loader

    def copy_for(self, loader: DataLoader[Any]) -> Replay:
        """Return the position of a copy of the loader, pickled or not."""
        copied = copy.copy(self)
        copied._loader_ref = weakref.ref(loader)  # noqa: SLF001 - of the same class
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the loader, which pickles this."""
        return {**self.__dict__, "_loader_ref": None}

    def _begin(self) -> None:
        self._base = 0
        self._start = _Position()
        self._drawn: collections.deque[_Position] = collections.deque()
        self._delivered: collections.deque[_Position] = collections.deque(maxlen=_KEPT_POSITIONS)
        self._random: dict[str, str | None] = {"torch": None, "generator": None}
        self._pending: dict[str, Any] | None = None

    def begin_epoch(self, epoch: int) -> int:
        """Prepare a pass; return how many of its first batches the loader must drop."""
        loaded, self._loaded = self._loaded, None
        self.finished = False
        self._begin()
        self._readers.begin()
        self.tracker.resume, self.tracker.first_worker = {}, 0
        self.tracker.leave()
        if loaded is None or loaded["epoch"] != epoch or loaded["finished"]:
            if loaded is not None and loaded["finished"]:
                # The next epoch is drawn from the generator as the finished one has left it.
                _set_generator(self._generator(), loaded["replay"]["generator_after"])
            return 0
        saved = loaded["replay"]
        self._pending = saved
        self._base = saved["batches"]
        workers = {int(worker): state for worker, state in saved["workers"].items()}
        self._start = _Position(saved["checksum"], saved["sampler"], workers, saved["last_worker"])
        if self.tracker.is_pipe:
            return self._base  # read again and discarded
        self.tracker.resume = dict(workers)
        count = self._loader.num_workers
        if count > 1 and self.tracker.has_state():
            self.tracker.first_worker = (saved["last_worker"] + 1) % count
        return self.tracker.first_worker

    def receive(self, batch: Any) -> Any:
        """Record the position after a delivered batch; return the batch for the user."""
        last = self._delivered[-1] if self._delivered else self._start
        drawn = self._drawn.popleft() if self._drawn else copy.copy(last)
        drawn.workers, drawn.last_worker = last.workers, last.last_worker
        if type(batch) is WorkerBatch:
            if batch.state is not None:
                drawn.workers = {**last.workers, batch.worker: batch.state}
            drawn.last_worker = batch.worker
            self._readers.add(batch.worker, batch.batch)
            batch = batch.batch
        else:
            self._readers.add(0, batch)
        self._delivered.append(drawn)
        return batch

    def skipped(self) -> int:
        """Return how many batches of the epoch were read before the pass."""
        return self._base

    def state(self, epoch: int, used: int, delivered: int, *, finished: bool) -> dict[str, Any]:
        """Return the state after `used` of the `delivered` batches of this pass."""
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        back = max(0, delivered - used)  # in even steps a rank may have fewer batches than steps
        if used and back >= len(self._delivered):
            raise DataConfigError(
                Explanation(
                    f"batches={used}, but only the last {len(self._delivered)} positions are kept.",
                    cause="the position of a sampler or dataset that is not ddpsafe's is its state, "
                    "which a number of batches cannot restore.",
                    fix="save sooner after the step that the state is for.",
                )
            )
        position = self._delivered[-1 - back] if used else self._start
        workers = position.workers
        if self._loader.num_workers == 0 and (delivered or self.tracker.has_entered()):
            if back and self.tracker.state() is not None:
                raise DataConfigError(
                    Explanation(
                        f"batches={used}, but the dataset has already read batch {delivered}.",
                        cause="without workers only the dataset's current state can be saved.",
                        fix="save before the next batch is read, or use num_workers=1.",
                    )
                )
            state = self.tracker.state()
            workers = {} if state is None else {0: state}
        replica = current_replica()
        return {
            "version": VERSION,
            "epoch": epoch,
            "consumed": self._base + used,
            "finished": finished or self.finished,
            "world_size": replica.num_replicas,
            "identity": self._identity(),
            "replay": {
                "rank": replica.rank,
                "batches": self._base + used,
                "checksum": position.checksum,
                "sampler": position.sampler,
                "workers": {str(worker): state for worker, state in workers.items()},
                "last_worker": position.last_worker,
                **self._random_of_order(),
                "generator_after": _generator_text(self._generator()),
            },
        }

    def _random_of_order(self) -> dict[str, str | None]:
        """Return the states of the generators that this pass draws, or will draw, its order from."""
        if self._random["torch"] is not None or self.tracker.is_stream:
            return self._random
        if self._pending is not None:
            return {key: self._pending[key] for key in self._random}
        # With more ranks the loader derives torch's generator from seed, epoch and rank.
        alone = current_replica().num_replicas == 1
        torchs = _text(torch.get_rng_state()) if alone else None
        return {"torch": torchs, "generator": _generator_text(self._generator())}

    def _identity(self) -> dict[str, object]:
        loader = self._loader
        same: dict[str, object] = {
            "sampler": self._name(),
            "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
            "num_replicas": current_replica().num_replicas,
        }
        if self.tracker.is_stream or self.tracker.is_stateful:
            same["num_workers"] = loader.num_workers
        if not self.tracker.is_stream and hasattr(loader.dataset, "__len__"):
            same["n"] = len(loader.dataset)
        return same

    def load(self, state: Mapping[str, Any], *, strict: bool) -> int:
        """Load a state for the next pass; return its epoch."""
        parsed = parse_state(state)
        compare_identity(parsed["identity"], self._identity(), strict=strict, what="loader")
        saved = parsed.get("replay")
        if not isinstance(saved, dict):
            raise StateMismatchError(
                Explanation(
                    "The state belongs to a sampler of ddpsafe.data.",
                    cause="this loader has a sampler or dataset that is not ddpsafe's.",
                    fix="make the loader with the sampler and dataset that it was saved with.",
                )
            )
        rank = current_replica().rank
        if saved["rank"] != rank:
            if saved["workers"] or saved["sampler"] is not None:
                raise StateMismatchError(
                    Explanation(
                        f"The state belongs to rank {saved['rank']}, but this is rank {rank}.",
                        cause="the dataset or the sampler has its own state on each rank.",
                        fix="save it on every rank: ddpsafe.checkpoint.PerRank(loader) in a Checkpointer.",
                    ),
                    differences={"rank": (saved["rank"], rank)},
                )
            # The rank that saved it has drawn other indices, so their checksum cannot be compared.
            parsed["replay"] = {**saved, "checksum": None}
        self._loaded = copy.deepcopy(parsed)
        self.finished = parsed["finished"]
        return int(parsed["epoch"])

    def _source(self) -> Any:
        loader = self._loader
        if self.tracker.is_stream:
            return loader.dataset
        return loader.sampler if loader.batch_sampler is None else loader.batch_sampler

    def _name(self) -> str:
        source = self._source()
        return type(source.sampler if type(source) is BatchSampler else source).__name__

    def _generator(self) -> torch.Generator | None:
        source = self._source()
        generator = getattr(source, "generator", None) or getattr(
            getattr(source, "sampler", None), "generator", None
        )
        return generator if isinstance(generator, torch.Generator) else None

    def indices(self) -> Iterator[Any]:
        """Draw what the loader reads, recording the sampler's position after each batch."""
        # Resume with the worker after the last one: those before it get a batch that is dropped.
        nothing = [Skip] if self._loader.batch_sampler is not None else Skip
        yield from itertools.repeat(nothing, self.tracker.first_worker)
        source, pending = self._source(), self._pending
        generator = self._generator()
        outer = torch.get_rng_state()
        if pending is None:
            self._random = {"torch": _text(outer), "generator": _generator_text(generator)}
        else:
            self._random = {key: pending[key] for key in ("torch", "generator")}
            _set_generator(generator, pending["generator"])
            if pending["torch"] is not None:
                torch.set_rng_state(_from_text(pending["torch"]))
        try:
            batches, owner = _batches(source, None if pending is None else pending["sampler"])
            checksum: int | None = 0
            if owner is None:
                for batch in itertools.islice(batches, self._base):
                    checksum = zlib.crc32(repr(batch).encode(), checksum or 0)
                expected = self._start.checksum
                if self._base and expected is not None and checksum != expected:
                    raise StateMismatchError(
                        Explanation(
                            f"{self._name()} draws other indices than before the state was saved, "
                            f"so it is unknown which samples the first {self._base} batches had.",
                            cause="its order depends on something that the state does not hold: "
                            "Python's or numpy's generator, a counter, the time.",
                            fix="give the sampler state_dict() and load_state_dict(), draw from a "
                            "torch.Generator, or use ddpsafe.data.DistributedSampler.",
                        )
                    )
            else:
                checksum = self._start.checksum
            # Before the training's generator is restored: torch's RandomSampler draws its seed at
            # the first index.
            first = next(batches, Skip)
        finally:
            if pending is not None:
                torch.set_rng_state(outer)
        for batch in itertools.chain([] if first is Skip else [first], batches):
            checksum = zlib.crc32(repr(batch).encode(), checksum or 0)
            state = None if owner is None else copy.deepcopy(owner.state_dict())
            self._drawn.append(_Position(checksum, state))
            yield batch


class TrackedIndices:
    """What torch's iterator draws from instead of the sampler."""

    def __init__(self, replay: Replay, source: Any) -> None:
        self._replay = replay
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return self._replay.indices()

    def __len__(self) -> int:
        return len(self._source)


def _batches(source: Any, saved: Any) -> tuple[Iterator[Any], Any]:
    """Return what a sampler draws from its saved state on, and the object that has the state."""
    plain = type(source) is BatchSampler
    sampler = source.sampler if plain else source
    if saved is not None and is_stateful(sampler):
        sampler.load_state_dict(saved)
    elif saved is None and isinstance(sampler, Resumable):
        # It may hold the offset of an earlier resume; a change of epoch resets it to 0.
        epoch = sampler.epoch
        sampler.set_epoch(int(epoch) + 1)
        sampler.set_epoch(epoch)
    iterator = iter(sampler)
    owner = iterator if is_stateful(iterator) else sampler if is_stateful(sampler) else None
    if saved is not None and is_stateful(iterator) and iterator is not sampler:
        iterator.load_state_dict(saved)
    if plain:
        # Like torch's BatchSampler, which does not expose its iterator and so the iterator's state.
        size, drops = source.batch_size, source.drop_last
        batches = iter(lambda: list(itertools.islice(iterator, size)), [])
        return (batch for batch in batches if len(batch) == size or not drops), owner
    return iterator, owner


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _generator_text(generator: torch.Generator | None) -> str | None:
    return None if generator is None else _text(generator.get_state())


def _set_generator(generator: torch.Generator | None, text: str | None) -> None:
    if generator is not None and text is not None:
        generator.set_state(_from_text(text))
