"""Exchanges: how the ranks agree over the store while they save and restore.

In an exchange every rank sends rank 0 a message, and rank 0 announces one answer. A rank that fails
reports it, and the ranks that wait notice when a process has exited. No rank waits in a collective,
which would not end when a peer dies.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
import weakref
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._clock import Deadline
from ddpsafe._errors import DDPSafeError, Explanation, from_plain, to_plain
from ddpsafe._host import boot_id
from ddpsafe._text import ranks_text
from ddpsafe.checkpoint import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import nn

    from ddpsafe._errors import Origin
    from ddpsafe._worker.context import RankContext
    from ddpsafe._worker.store_sync import Control

    Decide = Callable[[dict[int, "Message"]], dict[str, Any]]
    MakeError = Callable[["Absence"], errors.CheckpointError]

BEAT_S: Final = 5.0
"""How often a rank renews the heartbeat that ranks on other hosts see."""
SILENCE_S: Final = 30.0
"""A rank on another host counts as lost if its heartbeat has not changed for this long."""
_CHECK_S: Final = 0.25
"""How often a waiting rank checks that the others are alive."""

_MAX_ERROR_CHARS: Final = 4_000
_ranks_counter = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one rank sends rank 0 in an exchange.

    Attributes:
        facts: Plain values.
        data: Bytes that go with them.
        failure: The sender's error as `plain_failure` describes it; ``None`` if it has not failed.
        call: The call that it belongs to; set by `Exchange.send`.
    """

    facts: dict[str, Any]
    data: bytes = b""
    failure: dict[str, Any] | None = None
    call: str = ""

    def dumps(self) -> bytes:
        """Return it as bytes: a line of JSON, then `data`."""
        head = {"facts": self.facts, "failure": self.failure, "call": self.call}
        return json.dumps(head).encode() + b"\n" + self.data

    @classmethod
    def loads(cls, raw: bytes) -> Message:
        """Read a message from its bytes."""
        head, _, data = raw.partition(b"\n")
        return cls(data=data, **json.loads(head))


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """Ranks that did not send the message that another rank waited for.

    Attributes:
        ranks: Those ranks.
        waited_s: How long the other rank waited, in seconds.
        lost: Why the first of them will never send it; empty if it still may.
    """

    ranks: list[int]
    waited_s: float
    lost: str = ""

    @property
    def origin(self) -> Origin:
        """Whether a rank is lost or took too long, as `DDPSafeError.origin`."""
        return "peer-lost" if self.lost else "timeout"

    def explain(self, who: object, doing: str, *, cause: str, fix: str) -> Explanation:
        """Explain what the ranks were doing, and why it failed.

        Args:
            who: The rank that waited.
            doing: What the ranks were doing, as an infinitive without "to".
            cause: Why the ranks may be late; a predicate that follows their names.
            fix: What to do about that.
        """
        first = self.ranks[0]
        if self.lost:
            return Explanation(
                f"{who} cannot {doing}: rank {first} is lost (noticed after {self.waited_s:.1f} s).",
                cause=self.lost,
                fix=f"look at the last lines of rank {first}'s output; earlier checkpoints are "
                "unharmed.",
            )
        names = ranks_text(self.ranks)
        return Explanation(
            f"{who} waited {self.waited_s:.1f} s for {names} to {doing}.",
            cause=f"{names} {cause}",
            fix=fix,
        )


@dataclass(frozen=True, slots=True)
class _Process:
    """The identity of a rank's process, as it is sent to the other ranks."""

    host: str
    kernel: str
    pid: int
    started: str

    @classmethod
    def myself(cls) -> _Process:
        """Describe this process."""
        try:
            namespace = str(Path("/proc/self/ns/pid").readlink())
        except OSError:
            namespace = socket.gethostname()
        pid = os.getpid()
        return cls(socket.gethostname(), f"{boot_id()} {namespace}", pid, _start_of(pid) or "")

    def has_ended(self) -> bool:
        """Return whether it has exited; only for processes of this kernel and pid namespace."""
        return bool(self.started) and _start_of(self.pid) != self.started


