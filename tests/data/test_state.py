"""What ``state_dict`` means: the table of docs/reference/data-state.md, and random jobs with random cuts.

Sample i of epoch e is 1000 * e + i, so what was read tells the epoch that was read.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from data_programs import Numbers, WithEpoch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from ddpsafe._errors import ConfigError
from ddpsafe.data import (
    BalancedBatchSampler,
    DataLoader,
    DistributedSampler,
    ShardedIterable,
    WeightedSampler,
)
from ddpsafe.data.errors import DataWarning, StateMismatchError

pytestmark = pytest.mark.filterwarnings(
    "ignore::ddpsafe.data.errors.DataWarning", "ignore:This DataLoader will create"
)

N = 53
WEIGHTS = [0.5 + i % 4 for i in range(N)]
LENGTHS = [1 + i * 7 % 40 for i in range(N)]


class Epochs(WithEpoch, Numbers):
    """A dataset, or the source of a stream, whose samples tell the epoch."""

    def __getitem__(self, index: int) -> int:
        return 1000 * self.epoch + index

    def __iter__(self) -> Iterator[int]:
        return iter([self[i] for i in range(self.n)])


class Counting(Epochs):
    """A dataset with a state of its own: its number of reads, which shows in no sample."""

    reads = 0

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return super().__getitem__(index)

    def state_dict(self) -> dict[str, int]:
        """Return the number of reads."""
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set it."""
        self.reads = state["reads"]


def loader_of(kind: str, replicas: int, rank: int, size: int, **options: Any) -> DataLoader[int]:
    """Make the loader of a rank, as a new process would."""
    data, of = Epochs(N), {"num_replicas": replicas, "rank": rank}
    if kind == "stream":
        return DataLoader(ShardedIterable(data, **of), size, **options)  # type: ignore[arg-type]
    balanced: dict[str, dict[str, Any]] = {
        "balanced": {},
        "balanced in windows": {"window": 3},
        "balanced, drop_last": {"window": 2, "drop_last": True},
        "by tokens": {"max_tokens": 90},
    }
    if kind in balanced:
        sampler = BalancedBatchSampler(
            LENGTHS, 6 if kind == "by tokens" else size, **balanced[kind], **of
        )
        return DataLoader(data, batch_sampler=sampler, **options)
    samplers: dict[str, Any] = {
        "ordered": lambda: DistributedSampler(N, pad=False, **of),
        "feistel": lambda: DistributedSampler(N, pad=False, algorithm="feistel-v1", **of),
        "padded": lambda: DistributedSampler(N, **of),
        "drop_last": lambda: DistributedSampler(N, drop_last=True, **of),
        "weighted": lambda: WeightedSampler(WEIGHTS, pad=False, **of),
        "repeated": lambda: WeightedSampler(WEIGHTS, mode="repeat", pad=False, **of),
        "a batch sampler": lambda: BatchSampler(
            DistributedSampler(N, pad=False, **of), size, drop_last=False
        ),
        "torch's": lambda: TorchDistributedSampler(range(N), replicas, rank),
        "RandomSampler": lambda: RandomSampler(
            range(N), generator=torch.Generator().manual_seed(9)
        ),
        "a dataset with a state": lambda: DistributedSampler(N, pad=False, **of),
    }
    sampler = samplers[kind]()
    if kind == "a batch sampler":
        return DataLoader(data, batch_sampler=sampler, **options)
    data = Counting(N) if kind == "a dataset with a state" else data
    return DataLoader(data, size, sampler=sampler, **options)


def ranks_of(kind: str, replicas: int, size: int, **options: Any) -> list[DataLoader[int]]:
    """Make the loaders of all ranks in this process."""
    return [loader_of(kind, replicas, rank, size, **options) for rank in range(replicas)]


OWN = ["ordered", "feistel", "weighted", "repeated", "a batch sampler", "stream"]
"""Kinds that read each sample of an epoch exactly once, in any world."""
FILLED = ["padded", "balanced", "balanced in windows"]
"""Kinds that fill the last batch with samples of the epoch."""
CUT = ["drop_last", "balanced, drop_last", "by tokens"]
"""Kinds that drop what is less than a step of all ranks."""
FOLLOWED = ["torch's", "RandomSampler", "a dataset with a state"]
"""Kinds that are followed or replayed, in the same world."""


def saved(loaders: list[DataLoader[int]]) -> dict[str, Any]:
    """Return the state of rank 0, after a check that it is the same on every rank."""
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    # A rank that has no batch in the last step of a stream has seen its end, and rank 0 not yet.
    if "replay" not in states[0] and "shard" not in states[0]["identity"]:
        assert all(state == states[0] for state in states)
    return states[0]  # type: ignore[no-any-return]  # from JSON


