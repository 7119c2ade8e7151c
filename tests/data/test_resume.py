"""A resume loses nothing and repeats nothing, whatever has changed since."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from data_programs import Numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from ddpsafe.data import (
    BalancedBatchSampler,
    DataLoader,
    DistributedSampler,
    ShardedIterable,
    WeightedSampler,
)
from ddpsafe.data.errors import DataConfigError, DataWarning, StateMismatchError

pytestmark = pytest.mark.filterwarnings("ignore::ddpsafe.data.errors.DataWarning")

N = 103
steps = st.integers(0, 9)
topologies = st.tuples(st.integers(1, 5), st.integers(1, 9))


def loaders(n: int, replicas: int, batch_size: int, **options: Any) -> list[DataLoader[int]]:
    """Make the loaders of all ranks in this process."""
    sampler = {key: options.pop(key) for key in ("algorithm", "pad", "seed") if key in options}
    return [
        DataLoader(
            Numbers(n),
            batch_size,
            sampler=DistributedSampler(n, replicas, rank, **sampler),
            **options,
        )
        for rank in range(replicas)
    ]


def read(loader: DataLoader[int], count: int | None = None) -> list[list[int]]:
    """Read `count` batches of one iteration, or all."""
    iterator = iter(loader)
    batches = []
    while count is None or len(batches) < count:
        batch = next(iterator, None)
        if batch is None:
            break
        batches.append([int(x) for x in batch])
    return batches


@given(
    n=st.integers(1, 150),
    chain=st.lists(st.tuples(topologies, steps), max_size=6),
    algorithm=st.sampled_from(["torch", "feistel-v1"]),
    last=topologies,
)
@settings(max_examples=60)
def test_chain_of_resumes_reads_every_sample_exactly_once(
    n: int, chain: list[Any], algorithm: str, last: tuple[int, int]
) -> None:
    """With any world sizes, batch sizes and stops, the epoch's samples are the dataset."""
    state: Any = None
    seen: Counter[int] = Counter()
    for (replicas, batch_size), count in [*chain, (last, None)]:
        ranks = loaders(n, replicas, batch_size, algorithm=algorithm, pad=False)
        if state is not None:
            for loader in ranks:
                loader.load_state_dict(state)
            if state["finished"]:
                break
        parts = [read(loader, count) for loader in ranks]
        seen.update(i for part in parts for batch in part for i in batch)
        states = [loader.state_dict() for loader in ranks]
        # Without padding a rank may lack the last batch; rank 0 has every batch.
        state = json.loads(json.dumps(states[0]))
    assert seen == Counter(range(n))


@given(chain=st.lists(steps, min_size=1, max_size=5), swap=st.booleans())
@settings(max_examples=30)
def test_constant_global_batch_size_gives_the_uninterrupted_batches(
    *,
    chain: list[int],
    swap: bool,
) -> None:
    """If world size times batch size is constant, each step has the same samples."""
    whole = [read(loader) for loader in loaders(102, 2, 6)]
    expected = [sorted(i for part in whole for i in part[step]) for step in range(len(whole[0]))]
    state: Any = None
    got = []
    for number, count in enumerate([*chain, 99]):
        replicas, batch_size = (3, 4) if swap and number % 2 else (2, 6)
        ranks = loaders(102, replicas, batch_size)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        if state is not None and state["finished"]:
            break
        parts = [read(loader, count) for loader in ranks]
        got += [sorted(i for part in parts for i in part[step]) for step in range(len(parts[0]))]
        states = [loader.state_dict() for loader in ranks]
        assert all(each == states[0] | {"world_size": replicas} for each in states)
        state = states[0]
    assert got == expected


@pytest.mark.parametrize("style", ["automatic", "set_epoch", "epochs"])
@pytest.mark.parametrize("stop", range(8))
def test_interrupting_at_any_step_changes_nothing(style: str, stop: int) -> None:
    """Of three epochs, the second stops at each step, the first and the last included."""
    expected = [read(loader, None) for loader in loaders(N, 2, 8)[1:] for _ in range(3)]
    first = loaders(N, 2, 8)[1]
    got = [read(first)]
    part = read(first, stop)
    state = first.state_dict()
    resumed = loaders(N, 2, 8)[1]
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    got += _rest(resumed, part, style, finished=state["finished"])
    assert got == expected