def _start_of(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot; ``None`` once it has exited.

    With the pid it identifies a process even after the kernel has given the pid to another one.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name, in parentheses, may contain anything, parentheses too. The state is field 3 of proc(5),
    # Z for a zombie and X for a dead process, and the start time is field 22.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]


class _PeerWatch:
    """Finds ranks that have exited: on this host by their process, on others by their heartbeat.

    A thread renews this rank's own heartbeat. It refers only to the connection, not to this object,
    so that it can be stopped when the `Ranks` that made this is garbage-collected.
    """

    def __init__(self, control: Control, name: str, rank: int, *, on_many_hosts: bool) -> None:
        self._control = control
        self._name = name
        self._myself = _Process.myself()
        self._processes: dict[int, _Process] = {}
        # By rank: its heartbeat, since when it has been unchanged, and when it was last read.
        self._heartbeats: dict[int, tuple[bytes | None, float, float]] = {}
        self._next_check_s = 0.0
        self._stop = threading.Event()
        control.put(f"{name}/process/{rank}", json.dumps(asdict(self._myself)).encode())
        if on_many_hosts:
            work = (control, f"{name}/beat/{rank}", self._stop)
            threading.Thread(target=_beat, args=work, name="ddpsafe-beat", daemon=True).start()

    def stop(self) -> None:
        """Stop this rank's heartbeat."""
        self._stop.set()

    def find_lost(
        self, ranks: Collection[int], has_sent: Callable[[int], bool]
    ) -> tuple[int, str] | None:
        """Return the first rank that is lost and has not sent its message, and why it is lost."""
        now = time.monotonic()
        if now < self._next_check_s:
            return None
        self._next_check_s = now + _CHECK_S
        for rank in ranks:
            why = self._why_lost(rank, now)
            if why and not has_sent(rank):
                return rank, why
        return None

    def _why_lost(self, rank: int, now: float) -> str:
        departed = self._control.departure()
        if departed is not None and departed.rank == rank:
            return f"it has failed: {departed.error}"
        if rank not in self._processes:
            raw = _read(self._control, f"{self._name}/process/{rank}")
            if raw is None:
                return ""
            self._processes[rank] = _Process(**json.loads(raw))
        process = self._processes[rank]
        if process.kernel == self._myself.kernel:
            where = f"{process.pid} on {process.host}"
            return f"its process {where} has ended." if process.has_ended() else ""
        silent = self._is_silent(rank, now)
        return (
            f"it has sent no heartbeat from {process.host} for {SILENCE_S:g} s." if silent else ""
        )

    def _is_silent(self, rank: int, now: float) -> bool:
        beat = _read(self._control, f"{self._name}/beat/{rank}")
        before, since_s, read_s = self._heartbeats.get(rank, (None, now, now))
        # Count only the time in which this rank kept reading: it does not read between two waits,
        # nor while its process is suspended. A rank without any heartbeat does not count as silent.
        if beat is None or beat != before or now - read_s > 2 * BEAT_S:
            since_s = now
        self._heartbeats[rank] = (beat, since_s, now)
        return now - since_s > SILENCE_S


def _beat(control: Control, key: str, stop: threading.Event) -> None:
    for number in itertools.count():
        try:
            control.put(key, str(number).encode())
        except Exception:  # noqa: BLE001 - without the store, no rank can read the heartbeat
            return
        if stop.wait(BEAT_S):
            return


def _read(control: Control, key: str) -> bytes | None:
    """Return the value of a key, or ``None`` if it is not set; without waiting."""
    return control.take(key, deadline=Deadline.after(timedelta(0)))


class Ranks:
    """This rank among the ranks of the job; a world of one without a process group.

    Args:
        timeout: How long an exchange may wait for rank 0, or for the other ranks.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        host: Name of this rank's host.
        timeout: As given.
        read_keys: Keys that rank 0 has written or read, to be removed once all ranks are in the next
            exchange.
    """

    def __init__(self, timeout: timedelta) -> None:
        from ddpsafe._worker.join.attached import current

        self._context: RankContext = current()
        self._control: Control | None = self._context.control
        self.rank = self._context.rank
        self.world_size = self._context.world_size if self._control is not None else 1
        self.host = socket.gethostname()
        self.timeout = timeout
        self._name = f"checkpoint/{next(_ranks_counter)}"
        self._exchanges = itertools.count()
        self.read_keys: list[str] = []
        self._peers: _PeerWatch | None = None
        if self._control is not None and self.world_size > 1:
            several = self._context.world.local_world_size != self.world_size
            self._peers = _PeerWatch(self._control, self._name, self.rank, on_many_hosts=several)
            weakref.finalize(self, self._peers.stop)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes the checkpoint."""
        return self._context.is_main

    def __str__(self) -> str:
        return f"{self._context.world} on {self.host} in attempt {self._context.attempt}"

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside the wrappers of DDP and torch.compile."""
        return self._context.unwrap(model)

    def note_checkpoint(self, step: int, *, is_new: bool) -> None:
        """Report the newest saved or restored step to the launcher, if ddpsafe started this rank."""
        from ddpsafe._worker.environment import note_checkpoint

        note_checkpoint(step, is_new=is_new)

    def note_folder(self, path: Path) -> None:
        """Report the directory of the checkpoints to the launcher, if ddpsafe started this rank."""
        from ddpsafe._worker.environment import note_checkpoint_folder

        note_checkpoint_folder(str(path))

    def note_saving(self) -> None:
        """Report the begin of a save to the launcher, if ddpsafe started this rank."""
        from ddpsafe._worker.environment import note_saving

        note_saving()

    def begin(self, call: str) -> Exchange:
        """Begin the next exchange. Every rank must begin the same ones in the same order."""
        return Exchange(self, self._control, f"{self._name}/{next(self._exchanges)}", call)

    def drop_read_keys(self, control: Control | None) -> None:
        """Remove the messages of finished exchanges, or the store would grow with every save."""
        keys, self.read_keys = self.read_keys, []
        for key in keys:
            if control is not None:
                control.drop(key)

    def deadline(self) -> Deadline:
        """Return the end of a wait that begins now."""
        return Deadline.after(self.timeout)

    def find_lost(
        self, ranks: Collection[int], has_sent: Callable[[int], bool]
    ) -> tuple[int, str] | None:
        """Return a rank that is lost and has not sent its message, and why it is lost, if any."""
        return None if self._peers is None else self._peers.find_lost(ranks, has_sent)

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank is known to be lost."""
        return self.find_lost([rank], lambda _: False) is not None

    def close(self) -> None:
        """Stop this rank's heartbeat."""
        if self._peers is not None:
            self._peers.stop()


class Exchange:
    """All ranks send rank 0 a message, and rank 0 sends all of them one answer."""

    def __init__(self, ranks: Ranks, control: Control | None, name: str, call: str) -> None:
        self._ranks = ranks
        self._call = call
        self._control = control
        self._name = name
        self._mine: Message | None = None

    def send(self, message: Message) -> None:
        """Send this rank's message to rank 0 without waiting."""
        message = replace(message, call=self._call)
        if self._ranks.rank == 0:
            self._mine = message
        if self._control is not None:
            data = b"here" if self._ranks.rank == 0 else message.dumps()
            # If the store ended with rank 0, this rank reports it when it waits for the answer.
            with contextlib.suppress(*(() if self._ranks.is_main else (RuntimeError,))):
                self._control.put(self._key(self._ranks.rank), data)

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"

    def agree(self, decide: Decide, absence_error: MakeError) -> dict[str, Any]:
        """Let rank 0 decide by the messages of all ranks, and return its answer on every rank.

        Args:
            decide: Makes the answer from the messages, on rank 0. If it raises, every rank raises.
            absence_error: Makes the error for ranks that did not send their message.

        Returns:
            The answer.

        Raises:
            CheckpointError: A rank failed, or sent nothing, or rank 0 rejected its message.
        """
        deadline = self._ranks.deadline()
        if not self._ranks.is_main:
            return self.receive(deadline, absence_error)
        try:
            answer = decide(self.gather(deadline, absence_error))
        except BaseException as exc:
            self.announce(error=exc)
            raise
        self.announce(answer)
        return answer

    def gather(self, deadline: Deadline, absence_error: MakeError) -> dict[int, Message]:
        """Collect the ranks' messages on rank 0.

        Returns:
            The messages by rank, including its own.

        Raises:
            CheckpointError: A rank failed, is lost, or did not send in time.
        """
        messages = {} if self._mine is None else {0: self._mine}
        missing = list(range(1, self._ranks.world_size))
        lost = ""
        while missing:
            raw, found = self._wait(self._key(missing[0]), missing, deadline, self._has_sent)
            if found is not None:
                missing, lost = [found[0]], found[1]
                break
            if raw is None:
                missing = [rank for rank in missing if not self._has_sent(rank)]
                break
            messages[missing.pop(0)] = Message.loads(raw)
        if not missing:  # all ranks are in this exchange, so no rank reads earlier ones any longer
            self._ranks.drop_read_keys(self._control)
        self._ranks.read_keys += [self._key(rank) for rank in messages]
        if missing:
            raise absence_error(Absence(ranks=missing, waited_s=deadline.waited_s(), lost=lost))
        for rank, message in messages.items():
            if message.failure is not None:
                raise peer_error(message.failure, str(self._ranks))
            self._require_same_call(rank, message)
        return messages

    def _require_same_call(self, rank: int, message: Message) -> None:
        """Refuse a message from another call: its facts would be misread.

        Raises:
            CheckpointConfigError: The calls differ.
        """
        if message.call == self._call:
            return
        raise errors.CheckpointConfigError(
            Explanation(
                f"rank {rank} calls {message.call} while {self._ranks} calls {self._call}.",
                cause="the ranks take different paths through the script, for example after a "
                "condition that differs from rank to rank.",
                fix="call the methods of a Checkpointer on every rank, in the same order.",
            ),
            rank=rank,
        )

    def _wait(
        self,
        key: str,
        senders: Collection[int],
        deadline: Deadline,
        has_sent: Callable[[int], bool],
    ) -> tuple[bytes | None, tuple[int, str] | None]:
        """Wait for a key; return its value, or else a sender that is lost and why."""
        assert self._control is not None  # noqa: S101 - a rank that waits has peers
        for pause_s in deadline.pauses_s():
            raw = _read(self._control, key)
            if raw is not None:
                return raw, None
            lost = self._ranks.find_lost(senders, has_sent)
            if lost is not None:
                return None, lost
            time.sleep(pause_s)
        return None, None

    def _has_sent(self, rank: int) -> bool:
        assert self._control is not None  # noqa: S101 - a rank that waits has peers
        return _read(self._control, self._key(rank)) is not None

    def announce(
        self, answer: dict[str, Any] | None = None, *, error: BaseException | None = None
    ) -> None:
        """Send rank 0's answer, or its error, to all other ranks."""
        if isinstance(error, errors.CheckpointError) and error.rank is None:
            error.rank = 0
        if self._control is None:
            return
        failure = None if error is None else plain_failure(error, rank=0)
        message = Message(facts=answer or {}, failure=failure, call=self._call)
        self._control.put(f"{self._name}/answer", message.dumps())
        self._ranks.read_keys.append(f"{self._name}/answer")
        # The error may end this rank, and under torchrun the store with it, before others read it.
        if error is not None:
            self._control.stay(self._name, self._ranks.has_ended)

    def fail(self, error: BaseException) -> None:
        """Report on any rank that this exchange has failed."""
        if self._ranks.is_main:
            self.announce(error=error)
        else:
            self.send(Message(facts={}, failure=plain_failure(error, rank=self._ranks.rank)))

    def receive(self, deadline: Deadline, absence_error: MakeError) -> dict[str, Any]:
        """Wait for rank 0's answer on another rank.

        Raises:
            CheckpointError: Rank 0 announced a failure of its own or of another rank; or it is lost,
                or did not answer in time.
        """
        from ddpsafe._worker import pending_exception

        control = self._control
        assert control is not None  # noqa: S101 - a rank other than 0 has peers
        answer = f"{self._name}/answer"
        with pending_exception.waiting():
            try:
                raw, lost = self._wait(
                    answer, [0], deadline, lambda _: _read(control, answer) is not None
                )
            except RuntimeError as exc:  # torch raises it when the store does not respond
                why = "the store, which it or the launcher served, is no longer reachable."
                lost_store = Absence(ranks=[0], waited_s=deadline.waited_s(), lost=why)
                raise absence_error(lost_store) from exc
        if raw is None:
            # Name the ranks that have not sent; if all have, rank 0 alone, which has not answered.
            silent = [rank for rank in range(self._ranks.world_size) if not self._has_sent(rank)]
            missing = [0] if lost else silent or [0]
            why = "" if lost is None else lost[1]
            raise absence_error(Absence(ranks=missing, waited_s=deadline.waited_s(), lost=why))
        message = Message.loads(raw)
        if message.failure is not None:
            with contextlib.suppress(RuntimeError):  # rank 0 may have exited, and the store with it
                control.acknowledge(self._name)
            raise peer_error(message.failure, str(self._ranks)) from None
        self._require_same_call(0, message)
        return message.facts


def plain_failure(error: BaseException, *, rank: int) -> dict[str, Any]:
    """Return the error of a rank as plain values, with the rank."""
    if not isinstance(error, errors.CheckpointError):
        text = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
        error = errors.CheckpointError(text)
    plain = to_plain(error)
    if error.rank is None:
        plain["facts"]["rank"] = rank
    return plain


def peer_error(failure: dict[str, Any], who: str) -> DDPSafeError:
    """Return another rank's error, with a note on which rank raised it first."""
    error = from_plain(failure)
    what = f"{error.explanation.what} (raised on rank {failure['facts']['rank']}, seen by {who})"
    error.explanation = replace(error.explanation, what=what)
    error.origin = "peer-lost"  # another rank failed; this one only waited for it
    return error