def read(loader: DataLoader[int], count: float = math.inf, *, asks: bool = True) -> list[int]:
    """Read some batches of a pass, or all; a pass that does not ask for more than it reads has no end."""
    samples: list[int] = []
    iterator, done = iter(loader), 0
    while done < count:
        if not asks and done == len(loader):
            break
        batch = next(iterator, None)
        if batch is None:
            break
        samples += [int(x) for x in batch]
        done += 1
    return samples


STEPS: dict[str, tuple[list[Any], tuple[int, int | None]]] = {
    "before the first pass": ([], (0, 0)),
    "before the first batch": (["begin"], (0, 0)),
    "in the middle": ([2], (0, 2)),
    "after the last batch": (["by number"], (0, None)),
    "at the end": (["pass"], (0, None)),
    "in the middle of a later epoch": (["pass", "pass", 2], (2, 2)),
    "after a pass that was left": ([1, 2], (1, 2)),
    "after set_epoch": ([2, "set 5"], (5, 0)),
    "after set_epoch, before any pass": (["set 3"], (3, 0)),
    "after a whole pass and set_epoch": (["pass", "set 3"], (3, 0)),
    "after set_epoch of the same epoch": ([2, "set 0"], (0, 0)),
    "after set_epoch and a look": (["set 5", 1], (5, 1)),
    "at the beginning of a loop's epoch": (["loop", "break"], (0, 0)),
    "there, after a look before it": ([1, "loop", "break"], (0, 0)),
    "after looks at an epoch that was read by number": (
        ["loop", "by number", 1, 1, "break"],
        (0, None),
    ),
    "in a loop": (["loop", "pass", "next", 2, "break"], (1, 2)),
    "at the end of a loop's epoch": (["loop", "pass", "break"], (0, None)),
    "after a look at a loop's epoch that was read": (["loop", "pass", 1, 1, "break"], (0, None)),
    "in a loop, after a look before it": ([1, "loop", 2, "break"], (0, 2)),
    "after a loop that was left": (["loop", 2, "break"], (0, 2)),
}
"""What was done before the state was saved: batches of a pass, or what `run` knows. Then the epoch and the
batches of the state; ``None`` is the whole epoch."""


def run(loader: DataLoader[int], steps: list[Any]) -> list[int]:
    """Do the steps; return what the newest pass has read."""
    got: list[int] = []
    loop = iter(loader.epochs(9))
    for step in steps:
        if step in {"loop", "next"}:
            next(loop)
            got = []
        elif step == "begin":
            iter(loader)
        elif isinstance(step, str) and step.startswith("set "):
            loader.set_epoch(int(step[4:]))
            got = []
        elif step != "break":
            is_count = isinstance(step, int)
            got = read(loader, step if is_count else math.inf, asks=step != "by number")
    return got


def whole(kind: str, epoch: int) -> Counter[int]:
    """Return the samples of an epoch, as one process reads them."""
    loader = loader_of(kind, 1, 0, 4)
    loader.set_epoch(epoch)
    return Counter(read(loader))


@pytest.mark.parametrize("other", [(2, 4), (3, 5), (1, 2)], ids=str)
@pytest.mark.parametrize(
    ("kind", "row"),
    # A stream shows its end only when it is asked for more.
    [(k, r) for k in OWN for r in STEPS if k != "stream" or "by number" not in STEPS[r][0]],
)
def test_state_says_what_is_left_of_which_epoch(
    kind: str, row: str, other: tuple[int, int]
) -> None:
    """In the same world and in others, what follows is the rest of the epoch, or all of the next one."""
    steps, (epoch, batches) = STEPS[row]
    ranks = ranks_of(kind, 2, 4)
    got = Counter(x for loader in ranks for x in run(loader, steps))
    state = saved(ranks)
    assert (state["epoch"], state["finished"]) == (epoch, batches is None)
    resumed = ranks_of(kind, *other)
    for loader in resumed:
        loader.load_state_dict(state)
    assert {**saved(resumed), "world_size": 2} == state
    rest = Counter(x for loader in resumed for x in read(loader))
    if batches is None:
        assert rest == whole(kind, epoch + 1)
    elif batches == 0:
        assert rest == whole(kind, epoch)
    else:
        assert rest + got == whole(kind, epoch)
    after = Counter(x for loader in resumed for x in read(loader))
    assert after == whole(kind, epoch + 1 + (batches is None))


