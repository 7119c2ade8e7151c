"""Datasets, iterators and samplers with their own state resume; others are replayed.

These are the resume guarantees of torchdata's StatefulDataLoader; where ddpsafe differs,
docs/reference/data.md has the difference and the reason.
"""

from __future__ import annotations

import importlib
import json
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
import torch
from data_programs import Numbers
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from ddpsafe.data import DataLoader
from ddpsafe.data._loader.equal_readers import checksum
from ddpsafe.data.errors import DataWarning, StateMismatchError, UndividedStreamError

N = 46


@pytest.mark.parametrize(
    "change",
    [
        lambda place: torch.arange(5000).index_fill(0, torch.tensor([place]), -1),
        lambda place: np.where(np.arange(5000) == place, -1, np.arange(5000)),
        lambda place: {"rows": [np.where(np.arange(5000) == place, -1.0, 0.0)]},
        lambda place: np.array([*range(place), "key", *range(place, 4999)], dtype=object),
    ],
    ids=["a tensor", "an array", "a state with an array", "an array of objects"],
)
def test_contents_are_compared_completely(change: Callable[[int], object]) -> None:
    """The text of a long array omits its middle, so two different ones would be taken for equal."""
    assert checksum(change(2500)) == checksum(change(2500))
    assert checksum(change(2500)) != checksum(change(2501))


