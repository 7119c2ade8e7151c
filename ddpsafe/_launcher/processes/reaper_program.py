"""The program of the reaper process: wait until the launcher has died, then clean up.

Most launches clean up themselves, so it imports almost nothing at first. It imports ddpsafe when it
has to clean up, or once the launch has run for a while: ddpsafe may be on a file system that is
unmounted later.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from ddpsafe._launcher.processes.descendants import ProcessIdentity, RankIdentity, kill_members
from ddpsafe._launcher.processes.shutdown import unlink_semaphores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CLEAN_UP_S: Final = 5.0


def outlive(launcher_pid: int) -> None:
    """Read lines until the launcher has died, then clean up; a launcher that ends itself kills this.

    Only the code of this function is sent to the process. Of this module's globals it has only those
    that `_BOOTSTRAP` of `reaper` imports.
    """
    look_every_s, import_after_s, import_for_s = 0.25, 5.0, 60.0
    lines: list[bytes] = []
    has_closed = threading.Event()

    def read() -> None:
        for line in sys.stdin.buffer:
            if not line.endswith(b"\n"):  # the launcher was killed in the middle of a line
                break
            lines.append(line)
        has_closed.set()

    def find_clean_up() -> Callable[[list[bytes]], None] | None:
        sys.path_importer_cache.clear()  # it remembers folders that could not be read
        try:
            import json

            sys.path[:] = json.loads(lines[0])["path"]
            from ddpsafe._launcher.processes.reaper_program import clean_up
        except Exception:  # noqa: BLE001 - a file system may be unavailable now, and not at the next look
            return None
        return clean_up

    threading.Thread(target=read, daemon=True).start()
    import_s = time.monotonic() + import_after_s
    # Check the parent, too: a process that the launcher has forked may hold the pipe open after its death.
    while not has_closed.wait(look_every_s) and os.getppid() == launcher_pid:
        if lines and time.monotonic() >= import_s:
            is_imported = find_clean_up() is not None
            import_s = float("inf") if is_imported else time.monotonic() + import_after_s
    ends_s = time.monotonic() + import_for_s
    while lines and time.monotonic() < ends_s:
        clean_up = find_clean_up()
        if clean_up is not None:
            clean_up(lines)
            break
        time.sleep(look_every_s)
    os._exit(0)  # the thread may still be reading


def clean_up(lines: Sequence[bytes]) -> None:
    """End the ranks of a launcher that has died, and remove what it left behind.

    `lines` are those that it has sent.
    """
    first, *others = map(json.loads, lines)
    launch_id: str = first["launch"]
    ranks: dict[int, RankIdentity] = {}
    folders: list[str] = []
    for sent in others:
        if "folder" in sent:
            folders.append(sent["folder"])
        else:  # the last line about a rank counts: another process may have its pid by now
            rank = sent["rank"]
            left = rank["left"]
            members = None if left is None else tuple(ProcessIdentity(**fields) for fields in left)
            ranks[rank["pid"]] = RankIdentity(rank["pid"], rank["started"], members)
    kill_members(list(ranks.values()), launch_id, within_s=_CLEAN_UP_S)
    # A kill of the launcher's process group has also killed Python's resource tracker.
    unlink_semaphores(launch_id)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