@pytest.mark.parametrize("row", [row for row in STEPS if row != "after the last batch"])
@pytest.mark.parametrize("kind", ["padded", *FOLLOWED])
def test_state_of_a_followed_sampler_says_the_same(kind: str, row: str) -> None:
    """In the same world; the rest is read in the order of the uninterrupted pass."""
    steps, (epoch, batches) = STEPS[row]
    first, plain = loader_of(kind, 1, 0, 4), loader_of(kind, 1, 0, 4)
    got = run(first, steps)
    state = saved([first])
    assert (state["epoch"], state["finished"]) == (epoch, batches is None)
    resumed = loader_of(kind, 1, 0, 4)
    resumed.load_state_dict(state)
    rest = read(resumed)
    if kind == "RandomSampler":  # its order is that of its generator, not of the epoch
        assert len({x % 1000 for x in [*(got if batches else []), *rest]}) == N
        return
    plain.set_epoch(epoch + (batches is None))
    assert (got if batches else []) + rest == read(plain)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_batches_that_workers_or_a_prefetcher_hold_back_are_not_read(prefetch: int) -> None:
    """Workers run ahead of what the loop gets, and a prefetcher passes how many of these were used."""
    ranks = ranks_of("ordered", 2, 4, num_workers=1, prefetch_factor=prefetch)
    for loader in ranks:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        assert loader.state_dict()["consumed"] == 3 * 4 * 2
        assert loader.state_dict(batches=2)["consumed"] == 2 * 4 * 2
        with pytest.raises(ConfigError, match="has delivered 3"):
            loader.state_dict(batches=4)


def test_several_loaders_have_positions_of_their_own() -> None:
    """A validation pass in between changes nothing, and neither does a shared dataset."""
    data = Epochs(N)
    train, other = (DataLoader(data, 4, shuffle=True, seed=seed) for seed in (1, 2))
    iterator = iter(train)
    next(iterator)
    read(other)
    next(iterator)
    assert (train.state_dict()["epoch"], train.state_dict()["consumed"]) == (0, 8)
    assert (other.state_dict()["epoch"], other.state_dict()["finished"]) == (0, True)


def test_length_after_a_resume_is_that_of_the_whole_epoch() -> None:
    """A learning rate schedule computed from it does not depend on where the run was resumed."""
    for kind in ("ordered", "balanced", "a dataset with a state"):
        loader, resumed = loader_of(kind, 2, 0, 4), loader_of(kind, 2, 0, 4)
        read(loader, 4)
        resumed.load_state_dict(loader.state_dict())
        assert len(resumed) == len(loader) == 7
        assert len(read(resumed)) < len(read(loader))
        assert len(resumed) == 7


worlds = st.tuples(st.integers(1, 4), st.integers(1, 9))
phases = st.lists(
    st.tuples(worlds, st.integers(0, 25), st.sampled_from(["epochs", "set_epoch", "automatic"])),
    max_size=6,
)


def phase(loaders: list[DataLoader[int]], way: str, steps: int, epochs: int) -> list[int]:
    """Read up to so many steps on all ranks, over the ends of epochs; a look before each pass counts as none."""
    samples: list[int] = []

    def read_on(loader: DataLoader[int], looks: int, budget: float) -> int:
        for _ in range(looks):
            next(iter(loader), None)
        if budget == 0:
            return 0
        done = 0
        for batch in loader:
            samples.extend(int(x) for x in batch)
            done += 1
            if done == budget:
                break
        return done

    state = loaders[0].state_dict()
    first = state["epoch"] + state["finished"]
    # Without padding a rank may lack the last batch of a step that rank 0 has.
    loops = [iter(loader.epochs(epochs)) for loader in loaders]
    budget, epoch = steps, first
    # Where a rank has nothing left, a look finds the end, and completes the epoch on all ranks.
    of_stream = (N - state["consumed"]) // len(loaders)
    left = [getattr(loader.sampler, "num_samples", of_stream) for loader in loaders]
    looks = int(way != "automatic" and min(left) > 0)
    while epoch < epochs and budget > 0:
        taken = 0
        for loader, loop in zip(loaders, loops, strict=True):
            if way == "epochs":
                assert next(loop) == epoch
            elif way == "set_epoch":
                loader.set_epoch(epoch)
            taken = max(taken, read_on(loader, looks, budget))
        budget -= taken
        epoch += 1
    return samples


