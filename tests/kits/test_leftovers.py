"""The check for leftovers, which runs after every test, finds them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import leftovers
import pytest
import scripts

from ddpsafe._wire.spec import make_launch_id, semaphore_prefix

WAIT_FOR_STDIN = "import sys; sys.stdin.read()"


def test_running_process_is_found_and_an_ended_one_is_not() -> None:
    """A process of this run is reported until it has been reaped."""
    before = leftovers.Snapshot.take()
    command = [sys.executable, "-c", WAIT_FOR_STDIN]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        (found,) = leftovers.wait_until_gone(before, grace_s=0)
        assert f"process {process.pid}" in found
    assert leftovers.wait_until_gone(before, grace_s=1) == []


def test_orphan_is_found_after_its_parent_has_ended() -> None:
    """A process in its own session whose parent has exited still belongs to this run."""
    before = leftovers.Snapshot.take()
    read_end, write_end = os.pipe()
    try:
        orphan = f"subprocess.Popen([sys.executable, '-c', {WAIT_FOR_STDIN!r}]"
        code = f"import subprocess, sys; {orphan}, start_new_session=True)"
        subprocess.run([sys.executable, "-c", code], stdin=read_end, check=True)
        (found,) = leftovers.wait_until_gone(before, grace_s=0)
        assert WAIT_FOR_STDIN in found
    finally:
        os.close(read_end)
        os.close(write_end)
    assert leftovers.wait_until_gone(before, grace_s=5) == []


def test_thread_socket_and_files_are_found() -> None:
    """A thread, a listening socket, a run directory and shared memory are each named."""
    before = leftovers.Snapshot.take()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="forgotten")
    thread.start()
    shared = leftovers.SHARED_MEMORY / f"ddpsafe-test-{os.getpid()}"
    run_dir = Path(tempfile.mkdtemp(prefix="ddpsafe-"))
    # Open, so that tests that run at the same time see whose it is.
    with socket.create_server(("127.0.0.1", 0)) as server, shared.open("w"):
        found = "\n".join(leftovers.wait_until_gone(before, grace_s=0))
        assert str(server.getsockname()[1]) in found
    done.set()
    thread.join(scripts.LIMIT_S)
    shared.unlink()
    run_dir.rmdir()
    assert "thread forgotten" in found
    assert str(shared) in found
    assert str(run_dir) in found
    assert leftovers.wait_until_gone(before, grace_s=0) == []


@pytest.mark.full
def test_helper_processes_of_multiprocessing_are_allowed() -> None:
    """The fork server and the resource tracker live as long as pytest, and are not leaks."""
    before = leftovers.Snapshot.take()
    worker = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    worker.start()
    worker.join(scripts.LIMIT_S)
    worker.close()
    assert leftovers.wait_until_gone(before, grace_s=1) == []


def test_semaphores_of_another_run_are_ignored() -> None:
    """Leftovers of a killed test run in /dev/shm do not fail the tests of another run."""
    before = leftovers.Snapshot.take()
    stranger = leftovers.SHARED_MEMORY / f"sem.ddpsafe-0123abcd-{os.getpid():08x}-test"
    name = semaphore_prefix(make_launch_id()).removeprefix("/")
    own = leftovers.SHARED_MEMORY / f"sem.{name}-test"
    try:
        stranger.touch()
        assert leftovers.wait_until_gone(before, grace_s=0) == []
        own.touch()
        assert leftovers.wait_until_gone(before, grace_s=0) == [f"file {own}"]
    finally:
        stranger.unlink()
        own.unlink(missing_ok=True)
