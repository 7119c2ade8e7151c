"""What the process that `reaper` starts beside each launch does until it has to clean up.

Most launches end by themselves, so it imports almost nothing before it is needed, or before the
launch has lasted for a while: what it needs then may lie on a file system that is gone later.
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
    """Read lines until the launcher is gone, then clean up; one that has done so itself kills this.

    Only this function's code is sent there: of this module it finds what `reaper` imports for it.
    """
    look_every_s, import_after_s, import_for_s = 0.25, 5.0, 60.0
    said: list[bytes] = []
    has_closed = threading.Event()

    def read() -> None:
        for line in sys.stdin.buffer:
            if not line.endswith(b"\n"):  # killed in the middle of it
                break
            said.append(line)
        has_closed.set()

    def find_clean_up() -> Callable[[list[bytes]], None] | None:
        sys.path_importer_cache.clear()  # it keeps what was not there
        try:
            import json

            sys.path[:] = json.loads(said[0])["path"]
            from ddpsafe._launcher.processes.reaper_program import clean_up
        except Exception:  # noqa: BLE001 - its file system may be away, and there at the next look
            return None
        return clean_up

    threading.Thread(target=read, daemon=True).start()
    import_s = time.monotonic() + import_after_s
    # A process that the launcher has forked off holds the pipe open beyond the launcher's death.
    while not has_closed.wait(look_every_s) and os.getppid() == launcher_pid:
        if said and time.monotonic() >= import_s:
            is_there = find_clean_up() is not None
            import_s = float("inf") if is_there else time.monotonic() + import_after_s
    ends_s = time.monotonic() + import_for_s
    while said and time.monotonic() < ends_s:
        clean_up = find_clean_up()
        if clean_up is not None:
            clean_up(said)
            break
        time.sleep(look_every_s)
    os._exit(0)  # the thread may still read


def clean_up(said: Sequence[bytes]) -> None:
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
