"""Data paths: ready, and on which storage."""

from __future__ import annotations

import contextlib
import shlex
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import psutil

from ddpsafe._config.mounts import find_mount_point
from ddpsafe._config.wait_for_paths import PathWatch
from ddpsafe.doctor._findings import Finding, failed, ok, to_copy, warning

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._subject import Subject

_PATIENCE: Final = timedelta(seconds=3)
_NETWORK: Final = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p")
)


def check_ready(subject: Subject) -> Iterator[Finding]:
    """Look at every data path once, as the launch will."""
    for name, wanted in subject.config.data_paths.items():
        problems = PathWatch(wanted).look(_PATIENCE)
        for problem in problems:
            yield failed(
                "DS-PATH-001",
                f"Data path {name!r} is not ready: {problem.what}.",
                cause=f"{problem.cause}.",
                fix=to_copy(f"{problem.fix}.", shlex.join(["namei", "-l", str(wanted.path)])),
            )
        if not problems:
            yield ok("DS-PATH-001", f"Data path {name!r} ({wanted.path}) is ready.")


def check_storage(subject: Subject) -> Iterator[Finding]:
    """Say on which file system each data path lies, and warn of one that loses reads."""
    for name, wanted in subject.config.data_paths.items():
        kind, options = find_storage(wanted.path)
        where = "network" if is_network(kind) else "local"
        if is_network(kind) and "soft" in options.split(","):
            yield warning(
                "DS-PATH-002",
                f"Data path {name!r} lies on {kind}, mounted `soft`: a busy server makes reads fail "
                "with an error in the middle of an epoch.",
                cause="the option `soft` of the mount.",
                fix=to_copy(
                    "Mount it `hard`:", f"mount -o remount,hard {find_mount_point(wanted.path)}"
                ),
                file_system=kind,
            )
        else:
            yield ok(
                "DS-PATH-002",
                f"Data path {name!r} lies on {where} storage ({kind}).",
                file_system=kind,
            )


def find_storage(path: Path) -> tuple[str, str]:
    """Return kind and options of the file system that a path lies on."""
    with contextlib.suppress(OSError):
        point = str(find_mount_point(path))
        # The last one mounted on a point hides the others.
        for partition in reversed(psutil.disk_partitions(all=True)):
            if partition.mountpoint == point:
                return partition.fstype, partition.opts
    return "unknown", ""


def is_network(kind: str) -> bool:
    """Tell whether a file system of this kind is served by another host."""
    return kind in _NETWORK or kind.startswith("fuse.")


CHECKS: Final[tuple[Check, ...]] = (check_ready, check_storage)
