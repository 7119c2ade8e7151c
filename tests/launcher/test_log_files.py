"""Files of the run directory are private, and links planted by another user are not followed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from launch_programs import add_up

import ddpsafe
from ddpsafe._launcher.run_directory import open_run_directory
from ddpsafe._wire.messages import Position, Raised, RankOutcome
from ddpsafe._wire.spec import open_log, read_log
from ddpsafe._worker.environment import capture_output
from ddpsafe._world import World

WRITE = os.O_WRONLY | os.O_CREAT | os.O_APPEND


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Return a file that must neither be written to nor shown."""
    file = tmp_path / "home" / "bashrc"
    file.parent.mkdir()
    file.write_text("private")
    return file


@pytest.mark.parametrize("planted", ["link", "dangling link", "pipe", "linked folder"])
def test_planted_links_and_pipes_are_neither_written_nor_read(
    tmp_path: Path, victim: Path, planted: str
) -> None:
    """A link instead of the file or its folder is refused, and a pipe does not block."""
    folder = tmp_path / "attempt-1"
    log = folder / "rank-0.out"
    if planted == "linked folder":
        folder.symlink_to(victim.parent)
        (victim.parent / log.name).write_text("private")
    else:
        folder.mkdir()
        if planted == "pipe":
            os.mkfifo(log)
        else:
            log.symlink_to(victim if planted == "link" else victim.parent / "new")
    with pytest.raises(OSError, match=r"link|regular|Not a directory|No such device"):
        open_log(log, WRITE)
    assert read_log(log) == ""
    assert victim.read_text() == "private"
    assert sorted(path.name for path in victim.parent.iterdir()) in (
        ["bashrc"],
        ["bashrc", "rank-0.out"],
    )


def test_a_new_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    """Logs may contain data that other users must not see."""
    before = os.umask(0)
    try:
        os.close(open_log(tmp_path / "log", WRITE))
        with open_run_directory(tmp_path / "run") as directory:
            directory.make_attempt_folder(1)
    finally:
        os.umask(before)
    found = [tmp_path / "log", tmp_path / "run", tmp_path / "run" / "attempt-1"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in found] == [0o600, 0o700, 0o700]


@pytest.mark.parametrize("by", ["link", "folder of another user"])
def test_a_rank_refuses_a_swapped_attempt_folder(tmp_path: Path, victim: Path, by: str) -> None:
    """A user who may write to the run directory can rename the folder, but ranks refuse the new one."""
    world = World.alone()
    with open_run_directory(tmp_path / "run") as directory:
        attempt = directory.make_attempt_folder(1)
        attempt.rename(attempt.with_name("mine"))
        if by == "link":
            attempt.symlink_to(victim.parent)
            (victim.parent / "rank-0.out").symlink_to(victim)
        elif os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        else:
            attempt.mkdir()
            os.chown(attempt, 65534, 65534)
        with pytest.raises(ddpsafe.PreflightError, match="run_dir=") as caught:
            capture_output(directory.logs(1, world, is_shown=True), print)
        assert str(attempt) in caught.value.explanation.what
    assert victim.read_text() == "private"


@pytest.mark.parametrize("name", ["attempt-1", "earlier"])
def test_a_link_planted_before_the_launch_is_not_followed(
    tmp_path: Path, victim: Path, name: str
) -> None:
    """An old attempt is moved aside unread; a link instead of the folder for old attempts is refused."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "attempt-1").symlink_to(victim.parent)
    if name == "earlier":
        (run_dir / "earlier").symlink_to(victim.parent)
        with (
            pytest.raises(ddpsafe.PreflightError, match="symbolic link"),
            open_run_directory(run_dir),
        ):
            pass
    else:
        options = {"nproc_per_node": 2, "backend": "gloo", "start_method": "forkserver"}
        result = ddpsafe.launch(add_up, (1,), run_dir=run_dir, **options)
        assert result.values == {0: 2.0, 1: 3.0}
        assert not (run_dir / "attempt-1").is_symlink()
    assert [path.name for path in victim.parent.iterdir()] == ["bashrc"]
    assert victim.read_text() == "private"


@pytest.mark.parametrize(
    ("mode", "warnings"),
    [(0o700, 0), (0o755, 0), (0o1777, 0), (0o775, 1), (0o777, 1)],
)
def test_a_run_directory_that_other_users_can_change_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warnings: int
) -> None:
    """They could remove the logs, or make the launch fail."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(mode)
    with open_run_directory(run_dir):
        pass
    assert caplog.text.count("other users can rename") == warnings


def test_only_the_end_of_a_large_log_is_read(tmp_path: Path) -> None:
    """A rank may write gigabytes; the launcher does not load them to find the last lines."""
    log = tmp_path / "rank-0.err"
    log.write_bytes(b"\xc3\xa9 and so on\n" * 200_000 + b"the last words\n")
    text = read_log(log)
    assert text.endswith("and so on\nthe last words\n")
    assert len(text) <= 1 << 20


@pytest.mark.parametrize(("said", "times"), [(None, 1), ("a line\n", 0)], ids=["own", "another's"])
def test_only_its_own_launcher_appends_the_traceback_of_a_rank(
    tmp_path: Path, said: str | None, times: int
) -> None:
    """The launchers of several nodes may share the directory."""
    raised = Raised(
        type_name="ValueError",
        message="bad batch",
        traceback="ValueError: bad batch\n",
        payload=None,
        phase="running",
        where="train.py:3",
        position=Position(collectives=()),
        at_ns=1,
    )
    with open_run_directory(tmp_path / "run") as directory:
        directory.make_attempt_folder(1)
        log = directory.logs(1, World.alone(), is_shown=True).stderr
        outcome = RankOutcome(
            rank=0,
            local_rank=0,
            pid=1,
            hostname="h1",
            status="raised",
            phase="running",
            exit_code=1,
            raised=raised,
            stderr=log,
            said=said,
        )
        directory.note_tracebacks([outcome])
        assert read_log(log).count("bad batch") == times
