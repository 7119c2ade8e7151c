"""Processes that ranks start are ended with the launch, however it ends."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import leftovers
import orphan_programs as programs
import pytest
import scripts
from fault_kit import (
    CRASH_S,
    WORLD_SIZES,
    WORLDS,
    World,
    is_running,
    require_nothing_left,
    require_rank,
    start_script,
)

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


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Yield a folder for torch's sockets, whose paths may have 108 characters."""
    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        yield Path(folder)


def require_no_shared_tensors(folder: Path, temporary: Path, *, of_ranks: int = 2) -> None:
    """Fail unless all that `share_as_files` shared has been removed, with the folders of torch's processes."""
    texts = [path.read_text() for path in folder.glob("shared-*")]
    assert len(texts) == of_ranks
    names = " ".join(texts).split()
    left = [name for name in names if (leftovers.SHARED_MEMORY / name).exists()]
    assert (left, list(temporary.iterdir())) == ([], [])


MANAGER_S = 3.0
"""torch's process that removes shared tensors ends 2 s after the last process that has shared any."""


@pytest.mark.parametrize(
    "start_method", ["spawn", pytest.param("forkserver", marks=pytest.mark.full)]
)
def test_a_successful_launch_leaves_no_shared_tensors(
    tmp_path: Path, temporary: Path, start_method: str
) -> None:
    """With ``set_sharing_strategy("file_system")`` they are files, which a process of torch removes."""
    world = World(folder=tmp_path, start_method=start_method)
    world.launch(programs.share_as_files, str(temporary), "return")
    require_no_shared_tensors(tmp_path, temporary)


@pytest.mark.full(but=["raise-1"])
@pytest.mark.parametrize(("how", "attempts"), [("raise", 1), ("be killed", 2)])
def test_a_failed_launch_leaves_no_shared_tensors(
    tmp_path: Path, temporary: Path, how: str, attempts: int
) -> None:
    """No attempt leaves any, whether a rank raises or is killed."""
    World(folder=tmp_path).launch_fails(
        ddpsafe.RankRaisedError if how == "raise" else ddpsafe.RankKilledError,
        *(programs.share_as_files, str(temporary), how),
        within_s=CRASH_S + MANAGER_S,
        retry=ddpsafe.RetryPolicy(attempts=attempts, on={"killed"}, no_progress=None),
    )
    require_no_shared_tensors(tmp_path, temporary, of_ranks=2 * attempts)


@pytest.mark.full(but=["9"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=int)
def test_a_launcher_that_a_signal_ends_leaves_no_shared_tensors(
    tmp_path: Path, temporary: Path, signum: int
) -> None:
    """After SIGKILL, the reaper lets torch's process do its work."""
    call = f"orphan_programs.share_as_files, (folder, {str(temporary)!r}, 'wait'), **options"
    with start_script(tmp_path, f"ddpsafe.launch({call})") as job:
        job.wait_until_up()
        os.kill(job.pid, signum)
        job.end()
        if signum == signal.SIGTERM:
            require_no_shared_tensors(tmp_path, temporary)
        scripts.wait_until(lambda: not list(temporary.iterdir()))
        job.require_all_ended()
    require_no_shared_tensors(tmp_path, temporary)


LOADER_S = 7.0
"""torch's DataLoader checks its workers every 5 s, unless a signal interrupts its wait."""
