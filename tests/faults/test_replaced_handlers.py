"""What signals do to a rank whose handlers are its own, or gone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import odd_end_programs as programs
import pytest
from fault_kit import BY_TIMEOUT, World, require_hang, require_rank
from training_programs import train

import ddpsafe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells which signals a process catches"
)


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        pytest.param(programs.become_another_program, "exec of sleep", id="exec"),
        pytest.param(programs.reset_signals_and_sleep, "in sleep", id="defaults"),
    ],
)
def test_it_hangs_and_was_not_killed(tmp_path: Path, fault: Callable[..., Any], place: str) -> None:
    """It would die of the question where it is, and an unknown sender would be blamed for it."""
    error = World(folder=tmp_path).launch_fails(
        ddpsafe.CollectiveTimeoutError,
        train,
        fault,
        **BY_TIMEOUT,
    )
    require_hang(error, 1)
    assert error.stacks[1].endswith(place), error.stacks
    assert "killed" not in str(error)


def test_a_handler_that_raises_while_the_failure_is_told(tmp_path: Path) -> None:
    """As torch's does for each worker of a DataLoader that dies: the report must not break off."""
    error = World(folder=tmp_path).launch_fails(
        ddpsafe.RankRaisedError, train, programs.fail_under_alarms
    )
    require_rank(error, 1)
    assert "SlowlyToldError" in str(error)
