"""A save: every rank takes part, rank 0 publishes, and all learn how it ended.

In order: every rank sends rank 0 what it saves, and its own part as bytes. Rank 0 makes sure that all
mean the same, and makes a folder. Where there are distributed tensors, it sends the others the
folder, each rank writes a file of its own, and sends what it wrote. Rank 0 writes the rest, and renames
the folder into place. Threads write, so that a disk that does not answer
holds no rank, and an asynchronous save is the same sequence, waited for later.
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
from ddpsafe._errors import Explanation
from ddpsafe.checkpoint import _directory, _sharded
from ddpsafe.checkpoint._checksums import ChecksumWriter, DamagedFileError
from ddpsafe.checkpoint._exchange import Message
from ddpsafe.checkpoint._format import (
    NAME,
    RANKS,
    STATE,
    FileFacts,
    Manifest,
    ShardedTensor,
    parse_manifest,
)
from ddpsafe.checkpoint._state import explaining
from ddpsafe.checkpoint._trees import size_bytes
from ddpsafe.checkpoint.errors import (
    CheckpointConfigError,
    CheckpointError,
    NoSpaceError,
    SaveError,
    SaveTimeoutError,
    warn,
)

if TYPE_CHECKING:
    from ddpsafe.checkpoint._exchange import Absence, Exchange, Ranks
    from ddpsafe.checkpoint._lock import DirectoryLock
    from ddpsafe.checkpoint._state import Snapshot

# A thread that is past its deadline may still be at its last step.
_LAST_STEP: Final = timedelta(seconds=1)

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_MARGIN_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """Where rank 0 publishes checkpoints.

    Attributes:
        directory: The directory.
        lock: The right to write there.
        keep: Which checkpoints stay.
        metrics: Those that are known of the checkpoints that are there.
    """

    directory: Path
    lock: DirectoryLock
    keep: _directory.Keep
    metrics: _directory.Metrics = field(default_factory=dict)

    def require_lock(self, step: int) -> None:
        """Refuse to publish into a directory that has vanished or belongs to another job now.

        Raises:
            SaveError: It does.
        """
        lost = self.lock.find_loss()
        if lost is None:
            return
        raise SaveError(
            Explanation(
                f"The checkpoint of step {step} was not saved: this job's lock on "
                f"{self.directory} is gone.",
                cause=lost,
                fix="if another job writes there, end one of the two; if the directory has vanished, look at "
                "its mount. Then start this job again.",
            ),
            step=step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """One save, as a rank was asked for it.

    Attributes:
        ranks: The ranks.
        place: Where it goes, on rank 0; ``None`` on the others, and where the step is saved already.
        snapshot: What this rank saves.
        step: The step.
        metrics: Numbers that go with it.
        metadata: Plain values that go with it.
    """

    ranks: Ranks
    place: Publisher | None
    snapshot: Snapshot
    step: int
    metrics: dict[str, float | None]
    metadata: dict[str, Any]


class _GivenUpError(Exception):
    """No rank waits for this save any more."""


class Save:
    """This rank's part of a save that has begun.

    Args:
        request: What is saved.
        first: The exchange in which this rank sends what it saves; it has not sent yet.
    """

    def __init__(self, request: SaveRequest, first: Exchange) -> None:
        self._request = request
        self._ranks = request.ranks
        self._step = request.step
        self._deadline = request.ranks.deadline()
        self._given_up = threading.Event()
        self._not_removed: list[str] = []
        # The exchange that rank 0's answer goes to next: the first gives the folder, if there are
        # shards; the second, or else the first, tells how the save ended.
        self._answering = first
        snapshot = request.snapshot
        first.send(
            Message(
                facts={
                    "step": request.step,
                    "names": snapshot.names,
                    "shard_bytes": _sharded.bytes_of(snapshot.shards),
                },
                data=snapshot.own,
            )
        )
        self._second = request.ranks.begin("save()") if snapshot.sharded else None
        self._call: BoundedCall[object] | None = None
        if request.ranks.is_main or self._second is not None:
            work = self._lead if request.ranks.is_main else self._write_own_shards
            self._call = BoundedCall(work, name=f"ddpsafe-save-{request.step}")

    def _gather(self, exchange: Exchange) -> dict[int, Message]:
        return exchange.gather(self._deadline, self._absent)

    def _lead(self) -> None:
        """Rank 0's part."""
        messages = self._gather(self._answering)
        first = messages[0].facts
        for other, answer in messages.items():
            for key in ("step", "names"):
                if answer.facts.get(key) != first.get(key):
                    raise CheckpointConfigError(
                        Explanation(
                            f"rank {other} saves {key} {answer.facts.get(key)!r}, and rank 0 "
                            f"{first.get(key)!r}.",
                            cause="the ranks count their steps differently, or build other states.",
                            fix="call save() on every rank with the same step and the same names.",
                        ),
                        rank=other,
                    )
        place = self._request.place
        if place is None:  # saved already
            return
        place.require_lock(self._step)
        parts = [messages[rank].data for rank in sorted(messages)]
        needed = size_bytes(self._request.snapshot.replicated) + sum(map(len, parts))
        needed += sum(message.facts["shard_bytes"] for message in messages.values())
        needed += needed // 100 + _MARGIN_BYTES
        free = _directory.free_bytes(place.directory)
        if free < needed:
            cause = f"it takes about {needed / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free."
            raise _no_space(place.directory, self._step, needed, free, cause)
        with _directory.unfinished(place.directory, self._step) as folder:
            files, shards = self._lead_shards(folder)
            _write_files(folder, self._request, parts, files, shards)
            if self._given_up.is_set():
                raise _GivenUpError
            place.require_lock(self._step)
            _directory.publish(folder, self._step)
        place.metrics[self._step] = self._request.metrics
        self._not_removed = _directory.prune(place.directory, place.keep, place.metrics)

    def _lead_shards(self, folder: Path) -> tuple[dict[str, FileFacts], dict[str, ShardedTensor]]:
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
                    f"The checkpoint of step {self._step} was not saved: what the ranks wrote does "
                    "not make up the distributed tensors.",
                    cause="the ranks have different models, or shard them otherwise.",
                    fix="build the same model on the same mesh on every rank.",
                    details=str(exc).splitlines()[:4],
                ),
                step=self._step,
            ) from exc

    def _write_own_shards(self) -> None:
        """Write another rank's distributed tensors to where rank 0 says."""
        assert self._second is not None  # noqa: S101 - there are such
        answer = self._answering.receive(self._deadline, self._absent)
        if "folder" not in answer:  # saved already
            return
        self._answering = self._second
        folder = Path(answer["folder"])
        try:
            written = _sharded.write_shards(self._request.snapshot.shards, folder, self._ranks.rank)
        except Exception as exc:
            error = _explain(exc, folder.parent, self._step)
            self._second.fail(error)
            raise error from exc
        self._second.send(Message(facts=written))

    def finish(self) -> None:
        """Wait for the end of it, and on rank 0 tell the others.

        Raises:
            CheckpointError: It failed, or took too long; it is not saved then and never will be.
        """
        if not self._ranks.is_main:
            if self._call is not None:
                self._await(self._deadline.remaining_s())
            if self._second is None or self._answering is self._second:
                self._answering.receive(self._ranks.deadline(), self._absent)
            return
        try:
            self._await(self._deadline.remaining_s())
        except BaseException as exc:
            self._answering.announce(error=exc)
            raise
        self._answering.announce({"saved": self._request.place is not None})
        # The disk will fill up; said once the save is known to be good.
        if self._not_removed and self._request.place is not None:
            place = self._request.place
            warn(
                f"{len(self._not_removed)} checkpoints more than {place.keep} stay in "
                f"{place.directory}, as they could not be removed; remove them by hand: "
                + "; ".join(self._not_removed[:4])
            )

    def abandon(self, limit: timedelta) -> None:
        """Give what is nearly written a moment to end, and tell no other rank: they may be dead."""
        if self._request.place is not None:
            self._await(limit.total_seconds())

    def _await(self, limit_s: float) -> None:
        assert self._call is not None  # noqa: S101 - begun on ranks that write
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
        except CheckpointError:
            raise
        except Exception as exc:
            place = self._request.place
            error = exc if place is None else _explain(exc, place.directory, self._step)
            if error is exc:
                raise
            raise error from exc

    def _too_slow(self) -> SaveTimeoutError:
        waited_s = self._deadline.waited_s()
        return SaveTimeoutError(
            Explanation(
                f"{self._ranks} could not write the checkpoint of step {self._step} in "
                f"{waited_s:.1f} s.",
                cause="the storage is slow or does not answer.",
                fix="look at that storage; raise the Checkpointer's timeout if it is only slow.",
            ),
            step=self._step,
            missing_ranks=[self._ranks.rank],
            waited_s=waited_s,
            rank=self._ranks.rank,
        )

    def _absent(self, absence: Absence) -> SaveError:
        writes = absence.ranks == [0] and not self._ranks.is_main
        explanation = absence.explain(
            self._ranks,
            f"save step {self._step}",
            cause="waits for storage that is slow or does not answer, is stopped, or hangs."
            if writes
            else "did not call save(), hangs, or is much slower.",
            fix="let every rank call save() at the same step; raise the Checkpointer's timeout "
            "if the storage is only slow.",
        )
        if absence.lost:
            error = SaveError(explanation, step=self._step, rank=absence.ranks[0])
            error.origin = absence.origin
            return error
        return SaveTimeoutError(
            explanation,
            step=self._step,
            missing_ranks=absence.ranks,
            waited_s=absence.waited_s,
        )


