"""Streams: ranks and workers read every sample once, in the same order for any worker count."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from data_programs import WithEpoch, lines_of, numbers_to, read_shares, run_ranks
from hypothesis import given
from hypothesis import strategies as st

from ddpsafe._errors import ConfigError
from ddpsafe.data import DataLoader, ShardedIterable
from ddpsafe.data.errors import DataWarning, StateMismatchError, UnevenStepsError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def read(loader: DataLoader[Any]) -> list[list[int]]:
    """Return the batches of one pass."""
    return [[int(x) for x in batch] for batch in loader]


@pytest.mark.full(but=["5"])
@pytest.mark.parametrize("n", [0, 1, 5, 64, 97])
def test_batches_do_not_depend_on_the_number_of_workers(n: int) -> None:
    """0, 1, 2 and 3 workers deliver the same batches in the same order."""
    for replicas in (1, 3):
        whole: Counter[int] = Counter()
        for rank in range(replicas):
            streams = [
                read(
                    DataLoader(
                        ShardedIterable(range(n), num_replicas=replicas, rank=rank),
                        7,
                        num_workers=workers,
                    )
                )
                for workers in ((0, 1, 2, 3) if rank == 0 else (0,))
            ]
            assert all(stream == streams[0] for stream in streams)
            whole.update(x for batch in streams[0] for x in batch)
        assert whole == Counter(range(n))


@given(
    n=st.integers(0, 200),
    replicas=st.integers(1, 6),
    even=st.sampled_from([None, "truncate", "repeat"]),
)
def test_shares_are_as_even_as_requested(n: int, replicas: int, even: Any) -> None:
    """None differs by at most one; truncate loses, and repeat adds, less than a round."""
    shares = [
        list(ShardedIterable(range(n), num_replicas=replicas, rank=rank, even=even))
        for rank in range(replicas)
    ]
    sizes = {len(share) for share in shares}
    counts = Counter(x for share in shares for x in share)
    if even is None:
        assert counts == Counter(range(n))
        assert max(sizes) - min(sizes) <= 1
        return
    assert len(sizes) == 1
    if even == "truncate":
        assert set(counts.values()) <= {1}
        assert counts.total() == n // replicas * replicas
    else:
        assert set(counts) == set(range(n))
        assert counts.total() - n < replicas


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_samples_are_strided_over_ranks_and_then_workers(workers: int) -> None:
    """Worker w of W of rank r of R reads r + R * w, then every (R * W)-th; workers take turns."""
    n, replicas, size = 50, 2, 4
    seen: Counter[int] = Counter()
    for rank in range(replicas):
        stream = ShardedIterable(range(n), shard="sample", num_replicas=replicas, rank=rank)
        got = read(DataLoader(stream, size, num_workers=workers))
        of_workers = []
        for worker in range(max(1, workers)):
            own = list(range(n))[rank::replicas][worker :: max(1, workers)]
            of_workers.append([own[i : i + size] for i in range(0, len(own), size)])
        rounds = itertools.zip_longest(*of_workers)
        assert got == [batch for turn in rounds for batch in turn if batch is not None]
        seen.update(x for batch in got for x in batch)
    assert seen == Counter(range(n))


def test_uneven_stream_can_raise_an_error() -> None:
    """Every rank raises, and names the ranks that would have one sample less."""
    for rank in range(3):
        stream = ShardedIterable(range(10), num_replicas=3, rank=rank, even="error")
        with pytest.raises(UnevenStepsError, match="after 10 samples") as caught:
            list(stream)
        assert caught.value.finished_ranks == (1, 2)


def write_shards(folder: Path, count: int) -> list[str]:
    """Write files of different sizes; return their paths in random order."""
    paths = []
    for number in range(count):
        path = folder / f"shard-{number:02d}"
        path.write_text(" ".join(str(number * 100 + line) for line in range(5 + number)))
        paths.append(str(path))
    random.Random(0).shuffle(paths)
    return paths


@pytest.mark.parametrize("workers", [0, 2])
def test_files_are_read_once_over_ranks_and_workers(tmp_path: Path, workers: int) -> None:
    """Each rank and each worker has its own files, in the order of their names."""
    paths = write_shards(tmp_path, 7)
    seen: Counter[int] = Counter()
    for rank in range(2):
        stream = ShardedIterable[Any](
            paths, shard="files", read=lines_of, num_replicas=2, rank=rank
        )
        loader = DataLoader(stream, 4, num_workers=workers)
        seen.update(int(x) for batch in loader for x in batch)
    assert seen == Counter(n * 100 + line for n in range(7) for line in range(5 + n))


def test_files_resume_only_with_the_same_number_of_workers(tmp_path: Path) -> None:
    """Samples that were already delivered are read again and discarded."""
    paths = write_shards(tmp_path, 6)

    def make(workers: int) -> DataLoader[Any]:
        stream = ShardedIterable[Any](paths, shard="files", read=lines_of, num_replicas=2, rank=0)
        return DataLoader(stream, 4, num_workers=workers)

    whole = list(make(2))
    loader = make(2)
    iterator = iter(loader)
    first = [next(iterator) for _ in range(3)]
    state = loader.state_dict()
    resumed = make(2)
    resumed.load_state_dict(state)
    assert first + list(resumed) == whole
    with pytest.raises(StateMismatchError, match="num_workers"):
        make(0).load_state_dict(state)


def test_persistent_workers_resume_the_stream() -> None:
    """They receive the offset of the resumed epoch, and start the next one at the beginning."""
    make = functools.partial(
        DataLoader,
        ShardedIterable(range(50), num_replicas=2, rank=1),
        4,
        num_workers=2,
        persistent_workers=True,
    )
    loader = make()
    whole = read(loader)
    iterator = iter(loader)
    first = [[int(x) for x in next(iterator)] for _ in range(3)]
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert first + read(resumed) == whole
    assert read(resumed) == whole


class Seekable(WithEpoch):
    """A source that can seek, and counts its reads."""

    def __init__(self) -> None:
        self.first = self.read = 0

    def seek(self, position: int) -> None:
        """Set the next position."""
        self.first = position

    def __iter__(self) -> Any:
        first, self.first = self.first, 0
        for x in range(first, 100):
            self.read += 1
            yield x + 1000 * self.epoch


def test_seekable_source_is_not_read_again() -> None:
    """Skipping is O(1), and the source receives the epoch."""
    loader = DataLoader(ShardedIterable(Seekable(), num_replicas=1, rank=0), 10)
    list(loader)
    iterator = iter(loader)
    for _ in range(9):
        next(iterator)
    source = Seekable()
    resumed = DataLoader(ShardedIterable(source, num_replicas=1, rank=0), 10)
    resumed.load_state_dict(loader.state_dict())
    assert read(resumed) == [list(range(1090, 1100))]
    assert source.read == 10


def test_source_may_be_a_function() -> None:
    """It is called again for each pass."""
    stream = ShardedIterable(functools.partial(numbers_to, 4), num_replicas=1, rank=0)
    assert list(stream) == list(stream) == [0, 1, 2, 3]


def test_fewer_files_than_ranks_is_an_error_and_than_workers_a_warning(tmp_path: Path) -> None:
    """The error is raised on every rank before anything is read, so none hangs."""
    paths = write_shards(tmp_path, 3)
    for rank in range(4):
        with pytest.raises(ConfigError, match="3 files are too few for 4 ranks"):
            ShardedIterable[Any](paths, shard="files", read=lines_of, num_replicas=4, rank=rank)
    stream = ShardedIterable[Any](paths, shard="files", read=lines_of, num_replicas=2, rank=0)
    with pytest.warns(DataWarning, match="3 files for 2 ranks with 2 workers each"):
        DataLoader(stream, num_workers=2)


WRONG = ["undivided", "pairs of ranks"]
RIGHT = [
    "divided",
    "constant",
    "few labels",
    "padding first",
    "undivided for fewer replicas",
    "by epoch",
]


@pytest.mark.full
def test_ranks_that_read_the_same_samples_of_a_stream_are_refused() -> None:
    """The error names two ranks and shows the samples; what may be equal by chance proves nothing."""
    found = run_ranks(read_shares, [*WRONG, *RIGHT], 0, ranks=3)
    for kind in WRONG:
        texts = [found[rank][kind] for rank in range(3) if found[rank][kind]]
        assert texts, kind
        for text, ranks, _ in texts:
            assert ranks == (0, 1) or kind == "undivided"
            assert "read the same samples of Share: the first 8" in text
            assert "sample 1: (tensor([" in text
    assert [found[rank][kind] for rank in range(3) for kind in RIGHT] == [""] * 3 * len(RIGHT)


@pytest.mark.full
def test_ranks_that_are_asked_for_in_the_workers_are_refused() -> None:
    """In a worker there is no group: each rank takes itself for rank 0, and half of the data is lost."""
    found = run_ranks(read_shares, ["asked in the workers", "divided"], 2)
    texts = [found[rank]["asked in the workers"] for rank in range(2)]
    text, ranks, workers = texts[0] or texts[1]
    assert ranks == (0, 1)
    assert workers[0] == workers[1]
    assert f"worker {workers[0]} of rank 0" in text
    assert "torch.distributed is not initialized" in text
    assert [found[rank]["divided"] for rank in range(2)] == ["", ""]
