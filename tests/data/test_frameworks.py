"""The loader of ddpsafe inside Accelerate and Lightning Fabric, at least as good as torch's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from data_programs import accelerated, fabricated, run_ranks


@pytest.mark.full
@pytest.mark.parametrize(
    ("package", "program"), [("accelerate", accelerated), ("lightning_fabric", fabricated)]
)
def test_a_framework_divides_the_data(package: str, program: Any) -> None:
    """Two ranks read every sample in each epoch, with different augmentations; with Fabric exactly once.

    Fabric adds its own sampler if there is none, and keeps ddpsafe's if there is one.
    """
    pytest.importorskip(package)
    values: Any = run_ranks(program)
    for own_sampler in (0, 1):
        parts = [values[rank][own_sampler] for rank in (0, 1)]
        for epoch in range(2):
            seen = Counter(x for part in parts for x, _ in part[epoch])
            assert set(seen) == set(range(48)), (own_sampler, epoch)
            assert program is accelerated or seen.total() == 48, (own_sampler, epoch)
        draws = [d for part in parts for epoch in (0, 1) for _, d in part[epoch]]
        assert len(set(draws)) == len(draws)
        assert parts[0][0] != parts[1][0]
