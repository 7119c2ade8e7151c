"""The run directory is on a full disk, is removed while ranks run, or is a week old."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import run_dir_programs as programs
import scripts
from exception_programs import LostSampleError, raise_chained
from fault_kit import BY_TIMEOUT, World, require_hang, require_rank
from hang_programs import wait_for_each_other
from training_programs import FAULT_STEP, return_rank, train

import ddpsafe
from ddpsafe._job.store_keys import FolderStore
from ddpsafe._launcher.run_directory import open_run_directory, remove_old_directories


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


OF_ALL_WAYS: Final = [
    *(f"of {writer}" for writer in ("a buffer", "the system", "a logger", "C")),
    *["of a program"] * 2,
    *(f"worker {index}" for index in [*range(4)] * 2),
]
"""What `programs.write_much` writes when the disk is full."""


@pytest.mark.root
@pytest.mark.parametrize(
    "console", ["rank-zero", "tagged", pytest.param("json", marks=pytest.mark.full)]
)
def test_a_disk_that_fills_up_does_not_end_a_training(
    tmp_path: Path,
    small_disk: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    console: str,
) -> None:
    """One warning names the log; everything that ranks and their processes write is still shown."""
    world = World(folder=tmp_path)
    fields: dict[str, Any] = {"run_dir": small_disk / "run", "console": console}
    assert world.launch(programs.write_much, **fields).values == {0: 0, 1: 1}
    shown = "".join(capfd.readouterr())
    ranks = 1 if console == "rank-zero" else 2
    assert caplog.text.count(f"cannot write to its log {small_disk / 'run'}") == 1
    assert all(shown.count(f"{number:099d}") == ranks for number in range(programs.LINES))
    assert shown.count("the last line") == ranks
    for text in OF_ALL_WAYS:
        assert shown.count(text) == ranks * OF_ALL_WAYS.count(text), text


@pytest.mark.root
@pytest.mark.full
def test_a_full_temporary_directory_does_not_keep_a_job_from_starting(
    tmp_path: Path, small_disk: Path
) -> None:
    """The ranks meet in memory, and Python finds another directory for the logs."""
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb") as file:
        file.write(b"x" * 100_000)
    script = scripts.write(tmp_path, "train.py", PRINTS)
    for method in ("spawn", "forkserver"):
        run = scripts.Script(
            [str(script), method], folder=tmp_path, env={"TMPDIR": str(small_disk)}, fresh=True
        ).end()
        assert "hello from rank 0" in run.out
        assert run.code == 0, run.err


PRINTS: Final = """
import sys
import ddpsafe

def train(ctx):
    ctx.barrier()
    print("hello from rank", ctx.rank)

if __name__ == "__main__":
    ddpsafe.launch(train, nproc_per_node=2, backend="gloo", start_method=sys.argv[1])
"""


def test_a_limit_of_file_sizes_does_not_end_a_training(tmp_path: Path) -> None:
    """``ulimit -f`` also holds for the logs."""
    values = World(folder=tmp_path).launch(programs.exceed_file_size).values
    assert values == {0: 0, 1: 1}


def test_a_cleaner_of_temporary_files_ends_no_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Barriers, groups, checkpoints, loaders and the console work after all files of a launch are gone."""
    result = World(folder=tmp_path).launch(programs.use_after_cleaning, console="all")
    assert [*result.values.values()] == [{"items": 4, "stop": False}] * 2
    assert capfd.readouterr().out.count("to the end") == 2