def job(kind: str, chain: list[Any], epochs: int) -> dict[int, Counter[int]]:
    """Run a job that is cut and resumed; return what it has read of each epoch."""
    state: dict[str, Any] | None = None
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for (replicas, size), steps, way, *workers in [*chain, ((2, 3), 10**6, "automatic")]:
        loaders = ranks_of(kind, replicas, size, num_workers=sum(workers))
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        for sample in phase(loaders, way, steps, epochs):
            seen[sample // 1000][sample] += 1
        state = saved(loaders)
    return seen


@given(kind=st.sampled_from(OWN), chain=phases)
@settings(max_examples=150, derandomize=True)
def test_any_job_reads_each_sample_of_each_epoch_once(kind: str, chain: list[Any]) -> None:
    """With any worlds, batch sizes, cuts and ways of looping."""
    seen = job(kind, chain, 3)
    assert {epoch: seen[epoch] for epoch in range(3)} == {e: whole(kind, e) for e in range(3)}


@given(
    kind=st.sampled_from(OWN),
    chain=st.lists(
        st.tuples(
            st.tuples(st.integers(1, 2), st.integers(1, 9)),
            st.integers(0, 12),
            st.sampled_from(["epochs", "set_epoch", "automatic"]),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=3,
    ),
)
@settings(max_examples=8, derandomize=True)
def test_any_job_with_workers_reads_each_sample_of_each_epoch_once(
    kind: str, chain: list[Any]
) -> None:
    """Their number may change, too; what they have read ahead of a cut is read again."""
    seen = job(kind, chain, 2)
    assert {epoch: seen[epoch] for epoch in range(2)} == {e: whole(kind, e) for e in range(2)}


@given(
    kind=st.sampled_from(["padded", "torch's", "a dataset with a state"]),
    world=st.integers(1, 3),
    chain=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=5),
)
@settings(max_examples=60, derandomize=True)
def test_any_job_in_one_world_reads_what_it_would_without_cuts(
    kind: str, world: int, chain: list[Any]
) -> None:
    """Datasets and samplers that have a state of their own, or none: each rank saves its own."""
    plain = ranks_of(kind, world, 4)
    expected = [[read(loader) for _ in range(3)] for loader in plain]
    loaders = ranks_of(kind, world, 4)
    got: list[list[int]] = [[] for _ in loaders]
    for steps, loop in [*chain, *[(99, False)] * 6]:
        states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        if states[0]["epoch"] + states[0]["finished"] == 3:
            break
        loaders = ranks_of(kind, world, 4)
        for loader, state, samples in zip(loaders, states, got, strict=True):
            loader.load_state_dict(state)
            if loop:
                assert list(zip([1], loader.epochs(3), strict=False))
            samples.extend(read(loader, steps))
    assert got == [[x for epoch in each for x in epoch] for each in expected]


@given(kind=st.sampled_from(FILLED + CUT), chain=phases)
@settings(max_examples=100, derandomize=True)
def test_jobs_that_fill_or_drop_a_step_do_so_at_the_end_only(kind: str, chain: list[Any]) -> None:
    """A filled step repeats fewer samples than ranks; a dropped one is less than a step of all ranks."""
    seen = job(kind, chain, 2)
    for epoch in range(2):
        counts = seen[epoch]
        if kind in FILLED:
            assert set(counts) == set(whole(kind, epoch))
            assert counts.total() - len(counts) < 4
        else:
            assert set(counts.values()) <= {1}
            largest = max([3, 2, *(size for (_, size), _, _ in chain)])
            assert N - counts.total() < 4 * max(largest, 6)


@given(chain=st.lists(st.integers(0, 9), min_size=1, max_size=5), swap=st.booleans())
@settings(max_examples=30, derandomize=True)
def test_constant_global_batch_size_gives_the_uninterrupted_batches(
    *, chain: list[int], swap: bool
) -> None:
    """If world size times batch size is constant, each step has the same samples."""

    def steps_of(loaders: list[DataLoader[int]], count: float) -> list[list[int]]:
        iterators = [iter(loader) for loader in loaders]
        steps = []
        while len(steps) < count:
            parts = [next(iterator, None) for iterator in iterators]
            if parts[0] is None:
                break
            steps.append(sorted(int(x) for part in parts if part is not None for x in part))
        return steps

    expected = steps_of(ranks_of("padded", 2, 6), math.inf)
    state: Any = None
    got: list[list[int]] = []
    for number, count in enumerate([*chain, math.inf]):
        ranks = ranks_of("padded", *((3, 4) if swap and number % 2 else (2, 6)))
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        if state is not None and state["finished"]:
            break
        got += steps_of(ranks, count)
        state = saved(ranks)
    assert got[:-1] == expected[:-1]
    assert set(got[-1]) <= set(range(N))  # filled differently


def sampler_of(kind: str, replicas: int, size: int = 4) -> Any:
    """Make the sampler of rank 0."""
    loader = loader_of(kind, replicas, 0, size)
    return loader.sampler if loader.batch_size is not None else loader.batch_sampler


SAMPLERS = ["ordered", "padded", "drop_last", "weighted", "repeated", *FILLED[1:], *CUT[1:]]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_sampler_state_counts_draws(kind: str) -> None:
    """The bare sampler knows only its draws, which suffices if nothing prefetches."""
    sampler, resumed = sampler_of(kind, 2), sampler_of(kind, 2)
    iterator = iter(sampler)
    drawn = [next(iterator) for _ in range(3)]
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert drawn + list(resumed) == list(sampler_of(kind, 2))
    assert list(iterator)
    assert sampler.state_dict()["finished"]


@pytest.mark.parametrize("way", ["epochs", "set_epoch", "automatic"])
@pytest.mark.parametrize("kind", ["ordered", "drop_last", "weighted", *CUT[1:]])
def test_an_epoch_with_less_than_a_step_left_is_over(kind: str, way: str) -> None:
    """No pass after a resume is empty, but where the script itself sets that epoch: a warning says so."""
    drops = {} if kind in CUT[1:] else {"drop_last": True}
    first, resumed, plain = (
        loader_of(kind, *shape, **drops) for shape in ((1, 0, 1), (3, 0, 4), (3, 0, 4))
    )
    read(first, len(first) - 1)
    state = first.state_dict()
    assert not state["finished"]
    resumed.load_state_dict(state)
    assert resumed.state_dict()["finished"]
    if way == "epochs":
        assert next(iter(resumed.epochs(3))) == 1
    elif way == "set_epoch":
        resumed.set_epoch(0)
        with pytest.warns(DataWarning, match="nothing is left to read; the next epoch is 1"):
            assert read(resumed) == []
    plain.set_epoch(1)
    assert read(resumed) == read(plain) != []


@pytest.mark.parametrize(
    "name", ["dict", "none", "version", "consumed", "epoch", "identity", "old", "new", "torchdata"]
)
def test_invalid_state_is_refused(name: str) -> None:
    """Only a state of this version is accepted as a position; the error has both versions."""
    loader = loader_of("ordered", 2, 0, 8)
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
    with pytest.raises(StateMismatchError, match="What to do") as caught:
        loader.load_state_dict(broken[name], strict=name != "old")
    if name == "old":
        assert "an older ddpsafe wrote it" in str(caught.value)
        assert caught.value.differences == {"version": (0, 1)}


@pytest.mark.parametrize(
    ("change", "key"),
    [({"dataset": 40}, "n"), ({"seed": 1}, "seed"), ({"algorithm": "feistel-v1"}, "algorithm")],
)
def test_state_of_other_data_is_refused_or_gives_a_warning(
    change: dict[str, Any], key: str
) -> None:
    """The differences are named; with strict=False they are a warning."""
    state = DistributedSampler(N, 1, 0).state_dict()
    other = DistributedSampler(**{"dataset": N, "num_replicas": 1, "rank": 0, **change})
    with pytest.raises(StateMismatchError, match=f"{key}: saved") as caught:
        other.load_state_dict(state)
    assert key in caught.value.differences
    with pytest.warns(DataWarning, match=key):
        other.load_state_dict(state, strict=False)


@pytest.mark.parametrize("kind", ["ordered", "balanced", "stream"])
def test_position_discarded_by_set_epoch_gives_a_warning(kind: str) -> None:
    """A framework that counts its own epochs from 0 would lose the position silently."""
    loader, resumed = loader_of(kind, 2, 0, 8), loader_of(kind, 2, 0, 8)
    read(loader)
    read(loader, 2)
    resumed.load_state_dict(loader.state_dict())
    with pytest.warns(DataWarning, match="discards the position"):
        resumed.set_epoch(0)


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("kind", [*OWN, *FOLLOWED])
def test_a_look_does_not_use_up_a_resumed_position(kind: str, *, in_loop: bool) -> None:
    """Of every sampler: looks before the rest read no less of it."""
    (first,) = ranks_of(kind, 1, 4)
    begun = read(first, 5)
    (resumed,) = ranks_of(kind, 1, 4)
    resumed.load_state_dict(saved([first]))
    loop = iter(resumed.epochs(1)) if in_loop else iter(())
    for _ in loop:
        break
    again = []
    for batches in (1, 1, math.inf, 2, math.inf):
        if not in_loop:
            resumed.set_epoch(0)
        again.append(read(resumed, batches))
    look, second_look, rest, _, whole = again
    assert look == second_look == rest[:4]
    if kind in FOLLOWED:
        assert sorted(begun + rest) == sorted(whole)
    else:  # as long as it is set again
        assert whole == rest