def _rest(
    loader: DataLoader[int], part: list[list[int]], style: str, *, finished: bool
) -> list[list[list[int]]]:
    if style == "epochs":
        rest = [read(loader) for _ in loader.epochs(3)]
    elif style == "set_epoch":
        rest = []
        for epoch in (1, 2):
            loader.set_epoch(epoch)
            rest.append(read(loader))
        return [part + rest[0], rest[1]]
    else:
        rest = [read(loader) for _ in range(1 if finished else 2)]
    return [part, *rest] if finished else [part + rest[0], *rest[1:]]


@pytest.mark.full(but=["0-1-False", "1-2-True"])
@pytest.mark.parametrize(("workers", "persistent"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("stop", [0, 1, 5, 7])
def test_prefetched_batches_are_not_counted_as_read(
    *,
    workers: int,
    persistent: bool,
    stop: int,
) -> None:
    """Workers run ahead by prefetch_factor * num_workers, and the state counts delivered batches."""
    expected = [read(loader) for loader in loaders(N, 2, 8)[:1] for _ in range(3)]
    options = {"num_workers": workers, "persistent_workers": persistent, "prefetch_factor": 3}
    first = loaders(N, 2, 8, **options)[0]
    got = [read(first)]
    part = read(first, stop)
    state = first.state_dict()
    del first
    resumed = loaders(N, 2, 8, num_workers=2 - workers)[0]
    resumed.load_state_dict(state)
    rest = [read(resumed) for _ in resumed.epochs(3)]
    got += [part, *rest] if state["finished"] else [part + rest[0], *rest[1:]]
    assert got == expected


def test_state_at_the_end_of_an_epoch_starts_the_next() -> None:
    """A checkpoint after the last batch neither replays the epoch nor skips the next one."""
    loader = loaders(N, 2, 8)[0]
    read(loader, 7)
    state = loader.state_dict()
    assert (state["finished"], state["epoch"], state["consumed"]) == (True, 0, N)
    resumed = loaders(N, 2, 8)[0]
    resumed.load_state_dict(state)
    assert list(resumed.epochs(2)) == [1]
    explicit = loaders(N, 2, 8)[0]
    explicit.load_state_dict(state)
    explicit.set_epoch(0)
    with pytest.warns(DataWarning, match="nothing is left to read; the next epoch is 1"):
        assert read(explicit) == []
    assert len(read(explicit)) == 7


def test_epoch_set_before_saving_starts_at_its_beginning() -> None:
    """Batches of the previous epoch do not count for it."""
    loader = loaders(N, 2, 8)[0]
    read(loader, 3)
    loader.set_epoch(5)
    assert loader.state_dict()["epoch"] == 5
    assert loader.state_dict()["consumed"] == 0


def test_lookahead_wrapper_passes_the_number_of_used_batches() -> None:
    """A prefetcher that holds one batch back passes the number it has used."""
    loader = loaders(N, 2, 8)[0]
    read(loader, 4)
    assert loader.state_dict(batches=3)["consumed"] == 48
    assert loader.state_dict()["consumed"] == 64
    with pytest.raises(DataConfigError, match="has delivered 4"):
        loader.state_dict(batches=5)


def test_length_after_a_resume_is_that_of_the_whole_epoch() -> None:
    """A learning rate schedule computed from it does not depend on where the run was resumed."""
    loader = loaders(N, 2, 8)[0]
    read(loader, 4)
    resumed = loaders(N, 2, 8)[0]
    resumed.load_state_dict(loader.state_dict())
    assert (len(loader), len(resumed), len(read(resumed)), len(resumed)) == (7, 7, 3, 7)


def test_batch_sampler_around_ddpsafes_sampler_resumes_too() -> None:
    """PyTorch's BatchSampler has the effect of batch_size."""
    sampler = DistributedSampler(N, 2, 0)
    loader = DataLoader(Numbers(N), batch_sampler=BatchSampler(sampler, 8, drop_last=True))
    first = read(loader, 2)
    again = DistributedSampler(N, 2, 0)
    resumed = DataLoader(Numbers(N), 8, sampler=again, drop_last=True)
    resumed.load_state_dict(loader.state_dict())
    assert first + read(resumed) == read(
        DataLoader(Numbers(N), 8, drop_last=True, sampler=DistributedSampler(N, 2, 0))
    )


def sampler_of(kind: str, replicas: int, rank: int = 0, batch_size: int = 4) -> Any:
    """Make a sampler of each kind that has a position, for N samples."""
    options: dict[str, Any] = {"num_replicas": replicas, "rank": rank}
    weights = [1 + i % 4 for i in range(N)]
    if kind == "balanced":
        return BalancedBatchSampler(weights, batch_size, window=2, drop_last=True, **options)
    if kind == "tokens":
        return BalancedBatchSampler(weights, 4, max_tokens=9, **options)
    if kind in {"iid", "repeat"}:
        return WeightedSampler(weights, mode=kind, **options)  # type: ignore[arg-type]
    return DistributedSampler(N, drop_last=kind == "drop_last", **options)


SAMPLERS = ["ordered", "drop_last", "iid", "repeat", "balanced", "tokens"]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_sampler_state_counts_draws(kind: str) -> None:
    """The bare sampler knows only its draws, which suffices if nothing prefetches."""
    sampler = sampler_of(kind, 2)
    iterator = iter(sampler)
    drawn = [next(iterator) for _ in range(11)]
    resumed = sampler_of(kind, 2)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert drawn + list(resumed) == list(sampler_of(kind, 2))
    assert list(iterator)
    assert sampler.state_dict()["finished"]


@pytest.mark.parametrize("way", ["epochs", "set_epoch", "automatic"])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_an_epoch_with_less_than_a_step_left_is_over(kind: str, way: str) -> None:
    """No pass after a resume is empty, but where the script itself sets that epoch: a warning says so."""

    def made(replicas: int, batch_size: int) -> DataLoader[int]:
        sampler = sampler_of(kind, replicas, batch_size=batch_size)
        if isinstance(sampler, BalancedBatchSampler):
            return DataLoader(Numbers(N), batch_sampler=sampler)
        return DataLoader(Numbers(N), batch_size, sampler=sampler, drop_last=True)

    first = made(1, 1)
    steps = len(first) - 1
    assert len(read(first, steps)) == steps
    state = first.state_dict()
    assert not state["finished"]
    resumed = made(3, 4)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["finished"]
    if way == "epochs":
        assert next(iter(resumed.epochs(3))) == 1
    elif way == "set_epoch":
        resumed.set_epoch(0)
        with pytest.warns(DataWarning, match="nothing is left to read; the next epoch is 1"):
            assert read(resumed) == []
    plain = made(3, 4)
    plain.set_epoch(1)
    assert read(resumed) == read(plain) != []


@pytest.mark.parametrize(
    "name", ["dict", "none", "version", "consumed", "epoch", "identity", "old", "new", "torchdata"]
)
def test_invalid_state_is_refused(name: str) -> None:
    """Only a state of this version is accepted as a position."""
    loader = loaders(N, 2, 8)[0]
    state = loader.state_dict()
    broken: dict[str, Any] = {
        "dict": [1, 2],
        "none": None,
        "version": {k: v for k, v in state.items() if k != "version"},
        "consumed": {**state, "consumed": -1},
        "epoch": {**state, "epoch": "1"},
        "identity": {k: v for k, v in state.items() if k != "identity"},
        "old": {**state, "version": 0},
        "new": {**state, "version": 99},
        "torchdata": {"_sampler_iter_yielded": 3, "_num_yielded": 3},
    }
    with pytest.raises(StateMismatchError, match="What to do"):
        loader.load_state_dict(broken[name])


@pytest.mark.parametrize(
    ("change", "key"),
    [({"n": 90}, "n"), ({"seed": 1}, "seed"), ({"algorithm": "feistel-v1"}, "algorithm")],
)
def test_state_of_other_data_is_refused_or_gives_a_warning(
    change: dict[str, Any], key: str
) -> None:
    """The differences are named; with strict=False they are a warning."""
    state = loaders(N, 2, 8)[0].state_dict()
    other = loaders(change.pop("n", N), 2, 8, **change)[0]
    with pytest.raises(StateMismatchError, match=f"{key}: saved") as caught:
        other.load_state_dict(state)
    assert key in caught.value.differences
    with pytest.warns(DataWarning, match=key):
        other.load_state_dict(state, strict=False)


def test_fingerprint_of_other_files_is_refused() -> None:
    """Equal length is not enough if the dataset has a fingerprint."""
    left, right = loaders(N, 2, 8)
    left.remember_fingerprint("a" * 32)
    right.remember_fingerprint("b" * 32)
    with pytest.raises(StateMismatchError, match="fingerprint"):
        right.load_state_dict(left.state_dict())


def test_position_discarded_by_set_epoch_gives_a_warning() -> None:
    """A framework that counts its own epochs from 0 would lose the position silently."""
    loader = loaders(N, 2, 8)[0]
    read(loader)
    read(loader, 2)
    resumed = loaders(N, 2, 8)[0]
    resumed.load_state_dict(loader.state_dict())
    with pytest.warns(DataWarning, match="discards the position"):
        resumed.sampler.set_epoch(0)  # type: ignore[union-attr]


@pytest.mark.full(but=["None-1"])
@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize("max_tokens", [None, 60.0])
def test_balanced_batches_resume_in_another_world(window: int, max_tokens: float | None) -> None:
    """This works inside a window of sorted lengths, and with token batches."""
    rng = random.Random(window)
    lengths = [rng.randint(1, 40) for _ in range(N)]
    for trial in range(25):
        state: Any = None
        seen: Counter[int] = Counter()
        while state is None or not state["finished"]:
            replicas = rng.randint(1, 4) if max_tokens is None else 1
            size = rng.randint(1, 6) if max_tokens is None else 5
            ranks = [
                DataLoader(
                    Numbers(N),
                    batch_sampler=BalancedBatchSampler(
                        lengths,
                        size,
                        window=window,
                        max_tokens=max_tokens,
                        seed=trial,
                        num_replicas=replicas,
                        rank=rank,
                    ),
                )
                for rank in range(replicas)
            ]
            for loader in ranks:
                if state is not None:
                    loader.load_state_dict(json.loads(json.dumps(state)))
            count = rng.randint(1, 6)
            for loader in ranks:
                seen.update(i for batch in read(loader, count) for i in batch)
            states = [loader.state_dict() for loader in ranks]
            assert all(each == states[0] for each in states)
            state = states[0]
        assert set(seen) == set(range(N))
        assert seen.total() - N < 4


@given(chain=st.lists(st.tuples(topologies, steps), max_size=5), last=topologies)
@settings(max_examples=30)
def test_stream_resumes_in_another_world(chain: list[Any], last: tuple[int, int]) -> None:
    """A stream in whole batches is also read exactly once over any chain of resumes."""
    state: Any = None
    seen: Counter[int] = Counter()
    for (replicas, batch_size), count in [*chain, (last, None)]:
        ranks = [
            DataLoader(ShardedIterable(range(N), num_replicas=replicas, rank=rank), batch_size)
            for rank in range(replicas)
        ]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        if state is not None and state["finished"]:
            break
        seen.update(i for loader in ranks for batch in read(loader, count) for i in batch)
        state = ranks[0].state_dict()
    assert seen == Counter(range(N))


# An orthogonal array: any two columns contain every pair of levels.
LEVELS = [(a, b, (a + b) % 3, (a + 2 * b) % 3) for a in range(3) for b in range(3)]


def ranks_of(row: tuple[int, int, int, int]) -> list[DataLoader[int]]:
    """Make the loaders for a row of the array."""
    replicas, size, workers, algorithm = row
    return loaders(
        N,
        (1, 2, 3)[replicas],
        (1, 4, 7)[size],
        num_workers=workers,
        persistent_workers=workers == 2,
        pad=False,
        algorithm=("torch", "feistel-v1", "torch")[algorithm],
    )


@pytest.mark.full(but=["shift0-1-0-1-1", "shift0-2-1-0-1"])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("row", LEVELS, ids=lambda row: "-".join(map(str, row)))
@pytest.mark.parametrize("shift", [(1, 0, 0), (2, 1, 1), (0, 2, 1)])
def test_world_batch_size_and_workers_may_all_change_at_once(row: Any, shift: Any) -> None:
    """After three batches, a resume that changes all of them reads every sample exactly once."""
    changed = tuple((level + by) % 3 for level, by in zip(row, shift, strict=False))
    before, after = ranks_of(row), ranks_of((*changed, row[3]))  # type: ignore[arg-type]
    parts = [read(loader, 3) for loader in before]
    state = json.loads(json.dumps(before[0].state_dict()))
    for loader in after:
        loader.load_state_dict(state)
    parts += [read(loader) for loader in after]
    assert Counter(i for part in parts for batch in part for i in batch) == Counter(range(N))


def test_state_of_an_older_version_is_refused() -> None:
    """Its numbers may have another meaning; the error has both versions."""
    loader = loaders(N, 2, 8)[0]
    with pytest.raises(StateMismatchError, match="version 0; this ddpsafe reads version 1") as got:
        loader.load_state_dict({**loader.state_dict(), "version": 0}, strict=False)
    assert "an older ddpsafe wrote it" in str(got.value)
    assert got.value.differences == {"version": (0, 1)}