def test_a_launch_removes_the_store_of_a_launcher_that_was_killed_with_its_reaper() -> None:
    """A store that a launcher holds, or that is new, stays."""
    stores = {
        name: Path(f"/dev/shm/ddpsafe-store-99999999-{name}") for name in ("old", "held", "new")
    }
    for path in stores.values():
        path.mkdir(mode=0o700)
    for name in ("old", "held"):
        os.utime(stores[name], times=(0, 0))
    held = os.open(stores["held"], os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        ddpsafe.launch(return_rank, nproc_per_node=1, start_method="forkserver", console="none")
        assert [path.exists() for path in stores.values()] == [False, True, True]
    finally:
        os.close(held)
        for path in stores.values():
            shutil.rmtree(path, ignore_errors=True)


def test_a_store_that_is_removed_is_made_again_with_what_its_ranks_have_set(tmp_path: Path) -> None:
    """Whoever notices makes the folder again; each rank puts its keys back, at its next look."""
    stores = [FolderStore(tmp_path / "store" / "keys") for _ in range(2)]
    for number, store in enumerate(stores):
        store.set(f"of {number}", "set")
        assert store.compare_set("first", "", f"{number}") == b"0"
    stores[0].set("gone", "set")
    stores[0].delete_key("gone")
    for what in ("store", "store/keys"):
        shutil.rmtree(tmp_path / what)
        assert stores[1].compare_set("new", "", "1") == b"1"
        # Each look that finds nothing puts back what is missing, also where the other rank made the folder.
        assert not stores[0].check(["other"])
        for store in stores:
            assert store.check(["of 0", "of 1", "first", "new"])
            assert store.get("first") == b"0"
            assert not store.check(["gone"])
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0


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
    error = world.launch_fails("collective", programs.remove_run_dir, "hang", **BY_TIMEOUT)
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
    error = world.launch_fails("collective", train, wait_for_each_other, **BY_TIMEOUT)
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


def test_the_directories_of_failures_have_a_bound(tmp_path: Path) -> None:
    """However many launches fail, 50 directories stay, and 1 GiB; the newest one whatever its size."""
    now_s = time.time()
    for number in range(60):
        folder = tmp_path / f"ddpsafe-{number:08d}"
        folder.mkdir()
        os.utime(folder, times=(now_s - number,) * 2)
    removed = remove_old_directories(tmp_path)
    assert sorted(path.name for path in removed) == [f"ddpsafe-{n:08d}" for n in range(49, 60)]
    for number in range(3):
        log = tmp_path / f"ddpsafe-{number:08d}" / "log"
        with log.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 600 << 20)
        os.utime(log, times=(now_s + 10 - number,) * 2)
    while remove_old_directories(tmp_path):
        pass
    left = [path.name for path in sorted(tmp_path.iterdir())]
    assert left[0] == "ddpsafe-00000000"
    assert {"ddpsafe-00000001", "ddpsafe-00000002"}.isdisjoint(left)


def test_two_launches_with_one_run_directory_share_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second one gets a folder of its own in it, as a warning says; the next one has the directory again."""
    run = tmp_path / "run"
    with open_run_directory(run) as first:
        attempt = first.make_attempt_folder(1)
        error = World(folder=tmp_path).launch_fails(
            ddpsafe.RankRaisedError, train, raise_chained, run_dir=run
        )
        assert error.run_dir == run / "launch-2"
        assert f"another launch uses the run directory {run}" in caplog.text
        assert list(attempt.iterdir()) == []
        assert (run / "launch-2" / "attempt-1" / "report.json").exists()
        assert not (run / "earlier").exists()
        with open_run_directory(run) as third:
            assert third.path == run / "launch-2"  # free again
            assert (run / "launch-2" / "earlier").exists()
            with open_run_directory(run) as fourth:
                assert fourth.path == run / "launch-3"
    with open_run_directory(run) as later:
        assert later.path == run


def test_nodes_that_share_a_run_directory_have_a_folder_each(tmp_path: Path) -> None:
    """Each node's launcher holds the lock of its own folder."""
    with (
        open_run_directory(tmp_path, node="node-0-a") as one,
        open_run_directory(tmp_path, node="node-1-b") as two,
    ):
        assert one.path == two.path == tmp_path
        assert one.make_attempt_folder(1) == tmp_path / "node-0-a" / "attempt-1"
        assert two.make_attempt_folder(1) == tmp_path / "node-1-b" / "attempt-1"


def test_one_launch_removes_a_limited_number_of_directories(tmp_path: Path) -> None:
    """Thousands of old directories must not delay a start, so each start removes a few."""
    for number in range(50):
        (tmp_path / f"ddpsafe-{number:08d}").mkdir()
        os.utime(tmp_path / f"ddpsafe-{number:08d}", times=(0, 0))
    assert len(remove_old_directories(tmp_path)) == 20
    assert len(list(tmp_path.iterdir())) == 30
