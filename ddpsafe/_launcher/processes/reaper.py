"""A small process that outlives the launcher for as long as it takes to clean up after it.

A launcher that is killed by SIGKILL can do nothing, and a rank killed with it cannot end what it
started. The reaper learns the ranks' pids on a pipe; when the pipe ends without a good-bye, it ends
them and all that descends from them.
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

from ddpsafe._errors import Explanation, PreflightError, signal_name
from ddpsafe._launcher.processes.reaper_program import outlive
from ddpsafe._logging import get_logger
from ddpsafe._secrets import withheld_own_secrets
from ddpsafe._wire.spec import MARKER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe._launcher.processes.descendants import RankIdentity

logger = get_logger(__name__)

# Its code comes through the pipe: ddpsafe may lie in a zip file, or be compiled without its source.
_BOOTSTRAP: Final = """# ddpsafe's reaper: ends what a killed launcher leaves
import marshal, os, sys, threading, time
type(lambda: 0)(marshal.load(sys.stdin.buffer), globals())(int(sys.argv[1]))
"""

LIMITS: Final = {
    errno.EAGAIN: "the number of processes is limited on this machine (ulimit -u, pids.max).",
    errno.EMFILE: "the number of open files is limited for this process (ulimit -n).",
    errno.ENFILE: "the number of open files is limited on this machine (fs.file-max).",
    errno.ENOMEM: "this machine, or its cgroup, has no memory left.",
    errno.ENOSPC: "the disk with the run directory or TMPDIR is full.",
}
"""Which limit stopped the start of a process, by errno."""


class Reaper:
    """The launcher's end of the reaper process."""

    def __init__(self, process: subprocess.Popen[bytes] | None) -> None:
        """Own the process; without one nothing is cleaned up."""
        self._process = process

    def teach(self, launch_id: str) -> None:
        """Say where the code lies and whose processes to look for."""
        entries: list[object] = list(
            sys.path
        )  # a Path among them is common; Python ignores it, too
        path = [entry for entry in entries if isinstance(entry, str)]
        path.append(str(Path(__file__).parents[3]))  # an import hook may have found ddpsafe there
        self._say(json.dumps({"path": path, "launch": launch_id}))

    def protect(self, rank: RankIdentity) -> None:
        """End this process and its session too, should the launcher vanish.

        Told again once the rank has ended: its number may become another process's.
        """
        self._say(json.dumps({"rank": asdict(rank)}))

    def remove_later(self, folder: Path) -> None:
        """Remove a temporary folder too, should the launcher vanish."""
        self._say(json.dumps({"folder": str(folder)}))

    def dismiss(self) -> None:
        """End the reaper: the launcher has cleaned up itself."""
        if self._process is None:
            return
        code = self._process.poll()
        if code is not None:
            logger.warning(
                "the process that cleans up after a killed launcher has ended too early (%s): what "
                "ranks had started would have lived on",
                signal_name(-code) if code < 0 else f"exit code {code}",
            )
        self._process.kill()  # before it sees the end of the pipe, at which it would clean up
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            _pipe_of(self._process).close()

    def _say(self, line: str) -> None:
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
        OSError: The system would not start another one.
    """
    executable = os.fsdecode(spawn.get_executable() or "")
    # What is sent to all processes of a job must not end the one that cleans up after them: it
    # begins with all signals blocked, and leaves them so.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with withheld_own_secrets():
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
                [executable, "-I", "-S", "-c", _BOOTSTRAP, str(launcher_pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                # What ends an outer launch's processes must not end the one that cleans up after this one.
                env={name: text for name, text in os.environ.items() if name != MARKER},
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _send(process, marshal.dumps(outlive.__code__))
    return process


@contextlib.contextmanager
def running_reaper(launch_id: str) -> Iterator[Reaper]:
    """Keep a reaper while ranks run, where this program can start one.

    Raises:
        PreflightError: The system would not start another process.
    """
    # The program of a frozen application is the application, which would run again.
    if getattr(sys, "frozen", False):
        logger.warning(
            "this program is frozen, so nothing cleans up should the launcher be killed by SIGKILL: "
            "what ranks have started may live on then"
        )
        yield Reaper(None)
        return
    try:
        process = start(os.getpid())
    except OSError as exc:
        what = f"the process that cleans up after a killed launcher could not be started: {exc}."
        cause = LIMITS.get(exc.errno or 0)
        fix = "raise the limit, or end what else runs."
        if cause is None and exc.filename is not None:
            cause = f"Python's own program ({exc.filename!r}) is not there, or may not be run."
            fix = "install it again, or name it with multiprocessing.set_executable(path)."
        cause = cause or "a limit of this machine: processes (ulimit -u), open files, memory."
        raise PreflightError(Explanation(what, cause=cause, fix=fix)) from exc
    reaper = Reaper(process)
    try:
        reaper.teach(launch_id)
        yield reaper
    finally:
        reaper.dismiss()
