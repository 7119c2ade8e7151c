"""Inside Accelerate and Lightning Fabric, at least as well as torch's loader."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from data_programs import accelerated, fabricated

import ddpsafe


@pytest.mark.parametrize("own_sampler", [False, True])
def test_accelerate_divides_the_data(*, own_sampler: bool) -> None:
    """Every sample once per epoch over two ranks, and other augmentations on each rank."""
    pytest.importorskip("accelerate")
    values: Any = ddpsafe.launch(
        accelerated, args=(own_sampler,), nproc_per_node=2, backend="gloo"
    ).values
    for epoch in range(2):
        seen = Counter(x for rank in (0, 1) for x, _ in values[rank][epoch])
        assert set(seen) == set(range(48)), epoch
    draws = [d for rank in (0, 1) for epoch in (0, 1) for _, d in values[rank][epoch]]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("own_sampler", [False, True])
def test_fabric_divides_the_data(*, own_sampler: bool) -> None:
    """Fabric adds its sampler where none is given, and keeps ours where one is."""
    pytest.importorskip("lightning_fabric")
    values: Any = ddpsafe.launch(
        fabricated, args=(own_sampler,), nproc_per_node=2, backend="gloo"
    ).values
    for epoch in range(2):
        seen = Counter(x for rank in (0, 1) for x, _ in values[rank][epoch])
        assert seen == Counter(range(48)), epoch
    draws = [d for rank in (0, 1) for epoch in (0, 1) for _, d in values[rank][epoch]]
    assert len(set(draws)) == len(draws)
    assert values[0][0] != values[0][1]
