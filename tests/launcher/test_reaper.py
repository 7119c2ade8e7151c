"""The reaper cleans up after a launcher that was killed, and no process is ended that is not of the launch."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.spawn
import os
import py_compile
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import descendant_programs as programs
import psutil
import pytest
import scripts
from fault_kit import is_running

import ddpsafe
from ddpsafe._launcher.processes import reaper
from ddpsafe._launcher.processes.descendants import (
    Orphans,
    ProcessIdentity,
    RankIdentity,
    find_members,
    kill_members,
)
from ddpsafe._secrets import JOB_SECRET
from ddpsafe._wire.spec import MARKER


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that the reaper removes if the launcher is killed."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


def start(folder: Path, launcher_pid: int, path: list[str] = sys.path) -> subprocess.Popen[bytes]:
    """Start a reaper and send it the messages of a launcher."""
    process = reaper.start(launcher_pid)
    assert process.stdin is not None
    for line in ({"path": path, "launch": "5" * 32}, {"folder": str(folder)}):
        process.stdin.write(json.dumps(line).encode() + b"\n")
    process.stdin.flush()
    return process


def require_cleaned(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Let the launcher end; fail unless the reaper removes the folder and ends well."""
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(scripts.LIMIT_S) == 0
    assert not folder.exists()


def test_it_cleans_up_after_a_launcher_killed_in_the_middle_of_a_message(folder: Path) -> None:
    """The complete messages before it count."""
    process = start(folder, os.getpid())
    assert process.stdin is not None
    process.stdin.write(b'{"rank": {"pi')
    require_cleaned(process, folder)


def test_it_cleans_up_after_a_launcher_killed_before_the_first_look(folder: Path) -> None:
    """A process that the launcher forked may still hold the pipe open."""
    process = start(folder, launcher_pid=1)
    assert process.wait(scripts.LIMIT_S) == 0
    assert process.stdin is not None
    process.stdin.close()
    assert not folder.exists()


def test_no_signal_except_sigkill_ends_it(folder: Path) -> None:
    """Schedulers may send signals to all processes of a job at any time."""
    process = start(folder, os.getpid())
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        process.send_signal(signum)
    require_cleaned(process, folder)


def test_it_waits_for_a_file_system_that_is_briefly_unavailable(
    folder: Path, tmp_path: Path
) -> None:
    """It imports the cleanup code as soon as possible."""
    away, broken, tried = tmp_path / "away", tmp_path / "broken", tmp_path / "tried"
    package = broken / "ddpsafe"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text(f"open({str(tried)!r}, 'w'); raise OSError")
    process = start(folder, os.getpid(), [str(away), str(broken), *sys.path])
    assert process.stdin is not None
    process.stdin.close()
    scripts.wait_until(tried.exists)
    away.mkdir()
    away.joinpath("ddpsafe").symlink_to(Path(ddpsafe.__file__).parent)
    assert process.wait(scripts.LIMIT_S) == 0
    assert not folder.exists()


def test_it_finds_a_package_that_is_not_on_sys_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install may consist of an import hook only."""
    elsewhere = [each for each in sys.path if not Path(each, "ddpsafe", "py.typed").exists()]
    monkeypatch.setattr(sys, "path", elsewhere)
    process = reaper.start(os.getpid())
    launcher = reaper.Reaper(process)
    launcher.send_setup("5" * 32)
    launcher.remove_later(folder)
    require_cleaned(process, folder)


def test_the_end_of_an_outer_launch_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that a rank starts may itself launch, and be killed before it cleans up."""
    monkeypatch.setenv(MARKER, "6" * 32)
    monkeypatch.setenv(JOB_SECRET, "s3cr3t")
    with subprocess.Popen(["sleep", "60"]) as other, reaper.running_reaper("5" * 32) as running:
        killed = kill_members([], "6" * 32, within_s=1)
        assert running._process is not None
        assert running._process.poll() is None
        assert JOB_SECRET not in psutil.Process(running._process.pid).environ()
    assert [each.pid for each in killed] == [other.pid]


