"""Data paths: absolute, and checked before anything starts, without ever hanging."""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from typing_extensions import TypedDict, Unpack

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._config.durations import Duration
from ddpsafe._config.problems import Part, show, wrong
from ddpsafe._errors import Explanation, PreflightError
from ddpsafe._host import find_mount_point
from ddpsafe._logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddpsafe._config.durations import DurationLike

logger = get_logger(__name__)

_WINDOWS: Final = os.name == "nt"

PATIENCE: Final = timedelta(seconds=5)
"""How long one check may take before the file system counts as hung."""

_FIRST_REPORT_S, _REPORT_EVERY_S = 2.0, 10.0
_POLL_FIRST_S, _POLL_MAX_S = 0.05, 1.0


def _validate_path(value: object, *, or_else: str = "") -> Path:
    if not isinstance(value, (str, os.PathLike)) or isinstance(value, bytes):
        raise wrong(
            f"expected a path, got a {type(value).__name__}",
            write='an absolute path: "/data/train"',
        )
    text = os.fspath(value)
    if not isinstance(text, str):
        raise wrong("it is a path in bytes", write='an absolute path as a string: "/data/train"')
    example = 'an absolute path: "/data/train"'
    if not text.strip():
        raise wrong("it is empty, which means the current directory", write=example)
    try:
        is_possible = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_possible = False
    if not is_possible:
        raise wrong(f"{show(text)} has characters that no path can have", write=example)
    if text.startswith("~"):
        raise wrong(
            "only shells expand '~'; here it is a directory of that name",
            write=f'"{Path(text).expanduser()}"' if text[:2] in {"~", "~/"} else example,
        )
    if not _WINDOWS and "\\" in text:
        raise wrong(
            "it has backslashes, which on this system do not separate directories but are part of "
            "a name",
            write=f'"{text.replace(chr(92), "/")}"',
        )
    if not Path(text).is_absolute():
        try:
            here = Path.cwd()
        except OSError:  # the current directory was removed
            here = Path("/…")
        raise wrong(
            "it is relative, and ranks on other nodes or under another launcher start in other "
            "directories",
            write=f'"{here / text}"{or_else.format(text=text)}',
        )
    return Path(text)


def _validate_data_path(value: object) -> Path:
    return _validate_path(
        value,
        or_else=', or DataPath.here("{text}") to mean the directory from which the job is launched',
    )


AbsolutePath = Annotated[Path, BeforeValidator(_validate_path)]
"""An absolute `pathlib.Path`; usable as the type of a field in any pydantic model."""


class DataPathFields(TypedDict, total=False):
    """The fields of a `DataPath` other than its path, as keyword arguments."""

    kind: Literal["any", "directory", "file"]
    wait: DurationLike | None
    mount: Literal["any", "inside", "point"]
    min_entries: int | None
    marker: str | None


class DataPath(Part):
    """A path that the job needs, and conditions that it must meet before any rank starts.

    Creating one does not access the path. `check` checks it once, `require` waits for it.
    """

    path: Annotated[Path, BeforeValidator(_validate_data_path)] = Field(
        description="The absolute path.", examples=['"/data/train"']
    )
    kind: Literal["any", "directory", "file"] = Field(
        default="any",
        description="What the path must be.",
        examples=['"directory"', '"file"', '"any"'],
    )
    wait: Duration | None = Field(
        default=None,
        description="How long to wait for a late mount. None: check once.",
        examples=['"2min"', "None"],
    )
    mount: Literal["any", "inside", "point"] = Field(
        default="any",
        description='"inside": it must be on a file system mounted below "/", so that the empty '
        'directory left by a failed mount does not pass. "point": it must be a mount point itself.',
        examples=['"inside"', '"point"', '"any"'],
    )
    min_entries: int | None = Field(
        default=None,
        ge=1,
        description="Smallest number of entries that a ready directory has.",
        examples=["1000", "None"],
    )
    marker: str | None = Field(
        default=None,
        description="A file inside the directory whose presence shows that it is complete.",
        examples=['"_SUCCESS"', "None"],
    )

    if TYPE_CHECKING:

        def __init__(
            self, *, path: str | os.PathLike[str], **fields: Unpack[DataPathFields]
        ) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: object) -> object:
        return {"path": value} if isinstance(value, (str, os.PathLike)) else value

    @field_validator("min_entries", "marker")
    @classmethod
    def _require_directory(cls, value: int | str | None, info: ValidationInfo) -> int | str | None:
        if value is not None and info.data.get("kind") == "file":
            raise wrong(
                f"only a directory can have {info.field_name}, and kind is 'file'",
                write='kind="directory", or leave it out',
            )
        return value

    @field_validator("marker")
    @classmethod
    def _stay_inside(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = Path(value).parts
        if not parts or Path(value).is_absolute() or ".." in parts or "\0" in value:
            raise wrong("it must name a file inside the directory", write='marker="_SUCCESS"')
        return value

    @classmethod
    def here(
        cls,
        path: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str] | None = None,
        **fields: Unpack[DataPathFields],
    ) -> DataPath:
        """Make one from an intentionally relative path.

        Args:
            path: The path, relative to `base`.
            base: An absolute directory; by default the current one at the time of this call, from
                which the job is launched.
            **fields: The other fields.
        """
        given: object = path  # the constructor refuses what is not a path
        text = os.fspath(given) if isinstance(given, (str, os.PathLike)) else given
        if isinstance(text, str) and not text.startswith("~"):
            path = os.path.normpath((Path.cwd() if base is None else Path(base)) / text)
        return cls(path=path, **fields)

    def check(self) -> list[str]:
        """Check the path once, without waiting for it to become ready.

        Returns:
            What is not ready and what to do about it; empty if the path is ready.
        """
        return [str(reason) for reason in PathWatch(self).look()]

    def require(self, name: str = "data", *, deadline: Deadline | None = None) -> Path:
        """Return the path once it is ready; wait for it up to `wait`, with a warning now and then.

        Args:
            name: Name of the path in messages.
            deadline: Ends the wait before `wait` does.

        Raises:
            PreflightError: It is not ready by then; the error's kind is "mount".
        """
        require_data_paths({name: self}, deadline=deadline)
        return self.path


