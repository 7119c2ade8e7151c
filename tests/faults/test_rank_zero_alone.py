"""Rank 0 evaluates by itself through the DDP wrapper, which makes it a collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

import collective_programs as programs
import pytest
from fault_kit import BY_TIMEOUT, World, require_hang

import ddpsafe

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.recorder
def test_of_four_ranks_rank_zero_is_named(tmp_path: Path) -> None:
    """It broadcasts the buffers of BatchNorm while the others reduce gradients."""
    world = World(folder=tmp_path, ranks=4)
    error = world.launch_fails(
        ddpsafe.CollectiveTimeoutError,
        programs.evaluate_on_rank_zero,
        **BY_TIMEOUT,
    )
    require_hang(error, 0)
    assert "broadcast number" in str(error)
    assert "all_reduce number" in str(error)


@pytest.mark.recorder
def test_of_two_ranks_both_calls_are_shown(tmp_path: Path) -> None:
    """Nothing tells which of two is wrong, so the message shows both lines and both calls."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.CollectiveTimeoutError,
        programs.evaluate_on_rank_zero,
        **BY_TIMEOUT,
    )
    assert len(error.missing_ranks) == 1
    assert "broadcast number" in str(error)
    assert "all_reduce number" in str(error)


def test_through_the_bare_model_it_works(tmp_path: Path) -> None:
    """`ctx.unwrap(model)` is what the fix says."""
    values = World(folder=tmp_path).launch(programs.evaluate_unwrapped_on_rank_zero).values
    assert values == {0: "evaluated", 1: "trained"}
