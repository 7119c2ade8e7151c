"""The directory of one launch: logs and reports, kept when something failed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpsafe._errors import Explanation, LaunchError, PreflightError
from ddpsafe._host import is_locked
from ddpsafe._launcher.diagnosis.report_files import write_ranks, write_report
from ddpsafe._launcher.diagnosis.report_page import write_page
from ddpsafe._logging import get_logger
from ddpsafe._wire.spec import LogFiles, open_log

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ddpsafe._wire.messages import RankOutcome
    from ddpsafe._world import World

logger = get_logger(__name__)
_PROBE_BYTES: Final = 64 << 10
_KEPT_S: Final = 7 * 86_400.0
_TEMPORARY: Final = re.compile(r"ddpsafe-[a-z0-9_]{8}")
_MOST_LOOKED_AT: Final = 10_000
_MOST_REMOVED: Final = 20
_MOST_KEPT: Final = 50
_MOST_KEPT_BYTES: Final = 1 << 30
_BLOCK_BYTES: Final = 512
_LOCK: Final = ".lock"


class RunDirectory:
    """The run directory of a launch.

    Attributes:
        logs_below: The folder of this launcher in it, with its attempts: the directory itself on one node.
        is_ours: Whether ddpsafe made it in the system's temporary directory.
        owner_uid: The owner of new files in it: this user, unless the file system gives all files
            another owner.
        holds_failure: Whether it has the logs and the report of an attempt that failed.
    """

    def __init__(
        self, path: Path, *, is_ours: bool, owner_uid: int, logs_below: Path | None = None
    ) -> None:
        self.path = path
        self.logs_below = logs_below or path
        self.is_ours = is_ours
        self.owner_uid = owner_uid
        self.holds_failure = False

    def make_attempt_folder(self, number: int) -> Path:
        """Make the folder of an attempt, counted from 1, and return its path.

        Raises:
            PreflightError: It cannot be made, or something else is in its place.
        """
        path = self.logs_below / f"attempt-{number}"
        try:
            # A cleaner of temporary files may have removed it since the last attempt.
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.mkdir(mode=0o700)
            if path.lstat().st_uid != self.owner_uid:
                raise PermissionError(errno.EPERM, "another user has replaced it", str(path))
        except OSError as exc:
            raise _unusable(path, exc) from exc
        return path

    def set_attempts_aside(self) -> None:
        """Move the folders of all attempts: those that follow are counted from 1 again."""
        _set_aside(self.logs_below)

    def logs(
        self,
        number: int,
        world: World,
        *,
        is_shown: bool,
        drawn: tuple[int, ...] = (),
        tag_columns: int = 0,
    ) -> LogFiles:
        """Name the files of one rank in one attempt; see `LogFiles`."""
        stem = str(self.logs_below / f"attempt-{number}" / f"rank-{world.rank}")
        return LogFiles(
            stdout=f"{stem}.out",
            stderr=f"{stem}.err",
            stacks=f"{stem}.stacks",
            nccl=f"{stem}.nccl",
            owner_uid=self.owner_uid,
            is_shown=is_shown,
            drawn=drawn,
            tag_columns=tag_columns,
        )

    def note_tracebacks(self, outcomes: Iterable[RankOutcome]) -> None:
        """Append the traceback of each rank that raised to its log."""
        # The ranks do not print them: the console would then show peer errors before their cause.
        for outcome in outcomes:
            # The launcher of another node does so for its own ranks, where their logs are.
            is_own = outcome.said is None
            if is_own and outcome.raised is not None and outcome.stderr is not None:
                with contextlib.suppress(OSError):
                    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
                    fd = open_log(outcome.stderr, flags, owner_uid=self.owner_uid)
                    with open(fd, "a", encoding="utf-8", errors="backslashreplace") as file:  # noqa: PTH123 - a file descriptor
                        file.write(outcome.raised.traceback)

    def report(self, number: int, error: LaunchError, *, is_kept: bool = True) -> None:
        """Write the report of a failed attempt next to its logs, unless the disk fails."""
        self.holds_failure |= is_kept
        folder = self.logs_below / f"attempt-{number}"
        if not folder.exists():
            error.add_details(f"{folder} was removed while the ranks ran, and their logs with it")
            return
        with contextlib.suppress(OSError):
            write_report(error, folder)
            write_page(self.logs_below)

    def note_end(self, number: int, outcomes: Mapping[int, RankOutcome]) -> None:
        """Write the ranks' times of an attempt without a failure, if the directory is the user's."""
        if not self.is_ours:
            with contextlib.suppress(OSError):
                write_ranks(outcomes, self.logs_below / f"attempt-{number}")

    @property
    def is_kept(self) -> bool:
        """Whether it is kept when the launch ends, unless by success."""
        return self.holds_failure or not self.is_ours

    def discard(self) -> None:
        """Remove the directory if ddpsafe made it."""
        if self.is_ours:
            shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def open_run_directory(run_dir: Path | None, *, node: str = "") -> Iterator[RunDirectory]:
    """Make the run directory; remove a temporary one on success, or if no attempt has failed.

    Args:
        run_dir: The user's directory, or ``None`` for a private temporary one.
        node: Name of a folder in the user's directory for the logs of this node, since several nodes
            may share the directory; empty for none.

    Raises:
        PreflightError: It cannot be made or written to.
    """
    remove_old_directories(Path(tempfile.gettempdir()))
    in_use = None
    if run_dir is None:
        try:
            path = Path(tempfile.mkdtemp(prefix="ddpsafe-"))
            directory = RunDirectory(path, is_ours=True, owner_uid=path.lstat().st_uid)
        except OSError as exc:
            raise _unusable(Path(tempfile.gettempdir()), exc) from exc
        # A launch may run for more than a week: this lock keeps `remove_old_directories` of another
        # launch away. Some file systems have no locks.
        with contextlib.suppress(OSError):
            in_use = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            # Not LOCK_NB: only another launch that looks whether it is locked may hold it, for a moment.
            fcntl.flock(in_use, fcntl.LOCK_SH)
    else:
        directory, in_use = _make(run_dir, node)
    try:
        yield directory
    except BaseException as error:
        if not directory.holds_failure:
            directory.discard()
        elif not isinstance(error, LaunchError):  # a LaunchError names the directory itself
            logger.warning("the logs of the attempts that failed are in %s", directory.path)
        raise
    else:
        directory.discard()
    finally:
        if in_use is not None:
            with contextlib.suppress(OSError):  # a fork of this process may keep it open
                fcntl.flock(in_use, fcntl.LOCK_UN)
            os.close(in_use)


def remove_old_directories(parent: Path, *, now_s: float | None = None) -> list[Path]:
    """Remove what failed launches of this user left in the temporary directory; return what was removed.

    Kept are, with the one of a launch that fails next, the newest 50 that have changed within a week, as
    long as they take no more than 1 GiB together. The newest one is kept whatever its size. Only a few are
    removed at each launch, and only directories that have a name that `tempfile` makes for ddpsafe and are
    not locked by a launch.
    """
    too_old_s = (time.time() if now_s is None else now_s) - _KEPT_S
    removed: list[Path] = []
    try:
        with os.scandir(parent) as entries:
            left = [_last_change_s(entry) for entry in itertools.islice(entries, _MOST_LOOKED_AT)]
    except OSError:
        return []
    size = 0
    failed = [each for each in left if each is not None and not is_locked(each[1])]
    for number, (changed_s, path) in enumerate(sorted(failed, reverse=True)):
        size += _size_of(path) if size <= _MOST_KEPT_BYTES else 0
        is_kept = changed_s > too_old_s and (
            number == 0 or (number < _MOST_KEPT - 1 and size <= _MOST_KEPT_BYTES)
        )
        if not is_kept and len(removed) < _MOST_REMOVED:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _last_change_s(entry: os.DirEntry[str]) -> tuple[float, Path] | None:
    """Return when a directory of a failed launch changed last, and its path; ``None`` for others."""
    if not _TEMPORARY.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
        return None
    try:
        status = entry.stat(follow_symlinks=False)
        if status.st_uid != os.geteuid():
            return None
        with os.scandir(entry.path) as inside:
            changed_s = [child.stat(follow_symlinks=False).st_mtime for child in inside]
    except OSError:
        return None
    return max(changed_s, default=status.st_mtime), Path(entry.path)


def _size_of(folder: Path) -> int:
    size = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(where, name)).st_blocks * _BLOCK_BYTES  # noqa: PTH118 - there may be many
    return size


def _make(path: Path, node: str) -> tuple[RunDirectory, int | None]:
    """Make the user's directory, or one in it if another launch uses that one; lock it."""
    logs_below = path / node
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        logs_below.mkdir(mode=0o700, exist_ok=True)
        own, lock = _lock_own(logs_below)
        if own != logs_below:
            path, logs_below = (path, own) if node else (own, own)
        try:
            return _prepare(path, logs_below), lock
        except BaseException:
            if lock is not None:
                os.close(lock)
            raise
    except OSError as exc:
        raise _unusable(path, exc) from exc


