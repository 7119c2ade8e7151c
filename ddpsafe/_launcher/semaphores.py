"""Named semaphores that outlive the ranks that made them.

Queues and events of a DataLoader are semaphores with a name under /dev/shm, which Python removes
when their process ends in order. A rank that is killed leaves them to the resource tracker, which
lives as long as the launcher's process: too long for one that launches again and again.
"""

from __future__ import annotations

import contextlib
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Final

from ddpsafe._wire.spec import semaphore_prefix

_FOLDER: Final = Path("/dev/shm")  # noqa: S108 - where glibc keeps them, on Linux


def remove_semaphores(launch_id: str) -> None:
    """Remove those of a launch whose ranks have all ended; elsewhere than on Linux, none."""
    prefix = semaphore_prefix(launch_id)
    for path in _FOLDER.glob(f"sem.{prefix.removeprefix('/')}-*"):
        with contextlib.suppress(OSError):
            path.unlink()
            # Or it would warn of them, and remove them in vain, when this process ends.
            resource_tracker.unregister("/" + path.name.removeprefix("sem."), "semaphore")
