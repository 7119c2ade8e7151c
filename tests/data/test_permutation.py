"""The shuffle that needs no memory: a bijection, frozen, seekable and uniform."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpsafe.data import DistributedSampler, WeightedSampler
from ddpsafe.data._samplers.permutation import (
    FeistelPermutation,
    derive_keys,
    open_permutation,
    uniform_at,
)

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
