"""`Checkpointer`: saves and restores the state of a training, whatever happens in between."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import os
import pickle
import time
import weakref
import zipfile
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._job.agreement import Message
from ddpsafe._torch_private import changes_of
from ddpsafe.checkpoint import _directory, _restore, _save
from ddpsafe.checkpoint._checksums import DamagedFileError
from ddpsafe.checkpoint._directory import Keep, is_whole
from ddpsafe.checkpoint._format import (
    REPLICATED,
    Manifest,
    OptimizerFacts,
    from_json,
    read_manifest,
)
from ddpsafe.checkpoint._memory import StateMemory, open_memory
from ddpsafe.checkpoint._ranks import Ranks
from ddpsafe.checkpoint._schedule import is_due, schedule_of
from ddpsafe.checkpoint._sharded import is_sharded
from ddpsafe.checkpoint._slots import user_metadata
from ddpsafe.checkpoint._state import (
    Snapshot,
    check_names,
    explaining,
    is_text,
    own_bytes,
    plain_names,
    renamed,
    require_finite,
    take_snapshot,
)
from ddpsafe.checkpoint._trees import HostCopies
from ddpsafe.checkpoint.errors import (
    CorruptCheckpointError,
    RestoreError,
    SaveError,
    StepOrderError,
    warn,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, MutableMapping
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

# How long a `with` block that an error leaves waits for a save in the background.
_WAIT_ON_ERROR: Final = timedelta(seconds=5)

_TIMEOUT: Final = timedelta(minutes=30)

_MAX_LISTED: Final = 8

_DRIFT: Final = (
    "the ranks have different copies of a model that they should share, so the checkpoint of step {step} has "
    "rank 0's: {models}. Likely cause: parameters were unfrozen, added or loaded on one rank after the model "
    "had been wrapped, so that DDP does not average their gradients. What to do: unfreeze and load before "
    "wrapping, on every rank, or mark a model that differs on purpose with PerRank."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What is known about a checkpoint without loading it.

    Attributes:
        step: The step it was saved at.
        saved_at: When, in UTC, as ISO 8601.
        world_size: How many ranks saved it.
        size_bytes: Total size of its files.
        names: Names in its state.
        metrics: As given to `Checkpointer.save`; ``None`` for NaN and infinity.
        metadata: As given to `Checkpointer.save`.
        ddpsafe: Version of ddpsafe that wrote it.
        torch: Version of torch that wrote it.
        source: Where it is: in the directory, or in the memory of the nodes.
    """

    step: int
    saved_at: str
    world_size: int
    size_bytes: int
    names: tuple[str, ...]
    metrics: Mapping[str, float | None]
    metadata: Mapping[str, Any]
    ddpsafe: str
    torch: str
    source: Literal["disk", "memory"] = "disk"