@pytest.mark.full(but=["pyc"])
@pytest.mark.parametrize("packed", ["zip", "pyc"])
def test_it_starts_from_code_without_a_source_file(tmp_path: Path, packed: str) -> None:
    """The package may be in a zip file, or compiled without its source."""
    copy = tmp_path / "ddpsafe"
    shutil.copytree(
        Path(ddpsafe.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    source = copy / "_launcher" / "processes" / "reaper_program.py"
    location = tmp_path
    if packed == "zip":
        location = Path(shutil.make_archive(str(tmp_path / "app"), "zip", tmp_path, "ddpsafe"))
        shutil.rmtree(copy)
    else:
        py_compile.compile(str(source), str(source.with_suffix(".pyc")), doraise=True)
        source.unlink()
    program = f"""
        import json, sys
        sys.path.insert(0, {str(location)!r})
        from ddpsafe._launcher.processes import reaper
        process = reaper.start(1)
        process.stdin.close()
        print(reaper.__file__.startswith({str(location)!r}), process.wait(60))
    """
    assert scripts.run(tmp_path, program, fresh=True).lines() == ["True 0"]


@pytest.mark.parametrize(
    ("executable", "cause"),
    [
        ("/nonexistent/python", "the Python executable ('/nonexistent/python') does not exist"),
        ("/etc/passwd", "the Python executable ('/etc/passwd') does not exist, or may not be run"),
        ("", "the Python executable ('') does not exist"),
        (None, "the Python executable ('') does not exist"),
    ],
)
def test_a_python_that_cannot_be_started_is_named(
    monkeypatch: pytest.MonkeyPatch, executable: str | None, cause: str
) -> None:
    """The error does not blame a limit of the machine."""
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", executable)
    with pytest.raises(ddpsafe.PreflightError, match="could not be started") as caught:
        reaper.running_reaper("5" * 32).__enter__()
    assert str(caught.value.explanation.cause).startswith(cause)


def test_a_limit_that_prevents_the_start_is_named() -> None:
    """The errno of the error identifies the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    running = reaper.running_reaper("5" * 32)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        caught = stack.enter_context(pytest.raises(ddpsafe.PreflightError))
        running.__enter__()
    assert "ulimit -n" in str(caught.value)
    assert "ulimit -u" not in str(caught.value)


def test_a_frozen_program_runs_without_a_reaper(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its executable is the program itself, which would launch again."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", "/nonexistent/program")
    with reaper.running_reaper("5" * 32) as without:
        without.remove_later(Path("/nonexistent"))
    assert "this program is frozen" in caplog.text


def test_a_reaper_that_ended_too_early_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The kernel may kill it for memory, and a launcher killed after that leaves its processes."""
    with reaper.running_reaper("5" * 32) as running:
        assert running._process is not None
        running._process.kill()
        scripts.wait_until(lambda: running._process.poll() is not None)
    assert "has ended too early (SIGKILL)" in caplog.text


LAUNCH_ID = "5" * 32
AS_ROOT = pytest.mark.root


@AS_ROOT
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare of util-linux")
def test_an_unrelated_process_that_reuses_the_pid_of_a_rank_is_left_alone() -> None:
    """Its children are left alone, too, before and after its exit, whichever user launches."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, programs.__file__]
    run = subprocess.run(
        inside,
        capture_output=True,
        env=scripts.clean_environment(),
        text=True,
        check=False,
        timeout=scripts.LIMIT_S,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {"told": [True, True, True], "not told": [True, True]}


@pytest.mark.parametrize(
    ("looks", "inherited"),
    [
        ([(100, {7: 20})], []),  # of the first look, it is not known
        ([(100, {7: 20}), (200, {7: 20})], []),
        ([(100, {}), (200, {7: 150})], []),
        ([(100, {}), (200, {7: 100})], []),  # in the same tick as the look
        ([(100, {}), (200, {7: 20})], [7]),
        ([(100, {}), (200, {7: 150}), (300, {7: 150})], []),
        ([(100, {}), (200, {7: 20}), (300, {7: 20})], [7]),  # it has not ended before
        ([(100, {7: 20}), (200, {}), (300, {7: 250})], []),  # another process with its pid
        ([(100, {7: 20}), (200, {7: 20, 8: 30})], [8]),
        ([(100, {9: 20})], [9]),  # 9 has the mark of what ranks start
        ([(100, {}), (200, {9: 150})], [9]),
    ],
)
def test_inherited_children_are_told_from_own_ones(
    looks: list[tuple[int, dict[int, int]]], inherited: list[int]
) -> None:
    """The exit status of a child that the script has started, in a session of its own too, is the script's."""
    orphans = Orphans()
    found: list[ProcessIdentity] = []
    for now, children in looks:
        given = {ProcessIdentity(pid, started): pid == 9 for pid, started in children.items()}
        found = orphans.look(given, now)
    assert [each.pid for each in found] == inherited


def test_processes_in_the_session_of_a_rank_are_ended_after_its_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are recorded when the rank exits, and recognized even after the wall clock has changed."""
    rank = subprocess.Popen(["sh", "-c", "sleep 300 & exec sleep 301"], start_new_session=True)
    identity = RankIdentity.of(rank.pid)
    assert identity is not None
    scripts.wait_until(lambda: len(psutil.Process(rank.pid).children()) == 1)
    (child,) = psutil.Process(rank.pid).children()
    rank.kill()
    ended = identity.ended()
    rank.wait()
    assert [each.pid for each in ended.left or ()] == [child.pid]
    # The kernel computes the time of boot, to which psutil adds, from the wall clock.
    booted_s = psutil.boot_time()
    for name, value in {"boot_time": lambda: booted_s + 3600, "BOOT_TIME": booted_s + 3600}.items():
        monkeypatch.setattr(f"psutil._pslinux.{name}", value, raising=False)
    assert [each.pid for each in find_members([ended], LAUNCH_ID)] == [child.pid]
    kill_members([ended], LAUNCH_ID, within_s=1)
    assert not is_running(child.pid)
    assert find_members([ended], LAUNCH_ID) == []


def test_processes_are_ended_however_long_it_took_to_find_them() -> None:
    """On a busy machine, one pass over all processes may take the whole time allowed."""
    rank = subprocess.Popen(["sleep", "300"], start_new_session=True)
    identity = RankIdentity.of(rank.pid)
    assert identity is not None
    assert [each.pid for each in kill_members([identity], LAUNCH_ID, within_s=0)] == [rank.pid]
    rank.wait()
    assert not is_running(rank.pid)


@AS_ROOT
@pytest.mark.parametrize("user", [0, 65534])
def test_a_mark_counts_only_in_processes_of_this_user(user: int) -> None:
    """Root can read the environment of every process, and must end no other user's processes."""
    marked = subprocess.Popen(["sleep", "300"], env={MARKER: LAUNCH_ID}, user=user)
    try:
        scripts.wait_until(lambda: psutil.Process(marked.pid).name() == "sleep")
        expected = [marked.pid] if user == 0 else []
        assert [each.pid for each in find_members([], LAUNCH_ID)] == expected
    finally:
        marked.kill()
        marked.wait()


def test_a_service_without_the_mark_and_in_its_own_session_survives() -> None:
    """The documentation recommends ``env -u DDPSAFE_LAUNCH_ID setsid`` for a daemon."""
    result = ddpsafe.launch(
        programs.start_services, nproc_per_node=1, backend="gloo", start_method="forkserver"
    )
    kept, ended = result.values[0]
    try:
        assert is_running(kept)
        assert not is_running(ended)
    finally:
        psutil.Process(kept).kill()
