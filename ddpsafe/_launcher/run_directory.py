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


class RunDirectory:
    """The run directory of a launch.

    Attributes:
        path: The directory.
        is_ours: Whether ddpsafe made it in the system's temporary directory.
        owner_uid: The owner of new files in it: this user, unless the file system gives all files
            another owner.
        holds_failure: Whether it has the logs and the report of an attempt that failed.
    """

    def __init__(
        self, path: Path, *, is_ours: bool, owner_uid: int, logs_below: Path | None = None
    ) -> None:
        """Keep the path, and the parent of the attempts' folders if that is another one."""
        self.path = path
        self._logs_below = logs_below or path
        self.is_ours = is_ours
        self.owner_uid = owner_uid
        self.holds_failure = False

    def make_attempt_folder(self, number: int) -> Path:
        """Make the folder of an attempt, counted from 1, and return its path.

        Raises:
            PreflightError: It cannot be made, or something else is in its place.
        """
        path = self._logs_below / f"attempt-{number}"
        try:
            path.mkdir(mode=0o700)
            if path.lstat().st_uid != self.owner_uid:
                raise PermissionError(errno.EPERM, "another user has replaced it", str(path))
        except OSError as exc:
            raise _unusable(path, exc) from exc
        return path

    def set_attempts_aside(self) -> None:
        """Move the folders of all attempts into one: those that follow are counted from 1 again."""
        below = self._logs_below
        free = next(
            folder
            for number in itertools.count(1)
            if not (folder := below / f"earlier-{number}").exists()
        )
        attempts = [*below.glob("attempt-*")]
        free.mkdir(mode=0o700)
        for folder in attempts:
            folder.rename(free / folder.name)

    def logs(self, number: int, world: World) -> LogFiles:
        """Name the files of one rank in one attempt."""
        stem = str(self._logs_below / f"attempt-{number}" / f"rank-{world.rank}")
        return LogFiles(
            stdout=f"{stem}.out",
            stderr=f"{stem}.err",
            stacks=f"{stem}.stacks",
            nccl=f"{stem}.nccl",
            owner_uid=self.owner_uid,
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
        """Write the report of a failed attempt next to its logs, unless the disk fails.

        Args:
            number: The attempt.
            error: Its failure.
            is_kept: Whether the directory is to be kept because of it.
        """
        self.holds_failure |= is_kept
        with contextlib.suppress(OSError):
            write_report(error, self._logs_below / f"attempt-{number}")
            write_page(self._logs_below)

    def note_end(self, number: int, outcomes: Mapping[int, RankOutcome]) -> None:
        """Write the ranks' times of an attempt without a failure, if the directory is the user's."""
        if not self.is_ours:
            with contextlib.suppress(OSError):
                write_ranks(outcomes, self._logs_below / f"attempt-{number}")

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
            fcntl.flock(in_use, fcntl.LOCK_SH | fcntl.LOCK_NB)
    else:
        directory = _make(run_dir, node)
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
            os.close(in_use)


def remove_old_directories(parent: Path, *, now_s: float | None = None) -> list[Path]:
    """Remove what failed launches of this user left in the temporary directory a week ago or earlier.

    That is, directories that have a name that `tempfile` makes for ddpsafe, have not changed for a
    week, and are not locked by a launch; only a few of them at each launch.

    Args:
        parent: The temporary directory.
        now_s: The time, for tests.

    Returns:
        What was removed.
    """
    removed: list[Path] = []
    too_old_s = (time.time() if now_s is None else now_s) - _KEPT_S
    try:
        with os.scandir(parent) as entries:
            for entry in itertools.islice(entries, _MOST_LOOKED_AT):
                if len(removed) < _MOST_REMOVED and _may_be_removed(entry, too_old_s):
                    shutil.rmtree(entry.path, ignore_errors=True)
                    removed.append(Path(entry.path))
    except OSError:
        pass
    return removed


def _may_be_removed(entry: os.DirEntry[str], too_old_s: float) -> bool:
    if not _TEMPORARY.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
        return False
    try:
        status = entry.stat(follow_symlinks=False)
        if status.st_uid != os.geteuid() or status.st_mtime > too_old_s:
            return False
        with os.scandir(entry.path) as inside:
            changed_s = [child.stat(follow_symlinks=False).st_mtime for child in inside]
        if max(changed_s, default=0) > too_old_s:
            return False
        fd = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where a launch still holds it
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


def _make(path: Path, node: str) -> RunDirectory:
    logs_below = path / node
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        logs_below.mkdir(mode=0o700, exist_ok=True)
        _set_aside_earlier_attempts(logs_below)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(_PROBE_BYTES))  # an empty file fits on a full disk
            owner_uid = os.fstat(file.fileno()).st_uid
        # Other users might remove or rename the logs, which is worth a warning. They cannot redirect them:
        # `open_log` follows no links.
        status = path.stat()
        writable = (
            status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
        )
        if writable or status.st_uid not in (owner_uid, 0):
            logger.warning(
                "other users can rename or remove files in the run directory %s (owner uid %d, mode "
                "%03o); choose one that only you can write to",
                path,
                status.st_uid,
                stat.S_IMODE(status.st_mode),
            )
    except OSError as exc:
        raise _unusable(path, exc) from exc
    return RunDirectory(path, is_ours=False, owner_uid=owner_uid, logs_below=logs_below)


def _set_aside_earlier_attempts(path: Path) -> None:
    """Keep the logs of an earlier launch in the same directory: its failure may be why it is repeated."""
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
