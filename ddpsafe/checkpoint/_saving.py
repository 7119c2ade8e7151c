"""A save, seen from rank 0, which writes, and from the others, which wait for its word."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._bounded import BoundedCall
from ddpsafe._errors import Explanation
from ddpsafe.checkpoint import _folders, _sharded
from ddpsafe.checkpoint._trees import size_bytes
from ddpsafe.checkpoint._warnings import warn
from ddpsafe.checkpoint._writing import Content, require_space, save_error, write_files
from ddpsafe.checkpoint.errors import (
    CheckpointConfigError,
    SaveError,
    SaveTimeoutError,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ddpsafe._clock import Deadline
    from ddpsafe.checkpoint._lock import DirectoryLock
    from ddpsafe.checkpoint._party import Party, Round, Word
    from ddpsafe.checkpoint._snapshot import Snapshot

# A writer that is past its deadline may still be at its last step.
_LAST_STEP: Final = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where checkpoints go.

    Attributes:
        directory: The directory.
        lock: The right to write there.
        keep: How many checkpoints stay; ``None`` for all.
    """

    directory: Path
    lock: DirectoryLock
    keep: int | None

    def require_lock(self, step: int) -> None:
        """Refuse to publish into a directory that has vanished or belongs to another job now.

        Raises:
            SaveError: It does.
        """
        if self.lock.is_held():
            return
        raise SaveError(
            Explanation(
                f"The checkpoint of step {step} was not saved: this job's lock on "
                f"{self.directory} is gone.",
                cause="the directory was removed or unmounted, or this process stood still for "
                "so long that another job took it for dead.",
                fix="find out who removed it; end one of two jobs that write there.",
            ),
            step=step,
        )


class _GivenUpError(Exception):
    """Nobody waits for this save any more."""


class Writer:
    """Rank 0's writing of one checkpoint, in a thread of its own, so that it can be given up on."""

    def __init__(
        self, party: Party, place: Place, current: Round, snapshot: Snapshot, step: int
    ) -> None:
        self._party = party
        self._place = place
        self._round = current
        self._snapshot = snapshot
        self._step = step
        self._deadline = party.deadline()
        self._given_up = threading.Event()
        self._kept_too_long: list[str] = []
        self._publishing = threading.Lock()
        self._call = BoundedCall(self._write, name=f"ddpsafe-save-{step}")

    def _write(self) -> None:
        words = heard(self._round, self._party, self._deadline, self._step)
        content = Content(
            step=self._step,
            replicated=self._snapshot.replicated,
            ranks=[words[rank].data for rank in sorted(words)],
            names=self._snapshot.names,
            optimizers=self._snapshot.optimizers,
        )
        needed = size_bytes(content.replicated) + sum(map(len, content.ranks))
        directory = self._place.directory
        self._place.require_lock(self._step)
        require_space(directory, needed, self._step)
        with _folders.unfinished(directory, self._step) as folder:
            write_files(folder, content)
            self._publish(folder)
        self._kept_too_long = _folders.prune(directory, self._place.keep)

    def _publish(self, folder: Path) -> None:
        with self._publishing:
            if self._given_up.is_set():
                raise _GivenUpError
            self._place.require_lock(self._step)
            _folders.publish(folder, self._step)

    def finish(self, limit: timedelta | None = None) -> None:
        """Wait for the end of it.

        Raises:
            CheckpointError: It failed, or took too long; it is not saved then and never will be.
        """
        limit_s = self._deadline.remaining_s() if limit is None else limit.total_seconds()
        try:
            ended = self._call.wait(limit_s)
        except BaseException:  # Ctrl-C: a save that was broken off must not appear later
            self._given_up.set()
            raise
        if not ended:
            self._given_up.set()
            # Whoever is publishing already has the last word.
            if not self._call.wait(_LAST_STEP.total_seconds()):
                raise self._too_slow()
        try:
            self._call.result()
        except _GivenUpError:
            raise self._too_slow() from None
        except Exception as exc:
            error = save_error(exc, self._place.directory, self._step)
            if error is exc:
                raise
            raise error from exc

    def warn_of_leftovers(self) -> None:
        """Say which older checkpoints could not be removed, once the save is known to be good."""
        warn_of_leftovers(self._place, self._kept_too_long)

    def _too_slow(self) -> SaveTimeoutError:
        waited_s = self._deadline.waited_s()
        what = f"{self._party} could not write the checkpoint of step {self._step} in {waited_s:.1f} s."
        return SaveTimeoutError(
            Explanation(
                what,
                cause=f"the storage behind {self._place.directory} is slow or does not answer.",
                fix="look at that storage; raise the Checkpointer's timeout if it is only slow.",
            ),
            step=self._step,
            missing_ranks=[0],
            waited_s=waited_s,
            rank=0,
        )


