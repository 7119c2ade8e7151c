"""The check for leftovers, which runs after every test, finds them; hosts leave none."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Final

import leftovers
import psutil
import pytest
import scripts
from fault_kit import is_running
from hosts import find_obstacle, require
from scripts import wait_until

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


pytestmark = pytest.mark.root

KITS: Final = str(Path(__file__).parent)
PROGRAM: Final = """
import sys
sys.path.insert(0, sys.argv[1])
from hosts import Network
with Network(2) as network:
    started = [host.start(["sleep", "1000"]) for host in network]
    print(*(each.pid for each in started), *(host.pid for host in network), flush=True)
    sys.stdin.read()
"""


def test_hosts_end_with_the_process_that_made_them() -> None:
    """SIGKILL of the tests ends every process of every host, and removes namespaces and cables."""
    require(find_obstacle())
    maker = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, KITS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert maker.stdout is not None
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(pids) == 4
    assert all(map(psutil.pid_exists, pids))
    maker.kill()
    maker.communicate(timeout=10)
    wait_until(lambda: not any(map(is_running, pids)), within_s=10)
