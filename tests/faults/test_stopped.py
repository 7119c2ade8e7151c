"""A rank is stopped: SIGSTOP, a debugger, a frozen container."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import hang_programs as programs
import pytest
from fault_kit import BY_TIMEOUT, COLLECTIVE_S, HANG_S, WORLDS, World, require_hang, require_places
from training_programs import train, train_by_hand

import ddpsafe
from ddpsafe._launcher.processes.rank_process import Worker

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("ranks", "start_method"), WORLDS)
def test_the_stopped_rank_is_named_and_where_it_was(
    tmp_path: Path, ranks: int, start_method: str
) -> None:
    """It answers no question, but the system says its state, and it shows its line at the end."""
    world = World(folder=tmp_path, ranks=ranks, start_method=start_method)
    error = world.launch_fails(
        ddpsafe.CollectiveTimeoutError,
        train,
        programs.stop,
        **BY_TIMEOUT,
    )
    require_hang(error, 1)
    assert str(error).startswith(f"rank 1 (world_size {ranks}) is stopped at ")
    assert "kill -CONT" in str(error)
    names = require_places(error, range(ranks))
    assert names == {rank: "stop" if rank == 1 else "average_gradients" for rank in range(ranks)}


def test_in_an_unported_script(tmp_path: Path) -> None:
    """The timeout is then the script's own."""
    world = World(folder=tmp_path)
    error = world.spawn_fails(
        ddpsafe.CollectiveTimeoutError,
        train_by_hand,
        programs.stop,
        1,
        COLLECTIVE_S,
        within_s=COLLECTIVE_S + HANG_S,
    )
    require_hang(error, 1)


@pytest.mark.parametrize(
    ("exit_code", "is_being_ended", "status"),
    [
        (-signal.SIGKILL, False, "killed"),
        (-signal.SIGKILL, True, "stopped"),
        (-signal.SIGSEGV, False, "stopped"),
        (1, False, "stopped"),
        (None, False, "stopped"),
    ],
)
def test_a_suspended_rank_that_is_killed_was_killed(
    *, exit_code: int | None, is_being_ended: bool, status: str
) -> None:
    """As by the kernel, for memory; what else it does once it is continued to be asked is ddpsafe's doing."""
    state: Any = SimpleNamespace(
        returned=None,
        raised=None,
        failed=False,
        alive=exit_code is None,
        crashed=exit_code == -signal.SIGSEGV,
        exitcode=exit_code,
        is_being_ended=is_being_ended,
        was_stopped=True,
    )
    assert Worker._status(state) == status
