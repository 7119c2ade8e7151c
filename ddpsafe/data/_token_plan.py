"""Batches filled up to a number of tokens instead of a number of samples.

The list of batches is a function of (seed, epoch) and does not know the world size: step s gives
the batches s*R to s*R + R - 1 to the R ranks. Equal step counts come by construction; at most
R - 1 batches at the end of the list find no step and are reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddpsafe.data._dealing import bad_balance
from ddpsafe.data._permutation import random_order

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlan:
    """How a global order is cut into batches of at most `max_tokens`.

    Attributes:
        max_tokens: What a batch may cost.
        batch_size: How many samples it may hold.
        window: How many samples are sorted by length together; 0 keeps the order.
        padded: Whether a batch costs its longest sample times its size.
        largest_first: Whether the most expensive batch comes first.
    """

    max_tokens: float
    batch_size: int
    window: int
    padded: bool
    largest_first: bool = False

    def check(self, lengths: NDArray[np.float64]) -> None:
        """Refuse samples that fit into no batch."""
        longest = int(np.argmax(lengths))
        if lengths[longest] > self.max_tokens:
            raise bad_balance(
                f"lengths[{longest}] = {lengths[longest]:g} is more than max_tokens = "
                f"{self.max_tokens:g}",
                "raise max_tokens, or leave such samples out of the dataset",
            )

    def batches(
        self, order: NDArray[np.int64], lengths: NDArray[np.float64], words: tuple[int, int]
    ) -> list[list[int]]:
        """Return all batches of an epoch, as lists of dataset indices."""
        size = self.window or len(order)
        found: list[list[int]] = []
        for first in range(0, len(order), size):
            items = order[first : first + size]
            if self.window:
                items = items[np.argsort(-lengths[items], kind="stable")]
            filled = self._fill(items.tolist(), lengths[items].tolist())
            shuffled = random_order(len(filled), (*words, first)) if self.window else ()
            found += [filled[i] for i in shuffled] if self.window else filled
        if self.largest_first:
            costs = [self._cost_of(lengths[batch]) for batch in found]
            found.insert(0, found.pop(int(np.argmax(costs))))
        return found

    def _cost_of(self, lengths: NDArray[np.float64]) -> float:
        return float(lengths.max() * len(lengths) if self.padded else lengths.sum())

    def _fill(self, items: list[int], lengths: list[float]) -> list[list[int]]:
        batches: list[list[int]] = []
        total = longest = 0.0
        for item, length in zip(items, lengths, strict=True):
            longest = max(longest, length)
            count = len(batches[-1]) + 1 if batches else 1
            cost = longest * count if self.padded else total + length
            if not batches or cost > self.max_tokens or count > self.batch_size:
                batches.append([item])
                total, longest = length, length
            else:
                batches[-1].append(item)
                total += length
        return batches
