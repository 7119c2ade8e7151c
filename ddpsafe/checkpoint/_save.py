"""A save: every rank takes part, rank 0 publishes the checkpoint and announces the result.

The sequence:

1. Every rank sends rank 0 the step, the names, and its own part as bytes.
2. Rank 0 checks that all ranks agree, and creates a folder.
3. If there are distributed tensors, rank 0 announces the folder. Each rank writes a file of its own
   and sends rank 0 a description of it.
4. Rank 0 writes the rest and renames the folder into place.

An asynchronous save is the same sequence, waited for later.
"""

from __future__ import annotations

import errno
import functools
import threading
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._clock import BoundedCall
from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._job.agreement import Message
from ddpsafe.checkpoint import _directory, _sharded
from ddpsafe.checkpoint._checksums import DamagedFileError
from ddpsafe.checkpoint._format import (
    NAME,
    RANKS,
    STATE,
    FileFacts,
    Manifest,
    ShardedTensor,
    new_file,
    parse_manifest,
)
from ddpsafe.checkpoint._ranks import explain_absence
from ddpsafe.checkpoint._replicas import drift_of
from ddpsafe.checkpoint._state import explaining
from ddpsafe.checkpoint._trees import size_bytes
from ddpsafe.checkpoint.errors import (
    CheckpointError,
    NoSpaceError,
    SaveError,
    SaveTimeoutError,
    warn,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpsafe._clock import Deadline
    from ddpsafe._job.agreement import Absence, Exchange
    from ddpsafe.checkpoint._lock import DirectoryLock
    from ddpsafe.checkpoint._ranks import Ranks
    from ddpsafe.checkpoint._slots import Slot
    from ddpsafe.checkpoint._state import Snapshot

# At the deadline a thread may already be publishing, which takes one rename and a few fsyncs.
PUBLISH_TIME: Final = timedelta(seconds=1)

_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_MARGIN_BYTES: Final = 2**20  # room for the manifest, which is not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """Where rank 0 publishes checkpoints.

    Attributes:
        lock: This job's lock on the directory.
        metrics: Metrics of existing checkpoints, as far as they have been read.
        not_removed: Why old checkpoints could not be removed, since the last warning of it.
    """

    directory: Path
    lock: DirectoryLock
    keep: _directory.Keep
    metrics: _directory.Metrics = field(default_factory=dict)
    not_removed: list[str] = field(default_factory=list)

    def note_published(self, step: int, metrics: dict[str, float | None]) -> None:
        """Take in a new checkpoint, and remove those that it replaces."""
        self.metrics[step] = metrics
        self.not_removed[:] = _directory.prune(self.directory, self.keep, self.metrics)

    def warn_of_not_removed(self) -> None:
        """Warn that the disk will fill up, once the save itself has succeeded."""
        if self.not_removed:
            warn(
                f"{len(self.not_removed)} checkpoints beyond {self.keep} could not be removed "
                f"from {self.directory} and will fill up the disk; remove them by hand: "
                + "; ".join(self.not_removed[:4])
            )
            self.not_removed.clear()

    def require_lock(self, step: int) -> None:
        """Refuse to publish into a directory that has vanished or that another job has taken over.

        Raises:
            SaveError: The lock is lost.
        """
        lost = self.lock.find_loss()
        if lost is None:
            return
        raise SaveError(
            Explanation(
                f"The checkpoint of step {step} was not saved: this job has lost its lock on "
                f"{self.directory}.",
                cause=lost,
                fix="if another job writes there, end one of the two; if the directory has vanished, "
                "check its mount. Then start this job again.",
            ),
            step=step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """The arguments of one save, on one rank.

    Attributes:
        publisher: Publishes the checkpoint on rank 0; ``None`` on the other ranks, and if the step is
            already saved.
    """

    ranks: Ranks
    publisher: Publisher | None
    snapshot: Snapshot
    step: int
    metrics: dict[str, float | None]
    metadata: dict[str, Any]


class _GivenUpError(Exception):
    """The wait for this save ended, so it must not be published."""


class Writing:
    """What a thread writes to the directory: storage that does not respond would block the rank for ever.

    This rank waits until `deadline`, and explains errors of the file system if it is given the directory.
    """

    def __init__(self, ranks: Ranks, step: int, deadline: Deadline, directory: Path | None) -> None:
        self._ranks, self._step, self._deadline = ranks, step, deadline
        self._directory = directory
        self._given_up, self._is_published = threading.Event(), False
        self._call: BoundedCall[object] | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Call a function in the thread."""
        self._call = BoundedCall(work, name=f"ddpsafe-save-{self._step}")

    def publish(self, folder: Path, step: int) -> None:
        """Make a folder the checkpoint of a step, in the thread, unless the wait for it has ended."""
        if not _directory.publish(folder, step, is_wanted=lambda: not self._given_up.is_set()):
            raise _GivenUpError
        self._is_published = step == self._step  # memory may have only an older one

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait for the thread, if it was started, until the deadline or for another limit.

        Raises:
            CheckpointError: It failed or took too long; nothing is published later.
        """
        call = self._call
        if call is None:
            return
        limit_s = self._deadline.remaining_s() if limit is None else limit.total_seconds()
        try:
            ended = call.wait(limit_s)
        except BaseException:  # Ctrl-C: an interrupted save must not be published later
            self._given_up.set()
            raise
        if not ended:
            self._given_up.set()
            # A thread that is already publishing may still finish.
            if not call.wait(PUBLISH_TIME.total_seconds()):
                if self._is_published:  # it removes old checkpoints
                    return
                raise self._timeout_error()
        try:
            call.result()
        except _GivenUpError:
            raise self._timeout_error() from None
        except (CheckpointError, ConfigError):
            raise
        except Exception as exc:
            folder = self._directory
            error = exc if folder is None else explain(exc, folder, self._step)
            if error is exc:
                raise
            raise error from exc

    def _timeout_error(self) -> SaveTimeoutError:
        waited_s = self._deadline.waited_s()
        return SaveTimeoutError(
            Explanation(
                f"{self._ranks} could not write the checkpoint of step {self._step} in "
                f"{waited_s:.1f} s.",
                cause="the storage is slow or does not respond.",
                fix="check that storage; raise the Checkpointer's timeout if it is only slow.",
            ),
            step=self._step,
            missing_ranks=(self._ranks.rank,),
            waited_s=waited_s,
            rank=self._ranks.rank,
        )


class Save:
    """This rank's part of a save that has begun, to be sent in the exchange `first`.

    Attributes:
        drift: On rank 0, a line for each model of which the ranks have different copies.
    """

    def __init__(self, request: SaveRequest, first: Exchange) -> None:
        self._request = request
        self._ranks = request.ranks
        self.step = request.step
        self.drift: list[str] = []
        self._deadline = request.ranks.deadline()
        directory = None if request.publisher is None else request.publisher.directory
        self._writing = Writing(request.ranks, self.step, self._deadline, directory)
        # The exchange in which rank 0 answers next. With shards, the answer to the first exchange is
        # the folder and the answer to the second is the result; without, the first has the result.
        self._answering = first
        snapshot = request.snapshot
        first.send(
            Message(
                facts={
                    "step": request.step,
                    "names": snapshot.names,
                    "shard_bytes": _sharded.bytes_of(snapshot.shards),
                    "digests": snapshot.digests,
                },
                data=snapshot.own,
            )
        )
        self._second = request.ranks.begin("save()") if snapshot.sharded else None
        if request.ranks.is_main:
            self._writing.start(self._lead)
        elif self._second is not None:
            self._writing.start(self._write_own_shards)

    def _gather(self, exchange: Exchange) -> dict[int, Message]:
        return exchange.gather(self._deadline, self._absence_error)

    def _lead(self) -> None:
        """Do rank 0's part: check, write, publish, and remove old checkpoints."""
        messages = self._gather(self._answering)
        require_same(messages)
        publisher = self._request.publisher
        if publisher is None:  # already saved
            return
        self.drift = drift_of({rank: sent.facts["digests"] for rank, sent in messages.items()})
        publisher.require_lock(self.step)
        parts = [messages[rank].data for rank in sorted(messages)]
        needed = size_bytes(self._request.snapshot.replicated) + sum(map(len, parts))
        # What the other ranks will write counts too, since none of them has begun to write.
        needed += sum(message.facts["shard_bytes"] for message in messages.values())
        needed += needed // 100 + _MARGIN_BYTES
        directory = publisher.directory
        free = _directory.free_bytes(directory)
        if free < needed:
            cause = f"it needs about {needed / 1e6:.1f} MB, but only {free / 1e6:.1f} MB are free."
            raise _no_space(directory, self.step, needed, free, cause)
        with _directory.unfinished(directory, self.step) as folder:
            files, shards = self._collect_shards(folder)
            write_files(folder, self._request, parts, files, shards)
            # A job that was suspended while it wrote may have lost the lock meanwhile.
            publisher.require_lock(self.step)
            self._writing.publish(folder, self.step)
        publisher.note_published(self.step, self._request.metrics)

    def _collect_shards(
        self, folder: Path
    ) -> tuple[dict[str, FileFacts], dict[str, ShardedTensor]]:
        """Let every rank write its shards into the folder; return what the manifest says of them."""
        if self._second is None:
            return {}, {}
        self._answering.announce({"folder": str(folder)})
        self._answering = self._second
        own = _sharded.write_shards(self._request.snapshot.shards, folder, 0)
        self._second.send(Message(facts=own))
        messages = self._gather(self._second)
        written = [messages[rank].facts for rank in sorted(messages)]
        try:
            return _sharded.index_of(self._request.snapshot.sharded, written)
        except (ValueError, KeyError) as exc:
            raise SaveError(
                Explanation(
                    f"The checkpoint of step {self.step} was not saved: the parts that the ranks "
                    "wrote do not make up the distributed tensors.",
                    cause="the ranks have different models, or shard them differently.",
                    fix="build the same model on the same mesh on every rank.",
                    details=str(exc).splitlines()[:4],
                ),
                step=self.step,
            ) from exc

    def _write_own_shards(self) -> None:
        """Write this rank's distributed tensors, on another rank than 0, into rank 0's folder."""
        assert self._second is not None  # noqa: S101 - there are distributed tensors
        answer = self._answering.receive(self._deadline, self._absence_error)
        if "folder" not in answer:  # already saved
            return
        self._answering = self._second
        folder = Path(answer["folder"])
        try:
            written = _sharded.write_shards(self._request.snapshot.shards, folder, self._ranks.rank)
        except Exception as exc:
            error = explain(exc, folder.parent, self.step)
            # Rank 0 waits for what this rank wrote; it announces the error to all.
            self._second.fail(error)
            raise error from exc
        self._second.send(Message(facts=written))

    def finish(self) -> None:
        """Wait for the save to end; rank 0 then announces the result to the others.

        Raises:
            CheckpointError: The save failed or took too long. It will not be published later.
        """
        if not self._ranks.is_main:
            self._writing.wait()
            # If the step is already saved, `_write_own_shards` has received this answer instead of
            # a folder.
            if self._second is None or self._answering is self._second:
                # Rank 0 may succeed in its last moment.
                deadline = self._ranks.deadline(2 * PUBLISH_TIME)
                self._answering.receive(deadline, self._absence_error)
            return
        try:
            self._writing.wait()
        except BaseException as exc:  # Ctrl-C too: the others wait for an answer
            self._answering.announce(error=exc)
            raise
        publisher = self._request.publisher
        self._answering.announce({"saved": publisher is not None})
        if publisher is not None:
            publisher.warn_of_not_removed()

    def abandon(self, limit: timedelta) -> None:
        """Give a save that is nearly written a moment to end, without sending the others anything."""
        if self._request.publisher is not None:
            self._writing.wait(limit)

    def _absence_error(self, absence: Absence) -> SaveError:
        only_writer_missing = absence.ranks == [0] and not self._ranks.is_main
        explanation = explain_absence(
            absence,
            self._ranks,
            f"save step {self.step}",
            cause="waits for storage that is slow or does not respond, is stopped, or hangs."
            if only_writer_missing
            else "did not call save(), hangs, or is much slower.",
            fix="let every rank call save() at the same step; raise the Checkpointer's timeout "
            "if the storage is only slow.",
        )
        if absence.lost:
            error = SaveError(explanation, step=self.step, rank=absence.ranks[0])
            error.origin = absence.origin
            return error
        return SaveTimeoutError(
            explanation,
            step=self.step,
            missing_ranks=tuple(absence.ranks),
            waited_s=absence.waited_s,
        )


def require_same(messages: dict[int, Message]) -> None:
    """Refuse a save of different steps or names.

    Raises:
        ConfigError: A rank saves others than rank 0.
    """
    first = messages[0].facts
    for other, answer in messages.items():
        for key in ("step", "names"):
            if answer.facts.get(key) != first.get(key):
                raise ConfigError(
                    Explanation(
                        f"rank {other} saves {key} {answer.facts.get(key)!r}, but rank 0 saves "
                        f"{first.get(key)!r}.",
                        cause="the ranks count their steps differently, or build different states.",
                        fix="call save() on every rank with the same step and the same names.",
                    ),
                    rank=other,
                )


def _no_space(directory: Path, step: int, needed: int, free: int, cause: str) -> NoSpaceError:
    return NoSpaceError(
        Explanation(
            f"The checkpoint of step {step} does not fit into {directory}; earlier ones are unharmed.",
            cause=cause,
            fix="free some space, lower keep, or choose a directory on a larger disk.",
        ),
        step=step,
        needed_bytes=needed,
        free_bytes=free,
    )


def write_files(
    folder: Path | Slot,
    request: SaveRequest,
    parts: list[bytes],
    files: dict[str, FileFacts],
    shards: dict[str, ShardedTensor],
) -> None:
    """Write rank 0's files into a new folder: the state, the parts of the ranks, the manifest."""
    import torch

    files = dict(files)
    with new_file(folder, STATE) as writer, explaining(request.snapshot.replicated):
        torch.save(request.snapshot.replicated, writer)  # type: ignore[arg-type]  # it only calls write()
    files[STATE] = FileFacts(size_bytes=writer.size, crc32=writer.crc32)
    places: list[tuple[int, int]] = []
    with new_file(folder, RANKS) as writer:
        for data in parts:
            places.append((writer.size, len(data)))
            writer.write(data)
    files[RANKS] = FileFacts(size_bytes=writer.size, crc32=writer.crc32)
    manifest = Manifest(
        step=request.step,
        world_size=len(parts),
        saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ddpsafe=_version_of("ddpsafe"),
        torch=str(torch.__version__),
        names=request.snapshot.names,
        optimizers=request.snapshot.optimizers,
        files=files,
        ranks=places,
        shards=shards,
        metrics=request.metrics,
        metadata=request.metadata,
    )
    data = manifest.dumps()
    try:  # a manifest that no restore would accept must fail the save
        parse_manifest(data, folder)
    except DamagedFileError as exc:
        raise SaveError(
            Explanation(
                f"The checkpoint of step {request.step} was not saved: its manifest could not be "
                "read back.",
                cause=str(exc),
                fix="save fewer or simpler names, metrics and metadata.",
            ),
            step=request.step,
        ) from exc
    with new_file(folder, NAME) as writer:
        writer.write(data)


@functools.cache
def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def explain(exc: Exception, directory: Path, step: int) -> Exception:
    """Turn an error of the file system into a `SaveError`; return other errors as they are."""
    if not isinstance(exc, OSError) or isinstance(exc, SaveError):
        return exc
    if exc.errno in _DISK_FULL:
        try:
            free = _directory.free_bytes(directory)
        except OSError:
            free = 0
        cause = _directory.find_cause(directory, exc)
        # It is not known how much is needed, only that it is more than is free.
        return _no_space(directory, step, free + 1, free, cause)
    if isinstance(exc, FileExistsError):
        return SaveError(
            Explanation(
                f"Step {step} was not saved: {exc.filename} already exists.",
                cause="a save of this step was interrupted when it was nearly done, or the folder "
                "was put there by hand.",
                fix="continue and save the next step; or remove the folder and save this one again.",
            ),
            step=step,
        )
    return SaveError(
        Explanation(
            f"The checkpoint of step {step} could not be written to {directory}: {exc}.",
            cause=_directory.find_cause(directory, exc),
            fix="repair the directory; the training can continue and save again.",
        ),
        step=step,
    )
