"""Whether a data path is ready: a single check, and a wait with a deadline."""

from __future__ import annotations

import errno
import os
import socket
import stat
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

import tenacity

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._errors import Explanation, PreflightError
from ddpsafe._host import find_mount_point
from ddpsafe._logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

logger = get_logger(__name__)

PATIENCE: Final = timedelta(seconds=5)
"""How long one check may take before the file system counts as hung."""

_FIRST_REPORT_S, _REPORT_EVERY_S = 2.0, 10.0
_POLL_FIRST_S, _POLL_MAX_S = 0.05, 1.0


class Wanted(Protocol):
    """The conditions that a path must meet; `ddpsafe.DataPath` is one."""

    @property
    def path(self) -> Path:
        """The path."""

    @property
    def kind(self) -> str:
        """What it must be: "any", "directory" or "file"."""

    @property
    def mount(self) -> str:
        """What must be mounted: "any", "inside" or "point"."""

    @property
    def min_entries(self) -> int | None:
        """Smallest number of entries of a directory."""

    @property
    def marker(self) -> str | None:
        """Name of a file that must exist inside."""


class PathWatch:
    """Checks one path repeatedly, without ever hanging when its file system does."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._call: BoundedCall[list[Explanation]] | None = None
        self._looking_since = Deadline.after(None)

    def look(self, patience: timedelta = PATIENCE) -> list[Explanation]:
        """Check once; return what is not ready."""
        # A check that hangs continues in its own daemon thread, and the next call waits for the same
        # thread. So however long a file system hangs, only one thread hangs with it.
        if self._call is None:
            self._looking_since = Deadline.after(None)
            self._call = BoundedCall(lambda: list(_look(self._wanted)), name="ddpsafe-look")
        if not self._call.wait(patience.total_seconds()):
            return [
                Explanation(
                    what=f"{self._wanted.path} has not answered for {self._looking_since.waited_s():.1f} s",
                    cause="it is on a network file system whose server does not respond.",
                    fix=f"Check the server and the mount (`findmnt -T {self._wanted.path}`), then remount.",
                )
            ]
        call, self._call = self._call, None
        return call.result()


def find_not_ready(wanted: Wanted, *, name: str, deadline: Deadline) -> list[Explanation]:
    """Wait until a path is ready, with a last check after the deadline; return what is not."""
    watch = PathWatch(wanted)
    progress = _WaitReport(name, wanted.path, deadline)
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_result(bool),
        stop=lambda _: deadline.expired(),
        wait=lambda state: min(_backoff(state), deadline.remaining_s()),
        before_sleep=progress,
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else [],
    )

    def look() -> list[Explanation]:
        # After the deadline there is still one full check. Before it, a check ends with the wait.
        remaining = deadline.remaining_s()
        shortened = min(PATIENCE, timedelta(seconds=max(remaining, 0.1)))
        return watch.look(PATIENCE if remaining <= 0 else shortened)

    not_ready: list[Explanation] = retrying(look)
    if not not_ready:
        progress.finish()
    return not_ready


_backoff: Final = tenacity.wait_exponential(multiplier=_POLL_FIRST_S, max=_POLL_MAX_S)


class _WaitReport:
    """Reports now and then what a long wait is waiting for."""

    def __init__(self, name: str, path: Path, deadline: Deadline) -> None:
        self._subject = f"data path {name!r} ({path})"
        self._deadline = deadline
        self._next_s = _FIRST_REPORT_S
        self._has_reported = False

    def __call__(self, state: tenacity.RetryCallState) -> None:
        waited_s = self._deadline.waited_s()
        if waited_s < self._next_s or state.outcome is None:
            return
        self._next_s, self._has_reported = waited_s + _REPORT_EVERY_S, True
        total_s = waited_s + self._deadline.remaining_s()
        reasons = "; ".join(reason.what for reason in state.outcome.result())
        logger.warning(
            "waiting for %s: %s; %.0f s of %.0f s", self._subject, reasons, waited_s, total_s
        )

    def finish(self) -> None:
        """Report the end of the wait, if the wait was reported."""
        if self._has_reported:
            logger.warning("%s is ready after %.1f s", self._subject, self._deadline.waited_s())


def preflight_error(
    not_ready: list[tuple[str, Path, list[Explanation]]], *, waited_s: float
) -> PreflightError:
    """Make one error for all paths that are not ready."""
    reasons = [(name, path, reason) for name, path, left in not_ready for reason in left]
    (name, _, first), *others = reasons
    message = replace(
        first,
        what=f"data path {name!r} is not ready on {socket.gethostname()} after {waited_s:.1f} s: "
        f"{first.what}.",
        details=[f"Also: data path {other!r}: {reason}" for other, _, reason in others],
    )
    report = {name: [str(reason) for reason in left] for name, _, left in not_ready}
    return PreflightError(message, report=report, kind="mount")


def _look(wanted: Wanted) -> Iterator[Explanation]:
    try:
        mode = wanted.path.stat().st_mode
        is_right = {"directory": stat.S_ISDIR, "file": stat.S_ISREG}.get(wanted.kind)
        if is_right is not None and not is_right(mode):
            kind = "directory" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "device"
            yield Explanation(
                what=f"{wanted.path} is a {kind}, not a {wanted.kind}",
                cause="the path is wrong, or an unpacking step is missing.",
                fix=f'Use the path of a {wanted.kind}, or kind="any".',
            )
        if wanted.mount != "any":
            point = find_mount_point(wanted.path)
            is_mounted = (
                point == wanted.path.resolve() if wanted.mount == "point" else point.parent != point
            )
            if not is_mounted:
                yield Explanation(
                    what=f"nothing is mounted on {wanted.path}"
                    + (" or above it" if wanted.mount == "inside" else ""),
                    cause=f"the mount has not happened yet or failed; the directory is on {point}.",
                    fix=f"Mount it (`findmnt -T {wanted.path}` shows what is mounted), or give the data "
                    'path a longer wait, or mount="any" if no mount is expected.',
                )
        if stat.S_ISDIR(mode):
            least = wanted.min_entries or 0
            # Only as many as needed: a directory may have millions on slow network storage.
            with os.scandir(wanted.path) as entries:
                count = sum(1 for _ in islice(entries, least))
            if count < least:
                yield Explanation(
                    what=f"{wanted.path} has {count} of at least {least} entries",
                    cause="a copy is not finished, or this is the directory under a missing mount.",
                    fix="Wait for the copy (field wait), or correct min_entries.",
                )
            if wanted.marker is not None and not (wanted.path / wanted.marker).exists():
                yield Explanation(
                    what=f"{wanted.path / wanted.marker} does not exist",
                    cause="the program that writes the data has not finished, as it writes the marker last.",
                    fix="Wait for it (field wait), or correct marker.",
                )
        elif stat.S_ISREG(mode):
            wanted.path.open("rb").close()  # stat() needs no permission to read the file
    except OSError as error:
        yield _unreadable(wanted.path, error)


def _unreadable(path: Path, error: OSError) -> Explanation:
    if error.errno in {errno.ENOENT, errno.ENOTDIR}:
        return _absent(path)
    reason = error.strerror or str(error)
    if error.errno in {errno.EACCES, errno.EPERM}:
        return Explanation(
            what=f"{path} cannot be read ({reason})",
            cause=f"user id {os.getuid() if hasattr(os, 'getuid') else '?'} has no permission there.",
            fix=f"Check the permissions (`namei -l {path}`) and grant read access.",
        )
    return Explanation(
        what=f"{path} cannot be read ({reason})",
        cause="the mount is stale or the storage is failing.",
        fix=f"Check the mount (`findmnt -T {path}`) and the kernel log, then remount.",
    )


def _absent(path: Path) -> Explanation:
    if path.is_symlink():
        return Explanation(
            what=f"{path} is a link to {path.readlink()}, which does not exist",
            cause="the target is not mounted here or was moved.",
            fix="Mount the target on this node, or correct the link.",
        )
    deepest = next(parent for parent in path.parents if parent.exists())
    return Explanation(
        what=f"{path} does not exist",
        cause=f"the path is misspelt or not mounted on this node; it exists up to {deepest}.",
        fix=f"Compare with `ls {deepest}`; for a late mount, give the data path a wait.",
    )
