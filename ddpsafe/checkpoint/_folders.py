"""The directory of a job's checkpoints: what is complete, what is not, and how one becomes so.

::

    <directory>/
      step-000000000200/         complete: it was renamed into place after everything was on disk
      latest -> step-000000000200
      .saving-000000000300-<id>/ being written, or left by a job that died meanwhile
      .deleting-…/               on its way out
      .damaged-step-…/           was found damaged or left behind by a rollback; the newest is kept
      .lock                      who writes here
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import uuid
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_STEP: Final = re.compile(r"step-(\d{12,})")
_ASIDE: Final = ".damaged-"
_SAVING: Final = ".saving-"
_DELETING: Final = ".deleting-"
LATEST: Final = "latest"


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint; names sort as steps do."""
    return f"step-{step:012}"


def complete_steps(directory: Path) -> list[int]:
    """Return the steps that have a checkpoint, newest first."""
    found = (_STEP.fullmatch(name) for name in _names(directory))
    return sorted((int(match[1]) for match in found if match), reverse=True)


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208 - names only, in one call
    except FileNotFoundError:
        return []


@contextlib.contextmanager
def unfinished(directory: Path, step: int) -> Iterator[Path]:
    """Make a folder to write a checkpoint into; it goes again when that fails."""
    folder = directory / f"{_SAVING}{step:012}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def publish(folder: Path, step: int) -> Path:
    """Make a finished folder the checkpoint of its step, on disk too, or not at all.

    Raises:
        FileExistsError: That step has one.
    """
    directory = folder.parent
    for path, folders, _ in os.walk(folder):
        sync_directory(path)
        folders.sort()
    final = directory / folder_name(step)
    try:
        folder.rename(final)
    except OSError as exc:
        if exc.errno in _IN_THE_WAY:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final)) from exc
        raise
    sync_directory(directory)
    _point_to(final)
    return final


def _point_to(final: Path) -> None:
    """Renew the link for people and scripts; nothing here reads it."""
    scratch = final.parent / f".{LATEST}-{uuid.uuid4().hex[:8]}"
    with contextlib.suppress(OSError):  # some file systems have no links
        scratch.symlink_to(final.name)
        try:
            scratch.replace(final.parent / LATEST)
        except OSError:  # a directory of that name is in the way
            scratch.unlink()


def sync_directory(path: Path | str) -> None:
    """Bring a directory's entries to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(fd)


_IN_THE_WAY: Final = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
# Of network file systems that sync entries always.
_CANNOT_SYNC: Final = (errno.EINVAL, errno.EOPNOTSUPP)


def prune(directory: Path, keep: int | None) -> list[str]:
    """Remove all checkpoints but the newest `keep`; return why some could not be."""
    try:
        doomed = complete_steps(directory)[keep:] if keep is not None else []
    except OSError as exc:
        return [str(exc)]
    problems = {step: _remove(directory / folder_name(step)) for step in doomed}
    return [f"step {step}: {why}" for step, why in problems.items() if why is not None]


def _remove(folder: Path) -> OSError | None:
    """Take it out of sight first, so that one that is half gone never looks complete."""
    doomed = folder.parent / f"{_DELETING}{folder.name}-{uuid.uuid4().hex[:8]}"
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return None
    except OSError as exc:
        return exc
    shutil.rmtree(doomed, ignore_errors=True)
    return None


def set_aside(directory: Path, step: int) -> Path:
    """Take a checkpoint out of the row, for a person to look at; only the newest such is kept."""
    name = folder_name(step)
    target = directory / f"{_ASIDE}{name}-{uuid.uuid4().hex[:8]}"
    for old in directory.glob(f"{_ASIDE}*"):
        shutil.rmtree(old, ignore_errors=True)
    (directory / name).rename(target)
    sync_directory(directory)
    newest = complete_steps(directory)
    if newest:
        _point_to(directory / folder_name(newest[0]))
    else:
        with contextlib.suppress(OSError):
            (directory / LATEST).unlink()
    return target


def sweep(directory: Path) -> None:
    """Remove what jobs left that died while they saved or deleted; only the lock's owner may."""
    for name in _names(directory):
        if name.startswith((_SAVING, _DELETING)):
            shutil.rmtree(directory / name, ignore_errors=True)
        elif name.startswith(f".{LATEST}-"):
            with contextlib.suppress(OSError):
                (directory / name).unlink()


def free_bytes(directory: Path) -> int:
    """Return what a process without privileges may still write."""
    facts = os.statvfs(directory)
    return facts.f_bavail * facts.f_frsize