@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.eye(n).to_sparse(),
        lambda n: torch.nested.nested_tensor([torch.ones(n), torch.ones(1)]),
        lambda n: torch.empty(n, device="meta"),
        lambda n: torch.ones(n, dtype=torch.complex64).conj(),
    ],
    ids=["sparse", "nested", "meta", "conjugated"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own: nested tensors are a prototype
def test_a_tensor_without_contiguous_bytes_has_a_content_too(make: Callable[[int], object]) -> None:
    """Otherwise a pass over a stream ends with torch's error about its storage."""
    assert checksum(make(3)) == checksum(make(3))
    assert checksum(make(3)) != checksum(make(4))


def own_part(n: int) -> range:
    """Return this worker's numbers, as a stream that divides itself does."""
    info = get_worker_info()
    return range(n) if info is None else range(info.id, n, info.num_workers)


class Position:
    """An iterator with a state, which also draws."""

    def __init__(self, n: int) -> None:
        self.numbers = own_part(n)
        self.place = 0
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Position:
        return self

    def __next__(self) -> int:
        if self.place >= len(self.numbers):
            raise StopIteration
        self.place += 1
        drawn = int(torch.randint(1000, (), generator=self.generator))
        return self.numbers[self.place - 1] * 1000 + drawn

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"place": self.place, "generator": self.generator.get_state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position."""
        self.place = state["place"]
        self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))


class WithIterator(IterableDataset[int]):
    """A stream whose iterator has the state."""

    def __iter__(self) -> Iterator[int]:
        return Position(N)


class OnlyNext:
    """An iterator without ``__iter__``, which a ``for`` loop over its stream does not need."""

    def __init__(self) -> None:
        self.left = 4

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


class OfOnlyNext(IterableDataset[int]):
    """A stream of such an iterator."""

    def __iter__(self) -> Any:
        return OnlyNext()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_is_iterated_once_however_its_iterator_is_made(num_workers: int) -> None:
    """A second iter() would fail here, and starts other streams over."""
    loader = DataLoader(OfOnlyNext(), 2, num_workers=num_workers)
    assert [batch.tolist() for batch in loader] == [[3, 2], [1, 0]]


class IsIterator(IterableDataset[int]):
    """A stream that is its own iterator, as in older code."""

    def __init__(self) -> None:
        self.position: Position | None = None
        self.loaded: dict[str, Any] | None = None

    def __iter__(self) -> IsIterator:
        self.position = Position(N)
        if self.loaded is not None:
            self.position.load_state_dict(self.loaded)
            self.loaded = None
        return self

    def __next__(self) -> int:
        assert self.position is not None
        return next(self.position)

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {} if self.position is None else self.position.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position for the next iteration."""
        self.loaded = dict(state)


class BeginsAgain(IterableDataset[int]):
    """A stream that is its own iterator, and has a position only while it is iterated."""

    position: Position

    def __iter__(self) -> BeginsAgain:
        self.position = Position(N)
        return self

    def __next__(self) -> int:
        return next(self.position)

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return self.position.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position at once."""
        self.position.load_state_dict(state)


class DrawingPosition(Position):
    """An iterator that draws from torch's global generator, which is part of its state."""

    def __next__(self) -> int:
        self.generator = torch.default_generator
        return super().__next__()

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the generator's state."""
        return {"place": self.place, "generator": torch.get_rng_state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set both."""
        self.place = state["place"]
        torch.set_rng_state(torch.tensor(state["generator"], dtype=torch.uint8))


class WithDrawingIterator(IterableDataset[int]):
    """A stream whose iterator's state includes torch's generator."""

    def __iter__(self) -> Iterator[int]:
        return DrawingPosition(N)


class ByGenerator(IterableDataset[int]):
    """A generator function as a stream, with the state in the dataset, as in Hugging Face datasets."""

    def __init__(self) -> None:
        self.place = 0
        self.resume = 0

    def __iter__(self) -> Iterator[int]:
        first, self.resume = self.resume, 0
        for self.place, number in enumerate(own_part(N)[first:], first + 1):
            yield number

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position for the next iteration."""
        self.resume = state["place"]


class WithoutState(IterableDataset[int]):
    """A stream that is read again up to the position."""

    def __iter__(self) -> Iterator[int]:
        yield from own_part(N)


class CountingDataset(Numbers):
    """A map-style dataset with a state: its number of reads."""

    def __init__(self) -> None:
        super().__init__(N)
        self.reads = 0

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index * 1000 + self.reads

    def state_dict(self) -> dict[str, Any]:
        """Return the number of reads."""
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the number of reads."""
        self.reads = state["reads"]


class OfAll(Sampler[int]):
    """A sampler of all numbers."""

    def __len__(self) -> int:
        return N


class StatefulSampler(OfAll):
    """A sampler with its own order and a state."""

    def __init__(self) -> None:
        self.place = 0
        self.loaded = False

    def __iter__(self) -> Iterator[int]:
        if not self.loaded:
            self.place = 0
        self.loaded = False
        while self.place < N:
            self.place += 1
            yield (self.place * 7) % N

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position for the next iteration."""
        self.place = state["place"]
        self.loaded = True


class SamplerOfIterators(OfAll):
    """A sampler whose iterator has the state."""

    def __iter__(self) -> Iterator[int]:
        return _Sevens()


class _Sevens(Position):
    def __init__(self) -> None:
        super().__init__(N)

    def __next__(self) -> int:
        return (super().__next__() // 1000 * 7) % N


class DrawingSampler(OfAll):
    """A sampler that draws from torch's global generator, without a state."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(N).tolist()


class PairBatches(StatefulSampler):
    """A batch sampler with a state."""

    def __iter__(self) -> Iterator[Any]:
        pairs = super().__iter__()
        for first in pairs:
            yield [first, next(pairs)]

    def __len__(self) -> int:
        return N // 2


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "iterator with state": lambda: {"dataset": WithIterator(), "batch_size": 4},
    "iterator that draws": lambda: {"dataset": WithDrawingIterator(), "batch_size": 4},
    "dataset that is its iterator": lambda: {"dataset": IsIterator(), "batch_size": 4},
    "dataset that begins again as its iterator": lambda: {"dataset": BeginsAgain(), "batch_size": 4},
    "generator with state": lambda: {"dataset": ByGenerator(), "batch_size": 4},
    "generator with state, no batches": lambda: {"dataset": ByGenerator(), "batch_size": None},
    "generator with state, drop_last": lambda: {"dataset": ByGenerator(), "batch_size": 4,
        "drop_last": True},
    "generator without state": lambda: {"dataset": WithoutState(), "batch_size": 4},
    "map dataset with state": lambda: {"dataset": CountingDataset(), "batch_size": 4},
    "sampler with state": lambda: _sampled(sampler=StatefulSampler()),
    "sampler whose iterator has the state": lambda: _sampled(sampler=SamplerOfIterators()),
    "batch sampler with state": lambda: _sampled(batch_sampler=PairBatches()),
    "batches of a sampler with state": lambda: _sampled(batch_sampler=BatchSampler(StatefulSampler(), 4,
        drop_last=False)),
    "RandomSampler": lambda: _sampled(sampler=RandomSampler(range(N))),
    "RandomSampler with a generator": lambda: _sampled(sampler=RandomSampler(range(N),
        generator=torch.Generator().manual_seed(9))),
    "WeightedRandomSampler": lambda: _sampled(sampler=WeightedRandomSampler([1.0] * N, N)),
    "SequentialSampler": lambda: _sampled(sampler=SequentialSampler(range(N))),
    "sampler that draws, without state": lambda: _sampled(sampler=DrawingSampler()),
    "list of indices": lambda: _sampled(sampler=list(range(0, N, 2))),
}  # fmt: skip


def _sampled(**options: Any) -> dict[str, Any]:
    size = {} if "batch_sampler" in options else {"batch_size": 4}
    return {"dataset": Numbers(N), **size, **options}


def make(kind: str, num_workers: int, **options: Any) -> DataLoader[Any]:
    """Make the loader of a kind, as a new process would."""
    context = "fork" if num_workers else None
    return DataLoader(
        **KINDS[kind](), num_workers=num_workers, multiprocessing_context=context, **options
    )


def plain(batch: Any) -> Any:
    """Return a batch as numbers."""
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


IN_WORKERS: Final = {
    "iterator with state", "iterator that draws", "dataset that is its iterator",
    "dataset that begins again as its iterator", "generator with state", "generator without state",
    "map dataset with state", "sampler with state", "RandomSampler",
}  # fmt: skip
"""Kinds that workers affect; the other samplers run in the rank's own process."""


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        *((kind, 0) for kind in KINDS),
        *(pytest.param(kind, 2,
            marks=pytest.mark.full if kind in IN_WORKERS else pytest.mark.soak) for kind in KINDS),
    ],
)  # fmt: skip
def test_rest_of_the_epoch_and_the_next_equal_an_uninterrupted_run(
    kind: str, num_workers: int
) -> None:
    """States are saved after none, some and all batches, and survive JSON."""
    torch.manual_seed(3)
    loader = make(kind, num_workers)
    states, batches = [], []
    iterator = iter(loader)
    while True:
        states.append(json.loads(json.dumps(loader.state_dict())))
        batch = next(iterator, None)
        if batch is None:
            break
        batches.append(plain(batch))
    end = json.loads(json.dumps(loader.state_dict()))
    assert (end["finished"], states[-1]["consumed"]) == (True, len(batches))
    for stop in (0, 3, len(batches) - 1) if num_workers else (0, 1, 3, len(batches) - 1):
        resumed = make(kind, num_workers)
        resumed.load_state_dict(states[stop])
        assert resumed.state_dict() == states[stop]
        rest = iter(resumed)
        for number in range(stop, len(batches)):
            assert plain(next(rest)) == batches[number]
            assert json.loads(json.dumps(resumed.state_dict())) == states[number + 1]
        assert list(rest) == []
    assert len(list(resumed)) == len(batches)  # the next epoch is complete
    after = make(kind, num_workers)
    after.load_state_dict(end)
    assert list(after.epochs(1)) == []
    assert len([plain(batch) for batch in after]) == len(batches)


class DrawsByItself(CountingDataset):
    """A dataset whose state is that of torch's generator, from which it draws its samples."""

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(10**6, ()))

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state."""
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generator."""
        torch.set_rng_state(state["torch"])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_state_before_the_first_batch_includes_the_dataset(num_workers: int) -> None:
    """One loader resumes in the middle of an epoch, and then from its beginning."""
    loader: DataLoader[Any] = DataLoader(DrawsByItself(), 4, num_workers=num_workers, shuffle=True)
    iterator = iter(loader)
    beginning = loader.state_dict()
    batches = [plain(next(iterator)) for _ in range(4)]
    loader.load_state_dict(loader.state_dict())
    batches += [plain(batch) for batch in loader]
    loader.load_state_dict(beginning)
    assert [plain(batch) for batch in loader] == batches


