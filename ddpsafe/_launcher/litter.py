"""What Python's helpers leave on disk when a process does not end in order."""

from __future__ import annotations

import contextlib
import shutil
from multiprocessing import process, resource_tracker
from pathlib import Path
from typing import Final

from ddpsafe._wire.spec import semaphore_prefix

_SEMAPHORES: Final = Path("/dev/shm")  # noqa: S108 - where glibc keeps them, on Linux


def remove_semaphores(launch_id: str) -> None:
    """Remove the named semaphores of a launch whose ranks have all ended; on Linux only.

    Queues and events of a DataLoader are such semaphores. A rank that is killed leaves them to the
    resource tracker, which lives as long as the launcher's process: too long for one that launches
    again and again.
    """
    for name in unlink_semaphores(launch_id):
        # Or it would warn of them, and try to remove them, when this process ends.
        with contextlib.suppress(OSError):
            resource_tracker.unregister(name, "semaphore")


def unlink_semaphores(launch_id: str) -> list[str]:
    """Remove the files of a launch's semaphores; return the names they had."""
    removed = []
    prefix = semaphore_prefix(launch_id)
    for path in _SEMAPHORES.glob(f"sem.{prefix.removeprefix('/')}-*"):
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append("/" + path.name.removeprefix("sem."))
    return removed


def find_helpers_folder() -> Path | None:
    """Return the folder in which `multiprocessing` keeps the forkserver's socket, if there is one."""
    if process.parent_process() is not None:
        return None  # a process of `multiprocessing`, such as a rank, shares that of its parent
    # Python has no public name for it that does not make one.
    config = getattr(process.current_process(), "_config", {})
    folder = config.get("tempdir")
    return None if folder is None else Path(folder)


def remove_helpers_folder() -> None:
    """Remove that folder: a process that is ended by a signal does not do so itself."""
    folder = find_helpers_folder()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
