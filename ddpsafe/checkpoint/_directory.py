"""The directory of a job's checkpoints: what is complete, what is kept, and how ranks open it together.

::

    <directory>/
      step-000000000200/         complete: it was renamed into place after everything was on disk
      latest -> step-000000000200
      .saving-000000000300-<id>/ being written, or left over from a job that died while saving
      .deleting-…/               being deleted
      .aside-step-…/             set aside by the last restore: damaged, or newer than the restored one
      .lock                      which job writes here
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from ddpsafe._advice import ADVICE
from ddpsafe._clock import Deadline
from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._job.agreement import Message
from ddpsafe._text import ranks_text
from ddpsafe.checkpoint._checksums import DamagedFileError
from ddpsafe.checkpoint._format import read_manifest
from ddpsafe.checkpoint._lock import DirectoryLock, Owner, read_owner
from ddpsafe.checkpoint.errors import DirectoryError, RestoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ddpsafe.checkpoint._ranks import Ranks

_STEP: Final = re.compile(r"step-([0-9]{12,18})")
_ASIDE: Final = ".aside-"
_SAVING: Final = ".saving-"
_DELETING: Final = ".deleting-"
LATEST: Final = "latest"

VISIBLE_WITHIN: Final = timedelta(seconds=5)
"""How long a network file system may take to show one host what another has written."""


def folder_name(step: int) -> str:
    """Return the name of a step's folder; names sort like steps up to 12 digits."""
    return f"step-{step:012}"


def step_of(name: str) -> int | None:
    """Return the step that a folder's name stands for; ``None`` for other names."""
    match = _STEP.fullmatch(name)
    # With more zeros it is not a name that `folder_name` makes, so no path leads to it.
    return int(match[1]) if match and name == folder_name(int(match[1])) else None


def complete_steps(directory: Path) -> list[int]:
    """Return the steps that have a checkpoint, newest first."""
    steps = map(step_of, _names(directory))
    return sorted((step for step in steps if step is not None), reverse=True)


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208 - names only, in one call
    except FileNotFoundError:
        return []


@contextlib.contextmanager
def unfinished(directory: Path, step: int) -> Iterator[Path]:
    """Make a folder to write a checkpoint into; remove it if the block raises."""
    folder = directory / f"{_SAVING}{step:012}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder
    except BaseException:
        _delete(folder)
        raise


def _delete(path: Path) -> None:
    """Remove a folder, or a link or a file in its place, as far as possible."""
    shutil.rmtree(path, ignore_errors=True)  # it does not remove a link
    with contextlib.suppress(OSError):
        path.unlink()


def publish(folder: Path, step: int, *, is_wanted: Callable[[], bool] = lambda: True) -> bool:
    """Make a finished folder the checkpoint of its step, safely on disk, or not at all; return whether it is.

    `is_wanted` is asked before the rename and after it.

    Raises:
        FileExistsError: That step already has a checkpoint.
        OSError: The file system refused it.
    """
    directory = folder.parent
    # Before the rename: after a crash, a complete name must not have incomplete contents.
    for path, folders, _ in os.walk(folder):
        sync_directory(path)
        folders.sort()
    # The syncs may have blocked for as long as the storage did not respond.
    if not is_wanted():
        return False
    final = directory / folder_name(step)
    try:
        folder.rename(final)
    except OSError as exc:
        if exc.errno in _IN_THE_WAY:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final)) from exc
        raise
    try:
        sync_directory(directory)
    except OSError:  # a crash may undo the rename, so the step must not look as if it were saved
        with contextlib.suppress(OSError):
            final.rename(folder)
        raise
    # The rename and its sync may have blocked, too. By then every rank may have reported that the save failed.
    if not is_wanted():
        final.rename(folder)
        return False
    _point_to(final)
    return True


def _point_to(final: Path) -> None:
    """Update the link for people and scripts; ddpsafe does not read it."""
    scratch = final.parent / f".{LATEST}-{uuid.uuid4().hex[:8]}"
    with contextlib.suppress(OSError):  # some file systems have no symbolic links
        scratch.symlink_to(final.name)
        try:
            scratch.replace(final.parent / LATEST)
        except OSError:  # a directory of that name is in the way
            scratch.unlink()


