"""The sampler equals torch's, bit for bit, except where it improves on it."""

from __future__ import annotations

import itertools
import math
import pickle
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
from data_programs import Numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from ddpsafe._errors import ConfigError
from ddpsafe.data import (
    BalancedBatchSampler,
    DataLoader,
    DistributedSampler,
    EvalSampler,
    WeightedSampler,
    masked_batches,
)
from ddpsafe.data._samplers.base import Batching
from ddpsafe.data._samplers.permutation import (
    FeistelPermutation,
    derive_keys,
    open_permutation,
    uniform_at,
)
from ddpsafe.data.errors import DatasetChangedError, DataWarning, StateMismatchError

may_warn = pytest.mark.filterwarnings("ignore::ddpsafe.data.errors.DataWarning")
worlds = st.integers(1, 20).flatmap(lambda r: st.tuples(st.just(r), st.integers(0, r - 1)))


@may_warn
@given(
    n=st.integers(1, 300),
    world=worlds,
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 100),
    drop_last=st.booleans(),
)
def test_order_equals_torchs_bit_for_bit(
    *, n: int, world: tuple[int, int], shuffle: bool, seed: int, epoch: int, drop_last: bool
) -> None:
    """Equal arguments give equal indices and lengths, as Python ints, even if n < num_replicas."""
    replicas, rank = world
    drop_last = drop_last and n >= replicas
    theirs = TorchDistributedSampler(range(n), replicas, rank, shuffle, seed, drop_last)
    ours = DistributedSampler(range(n), replicas, rank, shuffle, seed, drop_last)
    theirs.set_epoch(epoch)
    ours.set_epoch(epoch)
    assert list(ours) == list(theirs)
    assert (len(ours), ours.num_samples, ours.total_size) == (
        len(theirs),
        theirs.num_samples,
        theirs.total_size,
    )
    assert all(type(index) is int for index in ours)


@may_warn
@given(
    n=st.integers(1, 300),
    replicas=st.integers(1, 20),
    algorithm=st.sampled_from(["torch", "feistel-v1"]),
    epoch=st.integers(0, 9),
    pad=st.booleans(),
)
def test_ranks_partition_the_dataset(
    *, n: int, replicas: int, algorithm: str, epoch: int, pad: bool
) -> None:
    """Without padding each sample is read once; with it, at most num_replicas - 1 are read twice."""
    shares = []
    for rank in range(replicas):
        sampler = DistributedSampler(n, replicas, rank, pad=pad, algorithm=algorithm)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
    sizes = [len(share) for share in shares]
    counts = Counter(index for share in shares for index in share)
    assert set(counts) == set(range(n))
    if pad:
        assert len(set(sizes)) == 1
        assert n < replicas or counts.total() - n <= replicas - 1
    else:
        assert counts.total() == n
        assert max(sizes) - min(sizes) <= 1


def test_eval_sampler_reads_in_order_and_may_leave_ranks_without_samples() -> None:
    """With three samples on five ranks, no rank reads a repeat and two ranks read nothing."""
    assert [list(EvalSampler(3, 5, rank)) for rank in range(5)] == [[0], [1], [2], [], []]


def test_sampler_is_torchs_subclass_and_pickles_during_iteration() -> None:
    """Frameworks recognise it by isinstance, and it holds no live generator."""
    sampler = DistributedSampler(1000, 2, 1)
    iterator = iter(sampler)
    first = [next(iterator) for _ in range(10)]
    assert isinstance(sampler, TorchDistributedSampler)
    assert list(pickle.loads(pickle.dumps(sampler)))[:10] == first


