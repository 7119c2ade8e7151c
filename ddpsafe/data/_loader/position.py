"""Where a loader is in its data: its sampler knows, or states are saved, or reads are replayed.

A sampler or stream of ddpsafe has a position of its own, which fits any world size, batch size and
number of workers. Other samplers and datasets are followed instead: a part with ``state_dict()`` and ``load_state_dict()`` (a dataset, its iterator, a sampler, its
iterator) gives its state after each delivered batch. A part without them is replayed. A sampler
draws its indices again, from the restored generators, and must draw the same ones. A stream is
read again up to the position. These positions fit only the same rank, world size, batch size and
number of workers.
"""

from __future__ import annotations

import base64
import collections
import collections.abc
import contextlib
import copy
import itertools
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import BatchSampler, IterableDataset, IterDataPipe, get_worker_info

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe.data._loader.equal_readers import EqualReaders, checksum
from ddpsafe.data._loader.torchs_loader import pinned
from ddpsafe.data._replica import current_replica
from ddpsafe.data._samplers.base import (
    VERSION,
    Batching,
    DrawnSampler,
    Resumable,
    compare_identity,
    complete_with,
    parse_state,
)
from ddpsafe.data.errors import StateMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.utils.data import DataLoader

    from ddpsafe.data._loader.cell import Pass

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
        saved = self.resume.pop(worker, {})
        self._dataset = dataset
        state = saved.get("dataset") if self.is_stateful else None
        if state is not None and saved.get("is_iterator"):
            # A stream that is its own iterator. Some apply a loaded state at the next iter().
            # Others start over at iter(), so they need the state after it, and may raise before.
            with contextlib.suppress(Exception):
                dataset.load_state_dict(copy.deepcopy(state))
            iterator = iter(dataset)
            if checksum(dataset.state_dict()) != checksum(state):
                dataset.load_state_dict(state)
        else:
            if state is not None:
                dataset.load_state_dict(state)
            iterator = iter(dataset)
        self._iterator, self._count = iterator, saved.get("count", 0)
        if saved.get("iterator") is not None and is_stateful(iterator):
            if iterator is not dataset:
                iterator.load_state_dict(saved["iterator"])
        # With a state of the dataset no further iter(), which restarts some streams.
        elif saved and saved["dataset"] is None:
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


class SamplerPosition:
    """The position of a loader that reads with a sampler or stream of ddpsafe: it knows its own."""

    tracker: Tracker | None = None

    def __init__(self, sampler: Resumable, batcher: Any) -> None:
        self.sampler = sampler
        self._batcher = batcher  # of the sampler's indices; `None` if there are no batches of them
        is_own = getattr(type(sampler), "__iter__", None) is DrawnSampler.__iter__
        self.draws = is_own and type(batcher) is BatchSampler

    @property
    def own(self) -> SamplerPosition:
        """The position of ddpsafe's sampler: this one."""
        return self

    @classmethod
    def find(cls, loader: DataLoader[Any], sampler: object) -> SamplerPosition | None:
        """Return the position of a loader; ``None`` if it is not known how it reads with `sampler`."""
        batcher: Any = loader.batch_sampler
        if not isinstance(sampler, Resumable):
            return None
        if batcher is sampler:
            return cls(sampler, None)
        reads: tuple[object, ...] = (loader.dataset, loader.sampler)
        if batcher is not None:
            reads = (loader.dataset, batcher.sampler if type(batcher) is BatchSampler else None)
        return cls(sampler, batcher) if any(item is sampler for item in reads) else None

    def batching(self) -> Batching:
        """Return how the loader makes batches; a batch sampler's size may change between epochs."""
        if self._batcher is None:
            return Batching()
        return Batching(self._batcher.batch_size, self._batcher.drop_last)

    def steps_of_epoch(self) -> int | None:
        """Return how many batches a whole epoch has; ``None`` if that is unknown."""
        return self.sampler.steps_of_epoch(self.batching())

    def is_finished(self) -> bool:
        """Return whether a loaded state leaves nothing of its epoch."""
        return self.sampler.finished

    def begin(self, new: Pass) -> int | None:  # noqa: ARG002 - `Replay` needs it
        """Begin a pass; return how many of its first batches to drop, or ``None`` if nothing is left."""
        return None if self.sampler.finished else self.sampler.batches_to_skip()

    def indices(self) -> Iterator[Any]:
        """Draw the batches that torch's `BatchSampler` makes of the sampler's indices."""
        sampler, batcher = self.sampler, self._batcher
        if not isinstance(sampler, DrawnSampler) or batcher.sampler is not sampler:
            return iter(batcher)  # a framework has replaced it since
        return sampler.draw().batches(batcher.batch_size, drop_last=batcher.drop_last)

    def steps_to_complete(self, *, without: int = 0) -> int | None:
        """Return how many batches complete a pass `without` the first ones; ``None`` if that is unknown."""
        return self.sampler.steps_to_complete(self.batching(), without=without)

    def state(self, of: Pass, batches: int | None) -> dict[str, Any]:
        """Return the state after the batches that a pass has delivered, or after `batches` of them."""
        used, finished = of.count_used(batches)
        return self.sampler.state_after(used, self.batching(), exhausted=finished)

    def load(self, state: Mapping[str, Any], *, strict: bool) -> int:
        """Load a state for the next pass; return its epoch."""
        self.sampler.restore(state, self.batching(), strict=strict)
        return int(self.sampler.epoch)