def _no_space(directory: Path, step: int, needed: int, free: int, cause: str) -> NoSpaceError:
    return NoSpaceError(
        Explanation(
            f"The checkpoint of step {step} does not fit into {directory}; those from before are "
            "unharmed.",
            cause=cause,
            fix="free some space, lower keep, or choose a directory on a larger disk.",
        ),
        step=step,
        needed_bytes=needed,
        free_bytes=free,
    )


def _write_files(
    folder: Path,
    request: SaveRequest,
    parts: list[bytes],
    files: dict[str, FileFacts],
    shards: dict[str, ShardedTensor],
) -> None:
    """Write what rank 0 writes into a new folder: the state, the parts of the ranks, the manifest."""
    import torch

    files = dict(files)
    with ChecksumWriter(folder / STATE) as writer, explaining(request.snapshot.replicated):
        torch.save(request.snapshot.replicated, writer)  # type: ignore[arg-type]  # write() is all it needs
    files[STATE] = FileFacts(size_bytes=writer.size, crc32=writer.crc32)
    places: list[tuple[int, int]] = []
    with ChecksumWriter(folder / RANKS) as writer:
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
    try:
        parse_manifest(data, folder)
    except DamagedFileError as exc:
        raise SaveError(
            Explanation(
                f"The checkpoint of step {request.step} was not saved: it could not be read again.",
                cause=str(exc),
                fix="save fewer or plainer names, metrics and metadata.",
            ),
            step=request.step,
        ) from exc
    with ChecksumWriter(folder / NAME) as writer:
        writer.write(data)


@functools.cache
def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _explain(exc: Exception, directory: Path, step: int) -> Exception:
    """Explain what the file system refused; return other errors as they are."""
    if not isinstance(exc, OSError) or isinstance(exc, SaveError):
        return exc
    if exc.errno in _FULL:
        try:
            free = _directory.free_bytes(directory)
        except OSError:
            free = 0
        cause = _directory.find_cause(directory, exc)
        return _no_space(directory, step, free + 1, free, cause)
    if isinstance(exc, FileExistsError):
        return SaveError(
            Explanation(
                f"Step {step} was not saved: {exc.filename} is there already.",
                cause="a save of this step was interrupted when it was nearly done, or the folder "
                "was put there by hand.",
                fix="go on, and save the next step; or remove the folder and save this one again.",
            ),
            step=step,
        )
    return SaveError(
        Explanation(
            f"The checkpoint of step {step} could not be written to {directory}: {exc}.",
            cause=_directory.find_cause(directory, exc),
            fix="repair the directory; the training can go on and save again.",
        ),
        step=step,
    )
