"""Forks a broken host for each request: a new interpreter would cost more than the examination.

Reads requests from stdin and answers on stdout, one line of JSON each; see `doctor_kit.examine`.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from typing import Any

import psutil  # noqa: F401 - loaded once, for all forks

from ddpsafe import doctor
from ddpsafe.doctor._checks import all_checks

NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x40000000
"""CLONE_NEWNS, CLONE_NEWUTS and CLONE_NEWNET of <linux/sched.h>."""


def become_host(setup: str) -> None:
    """Move into new namespaces and run `setup` there, in a shell."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NAMESPACES) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    script = f"mount --make-rprivate /\nip link set lo up\n{setup}"
    subprocess.run(["sh", "-ec", script], check=True, stdin=subprocess.DEVNULL, stdout=2)


def examine(asked: dict[str, Any]) -> str:
    """Run one examination; return its report."""
    if asked["folder"] is not None:
        os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.path[:0] = asked["path"]
    tempfile.tempdir = None
    if asked["host"] is not None:
        become_host(asked["host"])
    kept: dict[str, Any] = {}  # keeps open what `before` opens
    exec(asked["before"], kept)
    timeout = timedelta(seconds=asked["timeout_s"])
    report = doctor.run(checks=asked["checks"], mesh=False, timeout=timeout, **asked["fields"])
    return report.to_json()


def answer(line: str, writing: int) -> None:
    """Answer in the fork, and exit."""
    try:
        text = json.dumps({"report": json.loads(examine(json.loads(line)))})
    except BaseException:  # noqa: BLE001 - the test that asked will show it
        text = json.dumps({"error": traceback.format_exc()})
    with os.fdopen(writing, "w", encoding="utf-8") as pipe:
        pipe.write(text)
    os._exit(0)


def main() -> None:
    """Answer until stdin ends."""
    all_checks()
    print("{}", flush=True)
    for line in sys.stdin:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            answer(line, writing)
        os.close(writing)
        with os.fdopen(reading, encoding="utf-8") as pipe:
            text = pipe.read()
        os.waitpid(pid, 0)  # a limit or mount of the fork may delay its exit
        print(text, flush=True)


if __name__ == "__main__":
    main()
