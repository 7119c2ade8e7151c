"""Rank 0 evaluates alone through the DDP wrapper, whose forward pass is a collective."""

from __future__ import annotations

from pathlib import Path

import collective_programs as programs
import pytest
from fault_kit import BY_TIMEOUT, World, require_hang


@pytest.mark.full
@pytest.mark.recorder
def test_rank_zero_is_named_among_four_ranks(tmp_path: Path) -> None:
    """It broadcasts the buffers of BatchNorm while the others reduce gradients."""
    world = World(folder=tmp_path, ranks=4)
    error = world.launch_fails("collective", programs.evaluate_on_rank_zero, **BY_TIMEOUT)
    require_hang(error, 0)
    assert "broadcast number" in str(error)
    assert "all_reduce number" in str(error)


@pytest.mark.recorder
def test_both_calls_of_two_ranks_are_shown(tmp_path: Path) -> None:
    """Nothing shows which of two ranks is wrong, so the message has both lines and both calls."""
    world = World(folder=tmp_path)
    error = world.launch_fails("collective", programs.evaluate_on_rank_zero, **BY_TIMEOUT)
    assert sorted(error.missing_ranks) == [0, 1]
    assert "broadcast number" in str(error)
    assert "all_reduce number" in str(error)


@pytest.mark.full
def test_rank_zero_may_evaluate_the_unwrapped_model(tmp_path: Path) -> None:
    """The error message recommends the model inside DDP."""
    values = World(folder=tmp_path).launch(programs.evaluate_unwrapped_on_rank_zero).values
    assert values == {0: "evaluated", 1: "trained"}
