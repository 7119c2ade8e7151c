"""A small process that outlives a killed launcher, and cleans up after it.

A launcher that is killed by SIGKILL can do nothing, and a rank killed with it cannot end what it
started. The reaper reads the ranks' pids from a pipe. When the pipe ends and the reaper is still
alive, the launcher has died: the reaper ends the ranks and everything that they started.
"""

from __future__ import annotations

import contextlib
import errno
import json
import marshal
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from multiprocessing import spawn
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from ddpsafe._advice import ADVICE
from ddpsafe._errors import Explanation, PreflightError
from ddpsafe._launcher.processes.reaper_program import outlive
from ddpsafe._logging import get_logger
from ddpsafe._secrets import withheld_own_secrets
from ddpsafe._text import signal_name
from ddpsafe._wire.spec import MARKER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe._launcher.processes.descendants import RankIdentity

logger = get_logger(__name__)

# Its code is sent on the pipe: ddpsafe may be in a zip file, or be compiled without its source.
_BOOTSTRAP: Final = """# ddpsafe's reaper: ends what a killed launcher leaves
import marshal, os, sys, threading, time
type(lambda: 0)(marshal.load(sys.stdin.buffer), globals())(int(sys.argv[1]))
"""

LIMITS: Final = {
    errno.EAGAIN: "the number of processes is limited on this machine (ulimit -u, pids.max).",
    errno.EMFILE: ADVICE["DS-MEM-descriptors"][0],
    errno.ENFILE: "the number of open files is limited on this machine (fs.file-max).",
    errno.ENOMEM: "this machine, or its cgroup, has no memory left.",
    errno.ENOSPC: "the disk with the run directory or TMPDIR is full.",
}
"""The limit that kept a process from being started, by errno."""


class Reaper:
    """The launcher's end of the reaper process."""

    def __init__(self, process: subprocess.Popen[bytes] | None) -> None:
        """Own the process; with ``None`` nothing is cleaned up."""
        self._process = process

    def send_setup(self, launch_id: str) -> None:
        """Send where ddpsafe can be imported from, and whose processes to look for."""
        entries: list[object] = list(sys.path)
        # A Path in sys.path is common; Python ignores it, too.
        path = [entry for entry in entries if isinstance(entry, str)]
        path.append(str(Path(__file__).parents[3]))  # an import hook may have found ddpsafe there
        self._send_line(json.dumps({"path": path, "launch": launch_id}))

    def track(self, rank: RankIdentity) -> None:
        """Have a rank's process and its session ended if the launcher dies.

        To be called again once the rank has ended, since another process may then get its pid.
        """
        self._send_line(json.dumps({"rank": asdict(rank)}))

    def remove_later(self, folder: Path) -> None:
        """Have a temporary folder removed if the launcher dies."""
        self._send_line(json.dumps({"folder": str(folder)}))

    def stop(self) -> None:
        """End the reaper: the launcher has cleaned up itself."""
        if self._process is None:
            return
        code = self._process.poll()
        if code is not None:
            logger.warning(
                "the process that cleans up after a killed launcher has ended too early (%s): had the "
                "launcher been killed, what ranks had started would still be running",
                signal_name(-code) if code < 0 else f"exit code {code}",
            )
        self._process.kill()  # before the pipe ends, which would make it clean up
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            _pipe_of(self._process).close()

    def _send_line(self, line: str) -> None:
        if self._process is not None:
            _send(self._process, line.encode() + b"\n")


def _pipe_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None  # noqa: S101 - opened with a pipe
    return process.stdin


def _send(process: subprocess.Popen[bytes], data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        _pipe_of(process).write(data)
        _pipe_of(process).flush()


def start(launcher_pid: int) -> subprocess.Popen[bytes]:
    """Start the process, in a session of its own, which keeps the terminal's signals away from it.

    Raises:
        OSError: The system did not start it.
    """
    executable = os.fsdecode(spawn.get_executable() or "")
    # A signal that is sent to all processes of a job must not end the one that cleans up after them.
    # It inherits this mask, and keeps it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with withheld_own_secrets():
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
                [executable, "-I", "-S", "-c", _BOOTSTRAP, str(launcher_pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                # An outer launch ends all processes with its MARKER, and must not end this one.
                env={name: text for name, text in os.environ.items() if name != MARKER},
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _send(process, marshal.dumps(outlive.__code__))
    return process


@contextlib.contextmanager
def running_reaper(launch_id: str) -> Iterator[Reaper]:
    """Keep a reaper running while ranks run, if this program can start one.

    Raises:
        PreflightError: The system did not start it.
    """
    # The executable of a frozen application is the application itself, which would run again.
    if getattr(sys, "frozen", False):
        logger.warning(
            "this program is frozen, so nothing cleans up if the launcher is killed by SIGKILL: what "
            "ranks have started may then keep running"
        )
        yield Reaper(None)
        return
    try:
        process = start(os.getpid())
    except OSError as exc:
        what = f"the process that cleans up after a killed launcher could not be started: {exc}."
        cause = LIMITS.get(exc.errno or 0)
        fix = "raise the limit, or end other processes."
        if cause is None and exc.filename is not None:
            cause = f"the Python executable ({exc.filename!r}) does not exist, or may not be run."
            fix = "install it again, or set it with multiprocessing.set_executable(path)."
        cause = cause or "a limit of this machine: processes (ulimit -u), open files, memory."
        raise PreflightError(Explanation(what, cause=cause, fix=fix)) from exc
    reaper = Reaper(process)
    try:
        reaper.send_setup(launch_id)
        yield reaper
    finally:
        reaper.stop()
