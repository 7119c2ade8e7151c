"""The loader of ddpsafe inside Accelerate and Lightning Fabric, at least as good as torch's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from data_programs import accelerated, fabricated, run_ranks


@pytest.mark.full
def test_accelerate_divides_the_data() -> None:
    """Two ranks read every sample once per epoch, with different augmentations."""
    pytest.importorskip("accelerate")
    values: Any = run_ranks(accelerated)
    for own_sampler in (0, 1):
        parts = [values[rank][own_sampler] for rank in (0, 1)]
        for epoch in range(2):
            seen = Counter(x for part in parts for x, _ in part[epoch])
            assert set(seen) == set(range(48)), (own_sampler, epoch)
        draws = [d for part in parts for epoch in (0, 1) for _, d in part[epoch]]
        assert len(set(draws)) == len(draws)


@pytest.mark.full
def test_fabric_divides_the_data() -> None:
    """Fabric adds its own sampler if there is none, and keeps ddpsafe's if there is one."""
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