def warn_of_leftovers(place: Place, problems: list[str]) -> None:
    """Say that a disk will fill up: `_folders.prune` could not remove all that it should."""
    if problems:
        text = (
            f"{len(problems)} checkpoints more than keep={place.keep} stay in "
            f"{place.directory}, as they could not be removed; remove them by hand: "
            + "; ".join(problems[:4])
        )
        warn(text)


def facts_of(step: int, snapshot: Snapshot) -> dict[str, Any]:
    """Return what a rank tells of its part of a save."""
    return {
        "step": step,
        "names": snapshot.names,
        "shard_bytes": _sharded.own_bytes(snapshot.shards),
    }


def heard(current: Round, party: Party, deadline: Deadline, step: int) -> dict[int, Word]:
    """Collect on rank 0 what the ranks told, and make sure that they mean the same save.

    Raises:
        SaveTimeoutError: Some did not come.
        CheckpointError: One of them failed, or means another step or other names.
    """
    words = current.hear(deadline, functools.partial(_not_come, party, step))
    _require_agreement(words)
    return words


def meet(current: Round, party: Party, step: int) -> None:
    """Meet, on rank 0, for a step that is saved already: nothing is written, if all mean the same.

    Raises:
        SaveTimeoutError: Some did not come.
        CheckpointError: One of them failed, or means another step or other names.
    """

    def judge(words: dict[int, Word]) -> dict[str, Any]:
        _require_agreement(words)
        return {"saved": False}

    current.settle(judge, functools.partial(_not_come, party, step))


def _require_agreement(words: dict[int, Word]) -> None:
    first = words[0].facts
    for rank, word in words.items():
        for key in ("step", "names"):
            if word.facts.get(key) != first.get(key):
                raise CheckpointConfigError(
                    Explanation(
                        f"rank {rank} saves {key} {word.facts.get(key)!r}, and rank 0 "
                        f"{first.get(key)!r}.",
                        cause="the ranks count their steps differently, or build other states.",
                        fix="call save() on every rank with the same step and the same names.",
                    ),
                    rank=rank,
                )


def _not_come(party: Party, step: int, missing: list[int], deadline: Deadline) -> SaveTimeoutError:
    names = ", ".join(map(str, missing))
    waited_s = deadline.waited_s()
    slow = missing == [0] and not party.is_main
    cause = (
        "its storage is slow or does not answer, or it is stopped or hangs."
        if slow
        else f"rank {names} did not call save(), hangs, or is much slower."
    )
    return SaveTimeoutError(
        Explanation(
            f"{party} waited {waited_s:.1f} s for rank {names} to save step {step}.",
            cause=cause,
            fix="let every rank call save() at the same step; raise the Checkpointer's timeout "
            "if the storage is only slow.",
        ),
        step=step,
        missing_ranks=missing,
        waited_s=waited_s,
    )


def follow(current: Round, party: Party, deadline: Deadline, step: int) -> dict[str, Any]:
    """Wait, on a rank that does not write, until rank 0 has.

    Raises:
        SaveTimeoutError: It did not in time.
        CheckpointError: It failed.
    """
    return current.learn(deadline, functools.partial(_not_come, party, step))
