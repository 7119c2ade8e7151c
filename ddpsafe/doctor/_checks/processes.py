"""Processes: whether a rank's interpreter starts, whether it outlives the terminal, and the clock."""

from __future__ import annotations

import ctypes
import multiprocessing.spawn
import os
import shlex
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpsafe.doctor._findings import Finding, failed, ok, to_copy, warning
from ddpsafe.doctor._system.torch_probe import find_safe_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._subject import Subject

# Less than the 10 s of a check, so that this one itself reports what did not start.
_START_LIMIT_S: Final = 8.0
# What the spawn method needs, without the main script: an interpreter, and a lock in shared memory.
_CHILD: Final = "import multiprocessing as m; m.get_context('spawn').Lock()"
_TIMEX_BYTES: Final = 512  # more than sizeof(struct timex)
_TIME_ERROR: Final = 5  # of sys/timex.h: the clock is not synchronised
_TOLERANCE_S: Final = 60.0


def check_start(subject: Subject) -> Iterator[Finding]:
    """Start an interpreter as the start method does."""
    method = subject.config.start_method
    program = os.fsdecode(multiprocessing.spawn.get_executable())
    began_s = time.monotonic()
    try:
        child = subprocess.run(  # noqa: S603 - the interpreter that ranks are started with
            [program, "-c", _CHILD],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=dict(subject.env),
            cwd=find_safe_directory(),
            timeout=_START_LIMIT_S,
            check=False,
        )
        problem = child.stderr.decode("utf-8", "replace").strip()[-300:] if child.returncode else ""
        problem = problem or (f"exit code {child.returncode}" if child.returncode else "")
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if not problem:
        took = f"{time.monotonic() - began_s:.2f} s"
        yield ok("DS-PROC-001", f"{method} starts {sys.executable} in {took}.")
        return
    yield failed(
        "DS-PROC-001",
        f"{program} cannot be started as a rank: {problem}",
        cause="the interpreter was moved or is embedded in another program, or /dev/shm or a limit "
        "keeps locks from being made.",
        fix=to_copy(
            "This must exit without printing anything:", shlex.join([program, "-c", _CHILD])
        ),
    )


def check_terminal(subject: Subject) -> Iterator[Finding]:
    """Check whether closing this terminal would end the job."""
    env = subject.env
    by_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    kept = env.keys() & {"TMUX", "STY", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"}
    over_ssh = bool(env.get("SSH_CONNECTION") or env.get("SSH_TTY"))
    if (
        over_ssh
        and not kept
        and (by_nohup or (sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()))
    ):
        yield warning(
            "DS-PROC-002",
            "This is an SSH session without tmux or screen"
            + (
                " under nohup: torchrun installs a handler of its own, so SIGHUP still ends it."
                if by_nohup
                else ": the job ends with the connection."
            ),
            cause="a closed connection sends SIGHUP to everything that was started in it.",
            fix=to_copy(
                "Start the job where it outlives the connection:",
                "tmux new -s train",
                "setsid -f YOUR COMMAND > train.log 2>&1",
            ),
        )
        return
    yield ok("DS-PROC-002", "The job does not depend on an SSH session.")


def check_clock(subject: Subject) -> Iterator[Finding]:
    """Compare the clock with the time of ddpsafe's installation."""
    del subject
    now_s = time.time()
    # Whatever the time is, ddpsafe was installed before it; this needs no time server.
    written_s = Path(__file__).stat().st_mtime
    clock = datetime.fromtimestamp(now_s, tz=timezone.utc).isoformat(timespec="seconds")
    if now_s < written_s - _TOLERANCE_S:
        yield warning(
            "DS-PROC-003",
            f"The clock shows {clock}, which is {written_s - now_s:.0f} s before ddpsafe was installed.",
            cause="the clock of this host is wrong; certificates, logs and `make` rely on it.",
            fix=to_copy("Synchronise it:", "timedatectl set-ntp true   # or: chronyc makestep"),
        )
        return
    yield ok("DS-PROC-003", f"The clock shows {clock}.", synchronised=clock_is_synchronised())


def clock_is_synchronised() -> bool | None:
    """Return whether the kernel's clock follows a time server, or None if the kernel does not report it."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    if adjtimex is None:
        return None
    state = adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))  # all zero: read, change nothing
    return None if state < 0 else bool(state != _TIME_ERROR)


CHECKS: Final[tuple[Check, ...]] = (check_start, check_terminal, check_clock)
