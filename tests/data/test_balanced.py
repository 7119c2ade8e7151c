"""Balanced batches: equal counts, unchanged global batches, less waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpsafe.data import BalancedBatchSampler, DistributedSampler
from ddpsafe.data._samplers.base import Batching
from ddpsafe.data.errors import StateMismatchError

pytestmark = pytest.mark.filterwarnings("ignore::ddpsafe.data.errors.DataWarning")

lengths_lists = st.lists(st.integers(0, 500), min_size=1, max_size=150)


def plan(lengths: Any, replicas: int, batch_size: int, **options: Any) -> list[list[list[int]]]:
    """Return each rank's batches."""
    return [
        list(BalancedBatchSampler(lengths, batch_size, num_replicas=replicas, rank=rank, **options))
        for rank in range(replicas)
    ]


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


@pytest.mark.parametrize(
    ("saved", "window", "loads"),
    [
        (None, None, 100),
        (100, None, 100),
        (100, -5, 100),
        (100, True, 100),
        (100, 8, None),
    ],
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