@pytest.mark.parametrize(
    ("n", "num_replicas", "text"),
    [
        (2, 4, "^2 samples for 4 ranks: ranks 2 to 3 repeat samples of the others"),
        (1, 2, "^1 sample for 2 ranks: rank 1 repeats samples of the others"),
    ],
)
def test_fewer_samples_than_ranks_gives_a_warning(n: int, num_replicas: int, text: str) -> None:
    """PyTorch repeats samples silently; here the ranks that repeat them are named."""
    with pytest.warns(DataWarning, match=text):
        DistributedSampler(n, num_replicas, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EvalSampler(2, 4, 0)


def test_dataset_whose_length_changed_is_refused() -> None:
    """Samples added later would never be read, or an index would be out of range."""
    dataset = Numbers(10)
    sampler = DistributedSampler(dataset, 1, 0)
    dataset.n = 11
    with pytest.raises(DatasetChangedError, match="has 11 samples, but had 10"):
        list(sampler)


@pytest.mark.parametrize("announced", ["4", " 4\n"])
def test_sampler_before_the_process_group_exists_is_refused(
    announced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a launcher, a world of one would be silently wrong at that point."""
    monkeypatch.setenv("WORLD_SIZE", announced)
    with pytest.raises(ConfigError, match="no process group yet"):
        DistributedSampler(10)
    assert len(DistributedSampler(10, 1, 0)) == 10


# Orders that are functions of (seed, epoch).


SIZES = [2, 3, 4, 5, 97, 4095, 4096, 4097, 65537, 100_003, 1_000_000]


@given(
    n=st.one_of(st.integers(2, 2000), st.sampled_from(SIZES)),
    seed=st.integers(-(2**63), 2**64),
    epoch=st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_feistel_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    """Every index occurs exactly once, for any n and any key."""
    found = FeistelPermutation(n, derive_keys(seed, epoch, count=8))(np.arange(n))
    assert np.array_equal(np.sort(found), np.arange(n))


GOLDEN = {
    (10, 0, 0): [9, 6, 2, 4, 1, 7],
    (1 << 20, 1, 2): [432160, 837265, 1010454, 887065, 794710, 703819],
    (100_000_000, 0, 0): [81588534, 40724779, 29302459, 71407752, 35344391, 62815093],
    (100_000_000, 123, 45): [40765252, 83868749, 10224480, 44033897, 31812963, 56928898],
    (10**12, 7, 1): [302826694528, 1205110545, 47117035167, 277153119513, 19707220091, 823295173243],
    (2**60 + 1, 0, 3): [230985854726246283, 654526455705172248, 976321683456902921, 1012637978817149855,
        851739833313960203, 291642970921151342],
}  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN)
def test_feistel_v1_is_frozen(case: tuple[int, int, int]) -> None:
    """The name stands for this order, and a change would reshuffle resumed epochs."""
    n, seed, epoch = case
    assert open_permutation(n, seed=seed, epoch=epoch)(np.arange(6)).tolist() == GOLDEN[case]


def test_weighted_stream_is_frozen() -> None:
    """The same holds for the stream of weighted draws."""
    sampler = WeightedSampler([1.0, 2.0, 3.0, 4.0], 12, num_replicas=1, rank=0, seed=5)
    assert list(sampler) == [3, 3, 0, 0, 3, 3, 2, 2, 3, 2, 1, 2]


@given(n=st.integers(2**20 + 1, 2**40), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=30)
def test_seek_gives_the_stream_from_that_position(n: int, seed: int, data: st.DataObject) -> None:
    """Position p does not depend on the positions before it."""
    start = data.draw(st.integers(0, n - 64))
    permute = open_permutation(n, seed=seed, epoch=3)
    stream = permute(np.arange(start, start + 64))
    place = data.draw(st.integers(0, 63))
    assert permute(np.array([start + place]))[0] == stream[place]


def test_seeds_and_epochs_are_not_added() -> None:
    """(seed 0, epoch 1) and (seed 1, epoch 0) differ, as do all similar pairs."""
    firsts = {
        tuple(open_permutation(10**7, seed=seed, epoch=epoch)(np.arange(8)).tolist())
        for seed, epoch in itertools.product(range(20), range(20))
    }
    assert len(firsts) == 400


@pytest.mark.parametrize("n", [3_000_000, 100_000_000, 2**30, 10**12])
def test_deciles_lags_and_adjacent_keys_look_uniform(n: int) -> None:
    """For chi-square of deciles, of pairs at several lags and of two epochs, |z| is under 4."""
    count = 400_000
    permute = open_permutation(n, seed=11, epoch=0)
    stream = permute(np.arange(count))
    other = open_permutation(n, seed=11, epoch=1)(np.arange(count))
    assert abs(_z(np.bincount(stream * 10 // n, minlength=10))) < 4
    for lag in (1, 2, 64, 4096):
        assert abs(_z(_joint(stream[:-lag], stream[lag:], n))) < 4, lag
    assert abs(_z(_joint(stream, other, n))) < 4
    assert abs(_z(np.bincount((stream & 31) * 32 + (np.roll(stream, 1) & 31), minlength=1024))) < 4


def _joint(left: np.ndarray, right: np.ndarray, n: int) -> np.ndarray:
    return np.bincount((left * 40 // n) * 40 + right * 40 // n, minlength=1600)


def _z(observed: np.ndarray) -> float:
    expected = observed.sum() / len(observed)
    chi2 = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(observed) - 1
    return (chi2 - freedom) / (2 * freedom) ** 0.5


def test_uniform_numbers_are_uniform_and_independent_of_the_block() -> None:
    """A number depends only on its position, not on the others that are requested."""
    whole = uniform_at(np.arange(100_000), key=3)
    assert np.array_equal(whole[500:600], uniform_at(np.arange(500, 600), key=3))
    assert abs(_z(np.bincount((whole * 100).astype(np.int64), minlength=100))) < 4
    assert whole.min() >= 0
    assert whole.max() < 1


def test_huge_dataset_needs_no_list() -> None:
    """The first index of 10**12 samples is immediate, and so are positions near the end."""
    sampler = DistributedSampler(10**12, 8, 3, algorithm="feistel-v1")
    assert len(sampler) == 125_000_000_000
    assert 0 <= next(iter(sampler)) < 10**12


# Weights.


weights = st.lists(st.floats(0, 5), min_size=1, max_size=40).filter(any)


@given(
    values=weights,
    replicas=st.integers(1, 7),
    mode=st.sampled_from(["iid", "repeat"]),
    epoch=st.integers(0, 5),
)
@settings(max_examples=60)
def test_stream_does_not_depend_on_the_world_size(
    values: list[float], replicas: int, mode: str, epoch: int
) -> None:
    """Interleaved, the ranks' draws equal those of a single process."""
    options: dict[str, Any] = {"mode": mode, "pad": False}
    samplers = [
        WeightedSampler(values, num_replicas=replicas, rank=rank, **options)
        for rank in range(replicas)
    ]
    alone = WeightedSampler(values, num_replicas=1, rank=0, **options)
    for sampler in [*samplers, alone]:
        sampler.set_epoch(epoch)
    shares = [list(sampler) for sampler in samplers]
    whole = list(alone)
    assert [shares[p % replicas][p // replicas] for p in range(len(whole))] == whole
    assert all(values[index] > 0 for index in whole)


def test_frequencies_follow_the_weights() -> None:
    """They are within five standard deviations over several epochs; zero weight is never drawn."""
    values = np.array([0, 1, 2, 3, 4, 10.0, 0])
    draws = 100_000
    for epoch in range(3):
        sampler = WeightedSampler(values, draws, num_replicas=1, rank=0, seed=1)
        sampler.set_epoch(epoch)
        counts = Counter(sampler)
        for index, weight in enumerate(values / values.sum()):
            deviation = math.sqrt(draws * weight * (1 - weight))
            assert abs(counts[index] - draws * weight) <= 5 * deviation


@given(values=weights, epoch=st.integers(0, 20))
def test_repeat_mode_gives_floor_or_ceiling(values: list[float], epoch: int) -> None:
    """Every rare sample is drawn at least floor(w) times, without relying on chance."""
    sampler = WeightedSampler([*values, 1.0], mode="repeat", num_replicas=1, rank=0)
    sampler.set_epoch(epoch)
    counts = Counter(sampler)
    assert len(sampler) == counts.total()
    for index, weight in enumerate([*values, 1.0]):
        assert math.floor(weight) <= counts[index] <= math.ceil(weight)


def test_repeat_mode_averages_to_the_weight() -> None:
    """Over many epochs, a weight of 1.5 gives 1.5 draws on average."""
    sampler = WeightedSampler([1.5] * 400, mode="repeat", num_replicas=1, rank=0)
    lengths = []
    for epoch in range(40):
        sampler.set_epoch(epoch)
        lengths.append(len(sampler))
    assert abs(np.mean(lengths) / 600 - 1) < 0.01
    assert len(set(lengths)) > 10


def test_without_replacement_draws_distinct_samples() -> None:
    """Heavy samples are drawn early, and none is drawn twice."""
    values = [1.0] * 50 + [1000.0] * 50
    drawn = list(WeightedSampler(values, 60, replacement=False, num_replicas=1, rank=0))
    assert len(set(drawn)) == 60
    assert sum(index >= 50 for index in drawn[:50]) > 45


@pytest.mark.full
def test_more_weights_than_torch_supports() -> None:
    """``torch.multinomial`` stops at 2**24 categories."""
    n = 2**24 + 3
    values = np.zeros(n)
    values[[5, n - 1]] = 1, 3
    counts = Counter(WeightedSampler(values, 4000, num_replicas=1, rank=0))
    assert set(counts) == {5, n - 1}
    assert 2700 < counts[n - 1] < 3300


# Steps of equal size.


@may_warn
@given(n=st.integers(1, 60), replicas=st.integers(1, 8), batch_size=st.integers(1, 9))
def test_steps_are_equal_and_each_sample_counts_once(
    n: int, replicas: int, batch_size: int
) -> None:
    """Even with fewer samples than ranks, the counted parts are the dataset, in order."""
    steps, kept = set(), {}
    for rank in range(replicas):
        sampler = EvalSampler(n, replicas, rank, pad=True)
        loader = DataLoader(Numbers(n), batch_size, sampler=sampler)
        parts = [(batch.tolist(), counted) for batch, counted in masked_batches(loader)]
        steps.add((len(parts), sum(len(batch) for batch, _ in parts)))
        own = [x for batch, counted in parts for x in batch[:counted]]
        assert own == sampler.indices()
        kept.update(dict.fromkeys(own, rank))
        assert len(own) == len(range(rank, n, replicas))
    assert len(steps) == 1
    assert sorted(kept) == list(range(n))


# Batches of equal cost.


lengths_lists = st.lists(st.integers(0, 500), min_size=1, max_size=150)


def plan(lengths: Any, replicas: int, batch_size: int, **options: Any) -> list[list[list[int]]]:
    """Return each rank's batches."""
    return [
        list(BalancedBatchSampler(lengths, batch_size, num_replicas=replicas, rank=rank, **options))
        for rank in range(replicas)
    ]


@may_warn
@given(
    lengths=lengths_lists,
    replicas=st.integers(1, 6),
    batch_size=st.integers(1, 8),
    window=st.integers(0, 4),
    cost=st.sampled_from(["sum", "padded"]),
    drop_last=st.booleans(),
)
@settings(max_examples=80)
def test_ranks_get_equal_numbers_of_batches(
    *, lengths: list[int], replicas: int, batch_size: int, window: int, cost: str, drop_last: bool
) -> None:
    """For any lengths, ranks have equal batch sizes in each step, and no sample is lost."""
    drop_last = drop_last and len(lengths) >= replicas * batch_size
    options = {"window": window, "cost": cost, "drop_last": drop_last}
    ranks = plan(lengths, replicas, batch_size, **options)
    assert len({len(batches) for batches in ranks}) == 1
    assert all(len({len(b) for b in step}) == 1 for step in zip(*ranks, strict=True))
    read = [index for batches in ranks for batch in batches for index in batch]
    if drop_last:
        assert (
            len(read)
            == len(set(read))
            == len(lengths) // (replicas * batch_size) * (replicas * batch_size)
        )
    else:
        assert set(read) == set(range(len(lengths)))


@may_warn
@given(lengths=lengths_lists, replicas=st.integers(1, 6), batch_size=st.integers(1, 8))
@settings(max_examples=60)
def test_window_0_keeps_the_global_batches(
    lengths: list[int], replicas: int, batch_size: int
) -> None:
    """Each step reads the samples that DistributedSampler would, so statistics do not change."""
    n = len(lengths)
    ranks = plan(lengths, replicas, batch_size)
    steps = [sorted(i for batch in step for i in batch) for step in zip(*ranks, strict=True)]
    plain = [list(DistributedSampler(n, replicas, rank)) for rank in range(replicas)]
    expected = [
        sorted(i for own in plain for i in own[first : first + batch_size])
        for first in range(0, len(plain[0]), batch_size)
    ]
    # Padding repeats the epoch's first samples in both.
    assert steps == expected


@pytest.mark.parametrize(("window", "cost", "at_most"), [(0, "sum", 0.75), (8, "padded", 0.45)])
def test_slowest_rank_costs_less(window: int, cost: str, at_most: float) -> None:
    """Summed over steps, its cost is below that of strided batches (lognormal lengths)."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5, 1, 8 * 16 * 40), 16, 4096).round()
    plain = [list(DistributedSampler(len(lengths), 8, rank)) for rank in range(8)]
    strided = [[own[i : i + 16] for i in range(0, len(own), 16)] for own in plain]
    balanced = plan(lengths, 8, 16, window=window, cost=cost)

    def time(ranks: list[list[list[int]]]) -> float:
        measure = np.sum if cost == "sum" else lambda part: len(part) * part.max()
        return sum(
            max(float(measure(lengths[batch])) for batch in step)
            for step in zip(*ranks, strict=True)
        )

    assert time(balanced) / time(strided) < at_most


@may_warn
@given(lengths=lengths_lists, replicas=st.integers(1, 4), window=st.integers(0, 3))
@settings(max_examples=60)
def test_token_batches_stay_under_the_limit(lengths: list[int], replicas: int, window: int) -> None:
    """No batch exceeds it, ranks take equally many steps, and batches left over are counted."""
    samplers = [
        BalancedBatchSampler(
            lengths, 16, window=window, max_tokens=500, num_replicas=replicas, rank=rank
        )
        for rank in range(replicas)
    ]
    ranks = [list(sampler) for sampler in samplers]
    assert len({len(batches) for batches in ranks}) == 1
    for batches in ranks:
        assert all(sum(lengths[i] for i in batch) <= 500 for batch in batches)
        assert all(len(batch) <= 16 for batch in batches)
    read = [i for batches in ranks for batch in batches for i in batch]
    assert len(read) == len(set(read))
    assert samplers[0].dropped_batches < replicas
    if samplers[0].dropped_batches == 0:
        assert set(read) == set(range(len(lengths)))


def test_batches_that_too_many_ranks_cannot_share_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One batch is left when three ranks resume: the epoch ends, and the dropped batch is logged."""
    options: dict[str, Any] = {"batch_size": 2, "max_tokens": 2, "rank": 0}
    sampler = BalancedBatchSampler([1] * 6, num_replicas=1, **options)
    state = sampler.state_after(2, Batching(), exhausted=False)
    resumed = BalancedBatchSampler([1] * 6, num_replicas=3, **options)
    resumed.load_state_dict(state)
    assert resumed.finished
    assert resumed.dropped_batches == 1
    assert "1 of 3 batches are dropped" in caplog.text


def test_epochs_differ_and_repeat() -> None:
    """The order is a function of (seed, epoch)."""
    sampler = BalancedBatchSampler(range(1, 101), 5, window=3, num_replicas=2, rank=0)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_cost_can_be_a_function_of_the_length() -> None:
    """The cost of attention is quadratic."""
    ranks = plan([10, 1, 1, 1, 1, 1, 1, 9], 2, 4, cost=lambda length: length**2, shuffle=False)
    assert not any({0, 7} <= set(batch) for batches in ranks for batch in batches)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 4},
        {"window": 4, "cost": "padded"},
        {"max_tokens": 2000},
        {"window": 2, "max_tokens": 2000},
    ],
)
def test_largest_batch_comes_first_on_request(options: Any) -> None:
    """Too little memory then shows in the first step of every epoch."""
    lengths = np.random.default_rng(3).integers(1, 500, 300)
    for epoch in range(3):
        sampler = BalancedBatchSampler(
            lengths, 8, num_replicas=1, rank=0, largest_first=True, **options
        )
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert sorted(i for batch in batches for i in batch) == list(range(300))
        first_window = batches if "max_tokens" in options else batches[:4]
        padded = options.get("cost") == "padded"
        costs = [
            lengths[batch].max() * len(batch) if padded else lengths[batch].sum()
            for batch in first_window
        ]
        assert costs[0] == max(costs)


@may_warn
@pytest.mark.parametrize(
    ("saved", "window", "loads"),
    [(None, None, 100), (100, None, 100), (100, -5, 100), (100, True, 100), (100, 8, None)],
)
def test_position_in_other_batches_is_refused(
    saved: int | None, window: object, loads: int | None
) -> None:
    """Not even strict=False finds a place for it: a position counts batches of one kind."""
    state = BalancedBatchSampler(
        range(1, 50), 4, num_replicas=2, rank=0, max_tokens=saved
    ).state_dict()
    state["token_window"] = window
    sampler = BalancedBatchSampler(range(1, 50), 4, num_replicas=2, rank=0, max_tokens=loads)
    with pytest.raises(StateMismatchError, match="not saved by a BalancedBatchSampler with"):
        sampler.load_state_dict(state, strict=False)
