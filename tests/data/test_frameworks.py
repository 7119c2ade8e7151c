"""Inside Accelerate and Lightning Fabric, at least as well as torch's loader."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from data_programs import accelerated, fabricated, run_ranks


def test_accelerate_divides_the_data() -> None:
    """Every sample once per epoch over two ranks, and other augmentations on each rank."""
    pytest.importorskip("accelerate")
    values: Any = run_ranks(accelerated)
    for own_sampler in (0, 1):
        parts = [values[rank][own_sampler] for rank in (0, 1)]
        for epoch in range(2):
            seen = Counter(x for part in parts for x, _ in part[epoch])
            assert set(seen) == set(range(48)), (own_sampler, epoch)
        draws = [d for part in parts for epoch in (0, 1) for _, d in part[epoch]]
        assert len(set(draws)) == len(draws)


def test_fabric_divides_the_data() -> None:
    """Fabric adds its sampler where none is given, and keeps ours where one is."""
    pytest.importorskip("lightning_fabric")
    values: Any = run_ranks(fabricated)
    for own_sampler in (0, 1):
        parts = [values[rank][own_sampler] for rank in (0, 1)]
        for epoch in range(2):
            seen = Counter(x for part in parts for x, _ in part[epoch])
            assert seen == Counter(range(48)), (own_sampler, epoch)
        draws = [d for part in parts for epoch in (0, 1) for _, d in part[epoch]]
        assert len(set(draws)) == len(draws)
        assert parts[0][0] != parts[1][0]
