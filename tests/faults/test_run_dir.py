"""The run directory is on a full disk, is removed while ranks run, or is a week old."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING, Final

import pytest
import run_dir_programs as programs
from exception_programs import LostSampleError, raise_chained
from fault_kit import BY_TIMEOUT, World, require_hang, require_rank
from hang_programs import wait_for_each_other
from training_programs import FAULT_STEP, return_rank, train

import ddpsafe
from ddpsafe._launcher.run_directory import open_run_directory, remove_old_directories

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 64 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"needs the right to mount a small disk: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.root
def test_a_disk_that_fills_up_fails_the_rank_that_writes(tmp_path: Path, small_disk: Path) -> None:
    """Its error is the system's, and the launcher copes with being unable to write, too."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.RankRaisedError, programs.print_for_ever, run_dir=small_disk / "run"
    )
    require_rank(error, 1)
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.errno == errno.ENOSPC


@pytest.mark.root
def test_a_full_disk_does_not_hide_a_failure(tmp_path: Path, small_disk: Path) -> None:
    """Neither a log nor a report can be written, but the message is complete."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.RankRaisedError,
        programs.fill_and_fail,
        small_disk / "filler",
        run_dir=small_disk / "run",
    )
    require_rank(error, 1)
    assert isinstance(error.__cause__, LostSampleError)
    assert list(small_disk.rglob(".report*")) == []
    for report in small_disk.rglob("report.json"):
        json.loads(report.read_text())


@pytest.mark.root
def test_no_process_starts_when_the_disk_is_already_full(small_disk: Path) -> None:
    """The preflight writes to the run directory before any process starts."""
    with pytest.raises(OSError, match="No space left"), (small_disk / "filler").open("wb") as file:
        file.write(b"x" * 100_000)
    with pytest.raises(ddpsafe.PreflightError) as caught:
        ddpsafe.launch(return_rank, nproc_per_node=1, run_dir=small_disk / "run")
    assert f"the run directory {small_disk / 'run'} cannot be used" in str(caught.value)
    assert "No space left on device" in str(caught.value)


def test_removing_the_run_directory_while_ranks_run_is_not_a_failure(tmp_path: Path) -> None:
    """Only the logs are lost."""
    values = World(folder=tmp_path).launch(programs.remove_run_dir, "go on").values
    assert values == {0: "done", 1: "done"}


@pytest.mark.full
def test_a_removed_run_directory_does_not_hide_a_failure(tmp_path: Path) -> None:
    """The rank reports through a pipe, not through a file."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.remove_run_dir, "raise")
    require_rank(error, 1)
    assert isinstance(error.__cause__, LostSampleError)


@pytest.mark.full
@pytest.mark.recorder
def test_a_hang_without_a_run_directory_names_the_rank(tmp_path: Path) -> None:
    """Stacks go through a file, but the sequence of collectives does not."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.CollectiveTimeoutError,
        programs.remove_run_dir,
        "hang",
        **BY_TIMEOUT,
    )
    assert error.missing_ranks == (1,)


@pytest.mark.recorder
def test_the_report_of_a_failed_attempt_has_all_ranks(tmp_path: Path) -> None:
    """As text and as JSON, it has the failed rank, and what each rank raised and where it was."""
    world = World(folder=tmp_path, ranks=4)
    error = world.launch_fails(ddpsafe.RankRaisedError, train, raise_chained)
    folder = tmp_path / "run" / "attempt-1"
    facts = json.loads((folder / "report.json").read_text())
    assert (facts["error"], facts["kind"], facts["rank"]) == ("RankRaisedError", "user-error", 1)
    assert facts["message"] == str(error)
    assert [rank["rank"] for rank in facts["ranks"]] == [0, 1, 2, 3]
    blamed = facts["ranks"][1]
    assert (blamed["status"], blamed["raised"]["type"]) == ("raised", "ValueError")
    assert blamed["collectives"][-1]["number"] == FAULT_STEP
    text = (folder / "report.txt").read_text()
    assert text.startswith(f"RankRaisedError: {error}")
    assert "KeyError: 'key of the first'" in text


@pytest.mark.recorder
def test_the_report_of_a_hang_has_the_stacks_of_all_threads(tmp_path: Path) -> None:
    """The answers that ranks gave before they were ended are kept."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.CollectiveTimeoutError,
        train,
        wait_for_each_other,
        **BY_TIMEOUT,
    )
    require_hang(error, 1)
    text = (tmp_path / "run" / "attempt-1" / "report.txt").read_text()
    assert "in wait_for_each_other" in text
    assert "in other" in text
    assert "all_reduce number 3 " in text
    shutil.rmtree(tmp_path / "run")


WEEK_S: Final = 7 * 86_400.0


def test_directories_of_failed_launches_are_removed_after_a_week(tmp_path: Path) -> None:
    """They must belong to this user, match by name, be a week old, and not be held by a launch."""
    names = {
        "ddpsafe-a1b2c3_4": True,
        "ddpsafe-newlogs1": False,
        "ddpsafe-inuse_12": False,
        "ddpsafe-results": False,
        "ddpsafe-A1B2C3D4": False,
        "other-a1b2c3_4": False,
        "ddpsafe-store-a1b2c3_4": False,
    }
    now_s = time.time()
    for name in names:
        attempt = tmp_path / name / "attempt-1"
        attempt.mkdir(parents=True)
        (attempt / "rank-0.err").touch()
        os.utime(attempt, times=(now_s - WEEK_S - 60,) * 2)
        os.utime(tmp_path / name, times=(now_s - WEEK_S - 60,) * 2)
    os.utime(tmp_path / "ddpsafe-newlogs1" / "attempt-1")
    (tmp_path / "ddpsafe-a_link_1").symlink_to(tmp_path / "ddpsafe-results")
    if os.geteuid() == 0:
        names["ddpsafe-strange1"] = False
        (tmp_path / "ddpsafe-strange1").mkdir()
        os.chown(tmp_path / "ddpsafe-strange1", 65534, 65534)
        os.utime(tmp_path / "ddpsafe-strange1", times=(0, 0))
    held = os.open(tmp_path / "ddpsafe-inuse_12", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    try:
        removed = remove_old_directories(tmp_path)
    finally:
        os.close(held)
    assert [path.name for path in removed] == [name for name, goes in names.items() if goes]
    assert all((tmp_path / name).exists() is not goes for name, goes in names.items())
    assert remove_old_directories(tmp_path, now_s=now_s + 2 * WEEK_S) != []


def test_a_launch_removes_old_directories_and_holds_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that a launch holds is not removed, however old it is."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old = tmp_path / "ddpsafe-a1b2c3_4"
    old.mkdir()
    os.utime(old, times=(0, 0))
    with open_run_directory(None) as directory:
        assert not old.exists()
        os.utime(directory.path, times=(0, 0))
        assert remove_old_directories(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_one_launch_removes_a_limited_number_of_directories(tmp_path: Path) -> None:
    """Thousands of old directories must not delay a start, so each start removes a few."""
    for number in range(50):
        (tmp_path / f"ddpsafe-{number:08d}").mkdir()
        os.utime(tmp_path / f"ddpsafe-{number:08d}", times=(0, 0))
    assert len(remove_old_directories(tmp_path)) == 20
    assert len(list(tmp_path.iterdir())) == 30
