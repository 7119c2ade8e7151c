"""The mount points that this process sees: tells a mount from the empty directory it belongs on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

_TABLE: Final = Path("/proc/self/mountinfo")
_MOUNT_POINT_FIELD: Final = 4
_ESCAPE: Final = re.compile(rb"\\([0-7]{3})")


def list_mount_points() -> set[Path] | None:
    """Return the mount points this process sees, or None where the system does not tell.

    Reads the kernel's table rather than comparing device numbers, as `os.path.ismount` does: a
    bind mount, as containers use for data, has the device number of what it was bound from.
    """
    try:
        lines = _TABLE.read_bytes().splitlines()
    except OSError:
        return None
    fields = (line.split()[_MOUNT_POINT_FIELD] for line in lines if line.strip())
    # proc(5): blanks, tabs, newlines and backslashes in a path are written as \ooo.
    unescaped = (_ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field) for field in fields)
    return {Path(os.fsdecode(field)) for field in unescaped}


def find_mount_point(path: Path) -> Path:
    """Return the mount point of the file system that `path` lies on, links followed."""
    real = path.resolve()
    points = list_mount_points()
    for candidate in (real, *real.parents):
        if candidate in points if points is not None else candidate.is_mount():
            return candidate
    return Path(real.anchor)
