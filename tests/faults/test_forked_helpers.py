"""A helper that a rank has forked off is not the rank: its errors and its steps are its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import forked_helper_programs as programs
from exception_programs import LostSampleError
from fault_kit import CRASH_S, World, require_rank
from training_programs import train

import ddpsafe

if TYPE_CHECKING:
    from pathlib import Path


def test_a_helpers_exception_does_not_end_the_job(tmp_path: Path) -> None:
    """An optional helper fails, destroys its copy of the group and raises; the rank goes on."""
    result = World(folder=tmp_path).launch(programs.go_on_without_the_helper)
    assert result.values == {0: 0, 1: 1}


def test_a_helpers_exception_is_not_the_reason_of_the_ranks_end(tmp_path: Path) -> None:
    """A rank that vanishes later has vanished."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankExitedError, train, programs.vanish_after_the_helper)
    require_rank(error, 1)
    assert error.exit_code == 7


def test_a_helpers_steps_do_not_take_the_ranks_exception_back(tmp_path: Path) -> None:
    """An optimizer that steps in a fork does not show that the rank makes progress."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.RankRaisedError,
        train,
        programs.fail_while_the_helper_trains,
        within_s=CRASH_S + programs.IMPORT_S,
    )
    require_rank(error, 1)
    assert isinstance(error.__cause__, LostSampleError)
    assert error.outcomes[1].steps == 0