@pytest.mark.parametrize(
    "kind", ["map dataset with state", "generator with state", "RandomSampler"]
)
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_finished_epoch_that_is_set_again_is_empty(kind: str, num_workers: int) -> None:
    """As with ddpsafe's samplers: a script that sets the saved epoch reads no sample twice."""
    loader = make(kind, num_workers)
    count = len(list(loader))
    state = loader.state_dict()
    resumed = make(kind, num_workers)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    with pytest.warns(DataWarning, match="nothing is left to read; the next epoch is 1"):
        assert list(resumed) == []
    assert resumed.state_dict()["finished"]
    assert len(list(resumed)) == count


def test_nested_loops_do_not_disturb_the_position() -> None:
    """The state is that of the newest iteration; the outer one only gets a warning."""
    loader = make("RandomSampler", 0)
    outer = iter(loader)
    next(outer)
    inner = iter(loader)
    next(inner)
    with pytest.warns(DataWarning, match="counts only the newest one"):
        next(outer)
    state = loader.state_dict()
    assert state["consumed"] == 1
    rest = [plain(batch) for batch in inner]
    resumed = make("RandomSampler", 0)
    resumed.load_state_dict(state)
    assert [plain(batch) for batch in resumed] == rest


def test_persistent_workers_restart_from_the_state() -> None:
    """Their dataset is at another position, so they are replaced."""
    loader = make("generator with state", 2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = [plain(batch) for batch in iterator]
    loader.load_state_dict(state)
    assert [plain(batch) for batch in loader] == rest


def test_next_epoch_of_a_generator_sampler_equals_an_uninterrupted_run() -> None:
    """The generator of a RandomSampler is restored to its state at the end of the epoch."""
    loader = make("RandomSampler with a generator", 0)
    first = [plain(batch) for batch in loader]
    state = loader.state_dict()
    second = [plain(batch) for batch in loader]
    resumed = make("RandomSampler with a generator", 0)
    resumed.load_state_dict(state)
    assert [plain(batch) for batch in resumed] == second != first


def test_position_behind_a_prefetcher_is_restored() -> None:
    """batches= is how many of the delivered batches were used."""
    loader = make("sampler with state", 2)
    iterator = iter(loader)
    batches = [plain(next(iterator)) for _ in range(4)]
    resumed = make("sampler with state", 2)
    resumed.load_state_dict(loader.state_dict(batches=3))
    assert plain(next(iter(resumed))) == batches[3]


class Fickle(OfAll):
    """A sampler that draws from Python's own generator, which no state includes."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(N))
        random.shuffle(order)
        yield from order


def test_sampler_that_cannot_be_replayed_is_named() -> None:
    """It draws other indices than before, which raises an error before samples are lost or repeated."""
    loader = DataLoader(Numbers(N), 4, sampler=Fickle())
    next(iter(loader))
    state = loader.state_dict()
    resumed = DataLoader(Numbers(N), 4, sampler=Fickle())
    resumed.load_state_dict(state)
    with pytest.raises(StateMismatchError, match="Fickle draws other indices"):
        list(resumed)


def test_another_number_of_workers_is_refused_where_each_has_a_state() -> None:
    """It is allowed where only the sampler has a state."""
    state = make("generator with state", 2).state_dict()
    with pytest.raises(StateMismatchError, match="num_workers: saved 2, now 0"):
        make("generator with state", 0).load_state_dict(state)
    make("sampler with state", 0).load_state_dict(make("sampler with state", 2).state_dict())


def double(row: dict[str, int]) -> dict[str, int]:
    """A module-level function, because some versions of datasets cannot hash a lambda."""
    return {"a": row["a"] * 2}


@pytest.mark.extra("datasets")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_hugging_face_stream_resumes(num_workers: int) -> None:
    """Its IterableDataset has state_dict(), even when shuffled and mapped."""
    datasets = importlib.import_module("datasets")

    def stream() -> Any:
        data = datasets.Dataset.from_dict({"a": list(range(N))})
        return data.to_iterable_dataset(num_shards=4).map(double)

    def loader() -> DataLoader[Any]:
        context = "fork" if num_workers else None
        return DataLoader(stream(), 4, num_workers=num_workers, multiprocessing_context=context)

    first = loader()
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    state = first.state_dict()
    rest = [batch["a"].tolist() for batch in iterator]
    resumed = loader()
    resumed.load_state_dict(state)
    assert [batch["a"].tolist() for batch in resumed] == rest


@pytest.mark.full
@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_pipes_are_sharded_shuffled_and_resumed(num_workers: int) -> None:
    """PyTorch recognises their type, divides them over workers, and gives all workers one order."""

    def loader(epoch: int) -> DataLoader[Any]:
        pipe = IterableWrapper(range(N)).shuffle().sharding_filter()
        made: DataLoader[Any] = DataLoader(
            pipe,
            4,
            shuffle=True,
            num_workers=num_workers,
            multiprocessing_context="fork" if num_workers else None,
        )
        made.set_epoch(epoch)
        return made

    whole = [plain(batch) for batch in loader(0)]
    assert sorted(number for batch in whole for number in batch) == list(range(N))
    assert [plain(batch) for batch in loader(1)] != whole
    for stop in (1, 3):
        first = loader(0)
        iterator = iter(first)
        assert [plain(next(iterator)) for _ in range(stop)] == whole[:stop]
        resumed = loader(0)
        resumed.load_state_dict(first.state_dict())
        assert [plain(batch) for batch in resumed] == whole[stop:]


class Divided(IterableDataset[int]):
    """Each worker reads its own part, whose samples repeat."""

    def __iter__(self) -> Iterator[int]:
        return (number % 3 for number in own_part(N))


class Whole(IterableDataset[int]):
    """Each worker reads everything."""

    def __init__(self, n: int, divisor: int = 1) -> None:
        self.n = n
        self.divisor = divisor

    def __iter__(self) -> Iterator[int]:
        return (number // self.divisor for number in range(self.n))


@pytest.mark.full(but=["stream1-True-1", "stream6-False-4"])
@pytest.mark.parametrize("batch_size", [1, 4, None])
@pytest.mark.parametrize(
    ("stream", "is_refused"),
    [
        (Whole(7), False),  # too few to prove anything
        (Whole(8), True),
        (Whole(100), True),
        (Whole(400, divisor=30), True),
        (Whole(400, divisor=100), False),  # so few different samples may be equal by chance
        (Whole(100, divisor=1000), False),
        (Divided(), False),
        (WithIterator(), False),
    ],
)
def test_a_stream_that_each_worker_reads_completely_is_refused(
    stream: IterableDataset[int],
    is_refused: bool,  # noqa: FBT001 - a parametrized test's argument
    batch_size: int | None,
) -> None:
    """The error shows the samples, before the second worker's are delivered; a divided stream gets nothing."""
    loader = DataLoader(stream, batch_size, num_workers=2, multiprocessing_context="fork")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        if not is_refused:
            for _ in range(2):
                list(loader)
            return
        with pytest.raises(UndividedStreamError, match="sample 0: ") as caught:
            list(loader)
    assert caught.value.workers == (0, 1)
    assert "get_worker_info" in str(caught.value)