def _lock_own(folder: Path) -> tuple[Path, int | None]:
    """Lock a folder, or the first ``launch-N`` in it that no other launch uses.

    Returns:
        The folder that is locked and the open lock, which is ``None`` if the file system has no locks.
    """
    for number in itertools.count(1):
        own = folder if number == 1 else folder / f"launch-{number}"
        own.mkdir(mode=0o700, exist_ok=True)
        if own.is_symlink() and own != folder:
            raise OSError(errno.ELOOP, f"{own} is a symbolic link")
        try:
            lock = _lock_file(own / _LOCK)
        except BlockingIOError:
            continue
        if number > 1:
            logger.warning(
                "another launch uses the run directory %s: the logs and reports of this one go to %s",
                folder,
                own,
            )
        return own, lock
    raise AssertionError


def _lock_file(path: Path) -> int | None:
    """Lock a file; return its descriptor, or ``None`` if it cannot be locked here.

    Raises:
        BlockingIOError: Another process holds the lock.
        OSError: The file cannot be opened.
    """
    # NFS locks only what is open for writing, which elsewhere would keep a disk from becoming read-only.
    for access in (os.O_RDONLY, os.O_RDWR):
        try:
            lock = os.open(path, access | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except PermissionError:  # another user, such as root, has made it
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise
        except OSError:
            os.close(lock)
        else:
            return lock
    return None


def _prepare(path: Path, logs_below: Path) -> RunDirectory:
    _set_aside(logs_below)
    with tempfile.TemporaryFile(dir=path) as file:
        file.write(bytes(_PROBE_BYTES))  # an empty file fits on a full disk
        owner_uid = os.fstat(file.fileno()).st_uid
    # Other users might remove or rename the logs, which is worth a warning. They cannot redirect them:
    # `open_log` follows no links.
    status = path.stat()
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if writable or status.st_uid not in (owner_uid, 0):
        logger.warning(
            "other users can rename or remove files in the run directory %s (owner uid %d, mode "
            "%03o); choose one that only you can write to",
            path,
            status.st_uid,
            stat.S_IMODE(status.st_mode),
        )
    return RunDirectory(path, is_ours=False, owner_uid=owner_uid, logs_below=logs_below)


def _set_aside(path: Path) -> None:
    """Keep the logs of earlier attempts in the same directory: their failure may be why it is repeated."""
    earlier = sorted(path.glob("attempt-*"))
    if not earlier:
        return
    aside = path / "earlier"
    if aside.is_symlink():
        raise OSError(errno.ELOOP, f"{aside} is a symbolic link")
    target = aside / time.strftime("%Y%m%dT%H%M%S")
    while target.exists():
        target = target.with_name(target.name + "+")
    target.mkdir(mode=0o700, parents=True)
    for attempt in earlier:
        attempt.rename(target / attempt.name)


def _unusable(path: Path, exc: OSError) -> PreflightError:
    what = f"the run directory {path} cannot be used: {exc.strerror or exc}."
    cause = "it is not writable, its disk is full, or a file is in its place."
    fix = "pass run_dir= with a directory that you can write to, or free some space."
    return PreflightError(Explanation(what, cause=cause, fix=fix))
