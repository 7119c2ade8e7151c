"""Two jobs in one directory: the second learns who the first is; a dead job does not block."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import checkpoint_programs as programs
import forked_ranks
import pytest
import scripts

from ddpsafe.checkpoint import Checkpointer, _lock, errors


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[BaseProcess]:
    """Return another process, which holds the lock of the directory."""
    context = forked_ranks.server()
    held = context.Event()
    process = context.Process(target=programs.hold_lock, args=(tmp_path, held))
    process.start()
    assert held.wait(forked_ranks.LIMIT_S)
    yield process
    process.kill()
    process.join()
    process.close()


def test_second_job_learns_which_job_holds_the_lock(
    tmp_path: Path, holder: BaseProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the host, the process, the scheduler's job and the time."""
    monkeypatch.setattr(_lock, "DYING_S", 0.2)
    with pytest.raises(errors.DirectoryLockedError) as caught:
        Checkpointer(tmp_path)
    owner = caught.value.owner
    assert owner["pid"] == holder.pid
    assert owner["host"] == os.uname().nodename
    assert f"process {holder.pid} of SLURM_JOB_ID=4711 on {owner['host']}" in str(caught.value)


def test_lock_of_a_killed_job_is_free_at_once(tmp_path: Path, holder: BaseProcess) -> None:
    """The kernel releases it with the process, so a retry waits for nothing."""
    holder.kill()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"x": 1}, 1)


def test_next_job_waits_for_one_that_is_ending(tmp_path: Path, holder: BaseProcess) -> None:
    """A scheduler may start the next job while the previous one is still ending."""
    threading.Timer(0.3, holder.kill).start()
    Checkpointer(tmp_path).close()


def other_host(directory: Path) -> _lock.Owner:
    """Write the lock of a job on another host, which record locks do not reach."""
    owner = replace(_lock.Owner.myself({}), host="gpu-07", boot="another kernel", pid=1)
    (directory / _lock.NAME).write_text(json.dumps(asdict(owner)))
    return owner


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(
            {"host": "gpu-07", "boot": "another kernel", "pid": 1, "lock": "open file"},
            id="another host",
        ),
        # The kernel drops it if its owner closes any descriptor of the file, and lives on.
        pytest.param({"id": "another", "lock": "process"}, id="the lock of a process"),
    ],
)
def test_heartbeat_is_respected_where_no_lock_shows_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    """The owner's file changes, so the owner is alive, whatever the clocks say."""
    monkeypatch.setattr(_lock, "SILENCE_S", 20.0)
    owner = replace(_lock.Owner.myself({}), **facts)
    (tmp_path / _lock.NAME).write_text(json.dumps(asdict(owner)))
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.1):
            os.utime(tmp_path / _lock.NAME)

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        with pytest.raises(errors.DirectoryLockedError, match=rf"on {owner.host}.*continues"):
            Checkpointer(tmp_path)
    finally:
        stop.set()
        heart.join()


def test_silent_owner_on_another_host_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory is taken over, and it gets an error if it resumes."""
    monkeypatch.setattr(_lock, "SILENCE_S", 0.5)
    other_host(tmp_path)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"x": 1}, 1)
        other_host(tmp_path)  # it writes its lock again, as if it had been suspended
        with pytest.raises(errors.SaveError, match="was suspended"):
            checkpointer.save({"x": 2}, 2)


def test_closed_checkpointer_lets_the_next_one_in(tmp_path: Path) -> None:
    """This holds within one process too, where two open ones at a time are refused."""
    first = Checkpointer(tmp_path)
    with pytest.raises(errors.DirectoryLockedError, match="Checkpointer of this process"):
        Checkpointer(tmp_path / ".." / tmp_path.name)
    first.close()
    first.close()
    Checkpointer(tmp_path).close()


def test_garbage_collected_checkpointer_lets_the_next_one_in(tmp_path: Path) -> None:
    """A notebook cell that runs again does not block itself."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save({"x": 1}, 1)
    del checkpointer
    Checkpointer(tmp_path).close()


def second_job(directory: Path) -> str:
    """Return the outcome of opening the directory in another process."""
    program = f"""
        from ddpsafe import DDPSafeError
        from ddpsafe.checkpoint import Checkpointer, _lock
        _lock.DYING_S = 0.2
        try:
            Checkpointer({str(directory)!r}).close()
        except DDPSafeError as exc:
            print(type(exc).__name__)
        else:
            print("got in")
    """
    return scripts.run(directory.parent, program).lines()[0]


def test_lock_survives_its_own_process_opening_and_closing_the_files(tmp_path: Path) -> None:
    """Neither a backup, an upload nor a fork that closes a lock file releases the lock."""
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save({"x": 1}, 1)
        shutil.copytree(tmp_path / "c", tmp_path / "backup", symlinks=True)
        (tmp_path / "c" / ".lock").read_bytes()
        subprocess.run(["true"], check=True)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert second_job(tmp_path / "c") == "DirectoryLockedError"
        checkpointer.save({"x": 2}, 2)
    assert second_job(tmp_path / "c") == "got in"
    Checkpointer(tmp_path / "backup").close()


def test_child_that_outlives_its_owner_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A DataLoader worker that was forked while the lock was held does not hold it."""
    program = f"""
        import os, signal
        from ddpsafe.checkpoint import Checkpointer
        checkpointer = Checkpointer({str(tmp_path / "c")!r})
        child = os.fork()
        if child == 0:
            os.closerange(1, 3)
            signal.pause()
        print(child, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    child = int(scripts.run(tmp_path, program).out)
    try:
        Checkpointer(tmp_path / "c").close()
    finally:
        os.kill(child, signal.SIGKILL)


PLANTED: Final[dict[str, Callable[[Path, Path], object]]] = {
    "a link": lambda path, victim: path.symlink_to(victim),
    "a hard link": lambda path, victim: path.hardlink_to(victim),
    "other content": lambda path, victim: path.write_bytes(victim.read_bytes()),
    "a pipe": lambda path, _: os.mkfifo(path),
}


@pytest.mark.parametrize("what", PLANTED)
def test_file_planted_by_another_user_is_not_written(tmp_path: Path, what: str) -> None:
    """The victim's file keeps its bytes, and the error names the file at once."""
    victim, path = tmp_path / "authorized_keys", tmp_path / "c" / ".lock"
    victim.write_bytes(b"ssh-ed25519 key")
    path.parent.mkdir()
    PLANTED[what](path, victim)
    with pytest.raises(errors.DirectoryError, match="cannot be used as the lock"):
        Checkpointer(path.parent)
    assert victim.read_bytes() == b"ssh-ed25519 key"
    assert _lock.read_owner(path.parent) is None


def test_the_end_of_a_job_waits_only_so_long_for_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage that does not respond must not hold it up; once it responds, the lock is released."""
    responds = threading.Event()
    lock = _lock.DirectoryLock(tmp_path, _lock.Owner.myself({}))
    monkeypatch.setattr(_lock, "_RELEASE_S", 0.1)
    monkeypatch.setattr(lock, "find_loss", lambda: None if responds.wait() else "")
    lock.release()
    assert (tmp_path / ".lock").read_text("utf-8")
    (thread,) = [each for each in threading.enumerate() if each.name == "ddpsafe-unlock"]
    responds.set()
    thread.join()
    assert (tmp_path / ".lock").read_text("utf-8") == ""
