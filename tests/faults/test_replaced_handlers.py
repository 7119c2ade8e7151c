"""A rank has replaced or removed the signal handlers of ddpsafe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import odd_end_programs as programs
import pytest
from fault_kit import BY_TIMEOUT, World, require_hang, require_rank
from training_programs import train

import ddpsafe

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux shows which signals a process catches"
)


@pytest.mark.full(but=["defaults"])
@pytest.mark.parametrize(
    ("fault", "place"),
    [
        pytest.param(programs.become_another_program, "exec of sleep", id="exec"),
        pytest.param(programs.reset_signals_and_sleep, "in sleep", id="defaults"),
    ],
)
def test_a_hanging_rank_without_handlers_is_not_killed_by_the_launchers_question(
    tmp_path: Path, fault: Callable[..., Any], place: str
) -> None:
    """The signal that asks for its stack would end it, and the message would report a kill."""
    error = World(folder=tmp_path).launch_fails("collective", train, fault, **BY_TIMEOUT)
    require_hang(error, 1)
    assert error.stacks[1].endswith(place), error.stacks
    assert "killed" not in str(error)


@pytest.mark.full
def test_a_handler_that_raises_does_not_interrupt_the_report(tmp_path: Path) -> None:
    """The handler of torch raises for each DataLoader worker that dies, also during a report."""
    error = World(folder=tmp_path).launch_fails(
        ddpsafe.RankRaisedError, train, programs.fail_under_alarms
    )
    require_rank(error, 1)
    assert "SlowlyToldError" in str(error)
