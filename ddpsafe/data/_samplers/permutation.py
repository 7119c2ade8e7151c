"""The global order of an epoch: torch's shuffle, or one that needs no memory.

`feistel-v1` is frozen: the same (n, seed, epoch) gives the same order in every release, on
every machine. A better algorithm would get a new name.

A Feistel network is a bijection of the b-bit numbers for any round function. Numbers outside of
[0, n) pass through it again until they fall inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

Algorithm = Literal["torch", "feistel-v1"]
"""How an epoch is shuffled: torch's order, or a frozen one that needs no memory."""

MASK64: Final = (1 << 64) - 1
SMALL: Final = 1 << 20
ROUNDS: Final = 8
_INT32_LIMIT: Final = 2**31

_GAMMA: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB


def derive_keys(*words: int, count: int) -> list[int]:
    """Derive `count` 64-bit keys from integers."""
    # SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
    state = 0
    # One by one, not added up: (seed 0, epoch 1) and (seed 1, epoch 0) must differ.
    for word in words:
        state = _splitmix((state ^ word) & MASK64)
    keys = []
    for _ in range(count):
        keys.append(_splitmix(state))
        state = (state + _GAMMA) & MASK64
    return keys


def _splitmix(state: int) -> int:
    mixed = (state + _GAMMA) & MASK64
    mixed = ((mixed ^ (mixed >> 30)) * _MIX_1) & MASK64
    mixed = ((mixed ^ (mixed >> 27)) * _MIX_2) & MASK64
    return mixed ^ (mixed >> 31)


def uniform_at(positions: NDArray[np.int64], key: int) -> NDArray[np.float64]:
    """Return the random numbers of a stream at the given positions.

    Args:
        positions: Shape (k,), int64.
        key: Which stream.

    Returns:
        Shape (k,), float64 in [0, 1), a multiple of 2**-53.
    """
    mixed = positions.astype(np.uint64)
    mixed *= np.uint64(_GAMMA)
    mixed += np.uint64(key & MASK64)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(_MIX_1)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_MIX_2)
    mixed ^= mixed >> np.uint64(31)
    return np.asarray((mixed >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def random_order(n: int, words: tuple[int, ...]) -> NDArray[np.int64]:
    """Return a shuffle of [0, n), shape (n,), int64, that is a function of `words` alone."""
    key = derive_keys(*words, count=1)[0]
    return np.argsort(uniform_at(np.arange(n, dtype=np.int64), key), kind="stable")


def open_order(
    n: int, *, shuffle: bool, algorithm: Algorithm, seed: int, epoch: int
) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Return the order of [0, n) in an epoch: position -> index, both (k,) int64."""
    if not shuffle:
        return lambda positions: positions
    if algorithm == "feistel-v1":
        return open_permutation(n, seed=seed, epoch=epoch)
    order = torchs_permutation(n, seed=seed, epoch=epoch).numpy()
    return lambda positions: order[positions].astype(np.int64)


def torchs_permutation(n: int, *, seed: int, epoch: int) -> torch.Tensor:
    """Return the permutation of ``DistributedSampler.__iter__`` (torch/utils/data/distributed.py)."""
    # int32 gives the same one as int64 in half the memory.
    dtype = torch.int32 if n < _INT32_LIMIT else torch.int64
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(n, generator=generator, dtype=dtype)


def open_permutation(
    n: int, *, seed: int, epoch: int
) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Return the `feistel-v1` order of [0, n): position -> index, both (k,) int64."""
    keys = derive_keys(seed, epoch, count=ROUNDS)
    # For a small n the rounds are measurably not uniform over all permutations, and a list costs
    # nothing.
    if n > SMALL:
        return FeistelPermutation(n, keys)
    generator = torch.Generator().manual_seed(keys[0] >> 1)
    order = torch.randperm(n, generator=generator, dtype=torch.int32).numpy()
    return lambda positions: order[positions].astype(np.int64)


class FeistelPermutation:
    """A bijection of [0, n) in O(1) memory.

    Alternating, unbalanced Feistel rounds on the ceil(log2 n) bits of a position.
    """

    def __init__(self, n: int, keys: list[int]) -> None:
        bits = max(2, (n - 1).bit_length())
        high = bits // 2
        low = bits - high
        self._n = np.uint64(n)
        self._low = np.uint64(low)
        self._low_mask = np.uint64((1 << low) - 1)
        # The highest bits of a product are the best mixed ones.
        self._to_high = np.uint64(64 - high)
        self._to_low = np.uint64(64 - low)
        self._keys = [np.uint64(key) for key in keys]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices at `positions`; both shape (k,), int64."""
        values = self._encrypt(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self._n)
        # Cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
        while outside.size:
            again = self._encrypt(values[outside])
            values[outside] = again
            outside = outside[again >= self._n]
        return values.astype(np.int64)

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high = values >> self._low
        low = values & self._low_mask
        for index, key in enumerate(self._keys):
            if index % 2 == 0:
                high ^= _round(low, key) >> self._to_high
            else:
                low ^= _round(high, key) >> self._to_low
        return np.asarray((high << self._low) | low, dtype=np.uint64)


def _round(half: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    mixed = half ^ key
    mixed *= np.uint64(_GAMMA)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(_MIX_1)
    return mixed
