"""Weighted draws: one stream for any world, with the right frequencies."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpsafe.data import WeightedSampler

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