class Checkpointer:
    """Keeps checkpoints of a training in a directory that all ranks share.

    All ranks must call every method in the same order, except `latest`, `path` and `info`, which any
    rank may call alone. Without a process group, a checkpointer serves a single process.

    Args:
        directory: Absolute path on storage that every node sees. It is created if it does not exist,
            and no other job can write to it while the checkpointer is open.
        keep: How many checkpoints to keep: a number, ``None`` for all, or a `Keep` for other rules.
        every: When `is_due` returns True: every so many steps, or about once per duration.
        memory_every: Also keep the newest state in the memory of each node, from where a restart
            continues: every so many steps, about once per duration, or ``"auto"``, as often as it takes
            at most 1 % of the time in the long run. It needs `every`, ddpsafe's own launcher, and
            memory for two states on each node; ``None`` keeps no state in memory.
        timeout: How long a save to the directory, or one step of a restore, may take; one to memory
            has the limit of collectives, ``timeouts.collective``.
        on_failure: What happens when a save fails: ``"raise"`` raises a `SaveError` on every rank,
            ``"warn"`` warns on rank 0 and lets the training continue. If the memory does not suffice for
            `memory_every`, ``"warn"`` uses the directory only.
        access: ``"read"`` only restores, and may run beside a job that writes.
        rng: Also save and restore the random number generators of each rank.

    Raises:
        ConfigError: An argument is wrong.
        DirectoryError: The directory cannot be written to, or is not the same for all ranks.
        DirectoryLockedError: Another job writes there.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | Keep | None = 3,
        *,
        every: int | timedelta | None = None,
        memory_every: Literal["auto"] | int | timedelta | None = None,
        timeout: timedelta = _TIMEOUT,
        on_failure: Literal["raise", "warn"] = "raise",
        access: Literal["write", "read"] = "write",
        rng: bool = True,
    ) -> None:
        from ddpsafe._worker import environment
        from ddpsafe._worker.join.attached import current

        self._directory = _require_absolute(directory)
        _check_arguments(keep, every, memory_every, timeout, on_failure=on_failure, access=access)
        rules = keep if isinstance(keep, Keep) else Keep(newest=keep)
        self._metric = rules.metric
        self._on_failure = on_failure
        self._access = access
        self._rng = rng
        # A limit that a user has chosen may be meant to run out.
        may_give_up = on_failure == "warn" or timeout < _TIMEOUT
        self._ranks = Ranks(current(), self._directory, timeout, may_give_up=may_give_up)
        self._newest: int | None = None
        self._newest_is_ours = False
        self._newest_on_disk: int | None = None  # an older one, if that was restored from memory
        self._versions: dict[str, int] = {}
        self._publisher: _save.Publisher | None = None
        self._pending: _save.Save | None = None
        self._has_drifted = False
        self._copies = HostCopies()
        self._entered = False
        self._closed = False
        self._every = every
        # When the newest save to the directory began, and the newest that is written there.
        self._began_s = self._written_s = time.monotonic()
        self._schedule = None if every is None else schedule_of(every, self._began_s)
        self._memory: StateMemory | None = None
        # A step, and whether the disk is due as well.
        self._memory_due: tuple[int, bool] | None = None
        self._restored: CheckpointInfo | None = None
        if access == "write":
            lock, self._newest = _directory.open_directory(self._ranks, self._directory)
            self._newest_on_disk = self._newest
            # A node that joins later must see the same folder.
            environment.note_checkpoint_folder(str(self._directory))
            if lock is not None:
                # For callers that use neither `with` nor close().
                weakref.finalize(self, lock.release)
                self._publisher = _save.Publisher(directory=self._directory, lock=lock, keep=rules)
        if memory_every is not None:
            self._memory = open_memory(
                self._ranks, self._directory, memory_every, may_give_up=on_failure == "warn"
            )

    @property
    def restored(self) -> CheckpointInfo | None:
        """What `restore` has loaded last, and from where; ``None`` if it found nothing."""
        return self._restored

    @property
    def directory(self) -> Path:
        """Where the checkpoints are."""
        return self._directory

    def latest(self) -> int | None:
        """Return the newest step that this rank sees a complete checkpoint of.

        Raises:
            DirectoryError: The directory cannot be read.
        """
        return next(iter(self.steps()), None)

    def steps(self) -> list[int]:
        """Return the steps that this rank sees complete checkpoints of, newest first.

        Raises:
            DirectoryError: The directory cannot be read.
        """
        return _directory.list_steps(self._directory)

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self._directory / _directory.folder_name(_require_step(step, "path"))

    def info(self, step: int) -> CheckpointInfo:
        """Return what is known about a step's checkpoint, including its metrics and metadata.

        This reads only the manifest. ``ddpsafe checkpoint verify`` checks the files.

        Raises:
            MissingCheckpointError: There is no checkpoint of that step.
            CorruptCheckpointError: Its manifest is damaged.
            NewerFormatError: A newer ddpsafe wrote it.
        """
        steps = self.steps()
        if _require_step(step, "info") not in steps:
            raise _restore.missing_step(self._directory, step, others=steps)
        return read_info(self.path(step))

    def is_due(self, step: int) -> bool:
        """Return whether it is time to save, by `every` or `memory_every`; the same answer on all ranks.

        `save` of that step then puts the state where it is due: into memory, into the directory, or both.

        With a number of steps, a save is due once the step has passed a multiple of that number since
        the last save. With a duration, rank 0 decides by its clock and the other ranks wait for its
        answer. They do so only at a few steps, which rank 0 chooses by the speed of the training.

        Args:
            step: Number of the step, as for `save`. All ranks must pass the same steps.

        Raises:
            ConfigError: The checkpointer was made without `every`.
        """
        if self._schedule is None:
            raise _misuse(
                "is_due() without every=.",
                "it does not know how often to save.",
                "create it with every=1000 steps, or every=timedelta(minutes=10).",
            )
        step = _require_step(step, "is_due")
        saved = self._newest_on_disk
        if saved is None and self._newest is not None:
            saved = 0  # the training continues from memory, and nothing is in the directory yet
        due = is_due(self._schedule, step, saved, self._ranks)
        memory = self._memory
        if (
            memory is not None
            and not memory.is_given_up
            and is_due(memory.schedule, step, memory.newest, self._ranks)
        ):
            self._memory_due = step, due
            return True
        self._memory_due = None
        return due

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        asynchronous: bool = False,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Save the state of the training. Once this returns, no crash loses it.

        After an `is_due` that was True for memory alone, the state goes into memory only, where it is
        kept once this has returned on the first rank of a node; what kills all launchers loses it. If
        the ``with`` block ends before a later state is in the directory, it is put there then.

        Args:
            state: Objects with ``state_dict`` and ``load_state_dict`` (models, optimizers,
                schedulers, scalers, loaders), tensors and plain values, by name. Every rank passes
                the same names. Rank 0's values are saved, except that each rank saves its own
                `PerRank` objects and its own part of distributed tensors.
            step: Number of the step, from 0, never smaller than in the call before. A step that was
                already saved or restored is not saved again; a `CheckpointWarning` reports it if
                the parameters, the metrics or the metadata have changed.
            asynchronous: Return once the state is copied to host memory, and write in the
                background, one save at a time. A failure is reported by the next call, or on
                leaving the ``with`` block, which an asynchronous save requires.
            metrics: Numbers such as a loss, for `Keep` and for `info`; rank 0's are saved.
            metadata: Plain values that JSON can hold, for `info`; rank 0's are saved.

        Raises:
            SaveError: Nothing was saved, on any rank; earlier checkpoints are unharmed.
            StepOrderError: `step` is smaller than the newest.
            UnsafeStateError: The state contains values that could not be loaded again.
            ConfigError: The metrics or the metadata are invalid.
        """
        due, self._memory_due = self._memory_due, None
        in_memory = due is not None and due[0] == step and self._memory is not None
        _require_open(
            closed=self._closed, entered=self._entered, asynchronous=asynchronous or in_memory
        )
        self.wait()
        lost: list[str] = []
        if in_memory and due is not None and self._memory is not None:
            is_kept = False
            with self._tolerating():
                is_kept = self._save_to_memory(self._memory, state, step, metrics, metadata)
            if is_kept and not due[1]:
                return
        with self._tolerating():
            lost = self._begin(state, step, metrics, metadata, asynchronous=asynchronous)
            if not asynchronous:
                self._finish()
        # Only now: where warnings are errors, this raises, and the other ranks would wait for this one.
        if lost:
            warn(
                f"step {step} is already saved and is not saved again. These changes are lost: "
                f"{', '.join(lost)}. Save them under a larger step."
            )

    def _save_to_memory(
        self,
        memory: StateMemory,
        state: Mapping[str, Any],
        step: int,
        metrics: Mapping[str, float] | None,
        metadata: Mapping[str, Any] | None,
    ) -> bool:
        """Save to memory; return whether that was possible."""
        from ddpsafe._worker import environment

        environment.note_saving()

        def take(whole: bool) -> _save.SaveRequest:  # noqa: FBT001 - called once
            unwrap, rng = self._ranks.unwrap, self._rng
            return _save.SaveRequest(
                ranks=self._ranks,
                publisher=None,
                snapshot=take_snapshot(
                    state, unwrap=unwrap, whole=whole, with_rng=rng, is_compared=False
                ),
                step=self._require_next(step),
                metrics=_require_numbers(metrics, ranked_by=self._metric),
                metadata=_require_plain(metadata),
            )

        if not memory.save(take, step, time.monotonic() - self._written_s):
            return False
        environment.note_checkpoint(step, is_new=True)
        return True

    def _begin(
        self,
        state: Mapping[str, Any] | Snapshot,
        step: int,
        metrics: Mapping[str, float] | None,
        metadata: Mapping[str, Any] | None,
        *,
        asynchronous: bool,
    ) -> list[str]:
        """Begin a save; return what is lost because the step was already saved with other values."""
        from ddpsafe._worker import environment

        ranks = self._ranks
        lost: list[str] = []
        # The launcher learns how long steps take; one with a save may take longer.
        environment.note_saving()
        exchange = ranks.begin("save()")
        try:
            step = self._require_next(step)
            self._began_s = time.monotonic()
            if self._schedule is not None:
                self._schedule.begin(step, self._began_s)
            snapshot = (
                state
                if isinstance(state, Snapshot)
                else take_snapshot(
                    state,
                    unwrap=ranks.unwrap,
                    whole=ranks.is_main,
                    with_rng=self._rng,
                    is_compared=ranks.world_size > 1,
                )
            )
            numbers = _require_numbers(metrics, ranked_by=self._metric)
            plain = _require_plain(metadata)
            if asynchronous:
                with explaining(snapshot.replicated):
                    copied = self._copies.copy(
                        {"replicated": snapshot.replicated, "shards": snapshot.shards}
                    )
                    snapshot = replace(
                        snapshot, replicated=copied["replicated"], shards=copied["shards"]
                    )
        except Exception as exc:
            exchange.fail(exc)
            raise
        # Only rank 0 decides whether the step is already saved; the others follow its answer.
        publisher = None if self._is_saved(step) else self._publisher
        if self._publisher is not None and not isinstance(state, Snapshot):
            if publisher is None:
                if self._versions != _versions_of(state):
                    lost.append("the parameters of the models")
                with contextlib.suppress(RestoreError):
                    saved = read_info(self.path(step))
                    lost += [repr(name) for name in state if name not in saved.names]
                    lost += ["the metrics"] if numbers and numbers != saved.metrics else []
                    lost += ["the metadata"] if plain and plain != saved.metadata else []
            else:
                self._versions = _versions_of(state)
        request = _save.SaveRequest(
            ranks=ranks,
            publisher=publisher,
            snapshot=snapshot,
            step=step,
            metrics=numbers,
            metadata=plain,
        )
        self._pending = _save.Save(request, exchange)
        return lost

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.finish()
        self._set_newest(pending.step, is_new=not self._is_saved(pending.step))
        self._written_s = self._began_s
        if self._memory is not None and self._memory.is_given_up:  # until now, a restart needed it
            self._memory.close(frees=True)
            self._memory = None
        if pending.drift and not self._has_drifted:  # said once: some train so on purpose
            self._has_drifted = True
            warn(_DRIFT.format(step=pending.step, models="; ".join(pending.drift)))

    def wait(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            SaveError: The save failed; raised on every rank.
        """
        with self._tolerating():
            self._finish()

    def restore(
        self, state: MutableMapping[str, Any], *, step: int | None = None, strict: bool = True
    ) -> int | None:
        """Load into the objects the newest checkpoint that every rank sees and finds undamaged.

        A `CheckpointWarning` reports each damaged checkpoint, and the one before it is used.
        Checkpoints newer than the restored one are set aside, so that the training can save those
        steps again.

        Args:
            state: Objects by name, as for `save`. Tensors are filled in place; plain values are put
                into the mapping. Names that only the checkpoint has are ignored.
            step: Load the checkpoint of this step, and no other.
            strict: With ``False``, what the checkpoint lacks stays as it is: whole objects, and
                tensors of models that are missing from it or have another shape or dtype there. A
                `CheckpointWarning` lists them.

        Returns:
            The step it was saved at; ``None`` if there is no checkpoint yet.

        Raises:
            CorruptCheckpointError: All checkpoints, or the requested one, are damaged.
            MissingCheckpointError: The ranks have no checkpoint in common, or not the requested one.
            NewerFormatError: A newer ddpsafe wrote it.
            NoSpaceError: A node that replaces a lost one has too little memory for the newest state.
            CheckpointMismatchError: Its names, tensors or optimizers differ, and nothing was changed;
                or an object's own ``load_state_dict`` raised after the objects before it in `state`
                were changed.
        """
        _require_open(closed=self._closed, entered=self._entered, asynchronous=False)
        self.wait()
        check_names(state)
        restored = _restore.restore(
            _restore.RestoreRequest(
                ranks=self._ranks,
                directory=self._directory,
                state=state,
                step=None if step is None else _require_step(step, "restore"),
                strict=strict,
                with_rng=self._rng,
                may_tidy=self._access == "write",
                memory=self._memory,
            )
        )
        self._restored = None
        if restored is None:
            return None
        self._restored = _info_of(restored.manifest, in_memory=restored.in_memory)
        self._set_newest(restored.manifest.step, is_new=False, in_memory=restored.in_memory)
        self._newest_on_disk = restored.on_disk
        if self._every is not None:
            is_on_disk = restored.on_disk == restored.manifest.step
            waited_s: Any = 0.0 if is_on_disk else restored.manifest.metadata["waited_s"]
            now_s = time.monotonic()
            self._schedule = schedule_of(self._every, now_s, waited_s)
            self._began_s = self._written_s = now_s - waited_s
        self._versions = _versions_of(state)
        return restored.manifest.step

    def close(self) -> None:
        """Wait for a save in the background, and unlock the directory for other jobs.

        Raises:
            SaveError: The save in the background failed.
        """
        if not self._closed:
            try:
                self.wait()
                self._publish_memory()
            finally:
                self._release()

    def _publish_memory(self) -> None:
        """Put the newest state into the directory if it is in memory only; all ranks call this."""
        memory = self._memory
        step = None if memory is None else memory.newest
        on_disk = self._newest_on_disk
        if memory is None or step is None or (on_disk is not None and step <= on_disk):
            return
        with self._tolerating():
            exchange = self._ranks.begin("close()")
            exchange.send(Message(facts={}))
            if not self._ranks.leads:
                absence_error = self._ranks.absence_error(
                    functools.partial(SaveError, step=step),
                    f"save step {step} from memory",
                    cause="waits for storage that is slow or does not respond, or hangs.",
                    fix="raise the Checkpointer's timeout if the storage is only slow.",
                )
                exchange.receive(self._ranks.deadline(2 * _save.PUBLISH_TIME), absence_error)
                return
            assert self._publisher is not None  # noqa: S101 - rank 0 of a checkpointer that writes
            with exchange.leading():
                memory.publish(self._publisher, step)

    def _release(self) -> None:
        self._closed = True
        if self._memory is not None:
            self._memory.close()
        self._ranks.close()
        if self._publisher is not None:
            self._publisher.lock.release()

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
        # The other ranks may be dead, so this sends them nothing. But a save that is nearly written
        # is worth a short wait.
        if self._pending is not None:
            with contextlib.suppress(Exception):
                self._pending.abandon(_WAIT_ON_ERROR)
        if not self._closed:
            self._release()

    @contextlib.contextmanager
    def _tolerating(self) -> Iterator[None]:
        try:
            yield
        except SaveError as exc:
            if self._on_failure == "raise":
                raise
            if self._ranks.is_main:
                warn(str(exc))

    def _require_next(self, number: object) -> int:
        step = _require_step(number, "save")
        if self._access == "read":
            raise _misuse(
                "save() with access='read'.",
                "this checkpointer may only read.",
                "create it with access='write'.",
            )
        newest, is_ours, place = self._newest, self._newest_is_ours, str(self._directory)
        in_memory = None if self._memory is None else self._memory.newest
        if in_memory is not None and (newest is None or newest < in_memory):
            newest, is_ours, place = in_memory, True, "memory"
        if newest is not None and step <= newest and not (is_ours and step == newest):
            raise StepOrderError(
                Explanation(
                    f"step {step} is not after step {newest}, the newest checkpoint in {place}.",
                    cause="the training continued from it but started counting again."
                    if is_ours
                    else "restore() was not called, or the directory belongs to another training.",
                    fix="count on from the step that restore() returns; for a new training choose "
                    "an empty directory.",
                ),
                step=step,
                newest=newest,
            )
        return step

    def _set_newest(self, step: int, *, is_new: bool, in_memory: bool = False) -> None:
        from ddpsafe._worker import environment

        self._newest = self._newest_on_disk = step
        self._newest_is_ours = True
        environment.note_checkpoint(step, is_new=is_new, in_memory=in_memory)

    def _is_saved(self, step: int) -> bool:
        return self._newest_is_ours and step == self._newest == self._newest_on_disk


def _versions_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Return torch's count of in-place changes of each parameter of the models."""
    from torch import nn

    return {
        f"{name}.{path}": changes_of(parameter)
        for name, model in state.items()
        if isinstance(model, nn.Module)
        for path, parameter in model.named_parameters()
        # torch does not count the changes of inference tensors, and raises.
        if not parameter.is_inference() and not is_sharded(parameter)
    }


def import_file(
    file: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    step: int,
    *,
    name: str = "model",
    rename: Mapping[str, str] | None = None,
) -> CheckpointInfo:
    """Turn a ``torch.save`` file into a checkpoint that `Checkpointer.restore` can load.

    The file holds a dict of states by name, or the state of one model. The prefixes that DDP and
    torch.compile put before the names of parameters are removed. Nothing in the file is executed.

    Args:
        file: The file.
        directory: Where the checkpoint goes; as for `Checkpointer`.
        step: Its step.
        name: Name of the state if the file holds that of one model.
        rename: New names for those in the file, such as ``{"state_dict": "model"}``.

    Returns:
        What is known about the checkpoint.

    Raises:
        ConfigError: The file is missing, or holds something else; or `rename` has a name
            that is not in the file, or gives two states the same name.
        StepOrderError: The directory has a checkpoint of this step or a later one.
        SaveError: The checkpoint could not be written.
    """
    step = _require_step(step, "import_file")
    tree = _read_foreign(file)
    if tree and all(_is_tensor(value) for value in tree.values()):
        tree = {name: tree}
    named = {old: dict(rename or {}).get(old, old) for old in tree}
    problem = _problem_of_names(named, rename or {})
    if problem:
        raise ConfigError(
            Explanation(
                f"{file} cannot be imported under these names: {problem}.",
                cause=f"the names in the file are {_quoted(tree)}.",
                fix="rename only names that are in the file, each to a different name.",
            )
        )
    tree = {named[old]: _without_wrappers(value) for old, value in tree.items()}
    snapshot = Snapshot(
        replicated=tree,
        own=own_bytes({}, None),
        names=dict.fromkeys(tree, REPLICATED),
        optimizers={
            key: OptimizerFacts(kind="", groups=[])
            for key, value in tree.items()
            if isinstance(value, dict) and {"state", "param_groups"} <= value.keys()
        },
    )
    # A path need not be UTF-8, but the manifest is.
    source = os.fsencode(file).decode(errors="backslashreplace")
    # keep=None: an import removes no other checkpoint.
    with Checkpointer(directory, keep=None) as checkpointer:
        imported = {"imported_from": source}
        try:
            checkpointer._begin(snapshot, step, None, imported, asynchronous=False)  # noqa: SLF001 - the same module
        except StepOrderError as exc:
            raise StepOrderError(
                Explanation(
                    exc.explanation.what,
                    cause="an import becomes the newest checkpoint, which a training continues from.",
                    fix=f"import it as a step after {exc.newest}, or into an empty directory.",
                ),
                step=step,
                newest=exc.newest,
            ) from None
        checkpointer._finish()  # noqa: SLF001 - the same module
        return checkpointer.info(step)


def _problem_of_names(named: Mapping[str, object], rename: Mapping[str, object]) -> str:
    """Return why the states of a file cannot have these names; empty if they can."""
    unknown = [old for old in rename if old not in named]
    if unknown:
        return f"it has no {_quoted(unknown)} to rename"
    for new in named.values():
        same = [old for old, other in named.items() if other == new]
        if not isinstance(new, str) or not new:
            return f"{_quoted(same)} would be called {new!r}"
        if len(same) > 1:
            return f"{_quoted(same)} would both be called {new!r}"
    return ""


def _quoted(names: Iterable[object]) -> str:
    quoted = [repr(name) for name in names]
    return ", ".join(quoted[:_MAX_LISTED]) + (", …" if len(quoted) > _MAX_LISTED else "")


def _read_foreign(file: str | os.PathLike[str]) -> dict[Any, Any]:
    """Load a file that ddpsafe did not write, without executing anything in it.

    Raises:
        ConfigError: It is missing, not written by torch.save, or holds something else.
    """
    import torch

    fix = "pass a file that torch.save wrote."
    try:
        tree = torch.load(file, map_location="cpu", weights_only=True)
        if isinstance(tree, dict) and tree:
            for key, value in tree.items():
                require_finite(value, str(key))
            return tree
        problem = f"it holds a value of type {type(tree).__name__}"
        problem = "it holds an empty dict" if isinstance(tree, dict) else problem
        fix = "save {name: state_dict} with torch.save, and import that."
    except OSError as exc:
        problem = exc.strerror or str(exc)
    except Exception as exc:  # noqa: BLE001 - a foreign file can make torch raise anything
        if not zipfile.is_zipfile(file):
            problem = "torch.save did not write it, or it is incomplete"
        elif isinstance(exc, pickle.UnpicklingError):
            problem = "weights_only=True does not allow what it holds"
            fix = "if you trust it, load it yourself and save {name: state_dict} again with torch.save."
            with contextlib.suppress(Exception):
                refused = torch.serialization.get_unsafe_globals_in_checkpoint(file)
                problem += f": {_quoted(refused)}"
        else:
            problem = (str(exc).splitlines() or [type(exc).__name__])[0]
    raise ConfigError(Explanation(f"{file} cannot be imported: {problem}.", fix=fix))


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _without_wrappers(state: Any) -> Any:
    """Return a model's state without the prefixes that DDP and torch.compile put before its names."""
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        return state
    is_model = bool(state) and all(map(_is_tensor, state.values()))
    if is_model and all(key.removeprefix("_orig_mod.").startswith("module.") for key in state):
        state = renamed(
            state, {key: key.removeprefix("_orig_mod.").removeprefix("module.") for key in state}
        )
    return renamed(state, plain_names(state)) if is_model else state


def read_info(folder: Path) -> CheckpointInfo:
    """Return what is known about a checkpoint without loading it.

    Raises:
        RestoreError: Its manifest is damaged, or has a newer format.
    """
    try:
        manifest = read_manifest(folder)
    except (DamagedFileError, OSError) as exc:
        raise CorruptCheckpointError(
            Explanation(
                f"The checkpoint {folder} is damaged: {exc}.",
                cause="the disk is failing, or the files were changed or only partly copied.",
                fix="restore another step.",
            ),
            problems=(str(exc),),
        ) from exc
    return _info_of(manifest, in_memory=False)


def _info_of(manifest: Manifest, *, in_memory: bool) -> CheckpointInfo:
    return CheckpointInfo(
        step=manifest.step,
        saved_at=manifest.saved_at,
        world_size=manifest.world_size,
        size_bytes=sum(facts.size_bytes for facts in manifest.files.values()),
        names=tuple(manifest.names),
        metrics=manifest.metrics,
        metadata=user_metadata(manifest) if in_memory else manifest.metadata,
        ddpsafe=manifest.ddpsafe,
        torch=manifest.torch,
        source="memory" if in_memory else "disk",
    )


# Validation of the arguments of a `Checkpointer` and its methods, before anything happens.


def _require_absolute(directory: object) -> Path:
    """Return the directory as a path.

    Raises:
        ConfigError: It is relative, or not a path.
    """
    from pydantic import TypeAdapter, ValidationError

    from ddpsafe._config import AbsolutePath

    if "://" in str(directory):
        raise _misuse(
            f"{directory!r} is an address, not a directory.",
            "checkpoints need a file system that can rename.",
            "write to a directory, and copy its contents to other storage.",
        )
    try:
        path: Path = TypeAdapter(AbsolutePath).validate_python(directory)
    except ValidationError as exc:
        context = exc.errors()[0].get("ctx", {})
        raise ConfigError(
            Explanation(
                f"Checkpointer({directory!r}): the directory cannot be used.",
                cause=f"{context.get('why', exc)}.",
                fix=f"write {context.get('write', 'an absolute path')}.",
            )
        ) from None
    return path


def _misuse(what: str, cause: str, fix: str) -> ConfigError:
    """Make the error for a wrong call."""
    return ConfigError(Explanation(f"Checkpointer: {what}", cause=cause, fix=fix))


def _check_arguments(
    keep: object,
    every: object,
    memory_every: object,
    timeout: object,
    *,
    on_failure: str,
    access: str,
) -> None:
    """Refuse invalid arguments.

    Raises:
        ConfigError: An argument is invalid.
    """
    if keep is not None and not isinstance(keep, Keep) and not is_whole(keep, 1):
        raise _misuse(
            f"keep={keep!r}.",
            "it must be a number of checkpoints.",
            "write keep=1 or more, or None.",
        )
    for name, value, auto in (("every", every, ""), ("memory_every", memory_every, '"auto", ')):
        is_duration = isinstance(value, timedelta) and value > timedelta(0)
        is_auto = bool(auto) and value == "auto"
        if value is not None and not is_duration and not is_auto and not is_whole(value, 1):
            raise _misuse(
                f"{name}={value!r}.",
                f"it must be {auto}a number of steps, or a duration.",
                f"write {name}=1000, or {name}=timedelta(minutes=10).",
            )
    if memory_every is not None and (every is None or access == "read"):
        raise _misuse(
            f"memory_every={memory_every!r} {'without every=' if every is None else 'with access=read'}.",
            "states in memory are lost with the job, so they also have to go to the directory at times.",
            "pass every= as well, such as every=timedelta(minutes=10), and access='write'.",
        )
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise _misuse(
            f"timeout={timeout!r}.",
            "it must be a duration longer than zero.",
            "write timeout=timedelta(minutes=30).",
        )
    for name, value, choices in (
        ("on_failure", on_failure, ("raise", "warn")),
        ("access", access, ("write", "read")),
    ):
        if value not in choices:
            raise _misuse(
                f"{name}={value!r}.",
                "that is not one of the choices.",
                f"write {' or '.join(f'{name}={choice!r}' for choice in choices)}.",
            )


def _require_step(step: object, call: str) -> int:
    """Return a step of any integer type as an int.

    Raises:
        ConfigError: It is not an integer, or out of range.
    """
    # Without contextlib.suppress: is_due() is called after each step, and half of its time was that.
    try:
        whole = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        whole = -1
    # The names of folders have at most 18 digits.
    if not 0 <= whole < 10**18:
        raise _misuse(
            f"{call}(step={step!r}).",
            "a step is an integer from 0 to 10**18 - 1.",
            "pass the number of steps done so far."
            if call in ("save", "is_due", "import_file")
            else "pass a number that restore() or steps() returned.",
        )
    return whole


def _require_open(*, closed: bool, entered: bool, asynchronous: bool) -> None:
    """Refuse a call after close(), or an asynchronous save outside of a ``with`` block.

    Raises:
        ConfigError: The call is one of these.
    """
    if closed:
        raise _misuse(
            "this one is closed.",
            "its with block has ended, or close() was called.",
            "create another Checkpointer, or call this one before it is closed.",
        )
    if asynchronous and not entered:
        raise _misuse(
            "save(asynchronous=True), or to memory, outside of its with block.",
            "without one, the training may end before its last save is in the directory.",
            "write: with Checkpointer(…) as checkpointer:",
        )


def _require_numbers(metrics: object, *, ranked_by: str | None) -> dict[str, float | None]:
    if metrics is None:
        return {}
    numbers: dict[str, float | None] = {}
    try:
        floats = {name: float(value) for name, value in dict(metrics).items()}  # type: ignore[call-overload]  # raises for others
        # JSON has neither NaN nor infinity.
        numbers = {name: value if math.isfinite(value) else None for name, value in floats.items()}
        cause = "" if all(map(is_text, floats)) else "a name is not a string that UTF-8 can encode."
    except Exception as exc:  # noqa: BLE001 - a user's type may raise anything
        cause = f"they are not a mapping of names to numbers: {exc}"
    if cause:
        raise _misuse(f"save(metrics={metrics!r}).", cause, 'write metrics={"loss": 0.3}.')
    if numbers and ranked_by is not None and ranked_by not in numbers:
        raise _misuse(
            f"save(metrics={metrics!r}).",
            f"Keep(metric={ranked_by!r}) is not among them.",
            f'write metrics={{"{ranked_by}": …}}, or another name in Keep(metric=).',
        )
    return numbers


def _require_plain(metadata: object) -> dict[str, Any]:
    if metadata is None:
        return {}
    try:
        plain: dict[str, Any] = from_json(dict(metadata))  # type: ignore[call-overload]  # raises for others
    except (TypeError, ValueError, RecursionError) as exc:
        raise _misuse(
            f"save(metadata=…) of {type(metadata).__name__}.",
            f"it is not a mapping that JSON can hold: {exc}",
            "pass a dict of strings, numbers, lists and dicts; the keys must be strings.",
        ) from None
    return plain
