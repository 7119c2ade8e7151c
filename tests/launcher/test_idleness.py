"""Idle ranks are distinguished from those that start slowly, and those that have returned have their time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from ddpsafe import Timeouts
from ddpsafe._launcher.watch.idleness import ThreadUsage, Usage, is_active, read_usage
from ddpsafe._launcher.watch.supervisor import let_ranks_leave

ELAPSED_S: Final = 5.0
NOTHING: Final = Usage(
    processes=frozenset({1}),
    threads={1: ThreadUsage(0, 0), 2: ThreadUsage(0, 0)},
    io_bytes=0,
    memory_bytes=10**9,
    faults=0,
    waits_for_disk=False,
)
SECOND: Final = 10**9

ROWS: Final = [
    pytest.param(NOTHING, False, False, id="nothing at all"),
    pytest.param(NOTHING._replace(threads={1: ThreadUsage(SECOND // 20, 100)}), False, False,
        id="polls 20 times a second"),
    pytest.param(NOTHING._replace(threads={1: ThreadUsage(SECOND, 5)}), False, True, id="computes"),
    pytest.param(NOTHING._replace(threads={3: ThreadUsage(SECOND, 5)}), False, True,
        id="a new thread computes, or waits for a core"),
    pytest.param(NOTHING._replace(threads={2: ThreadUsage(SECOND // 20, 400)}), False, True,
        id="a thread wakes up for every packet"),
    pytest.param(NOTHING._replace(threads={2: ThreadUsage(5 * SECOND, 490, SECOND)}), False, True,
        id="computes in as many slices as gloo's thread wakes up, on a busy machine"),
    pytest.param(NOTHING._replace(threads={2: ThreadUsage(SECOND // 20, 490)}), False, False,
        id="gloo's thread of an older torch wakes up by the clock"),
    pytest.param(NOTHING._replace(io_bytes=10_000), False, True, id="reads or writes slowly"),
    pytest.param(NOTHING._replace(memory_bytes=10**9 + 10**6), False, True, id="needs more memory"),
    pytest.param(NOTHING._replace(memory_bytes=10**8), False, False, id="gives memory back"),
    pytest.param(NOTHING._replace(faults=1), False, True, id="reads a mapped file"),
    pytest.param(NOTHING._replace(waits_for_disk=True), False, True, id="waits for a disk"),
    pytest.param(NOTHING._replace(processes=frozenset({1, 5})), False, True, id="starts a process"),
    pytest.param(NOTHING._replace(io_bytes=100_000, threads={1: ThreadUsage(SECOND // 2, 40)}), True, False,
        id="answers the launcher"),
    pytest.param(NOTHING._replace(threads={1: ThreadUsage(3 * SECOND, 40)}), True, True,
        id="answers, and computes"),
]  # fmt: skip


@pytest.mark.parametrize(("now", "answered", "expected"), ROWS)
def test_a_rank_is_idle_only_if_nothing_is_counted(
    now: Usage,
    answered: bool,  # noqa: FBT001 - a row
    expected: bool,  # noqa: FBT001 - a row
) -> None:
    """What the launcher's own questions cost does not count; everything else does."""
    assert is_active(NOTHING, now, elapsed_s=ELAPSED_S, has_answered=answered) is expected


IDLE: Final = {
    "sleeps": "import time\nready()\ntime.sleep(60)",
    "waits for a lock of a file": """
import fcntl, os, subprocess, sys, time
one, other = open(path, "w"), open(path, "w")
fcntl.flock(one, fcntl.LOCK_EX)
ready()
fcntl.flock(other, fcntl.LOCK_EX)
""",
    "polls a lock file": """
import os, time
open(path, "w").close()
ready()
while os.path.exists(path):
    time.sleep(0.05)
""",
    "waits for a server that says nothing": """
import socket
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
ready()
client.recv(1)
""",
    "waits for a process that waits": """
import subprocess
child = subprocess.Popen(["sleep", "60"])
ready()
child.wait()
""",
}

ACTIVE: Final = {
    "computes": "ready()\nwhile True: pass",
    "compiles in another process": """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
ready()
child.wait()
""",
    "reads slowly": """
import time
open(path, "wb").write(bytes(1 << 22))
file = open(path, "rb", buffering=0)
ready()
while True:
    file.read(2048)
    time.sleep(0.1)
""",
    "maps a file and reads it slowly": """
import mmap, time
with open(path, "wb") as file:
    file.write(bytes(1 << 28))
with open(path, "r+b") as file:
    pages = mmap.mmap(file.fileno(), 0)
ready()
for place in range(0, 1 << 28, 1 << 18):
    pages[place]
    time.sleep(0.05)
""",
    "fills memory slowly": """
import time
kept = []
ready()
while True:
    kept.append(bytearray(b"x" * 200_000))
    time.sleep(0.1)
""",
    "receives slowly, and keeps nothing": """
import socket, threading, time
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
sender, _ = server.accept()
def send():
    while True:
        sender.send(bytes(1400))
        time.sleep(0.005)
threading.Thread(target=send, daemon=True).start()
ready()
while True:
    client.recv(4096)
""",
    "starts one process after another": """
import subprocess
ready()
while True:
    subprocess.run(["sleep", "0.3"])
""",
}


