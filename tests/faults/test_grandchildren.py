"""Processes that ranks start are ended with the launch, however it ends."""

from __future__ import annotations

import re
from pathlib import Path

import leftovers
import orphan_programs as programs
import pytest
from fault_kit import WORLD_SIZES, WORLDS, World, is_running, require_nothing_left, require_rank

import ddpsafe


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "start_method"), WORLDS)
def test_a_failed_launch_ends_subprocesses_that_ignore_signals(
    tmp_path: Path, ranks: int, start_method: str
) -> None:
    """This includes subprocesses in their own session."""
    world = World(folder=tmp_path, ranks=ranks, start_method=start_method)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.leave_children_and_fail)
    require_rank(error, 1)
    pids = [pid for path in tmp_path.glob("children-*") for pid in path.read_text().split()]
    assert len(pids) == 2 * ranks
    assert [pid for pid in pids if is_running(int(pid))] == []


def test_a_successful_launch_ends_subprocesses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that returns leaves no process behind, and the launcher says which ones it has ended."""
    before = leftovers.Snapshot.take()
    values = World(folder=tmp_path).launch(programs.leave_children_and_return).values
    require_nothing_left(before)
    pids = [pid for pids in values.values() for pid in pids]
    assert [pid for pid in pids if is_running(pid)] == []
    (line,) = (each for each in caplog.messages if "left running" in each)
    assert any(f"process {pid} (" in line for pid in pids)


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_a_rank_whose_data_loader_worker_is_killed_is_blamed(tmp_path: Path, ranks: int) -> None:
    """The rank raises torch's error, or its read from the worker fails; no other worker is left."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(
        ddpsafe.RankRaisedError, programs.lose_a_loader_worker, within_s=LOADER_S
    )
    require_rank(error, 1)
    assert error.kind == "killed"
    # The line that torch's handler of SIGCHLD interrupts, or the one that reads from the worker.
    assert re.search(r"_programs\.py:\d+ in (lose_a_loader_worker|average_gradients)", str(error))
    assert "DataLoader" in str(error)


LOADER_S = 7.0
"""torch's DataLoader checks its workers every 5 s, unless a signal interrupts its wait."""
