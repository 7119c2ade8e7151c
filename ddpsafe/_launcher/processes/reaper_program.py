"""The process that `reaper` starts beside each launch: what it does until it has to clean up.

Most launches end by themselves, so it imports almost nothing before it is needed, or before the
launch has lasted for a while: what it needs then may lie on a file system that is gone later.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_EVERY_S = 0.25
_IMPORT_AFTER_S = 5.0


def main(launcher_pid: int, goodbye: str) -> None:
    """Read lines until the launcher says goodbye, having cleaned up itself, or is gone."""
    # What is sent to all processes of a job must not end the one that cleans up after them.
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    said: list[str] = []

    def await_end() -> None:
        import_s = time.monotonic() + _IMPORT_AFTER_S
        is_gone = False
        while not is_gone:
            time.sleep(_LOOK_EVERY_S)
            is_gone = os.getppid() != launcher_pid  # it may have ended before the first look
            if said and time.monotonic() >= import_s:
                _import(said[0])
                import_s = float("inf")
        _clean_up(said)
        os._exit(0)

    # A process that the launcher has forked off holds the pipe open beyond the launcher's death.
    threading.Thread(target=await_end, daemon=True).start()
    for line in sys.stdin:
        if line.strip() == goodbye:
            return
        if not line.endswith("\n"):  # killed in the middle of it
            break
        said.append(line)
    _clean_up(said)


def _clean_up(said: list[str]) -> None:
    if said:
        _import(said[0])(said)


def _import(first: str) -> Callable[[list[str]], None]:
    import json

    sys.path[:] = json.loads(first)["path"]
    from ddpsafe._launcher.processes.reaper import clean_up

    return clean_up


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
