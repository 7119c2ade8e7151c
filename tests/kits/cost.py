"""``python cost.py COMMAND …`` runs a command and prints what it cost beside ``import torch``.

CPU times are those of the command and of every process that it or its children started, also of those
that it did not wait for: they become children of this process.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from typing import Final, NamedTuple

_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h
_LEFTOVERS_S: Final = 10.0
"""How long processes that outlive the command are waited for."""


class Cost(NamedTuple):
    """CPU time, user and system, and the time of the clock."""

    cpu_s: float
    wall_s: float


def run(command: list[str]) -> tuple[int, Cost]:
    """Run a command and wait for its descendants; return its exit code and their cost."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    started = subprocess.Popen(command)
    code: int | None = None
    ends_s = float("inf")
    while time.monotonic() < ends_s:
        try:
            pid, status = os.waitpid(-1, 0 if code is None else os.WNOHANG)
        except ChildProcessError:
            break
        if pid == started.pid:
            code = started.returncode = os.waitstatus_to_exitcode(status)
            ends_s = time.monotonic() + _LEFTOVERS_S
        elif pid == 0:
            time.sleep(0.05)
    after, took_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began_s
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert code is not None
    return code, Cost(spent_s, took_s)


def main(command: list[str]) -> int:
    """Run the command, then import torch three times, of which the cheapest counts."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches the command, too
    code, spent = run(command)
    load = os.getloadavg()[0]
    imports = [run([sys.executable, "-c", "import torch"])[1] for _ in range(3)]
    cpu_s, wall_s = min(each.cpu_s for each in imports), min(each.wall_s for each in imports)
    print(
        f"{spent.cpu_s:.0f} s of CPU time, {spent.cpu_s / cpu_s:.0f} times that of importing torch; "
        f"{spent.wall_s:.0f} s, {spent.wall_s / wall_s:.0f} times as long (load {load:.1f})",
        flush=True,
    )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
