"""Directories: data paths, the run directory and the temporary directory; usable, with room, fast."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Listener
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from ddpsafe._config.paths import PathWatch
from ddpsafe._host import find_mount_point
from ddpsafe.doctor._findings import Finding, failed, ok, to_copy, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._subject import Subject

_MIB: Final = 1 << 20
_LOW_ROOM_BYTES: Final = 1024 * _MIB
_ROOM_AT_LAUNCH_BYTES: Final = 64 * _MIB
_BROKEN_BYTES: Final = 4 * _MIB
_FEWEST_INODES: Final = 1000
_CHUNK: Final = bytes(1 * _MIB)
_CHUNKS: Final = 32
_LONGEST_WRITE_S: Final = 2.0
_SLOW_BYTES_PER_S: Final = 20e6
_SOCKET_PATH_BYTES: Final = 107  # sun_path of struct sockaddr_un without its final zero
# multiprocessing.connection.arbitrary_address: a listener, in a directory of mkdtemp.
_SOCKET_NAME_BYTES: Final = len("/pymp-12345678/listener-12345678")

_PATH_LIMIT: Final = timedelta(seconds=3)
_NETWORK: Final = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p")
)


def check_ready(subject: Subject) -> Iterator[Finding]:
    """Check every data path once, as the launch will."""
    for name, data_path in subject.config.data_paths.items():
        problems = PathWatch(data_path).look(_PATH_LIMIT)
        for problem in problems:
            yield failed(
                "DS-PATH-001",
                f"Data path {name!r} is not ready: {problem.what}.",
                cause=problem.cause,
                fix=to_copy(problem.fix, shlex.join(["namei", "-l", str(data_path.path)])),
            )
        if not problems:
            yield ok("DS-PATH-001", f"Data path {name!r} ({data_path.path}) is ready.")


def check_storage(subject: Subject) -> Iterator[Finding]:
    """Report the file system of each data path, and warn about one on which reads can fail."""
    for name, data_path in subject.config.data_paths.items():
        kind, options = find_storage(data_path.path)
        where = "network" if is_network(kind) else "local"
        if is_network(kind) and "soft" in options.split(","):
            yield warning(
                "DS-PATH-002",
                f"Data path {name!r} is on {kind}, mounted `soft`: if the server is busy, reads fail "
                "with an error in the middle of an epoch.",
                cause="the mount option `soft`.",
                fix=to_copy(
                    "Mount it `hard`:",
                    shlex.join(
                        ["mount", "-o", "remount,hard", str(find_mount_point(data_path.path))]
                    ),
                ),
                file_system=kind,
            )
        else:
            yield ok(
                "DS-PATH-002",
                f"Data path {name!r} is on {where} storage ({kind}).",
                file_system=kind,
            )


def find_storage(path: Path) -> tuple[str, str]:
    """Return the type and mount options of the file system of a path."""
    with contextlib.suppress(OSError):
        point = str(find_mount_point(path))
        # The last mount on a mount point hides the earlier ones.
        for partition in reversed(psutil.disk_partitions(all=True)):
            if partition.mountpoint == point:
                return partition.fstype, partition.opts
    return "unknown", ""


def is_network(kind: str) -> bool:
    """Return whether another host serves a file system of this type."""
    return kind in _NETWORK or kind.startswith("fuse.")


def _existing_run_dir(subject: Subject) -> Path:
    """Return the run directory, or its deepest parent that exists."""
    run_dir = subject.config.run_dir
    if run_dir is None:
        return Path(tempfile.gettempdir())
    # The launch creates the rest, so what counts is the directory that it creates them in.
    return next((path for path in (run_dir, *run_dir.parents) if path.exists()), Path("/"))


def check_temporary_directory(subject: Subject) -> Iterator[Finding]:
    """Check that the temporary directory is the requested one and short enough for socket paths."""
    requested = next(
        (subject.env[name] for name in ("TMPDIR", "TEMP", "TMP") if subject.env.get(name)), None
    )
    try:
        used = tempfile.gettempdir()
    except FileNotFoundError as error:
        yield failed(
            "DS-PATH-006",
            f"There is no temporary directory that can be written ({error}).",
            cause="a read-only root file system without a writable /tmp, or a full disk.",
            fix=to_copy("Name one that can be written:", "export TMPDIR=/path/with/room"),
        )
        return
    path = Path(used)
    length = len(os.fsencode(used)) + _SOCKET_NAME_BYTES
    if requested is not None and not Path(requested).is_dir():
        yield warning(
            "DS-PATH-006",
            f"TMPDIR={requested!r} does not exist; files go to {used}, without a warning.",
            cause="a directory that the scheduler creates on other nodes only, or has removed.",
            fix=to_copy(
                "Create it, or unset the variable:",
                f"mkdir -p {shlex.quote(requested)}",
                "unset TMPDIR",
            ),
        )
    elif length > _SOCKET_PATH_BYTES and not _has_sockets():
        make = failed if subject.config.start_method == "forkserver" else warning
        yield make(
            "DS-PATH-006",
            f"The path of the temporary directory is too long for sockets ({length} of "
            f"{_SOCKET_PATH_BYTES} bytes): {used}.",
            cause="TMPDIR points deep into a tree; the forkserver and DataLoader workers create sockets there.",
            fix=to_copy("Use a short one:", "export TMPDIR=/tmp"),
        )
    else:
        yield ok("DS-PATH-006", f"Temporary files go to {path}.")


def _has_sockets() -> bool:
    """Return whether multiprocessing finds a place for a socket: from Python 3.14 on it passes by TMPDIR."""
    try:
        Listener(family="AF_UNIX").close()
    except OSError:
        return False
    return True


def check_writing(subject: Subject) -> Iterator[Finding]:
    """Create a file where the launch will create its own."""
    place = _existing_run_dir(subject)
    try:
        if not place.is_dir():
            raise NotADirectoryError(20, "Not a directory", str(place))
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(b"0")
            probe.flush()
    except OSError as error:
        run_dir = subject.config.run_dir
        yield failed(
            "DS-PATH-003",
            f"{place} cannot be written ({error.strerror}), and logs and reports go "
            f"{'there' if run_dir in (None, place) else f'below it, to {run_dir}'}.",
            cause="it is mounted read-only, belongs to another user, or is full.",
            fix=to_copy(
                "Name a directory that can be written, or check this one:",
                "export DDPSAFE_RUN_DIR=/path/with/room"
                if run_dir
                else "export TMPDIR=/path/with/room",
                f"namei -l {shlex.quote(str(place))}; findmnt -T {shlex.quote(str(place))}",
            ),
        )
        return
    yield ok("DS-PATH-003", f"{place} can be written.")


def check_room(subject: Subject) -> Iterator[Finding]:
    """Check how many bytes and files the run directory still has room for."""
    place = _existing_run_dir(subject)
    state = os.statvfs(place)
    free_bytes = state.f_bavail * state.f_frsize
    inodes = state.f_favail if state.f_files else None
    least_bytes = _ROOM_AT_LAUNCH_BYTES if subject.at_launch else _LOW_ROOM_BYTES
    has_few_inodes = inodes is not None and inodes < _FEWEST_INODES
    if free_bytes >= least_bytes and not has_few_inodes:
        yield ok(
            "DS-PATH-004", f"{place} has {free_bytes / _MIB:,.0f} MiB free.", free_bytes=free_bytes
        )
        return
    is_broken = not subject.at_launch and (free_bytes < _BROKEN_BYTES or inodes == 0)
    make = failed if is_broken else warning
    what = (
        f"room for only {inodes} more files"
        if has_few_inodes
        else f"only {free_bytes / _MIB:,.0f} MiB free"
    )
    yield make(
        "DS-PATH-004",
        f"{place} has {what}; logs, reports and checkpoints go there.",
        cause="old runs, caches or core dumps fill the file system, or a quota does.",
        fix=to_copy(
            "See what fills it, or name another directory:",
            f"du -xh --max-depth=1 {shlex.quote(str(place))} | sort -h | tail",
            "export DDPSAFE_RUN_DIR=/path/with/room",
        ),
        free_bytes=free_bytes,
        free_inodes=inodes,
    )


def check_speed(subject: Subject) -> Iterator[Finding]:
    """Measure how fast written data reaches the disk of the run directory."""
    place = _existing_run_dir(subject)
    began_s = time.monotonic()
    written = 0
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            while written < _CHUNKS and time.monotonic() - began_s < _LONGEST_WRITE_S:
                probe.write(_CHUNK)
                probe.flush()
                os.fsync(probe.fileno())  # else the page cache would be measured
                written += 1
    except OSError:  # reported by DS-PATH-003 and DS-PATH-004
        return
    bytes_per_s = written * _MIB / max(time.monotonic() - began_s, 1e-6)
    if bytes_per_s >= _SLOW_BYTES_PER_S:
        yield ok(
            "DS-PATH-005",
            f"{place} is written at {bytes_per_s / 1e6:.0f} MB/s.",
            bytes_per_s=bytes_per_s,
        )
        return
    yield warning(
        "DS-PATH-005",
        f"{place} is written at only {bytes_per_s / 1e6:.1f} MB/s; a checkpoint of 10 GB takes "
        f"{10e9 / max(bytes_per_s, 1) / 60:.0f} min while the other ranks wait.",
        cause="a network file system or a disk that others keep busy.",
        fix=to_copy(
            "Write to a local disk and copy afterwards:", "export DDPSAFE_RUN_DIR=/local/scratch"
        ),
        bytes_per_s=bytes_per_s,
    )


CHECKS: Final[tuple[Check, ...]] = (
    check_ready,
    check_storage,
    check_temporary_directory,
    check_writing,
    check_room,
    check_speed,
)