def sync_directory(path: Path | str) -> None:
    """Flush a directory's entries to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(fd)


_IN_THE_WAY: Final = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
# From network file systems that cannot fsync a directory because they always write entries at once.
_CANNOT_SYNC: Final = (errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which checkpoints stay when a new one is saved. A checkpoint stays if any rule keeps it.

    Attributes:
        newest: Keep this many of the newest; ``None`` for all.
        every: Also keep, for ever, those whose step is a multiple of this.
        best: Also keep this many with the best `metric`.
        metric: Name of the metric among the ``metrics`` passed to `Checkpointer.save`.
        mode: Whether the smallest or the largest value is the best.
    """

    newest: int | None = 3
    every: int | None = None
    best: int = 0
    metric: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        """Refuse rules that keep nothing, and `best` without `metric` or the reverse."""
        problem = ""
        if not (self.newest is None or is_whole(self.newest, 1)):
            problem = f"newest={self.newest!r} is neither a number of checkpoints from 1 nor None"
        elif not (self.every is None or is_whole(self.every, 1)):
            problem = f"every={self.every!r} is neither a number of steps from 1 nor None"
        elif not is_whole(self.best, 0):
            problem = f"best={self.best!r} is not a number of checkpoints from 0"
        elif (self.best > 0) != isinstance(self.metric, str):
            problem = "best= needs metric=, and metric= needs best="
        elif self.mode not in ("min", "max"):
            problem = f"mode={self.mode!r} is neither 'min' nor 'max'"
        if problem:
            raise ConfigError(
                Explanation(
                    f"Keep: {problem}.",
                    cause="one of its arguments is wrong.",
                    fix='write for example Keep(newest=3, best=1, metric="loss", every=10_000).',
                )
            )

    def find_doomed(
        self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float | None]]
    ) -> list[int]:
        """Return the steps to remove.

        Args:
            steps: The existing steps, newest first.
            metrics: Their metrics. Of two equally good checkpoints, the newer one stays.
        """
        if self.newest is None:
            return []
        sign = 1 if self.mode == "min" else -1
        ranked = [
            (sign * value, -step)
            for step in steps
            if (value := metrics.get(step, {}).get(self.metric or "")) is not None
        ]
        best = {-step for _, step in sorted(ranked)[: self.best]}
        return [
            step
            for step in steps[self.newest :]
            if step not in best and (self.every is None or step % self.every)
        ]


def is_whole(value: object, least: int) -> bool:
    """Return whether a value is an integer of at least `least`; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


Metrics = dict[int, dict[str, float | None]]
"""Metrics of checkpoints, by step."""


def prune(directory: Path, keep: Keep, metrics: Metrics) -> list[str]:
    """Remove the checkpoints that `keep` does not keep; return why some could not be removed.

    Metrics that have not been read so far are read from the checkpoints and added.
    """
    try:
        steps = complete_steps(directory)
        if keep.best > 0 and keep.newest is not None:  # the choice depends on them
            for step in set(steps) - metrics.keys():
                metrics[step] = {}
                with contextlib.suppress(DamagedFileError, RestoreError, OSError):
                    metrics[step] = read_manifest(directory / folder_name(step)).metrics
        doomed = keep.find_doomed(steps, metrics)
    except OSError as exc:
        return [str(exc)]
    problems = []
    for step in doomed:
        # Rename it first, so that a partly deleted checkpoint never looks complete.
        name = folder_name(step)
        hidden = directory / f"{_DELETING}{name}-{uuid.uuid4().hex[:8]}"
        try:
            (directory / name).rename(hidden)
        except FileNotFoundError:
            continue
        except OSError as exc:
            problems.append(f"step {step}: {exc}")
        else:
            _delete(hidden)
    return problems


def set_aside(directory: Path, steps: Sequence[int]) -> list[Path]:
    """Hide checkpoints from restores but keep them for inspection; remove those set aside before."""
    for old in directory.glob(f"{_ASIDE}*"):
        _delete(old)
    targets = []
    for step in steps:
        name = folder_name(step)
        target = directory / f"{_ASIDE}{name}-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(FileNotFoundError):  # only another node sees it
            (directory / name).rename(target)
            targets.append(target)
    sync_directory(directory)
    newest = complete_steps(directory)
    if newest:
        _point_to(directory / folder_name(newest[0]))
    else:
        with contextlib.suppress(OSError):
            (directory / LATEST).unlink()
    return targets


def sweep(directory: Path) -> None:
    """Remove leftovers of jobs that died while saving or deleting; only the lock's owner may."""
    for name in _names(directory):
        if name.startswith((_SAVING, _DELETING, f".{LATEST}-")):
            _delete(directory / name)


def free_bytes(directory: Path) -> int:
    """Return how many bytes an unprivileged process can still write."""
    facts = os.statvfs(directory)
    return facts.f_bavail * facts.f_frsize


