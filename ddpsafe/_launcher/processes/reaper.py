"""A small process that outlives the launcher for as long as it takes to clean up after it.

A launcher that is killed by SIGKILL can do nothing, and a rank killed with it cannot end what it
started. The reaper learns the ranks' pids on a pipe; when the pipe ends without a good-bye, it ends
them and all that descends from them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpsafe._errors import Explanation, PreflightError
from ddpsafe._launcher.processes.descendants import ProcessIdentity, RankIdentity, kill_members
from ddpsafe._launcher.processes.shutdown import unlink_semaphores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PROGRAM: Final = Path(__file__).with_name("reaper_program.py")
_GOODBYE: Final = "goodbye"
_CLEAN_UP_S: Final = 5.0


class Reaper:
    """The launcher's end of the reaper process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Own the process."""
        self._process = process

    def teach(self, launch_id: str) -> None:
        """Say where the code lies and whose processes to look for."""
        entries: list[object] = list(
            sys.path
        )  # a Path among them is common; Python ignores it, too
        path = [entry for entry in entries if isinstance(entry, str)]
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
        self._say(_GOODBYE)
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None  # noqa: S101 - opened with a pipe
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None  # noqa: S101 - opened with a pipe
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


@contextlib.contextmanager
def running_reaper(launch_id: str) -> Iterator[Reaper]:
    """Keep a reaper while ranks run. Its own session keeps the terminal's signals away from it.

    Raises:
        PreflightError: The system would not start another process.
    """
    try:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
            [sys.executable, "-I", "-S", str(_PROGRAM), str(os.getpid()), _GOODBYE],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
    except OSError as exc:
        what = f"the process that cleans up after a killed launcher could not be started: {exc}."
        cause = "a limit of this machine: processes (ulimit -u), open files (ulimit -n), memory."
        fix = "raise the limit, or end what else runs."
        raise PreflightError(Explanation(what, cause=cause, fix=fix)) from exc
    reaper = Reaper(process)
    try:
        reaper.teach(launch_id)
        yield reaper
    finally:
        reaper.dismiss()


def clean_up(said: Sequence[str]) -> None:
    """End the ranks of a launcher that is gone, and remove what it left.

    Args:
        said: The lines that it has sent.
    """
    first, *others = map(json.loads, said)
    launch_id: str = first["launch"]
    ranks: dict[int, RankIdentity] = {}
    folders: list[str] = []
    for known in others:
        if "folder" in known:
            folders.append(known["folder"])
        else:  # the last that was said of a process holds: its number may be another one's by now
            rank = known["rank"]
            left = rank["left"]
            members = None if left is None else tuple(ProcessIdentity(**each) for each in left)
            ranks[rank["pid"]] = RankIdentity(rank["pid"], rank["started"], members)
    kill_members(list(ranks.values()), launch_id, within_s=_CLEAN_UP_S)
    # Whoever killed the launcher's process group has killed Python's resource tracker with it.
    unlink_semaphores(launch_id)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