def look_at_program(program: str, folder: Path) -> tuple[Usage | None, Usage | None, float]:
    """Run a program in a session of its own, as ranks are; return what it had used at two times, and their distance."""
    start = f"path = {str(folder / 'file')!r}\ndef ready(): print('ready', flush=True)\n"
    command = [sys.executable, "-c", start + program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            wait([], 0.2)  # the rest of its start
            began_s = time.monotonic()
            before = read_usage([process.pid])[process.pid]
            wait([], 1.5)  # the time in which it is measured
            now = read_usage([process.pid])[process.pid]
            elapsed_s = time.monotonic() - began_s
            assert process.poll() is None, "the program has ended"
            return before, now, elapsed_s
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def without_waits(usage: Usage) -> Usage:
    """Return what a process would have used if it had never waited for a core, as on a machine with enough of them."""
    threads = {tid: thread._replace(busy_ns=thread.ran_ns) for tid, thread in usage.threads.items()}
    return usage._replace(threads=threads)


@pytest.mark.parametrize("what", IDLE)
def test_a_process_that_waits_is_idle(tmp_path: Path, what: str) -> None:
    """For a lock, a lock file, a silent server or an idle process; a wait for a core would be activity."""
    before, now, elapsed_s = look_at_program(IDLE[what], tmp_path)
    assert before is not None
    assert now is not None
    assert not is_active(
        without_waits(before), without_waits(now), elapsed_s=elapsed_s, has_answered=False
    )


@pytest.mark.full(but=["computes"])
@pytest.mark.parametrize("what", ACTIVE)
def test_a_slow_start_is_not_idle(tmp_path: Path, what: str) -> None:
    """However slow it is: compiling, reading, mapping, downloading."""
    before, now, elapsed_s = look_at_program(ACTIVE[what], tmp_path)
    # A process that ended while it was read is one that has started: in doubt a rank is active.
    if before is not None and now is not None:
        assert is_active(before, now, elapsed_s=elapsed_s, has_answered=False)


NEVER: Final = 10**6


class Rank:
    """A rank that has left its process group at one time, and exits at another."""

    def __init__(self, rank: int, leaves_s: float, exits_s: float, clock: Any) -> None:
        self.rank, self.pid, self.living_threads = rank, 1, None
        self._leaves_s, self._exits_s, self._clock = leaves_s, exits_s, clock

    @property
    def alive(self) -> bool:
        """Whether it has not exited."""
        return bool(self._clock.now_s < self._exits_s)

    @property
    def is_finishing(self) -> bool:
        """Whether only the script's own code is still running."""
        return bool(self._clock.now_s >= self._leaves_s)

    def ask_threads(self) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    ("ranks", "finish_s", "unfinished", "ends_s"),
    [
        pytest.param([(1, 100)], None, set(), 100, id="what the script does has no limit"),
        pytest.param([(1, 100)], 5, {0}, 6, id="from when the group is left"),
        pytest.param([(8, 10)], 5, set(), 10, id="leaving the group takes longer than that"),
        pytest.param([(8, 100), (1, 3)], 5, {0}, 13, id="each rank has its own time"),
        pytest.param([(NEVER, NEVER)], 5, set(), 30, id="a group that is never left is cut"),
        pytest.param([(NEVER, NEVER), (1, 40)], 60, set(), 40, id="beside one that still works"),
    ],
)
def test_each_rank_has_the_time_it_needs(
    ranks: list[tuple[float, float]], finish_s: float | None, unfinished: set[int], ends_s: float
) -> None:
    """`timeouts.finish` counts from when a rank has left its group, which has 30 s."""
    clock = SimpleNamespace(now_s=0.0)
    finish = None if finish_s is None else timedelta(seconds=finish_s)
    timeouts = Timeouts(finish=finish)
    workers: Any = [Rank(rank, *times, clock) for rank, times in enumerate(ranks)]

    def wait(limit_s: float) -> None:
        clock.now_s += min(limit_s, 0.5)

    left = let_ranks_leave(
        workers, timeouts, wait=wait, is_over=lambda: False, clock=lambda: clock.now_s
    )
    assert left.keys() == unfinished
    assert clock.now_s == pytest.approx(ends_s, abs=1.0)
