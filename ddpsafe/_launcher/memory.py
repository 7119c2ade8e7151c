"""Whether the kernel's out-of-memory killer has struck: the cgroup counts its victims."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_CGROUPS: Final = Path("/sys/fs/cgroup")
_MEMBERSHIPS: Final = Path("/proc/self/cgroup")
_COUNT: Final = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def count_oom_kills() -> int:
    """Return how many processes of this cgroup the kernel has killed for memory.

    Both versions of cgroups count them (``memory.events``, ``memory.oom_control``); the number
    before and after an attempt tells a SIGKILL of the kernel from one of a person.

    Returns:
        The count; 0 where nothing counts.
    """
    return sum(map(_read_count, _counters()))


def _counters() -> list[Path]:
    try:
        lines = _MEMBERSHIPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if controllers == "":
            found.append(_CGROUPS / inside / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(_CGROUPS / "memory" / inside / "memory.oom_control")
    return found


def _read_count(file: Path) -> int:
    try:
        match = _COUNT.search(file.read_text(encoding="utf-8"))
    except OSError:
        return 0
    return int(match[1]) if match else 0