def require_data_paths(
    data_paths: Mapping[str, DataPath], *, deadline: Deadline | None = None
) -> None:
    """Wait until all data paths are ready, for each up to its own `wait`.

    Raises:
        PreflightError: Some are not ready; it lists all of them, and its kind is "mount".
    """
    began = Deadline.after(None) if deadline is None else deadline
    # All waits begin at the same moment, so that they do not add up.
    own = {
        name: Deadline.after(data_path.wait or timedelta(0), clock=began.clock).earlier(began)
        for name, data_path in data_paths.items()
    }
    not_ready = {
        name: reasons
        for name, data_path in data_paths.items()
        if (reasons := _wait_until_ready(data_path, name=name, deadline=own[name]))
    }
    if not_ready:
        (name, first), *others = [(name, each) for name, left in not_ready.items() for each in left]
        waited_s = max(own[name].waited_s() for name in not_ready)
        message = replace(
            first,
            what=f"data path {name!r} is not ready on {socket.gethostname()} after {waited_s:.1f} s: "
            f"{first.what}.",
            details=[f"Also: data path {other!r}: {reason}" for other, reason in others],
        )
        report = {name: [str(reason) for reason in left] for name, left in not_ready.items()}
        raise PreflightError(message, report=report, kind="mount")


def _wait_until_ready(wanted: DataPath, *, name: str, deadline: Deadline) -> list[Explanation]:
    """Wait until a path is ready, with one full check after the deadline; return what is not ready."""
    watch = PathWatch(wanted)
    subject = f"data path {name!r} ({wanted.path})"
    pause_s, report_at_s = _POLL_FIRST_S, _FIRST_REPORT_S
    while True:
        # Before the deadline, a check ends with the wait.
        remaining_s = deadline.remaining_s() or PATIENCE.total_seconds()
        not_ready = watch.look(min(PATIENCE, timedelta(seconds=max(remaining_s, 0.1))))
        if not not_ready or deadline.expired():
            break
        waited_s = deadline.waited_s()
        if waited_s >= report_at_s:
            report_at_s = waited_s + _REPORT_EVERY_S
            reasons = "; ".join(reason.what for reason in not_ready)
            total_s = waited_s + deadline.remaining_s()
            logger.warning(
                "waiting for %s: %s; %.0f s of %.0f s", subject, reasons, waited_s, total_s
            )
        time.sleep(min(pause_s, deadline.remaining_s()))
        pause_s = min(2 * pause_s, _POLL_MAX_S)
    if not not_ready and report_at_s > _FIRST_REPORT_S:  # the wait was reported
        logger.warning("%s is ready after %.1f s", subject, deadline.waited_s())
    return not_ready


class PathWatch:
    """Checks one path repeatedly, without ever hanging when its file system does."""

    def __init__(self, wanted: DataPath) -> None:
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


def _look(wanted: DataPath) -> Iterator[Explanation]:
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