def open_directory(ranks: Ranks, directory: Path) -> tuple[DirectoryLock | None, int | None]:
    """Create and lock the directory on rank 0, and make sure that every rank sees it.

    Returns the lock, on rank 0 only, and the newest step in the directory.

    Raises:
        DirectoryError: It cannot be written to, or is not the same for all ranks.
        DirectoryLockedError: Another job holds the lock.
    """
    absence_error = ranks.absence_error(
        DirectoryError,
        f"open {directory}",
        cause="did not create a Checkpointer, hangs, or waits for a file system that does not "
        "respond.",
        fix="create the Checkpointer on every rank, at the same point of the script.",
    )
    opening, seeing = (ranks.begin("Checkpointer()") for _ in range(2))
    locks: list[DirectoryLock] = []

    def lead(_: dict[int, Message]) -> dict[str, Any]:
        try:
            _make(directory)
            locks.append(DirectoryLock(directory, Owner.myself(os.environ)))
            sweep(directory)
            newest = next(iter(complete_steps(directory)), None)
        except OSError as exc:
            raise DirectoryError(
                Explanation(
                    f"rank 0 cannot write checkpoints to {directory}: {exc}.",
                    cause=find_cause(directory, exc),
                    fix="choose a directory that this user can read and write.",
                ),
                rank=0,
            ) from exc
        return {"id": locks[0].owner.id, "newest": newest}

    def require_seen(messages: dict[int, Message]) -> dict[str, Any]:
        blind = {
            rank: message.facts for rank, message in messages.items() if not message.facts["sees"]
        }
        if blind:
            hosts = sorted({facts["host"] for facts in blind.values()})
            listed = [
                f"rank {rank} on {facts['host']} looked in {facts['directory']}"
                for rank, facts in list(blind.items())[:8]
            ]
            raise DirectoryError(
                Explanation(
                    f"rank 0 wrote to {directory}, but {ranks_text(blind)} on {', '.join(hosts)} cannot "
                    "see it.",
                    cause="the directory is not shared between the nodes, a mount is missing there, or "
                    "the ranks were given different paths.",
                    fix="give every rank the same directory on storage that all nodes share.",
                    details=listed,
                ),
                hosts=tuple(hosts),
                rank=min(blind),
            )
        return {}

    try:
        opening.send(Message(facts={}))
        facts = opening.agree(lead, absence_error, ranks.deadline())
        sees = ranks.is_main or _sees(directory, facts["id"])
        seeing.send(Message(facts={"sees": sees, "host": ranks.host, "directory": str(directory)}))
        seeing.agree(require_seen, absence_error, ranks.deadline())
    except BaseException:
        for lock in locks:
            lock.release()
        raise
    return next(iter(locks), None), facts["newest"]


def _make(directory: Path) -> None:
    """Create the directory and flush it to disk."""
    new = [path for path in [directory, *directory.parents] if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    # A crash after the first save could leave the checkpoint without a path to it.
    for path in new:
        # This user may not be allowed to open the parent.
        with contextlib.suppress(PermissionError):
            sync_directory(path.parent)


def list_steps(directory: Path) -> list[int]:
    """Return the steps that have a checkpoint, newest first; none if the directory does not exist.

    Raises:
        DirectoryError: It cannot be read.
    """
    try:
        return complete_steps(directory)
    except OSError as exc:
        raise DirectoryError(
            Explanation(
                f"The checkpoints in {directory} cannot be read: {exc}.",
                cause=find_cause(directory, exc),
                fix="pass the directory that a Checkpointer has written to.",
            )
        ) from exc


def find_cause(directory: Path, exc: OSError) -> str:
    """Return why a file system refused an operation in a directory."""
    with contextlib.suppress(OSError):
        if directory.is_symlink() and not directory.exists():
            return f"it is a link to {directory.readlink()}, which does not exist."
        if directory.exists() and not directory.is_dir():
            return "it is a file, not a directory."
    return _CAUSES.get(exc.errno or 0, "its file system refused it.")


_CAUSES: Final = {
    errno.EROFS: "the file system is mounted read-only.",
    errno.EACCES: "it belongs to another user, and this one has no permission.",
    errno.EPERM: "it belongs to another user, and this one has no permission.",
    errno.ENOENT: "the directory, or a part of its path, does not exist.",
    errno.ENOTDIR: "a part of its path is not a directory.",
    errno.ENOSPC: "the disk is full, or has no inodes left.",
    errno.EDQUOT: "this user's quota is used up.",
    errno.EFBIG: "the file is larger than the file system, or a limit such as ulimit -f, allows.",
    errno.EIO: "the disk has failed; see dmesg.",
    errno.ESTALE: "the network mount was exported again or no longer exists.",
    errno.ETIMEDOUT: "its storage does not respond.",
    errno.EMFILE: ADVICE["DS-MEM-descriptors"][0],
    errno.ENFILE: "this host has reached its limit of open files.",
    errno.ENOMEM: "this host, or this job's share of it, has no memory left.",
}


def _sees(directory: Path, lock_id: str) -> bool:
    """Wait until this host shows the lock that rank 0 has written; return False if it does not."""
    for pause_s in Deadline.after(VISIBLE_WITHIN).pauses_s():
        with contextlib.suppress(OSError):
            os.listdir(directory)  # noqa: PTH208 - makes NFS refresh its cache of the directory
        owner = read_owner(directory)
        if owner is not None and owner.id == lock_id:
            return True
        time.sleep(pause_s)
    return False
