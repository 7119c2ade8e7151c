"""Limits that a container or a scheduler sets through control groups, version 1 and 2."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEMBERSHIP: Final = Path("/proc/self/cgroup")
_ROOT: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of a page."""
_FIELDS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The tightest limits on this process, of its own group and those above.

    Attributes:
        memory_bytes: Limit of memory; ``None`` where there is none.
        memory_left_bytes: What is left of the tightest one, page cache counted as left.
        cores: Cores' worth of time; ``None`` where there is no limit.
        processes_left: Processes and threads that may still be started; ``None`` for no limit.
    """

    memory_bytes: int | None = None
    memory_left_bytes: int | None = None
    cores: float | None = None
    processes_left: int | None = None


def read_limits(*, membership: Path = _MEMBERSHIP, root: Path = _ROOT) -> Limits:
    """Read the limits of this process; what cannot be read counts as no limit.

    Args:
        membership: Where the kernel lists the groups of the process.
        root: Where the hierarchies are mounted.
    """
    groups = list(_groups(membership))
    memory = [found for each in _levels(groups, "memory", root) if (found := _memory(each))]
    cores = [share for each in _levels(groups, "cpu", root) if (share := _cores(each))]
    processes = [
        left for each in _levels(groups, "pids", root) if (left := _processes(each)) is not None
    ]
    return Limits(
        memory_bytes=min((limit for limit, _ in memory), default=None),
        memory_left_bytes=min((left for _, left in memory), default=None),
        cores=min(cores, default=None),
        processes_left=min(processes, default=None),
    )


def _groups(membership: Path) -> Iterator[tuple[str, str]]:
    """Yield controllers and path of each group; version 2 has no controllers there."""
    with contextlib.suppress(OSError):
        for line in membership.read_text(encoding="utf-8", errors="replace").splitlines():
            parts = line.split(":", 2)
            if len(parts) == _FIELDS:
                yield parts[1], parts[2]


def _levels(groups: list[tuple[str, str]], controller: str, root: Path) -> Iterator[Path]:
    """Yield the directories of a controller that bind this process, its own first."""
    for controllers, path in groups:
        if not controllers:
            base = root if (root / "cgroup.controllers").exists() else root / "unified"
        elif controller in controllers.split(","):
            base = next(
                (root / name for name in (controllers, controller) if (root / name).exists()), root
            )
        else:
            continue
        own = base / path.lstrip("/")
        # In a container the path is the host's, and what is mounted is already the own group.
        own = own if own.exists() and ".." not in path else base
        yield from (level for level in (own, *own.parents) if level.is_relative_to(base))


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        number = int(path.read_text(encoding="ascii"))
        return number if 0 <= number < _UNLIMITED else None
    return None


def _memory(group: Path) -> tuple[int, int] | None:
    for limit_name, usage_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _number(group / limit_name)
        if limit is not None:
            usage = (_number(group / usage_name) or 0) - _statistic(
                group / "memory.stat", cache_key
            )
            return limit, max(0, limit - max(0, usage))
    return None


def _statistic(path: Path, key: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return 0


def _cores(group: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us = _number(group / "cpu.cfs_quota_us")
    period_us = _number(group / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us else None


def _processes(group: Path) -> int | None:
    most = _number(group / "pids.max")
    return None if most is None else max(0, most - (_number(group / "pids.current") or 0))


def whole_cores(cores: float) -> int:
    """Return how many threads such a share can keep busy."""
    return max(1, math.floor(cores))