class Replay:
    """The position of a loader whose sampler or dataset is not ddpsafe's."""

    def __init__(self, loader: DataLoader[Any], own: SamplerPosition | None) -> None:
        self.own = own  # beside a dataset that has a state
        # Not the loader: a reference cycle would keep its persistent workers alive until the garbage
        # collector runs.
        self.tracker = Tracker(loader.dataset, loader.batch_size)
        self._source: Any = loader.dataset
        if not self.tracker.is_stream:
            batches = loader.batch_sampler
            self._source = loader.sampler if batches is None else batches
        plain = type(self._source) is BatchSampler
        self._sampler: Any = self._source.sampler if plain else self._source
        self._in_batches = loader.batch_sampler is not None
        self._num_workers = loader.num_workers
        self._same: dict[str, object] = {
            "sampler": type(self._sampler).__name__,
            "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        }
        self._dataset = loader.dataset
        self._loaded: dict[str, Any] | None = None  # for the next pass
        self._resumed: dict[str, Any] | None = None  # by this one
        self._readers = EqualReaders(loader)
        self.draws = not self.tracker.is_stream
        self._begin(None)

    def is_finished(self) -> bool:
        """Return whether the loaded state was saved at the end of its epoch."""
        return self._loaded is not None and bool(self._loaded["finished"])

    def _begin(self, new: Pass | None) -> None:
        self._of = new
        self.base = 0
        self._start = _Position()
        self._drawn: collections.deque[_Position] = collections.deque()
        self._delivered: collections.deque[_Position] = collections.deque(maxlen=_KEPT_POSITIONS)
        self._random: dict[str, str | None] = {"torch": None, "generator": None}

    def begin(self, new: Pass) -> int | None:
        """Begin a pass; return how many of its first batches to drop, or ``None`` if nothing is left."""
        # A pass that was left does not use up what was loaded: a look at the first batch, for example.
        loaded, self._loaded = self._find_loaded(new), None
        is_same = loaded is not None and loaded["epoch"] == new.epoch
        self._resumed = loaded if loaded and is_same and not loaded["finished"] else None
        self._begin(new)
        self._readers.begin()
        self.tracker.resume, self.tracker.first_worker = {}, 0
        self.tracker.leave()
        if isinstance(self._sampler, Resumable):  # which may hold the position of an earlier resume
            self._sampler.start, self._sampler.finished = self._sampler.beginning, False
        if loaded is None:
            return 0
        saved = loaded["replay"]
        if loaded["finished"]:
            # The next epoch is drawn from the generator as the finished one has left it.
            _set_generator(self._generator(), saved["generator_after"])
            return None if is_same else 0
        if not is_same:
            return 0
        self._random = {key: saved[key] for key in self._random}
        self.base = saved["batches"]
        workers = {int(worker): state for worker, state in saved["workers"].items()}
        self._start = _Position(saved["checksum"], saved["sampler"], workers, saved["last_worker"])
        if self.tracker.is_pipe:
            return self.base  # read again and discarded
        self.tracker.resume = dict(workers)
        if self._num_workers > 1 and self.tracker.has_state():
            self.tracker.first_worker = (saved["last_worker"] + 1) % self._num_workers
        return self.tracker.first_worker

    def _find_loaded(self, of: Pass) -> dict[str, Any] | None:
        """Return the state with which a pass begins."""
        if self._loaded is not None or self._resumed is None or of.epoch != self._resumed["epoch"]:
            return self._loaded
        last = self._of
        is_used = last is not None and last.epoch == of.epoch and last.is_complete()
        return None if is_used else self._resumed

    def steps_to_complete(self) -> int | None:
        """Return how many batches complete the pass that has begun; ``None`` if that is unknown."""
        if self.own is not None:
            return self.own.steps_to_complete(without=self.base)
        try:
            left = len(self._source) - self.base
        except (TypeError, NotImplementedError):  # a stream, or a sampler without a length
            return None
        return complete_with(left, left)

    def receive(self, batch: Any, running: Pass) -> Any:
        """Record the position after a batch of the newest pass; return the batch for the user."""
        if running is not self._of:
            return batch.batch if type(batch) is WorkerBatch else batch
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

    def state(self, of: Pass, batches: int | None) -> dict[str, Any]:
        """Return the state after the batches that a pass has delivered, or after `batches` of them."""
        loaded = None if of is self._of else self._find_loaded(of)
        if loaded is not None and loaded["epoch"] == of.epoch:
            return copy.deepcopy(loaded)
        used, finished = of.count_used(batches)
        back = max(0, of.batches - used)  # in even steps a rank may have fewer batches than steps
        if used and back >= len(self._delivered):
            raise ConfigError(
                Explanation(
                    f"batches={used}, but only the last {len(self._delivered)} positions are kept.",
                    cause="the position of a sampler or dataset that is not ddpsafe's is its state, "
                    "which a number of batches cannot restore.",
                    fix="save sooner after the step that the state is for.",
                )
            )
        is_new = of is not self._of  # the user has set an epoch since
        start = _Position() if is_new else self._start
        position = self._delivered[-1 - back] if used else start
        workers = position.workers
        if self._num_workers == 0 and not is_new and self.tracker.has_entered():
            if back and self.tracker.state() is not None:
                raise ConfigError(
                    Explanation(
                        f"batches={used}, but the dataset has already read batch {of.batches}.",
                        cause="without workers only the dataset's current state can be saved.",
                        fix="save before the next batch is read, or use num_workers=1.",
                    )
                )
            state = self.tracker.state()
            workers = {} if state is None else {0: state}
        consumed = used if is_new else self.base + used
        replica = current_replica()
        return {
            "version": VERSION,
            "epoch": of.epoch,
            "consumed": consumed,
            "finished": finished,
            "world_size": replica.num_replicas,
            "identity": self._identity(),
            "replay": {
                "rank": replica.rank,
                "batches": consumed,
                "checksum": position.checksum,
                "sampler": position.sampler,
                "workers": {str(worker): state for worker, state in workers.items()},
                "last_worker": position.last_worker,
                **self._random_of_order(is_new=is_new),
                "generator_after": _generator_text(self._generator()),
            },
        }

    def _random_of_order(self, *, is_new: bool) -> dict[str, str | None]:
        """Return the states of the generators that this pass draws, or will draw, its order from."""
        if self.tracker.is_stream or (any(self._random.values()) and not is_new):
            return self._random
        # With more ranks the loader derives torch's generator from seed, epoch and rank.
        alone = current_replica().num_replicas == 1
        torchs = _text(torch.get_rng_state()) if alone else None
        return {"torch": torchs, "generator": _generator_text(self._generator())}

    def _identity(self) -> dict[str, object]:
        same = {**self._same, "num_replicas": current_replica().num_replicas}
        if self.tracker.is_stream or self.tracker.is_stateful:
            same["num_workers"] = self._num_workers
        if not self.tracker.is_stream and hasattr(self._dataset, "__len__"):
            same["n"] = len(self._dataset)
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
        return int(parsed["epoch"])

    def _generator(self) -> torch.Generator | None:
        inner = getattr(self._source, "sampler", None)
        generator = getattr(self._source, "generator", None) or getattr(inner, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def indices(self) -> Iterator[Any]:
        """Draw what the loader reads, recording the sampler's position after each batch."""
        return self._draw(self._drawn)

    def _draw(self, drawn: collections.deque[_Position]) -> Iterator[Any]:
        # Resume with the worker after the last one: those before it get a batch that is dropped.
        nothing = [Skip] if self._in_batches else Skip
        yield from itertools.repeat(nothing, self.tracker.first_worker)
        source, is_resumed = self._source, self._resumed is not None
        generator = self._generator()
        outer = torch.get_rng_state()
        if not is_resumed:
            self._random = {"torch": _text(outer), "generator": _generator_text(generator)}
        else:
            _set_generator(generator, self._random["generator"])
            if self._random["torch"] is not None:
                torch.set_rng_state(_from_text(self._random["torch"]))
        try:
            batches, owner = _batches(source, self._start.sampler)
            checksum: int | None = 0
            if owner is None:
                for batch in itertools.islice(batches, self.base):
                    checksum = zlib.crc32(repr(batch).encode(), checksum or 0)
                expected = self._start.checksum
                if self.base and expected is not None and checksum != expected:
                    raise StateMismatchError(
                        Explanation(
                            f"{type(self._sampler).__name__} draws other indices than before the state was saved, "
                            f"so it is unknown which samples the first {self.base} batches had.",
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
            if is_resumed:
                torch.set_rng_state(outer)
        for batch in itertools.chain([] if first is Skip else [first], batches):
            checksum = zlib.crc32(repr(batch).encode(), checksum or 0)
            state = None if owner is None else copy.deepcopy(owner.state_dict())
            drawn.append(_Position(checksum, state))
            yield batch


class TrackedIndices:
    """What torch's iterator draws from instead of the sampler."""

    def __init__(self, position: SamplerPosition | Replay, source: Any) -> None:
        self._position = position
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return self._position.indices()

    def __len__(self) -> int:
        return len(self._source)


def _batches(source: Any, saved: Any) -> tuple[Iterator[Any], Any]:
    """Return what a sampler draws from its saved state on, and the object that has the state."""
    plain = type(source) is BatchSampler
    sampler = source.sampler if plain else source
    if saved is not None and is_stateful(sampler):
        sampler.load_state_dict(saved)
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
