"""Two jobs in one directory: the second is told who the first is; a dead one is in nobody's way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest

from ddpsafe.checkpoint import Checkpointer, _lock, errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOLD = """
import sys
from pathlib import Path
from ddpsafe.checkpoint._lock import DirectoryLock, Owner
lock = DirectoryLock(Path(sys.argv[1]), Owner.myself({"SLURM_JOB_ID": "4711"}))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Return another process, which has locked the directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_second_job_is_told_who_the_first_is(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host, process, the scheduler's job and since when."""
    monkeypatch.setattr(_lock, "DYING_S", 0.2)
    with pytest.raises(errors.DirectoryLockedError) as caught:
        Checkpointer(tmp_path)
    owner = caught.value.owner
    assert owner["pid"] == holder.pid
    assert owner["host"] == os.uname().nodename
    assert f"process {holder.pid} of SLURM_JOB_ID=4711 on {owner['host']}" in str(caught.value)


def test_lock_of_a_killed_job_is_free_at_once(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    """The kernel ends it with the process, so a retry waits for nothing."""
    holder.send_signal(signal.SIGKILL)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"x": 1}, 1)


def test_next_job_waits_for_one_that_is_on_its_way_out(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    """As when a scheduler starts the next while the last one still ends."""
    threading.Timer(0.3, holder.kill).start()
    Checkpointer(tmp_path).close()


def other_host(directory: Path) -> _lock.Owner:
    """Write the lock of a job on another host, where record locks do not reach."""
    owner = replace(_lock.Owner.myself({}), host="gpu-07", boot="another kernel", pid=1)
    (directory / _lock.NAME).write_text(json.dumps(asdict(owner)))
    return owner


def test_heartbeat_of_another_host_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file changes, so it lives, whatever the clocks say."""
    monkeypatch.setattr(_lock, "SILENCE_S", 20.0)
    other_host(tmp_path)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.1):
            os.utime(tmp_path / _lock.NAME)

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        with pytest.raises(errors.DirectoryLockedError, match=r"on gpu-07.*heartbeat goes on"):
            Checkpointer(tmp_path)
    finally:
        stop.set()
        heart.join()


def test_silent_owner_on_another_host_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory is taken over, and it learns so if it comes back."""
    monkeypatch.setattr(_lock, "SILENCE_S", 0.5)
    other_host(tmp_path)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"x": 1}, 1)
        other_host(tmp_path)  # it writes its lock again, as if it had only slept
        with pytest.raises(errors.SaveError, match="stood still"):
            checkpointer.save({"x": 2}, 2)


def test_closed_checkpointer_lets_the_next_one_in(tmp_path: Path) -> None:
    """In the same process, too; two at once are refused there."""
    first = Checkpointer(tmp_path)
    with pytest.raises(errors.DirectoryLockedError, match="this very process"):
        Checkpointer(tmp_path / ".." / tmp_path.name)
    first.close()
    first.close()
    Checkpointer(tmp_path).close()


def test_forgotten_checkpointer_lets_the_next_one_in(tmp_path: Path) -> None:
    """A notebook cell that is run again is not in its own way."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save({"x": 1}, 1)
    del checkpointer
    Checkpointer(tmp_path).close()
