"""`Checkpointer`: save and restore the state of a training, whatever happens in between."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from ddpsafe.checkpoint import _folders, _opening, _restoring, _saving, _saving_shards
from ddpsafe.checkpoint._arguments import (
    check_arguments,
    check_shards,
    misuse,
    require_absolute,
    require_open,
    require_step,
    step_too_old,
)
from ddpsafe.checkpoint._party import Party, Round, Word
from ddpsafe.checkpoint._snapshot import Snapshot, check_names, take_snapshot
from ddpsafe.checkpoint._trees import HostCopies
from ddpsafe.checkpoint._warnings import warn
from ddpsafe.checkpoint.errors import SaveError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, MutableMapping
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

# How long an error may keep a process for a save that is under way.
_LAST_WAIT: Final = timedelta(seconds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A save that goes on in the background; `writer` on rank 0 only."""

    step: int
    round: Round
    writer: _saving.Writer | None


class Checkpointer:
    """Keeps the last checkpoints of a training in a directory that all ranks share.

    Every method is called by all ranks, in the same order. Without a process group it is for one
    process alone.

    Args:
        directory: Absolute; on storage that every node sees. It is made if need be, and is this
            job's alone while the checkpointer is open.
        keep: How many checkpoints stay; ``None`` for all.
        timeout: How long a save, or one step of a restore, may take.
        on_failure: ``"raise"`` raises a `SaveError` on every rank, ``"warn"`` warns on rank 0 and
            lets the training go on.
        access: ``"read"`` only restores, next to a job that writes.
        rng: Save and restore the random number generators of each rank too.

    Raises:
        CheckpointConfigError: An argument is wrong.
        DirectoryError: The directory cannot be written to, or is not the same for all ranks.
        DirectoryLockedError: Another job writes there.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        *,
        timeout: timedelta = timedelta(minutes=30),
        on_failure: Literal["raise", "warn"] = "raise",
        access: Literal["write", "read"] = "write",
        rng: bool = True,
    ) -> None:
        self._directory = require_absolute(directory)
        check_arguments(keep, timeout, on_failure=on_failure, access=access)
        self._on_failure = on_failure
        self._access = access
        self._rng = rng
        self._party = Party(timeout)
        self._newest: int | None = None
        self._is_ours = False
        self._place: _saving.Place | None = None
        self._pending: _Pending | None = None
        self._copies = HostCopies()
        self._entered = False
        self._closed = False
        if access == "write":
            lock, self._newest = _opening.open_directory(self._party, self._directory)
            if lock is not None:
                weakref.finalize(self, lock.release)  # for those who neither use `with` nor close()
                self._place = _saving.Place(directory=self._directory, lock=lock, keep=keep)

    @property
    def directory(self) -> Path:
        """Where they are."""
        return self._directory

    def latest(self) -> int | None:
        """Return the newest step that this rank sees a complete checkpoint of.

        Raises:
            DirectoryError: The directory cannot be read.
        """
        return next(iter(_opening.list_steps(self._directory)), None)

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self._directory / _folders.folder_name(step)

    def save(self, state: Mapping[str, Any], step: int, *, asynchronous: bool = False) -> None:
        """Save the state of the training; once this returns, no crash loses it.

        Args:
            state: Objects with ``state_dict`` and ``load_state_dict`` (models, optimizers,
                schedulers, scalers, loaders), tensors and plain values, by name. The same names
                on every rank; rank 0's values are kept, except for what is marked `PerRank`.
            step: Number of the step, from 0, never smaller than the one before. A step that is
                saved already is not saved again.
            asynchronous: Return once the state is copied to host memory, and write in the
                background, one save at a time. How it ended shows in the next call and on leaving
                the ``with`` block, which is needed for that.

        Raises:
            SaveError: Nothing was saved, on any rank; the checkpoints from before are unharmed.
            StepOrderError: `step` is smaller than the newest.
            UnsafeStateError: The state holds what could not be loaded again.
        """
        self._require_open(asynchronous=asynchronous)
        self.wait()
        with self._tolerating():
            self._save(state, step, asynchronous=asynchronous)

    def _save(self, state: Mapping[str, Any], step: int, *, asynchronous: bool) -> None:
        party = self._party
        current = party.begin()
        try:
            snapshot = take_snapshot(
                state, unwrap=party.unwrap, whole=party.is_main, with_rng=self._rng
            )
            step = self._require_step(step)
            check_shards(snapshot.shards, asynchronous=asynchronous)
            facts = _saving.facts_of(step, snapshot)
            if asynchronous:
                copied = self._copies.copy(snapshot.replicated)
                snapshot = replace(snapshot, replicated=copied)
        except Exception as exc:
            current.fail(exc)
            raise
        current.tell(Word(facts=facts, data=snapshot.own))
        # Rank 0 alone decides what is saved already; the others do as it answers.
        is_new = not (party.is_main and self._is_saved(step))
        if snapshot.shards and is_new:
            _saving_shards.save_shards(party, self._place, current, snapshot, step)
            self._newest, self._is_ours = step, True
            return
        writer = self._start_writer(current, snapshot, step) if is_new else None
        self._pending = _Pending(step=step, round=current, writer=writer)
        if not asynchronous:
            self._finish()

    def _start_writer(self, current: Round, snapshot: Snapshot, step: int) -> _saving.Writer | None:
        if self._place is None:
            return None
        return _saving.Writer(self._party, self._place, current, snapshot, step)

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if not self._party.is_main:
            _saving.follow(pending.round, self._party, self._party.deadline(), pending.step)
        elif pending.writer is None:
            _saving.meet(pending.round, self._party, pending.step)
        else:
            try:
                pending.writer.finish()
            except BaseException as exc:
                pending.round.announce(error=exc)
                raise
            pending.round.announce({"saved": True})
        self._newest, self._is_ours = pending.step, True
        if pending.writer is not None:
            pending.writer.warn_of_leftovers()

    def wait(self) -> None:
        """Wait for the save that goes on in the background, if one does.

        Raises:
            SaveError: It failed, on every rank.
        """
        with self._tolerating():
            self._finish()

    def restore(self, state: MutableMapping[str, Any]) -> int | None:
        """Load the newest checkpoint that every rank sees and finds whole into the objects.

        A damaged one is reported by a `CheckpointWarning` and the one before is used.

        Args:
            state: Objects by name, as for `save`. Tensors are filled in place; a plain value is put
                into the mapping. Names that only the checkpoint has are left out.

        Returns:
            The step it was saved at; ``None`` where there is no checkpoint yet.

        Raises:
            CorruptCheckpointError: There are checkpoints, and all are damaged.
            MissingCheckpointError: No checkpoint is there for every rank.
            NewerFormatError: A newer ddpsafe wrote it.
            CheckpointMismatchError: It is of other names, tensors or optimizers, and nothing was
                changed; or an object's own ``load_state_dict`` refused, after those before it in
                `state` were changed.
        """
        self._require_open(asynchronous=False)
        self.wait()
        check_names(state)
        step = _restoring.restore(
            _restoring.Request(
                party=self._party,
                directory=self._directory,
                state=state,
                with_rng=self._rng,
                may_tidy=self._access == "write",
            )
        )
        if step is not None:
            self._newest, self._is_ours = step, True
        return step

    def close(self) -> None:
        """Wait for what goes on in the background, and let other jobs use the directory.

        Raises:
            SaveError: The save in the background failed.
        """
        if not self._closed:
            try:
                self.wait()
            finally:
                self._release()

    def _release(self) -> None:
        self._closed = True
        if self._place is not None:
            self._place.lock.release()

    def __enter__(self) -> Self:
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        # The others may be dead: nothing is said to them, but what is nearly written is kept.
        writer = None if self._pending is None else self._pending.writer
        if writer is not None:
            with contextlib.suppress(Exception):
                writer.finish(_LAST_WAIT)
        if not self._closed:
            self._release()

    @contextlib.contextmanager
    def _tolerating(self) -> Iterator[None]:
        try:
            yield
        except SaveError as exc:
            if self._on_failure == "raise":
                raise
            if self._party.is_main:
                warn(str(exc))

    def _require_open(self, *, asynchronous: bool) -> None:
        require_open(closed=self._closed, entered=self._entered, asynchronous=asynchronous)

    def _require_step(self, number: object) -> int:
        step = require_step(number)
        if self._access == "read":
            raise misuse(
                "save() with access='read'.",
                "this checkpointer has no right to write.",
                "make it with access='write'.",
            )
        if self._newest is not None and step <= self._newest and not self._is_saved(step):
            raise step_too_old(step, self._newest, self._directory, is_ours=self._is_ours)
        return step

    def _is_saved(self, step: int) -> bool:
        return self._is_ours and step == self._newest
