"""Ratios of measurements that took turns, with the interval in which their median lies."""

from __future__ import annotations

import random
import statistics
from typing import Final, NamedTuple

SAMPLES: Final = 2_000


class Ratio(NamedTuple):
    """The median of ratios, and its interval of 95 % confidence, by resampling them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: list[float]) -> Ratio:
        """Resample the ratios of single pairs."""
        draw = random.Random(0)  # noqa: S311 - not for secrets
        medians = sorted(
            statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(SAMPLES)
        )
        low, high = medians[round(0.025 * SAMPLES)], medians[round(0.975 * SAMPLES) - 1]
        return cls(statistics.median(ratios), low, high)

    def __str__(self) -> str:
        """Return two cells of a table: percent above one, and the interval."""
        shown = [f"{100 * (value - 1):+.2f}" for value in self]
        return f"{shown[0]} % | {shown[1]} to {shown[2]} %"
