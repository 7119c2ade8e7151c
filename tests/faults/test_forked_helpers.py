"""A helper process that a rank forks is not the rank: its errors and steps do not count as the rank's."""

from __future__ import annotations

from pathlib import Path

import orphan_programs as programs
import pytest
from exception_programs import LostSampleError
from fault_kit import CRASH_S, World, require_rank
from training_programs import train

import ddpsafe


def test_a_helpers_exception_does_not_end_the_job(tmp_path: Path) -> None:
    """The helper destroys its copy of the process group and raises; the rank continues."""
    result = World(folder=tmp_path).launch(programs.go_on_without_the_helper)
    assert result.values == {0: 0, 1: 1}


@pytest.mark.full
def test_a_helpers_exception_does_not_explain_the_ranks_exit(tmp_path: Path) -> None:
    """A rank that exits without a report later is reported as exactly that."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankExitedError, train, programs.vanish_after_the_helper)
    require_rank(error, 1)
    assert error.exit_code == 7


@pytest.mark.full
def test_a_helpers_steps_do_not_withdraw_the_ranks_exception(tmp_path: Path) -> None:
    """An optimizer step in a forked process does not count as progress of the rank."""
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
