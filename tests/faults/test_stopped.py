"""SIGSTOP, a debugger or a frozen container has stopped a rank."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hang_programs as programs
import pytest
from fault_kit import BY_TIMEOUT, COLLECTIVE_S, HANG_S, WORLDS, World, require_hang, require_places
from training_programs import train, train_by_hand

from ddpsafe._launcher.processes.rank_process import RankProcess


@pytest.mark.parametrize(("ranks", "start_method"), WORLDS)
def test_the_stopped_rank_is_named_with_its_line(
    tmp_path: Path, ranks: int, start_method: str
) -> None:
    """It cannot answer, but the system reports its state, and the rank its line when it is ended."""
    world = World(folder=tmp_path, ranks=ranks, start_method=start_method)
    error = world.launch_fails("collective", train, programs.stop, **BY_TIMEOUT)
    require_hang(error, 1)
    assert str(error).startswith(f"rank 1 (world_size {ranks}) is stopped at ")
    assert "kill -CONT" in str(error)
    names = require_places(error, range(ranks))
    assert names == {rank: "stop" if rank == 1 else "average_gradients" for rank in range(ranks)}


def test_a_stopped_rank_of_an_unported_script_is_named(tmp_path: Path) -> None:
    """The script's own timeout applies."""
    world = World(folder=tmp_path)
    error = world.spawn_fails(
        "collective", train_by_hand, programs.stop, 1, COLLECTIVE_S, within_s=COLLECTIVE_S + HANG_S
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
def test_a_stopped_rank_counts_as_killed_only_by_anothers_sigkill(
    *, exit_code: int | None, is_being_ended: bool, status: str
) -> None:
    """The kernel may kill it for memory; any other exit follows from ddpsafe resuming it to ask."""
    state: Any = SimpleNamespace(
        returned=None,
        raised=None,
        failed=False,
        alive=exit_code is None,
        crashed=exit_code == -signal.SIGSEGV,
        exitcode=exit_code,
        is_being_ended=is_being_ended,
        was_stopped=True,
        broke_late=False,
    )
    assert RankProcess._status(state) == status
