"""The ranks agree on a directory: rank 0 makes and locks it, the others make sure they see it."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._clock import Deadline
from ddpsafe._errors import Explanation
from ddpsafe.checkpoint import _folders
from ddpsafe.checkpoint._lock import DirectoryLock, Owner, read_owner
from ddpsafe.checkpoint._party import Word
from ddpsafe.checkpoint.errors import CheckpointError, DirectoryError

if TYPE_CHECKING:
    from pathlib import Path

    from ddpsafe.checkpoint._party import Party

SEE: Final = timedelta(seconds=5)
"""How long a network file system may take to show one host what another has written."""

_PAUSE_S: Final = 0.1


def open_directory(party: Party, directory: Path) -> tuple[DirectoryLock | None, int | None]:
    """Make the directory this job's, all ranks together.

    Returns:
        The lock, on rank 0, and the newest step that is there.

    Raises:
        DirectoryError: It cannot be written to, or is not the same for all ranks.
        DirectoryLockedError: Another job has it.
    """
    absent = functools.partial(_not_come, party, directory)
    opening, seeing = party.begin(), party.begin()
    locks: list[DirectoryLock] = []

    def lead(_: dict[int, Word]) -> dict[str, Any]:
        locks.append(_lock(directory))
        _folders.sweep(directory)
        newest = next(iter(_folders.complete_steps(directory)), None)
        return {"id": locks[0].owner.id, "newest": newest}

    def require_seen(words: dict[int, Word]) -> dict[str, Any]:
        _require_seen(words, directory)
        return {}

    try:
        opening.tell(Word(facts={}))
        facts = opening.settle(lead, absent)
        sees = party.is_main or _sees(directory, facts["id"])
        seeing.tell(Word(facts={"sees": sees, "host": party.host, "directory": str(directory)}))
        seeing.settle(require_seen, absent)
    except BaseException:
        for lock in locks:
            lock.release()
        raise
    return next(iter(locks), None), facts["newest"]


def _lock(directory: Path) -> DirectoryLock:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return DirectoryLock(directory, Owner.myself(os.environ))
    except OSError as exc:
        raise DirectoryError(
            Explanation(
                f"rank 0 cannot write checkpoints to {directory}: {exc}.",
                cause=_find_cause(directory)
                or "it belongs to another user, is mounted read-only, or its disk is full.",
                fix="choose a directory that this user may write to.",
            ),
            rank=0,
        ) from exc


def list_steps(directory: Path) -> list[int]:
    """Return the steps that have a checkpoint, newest first; none where there is no directory.

    Raises:
        DirectoryError: It cannot be read.
    """
    try:
        return _folders.complete_steps(directory)
    except OSError as exc:
        raise DirectoryError(
            Explanation(
                f"The checkpoints in {directory} cannot be read: {exc}.",
                cause=_find_cause(directory)
                or "it belongs to another user, or its storage does not answer.",
                fix="give the directory that a Checkpointer has written to.",
            )
        ) from exc


def _find_cause(directory: Path) -> str | None:
    """Tell what stands in a directory's place, if that is the trouble."""
    with contextlib.suppress(OSError):
        if directory.is_symlink() and not directory.exists():
            return f"it is a link to {directory.readlink()}, which does not exist."
        if directory.exists() and not directory.is_dir():
            return "it is a file and no directory."
    return None


def _sees(directory: Path, lock_id: str) -> bool:
    """Look until this host shows the lock that rank 0 has written, or does not in time."""
    deadline = Deadline.after(SEE)
    while True:
        with contextlib.suppress(OSError):
            os.listdir(directory)  # noqa: PTH208 - makes NFS look again
        owner = read_owner(directory)
        if owner is not None and owner.id == lock_id:
            return True
        if deadline.expired():
            return False
        time.sleep(_PAUSE_S)


def _require_seen(words: dict[int, Word], directory: Path) -> None:
    blind = {rank: word.facts for rank, word in words.items() if not word.facts["sees"]}
    if not blind:
        return
    hosts = sorted({facts["host"] for facts in blind.values()})
    listed = [
        f"rank {rank} on {facts['host']} looked in {facts['directory']}"
        for rank, facts in list(blind.items())[:8]
    ]
    names = ", ".join(map(str, blind))
    raise DirectoryError(
        Explanation(
            f"rank {names} on {', '.join(hosts)} does not see what rank 0 wrote to {directory}.",
            cause="the directory is not shared between the nodes, a mount is missing there, or "
            "the ranks were given different paths.",
            fix="give every rank the same directory on storage that all nodes share.",
            details=listed,
        ),
        hosts=hosts,
        rank=min(blind),
    )


def _not_come(
    party: Party, directory: Path, missing: list[int], deadline: Deadline
) -> CheckpointError:
    names = ", ".join(map(str, missing))
    return DirectoryError(
        Explanation(
            f"{party} waited {deadline.waited_s():.1f} s for rank {names} to open {directory}.",
            cause=f"rank {names} made no Checkpointer, hangs, or its file system does not answer.",
            fix="make the Checkpointer on every rank, at the same place of the script.",
        ),
        rank=missing[0],
    )
