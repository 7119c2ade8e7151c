"""Exchanges: how the ranks that save and restore together agree, over the store.

In an exchange every rank sends rank 0 a message, and rank 0 announces one answer. A rank that failed
says so; a rank whose process has ended is noticed while the others wait for it. No rank waits in a
collective, which would not end when a peer dies.
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
from ddpsafe._errors import Explanation, ranks_text
from ddpsafe._host import boot_id
from ddpsafe.checkpoint import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import nn

    from ddpsafe._errors import Origin
    from ddpsafe._worker.context import RankContext
    from ddpsafe._worker.store_sync import Control

    Decide = Callable[[dict[int, "Message"]], dict[str, Any]]
    Absent = Callable[["Absence"], errors.CheckpointError]

BEAT_S: Final = 5.0
"""How often a rank shows those on other hosts that it lives."""
SILENCE_S: Final = 30.0
"""A rank on another host that shows nothing for so long has ended, or its host has."""
_LOOK_S: Final = 0.25
"""How often a waiting rank looks whether the others live."""

_MAX_TEXT: Final = 4_000
_NOT_FACTS: Final = {"explanation", "exit_code", "origin"}
_number_of_ranks = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one rank sends rank 0 in an exchange.

    Attributes:
        facts: Plain values.
        data: Bytes that go with them.
        failure: What it failed with, as `to_wire` has it; ``None`` where it did not.
        call: The call that it belongs to; set when it is sent.
    """

    facts: dict[str, Any]
    data: bytes = b""
    failure: dict[str, Any] | None = None
    call: str = ""

    def dumps(self) -> bytes:
        """Return it as bytes: a line of JSON and what goes with it."""
        head = {"facts": self.facts, "failure": self.failure, "call": self.call}
        return json.dumps(head).encode() + b"\n" + self.data

    @classmethod
    def loads(cls, raw: bytes) -> Message:
        """Read it back."""
        head, _, data = raw.partition(b"\n")
        return cls(data=data, **json.loads(head))


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """Ranks that were waited for and did not come.

    Attributes:
        ranks: Which.
        waited_s: How long, in seconds.
        lost: How it shows that the first of them will never come; empty where it still may.
    """

    ranks: list[int]
    waited_s: float
    lost: str = ""

    @property
    def origin(self) -> Origin:
        """Whether a rank has ended, or took too long: `DDPSafeError.origin`."""
        return "peer-lost" if self.lost else "timeout"

    def explain(self, who: object, doing: str, *, cause: str, fix: str) -> Explanation:
        """Explain what the others were doing, and what ended it.

        Args:
            who: The rank that waited.
            doing: What the ranks were to do, as after "to".
            cause: Why the ranks may not have come in time.
            fix: What helps against that.
        """
        gone = self.ranks[0]
        if self.lost:
            return Explanation(
                f"{who} cannot {doing}: rank {gone} is gone (noticed after {self.waited_s:.1f} s).",
                cause=self.lost,
                fix=f"look at the last lines of rank {gone}'s output; what was saved before is "
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
    """A rank's process, as it describes itself to the others."""

    host: str
    kernel: str
    pid: int
    started: str

    @classmethod
    def myself(cls) -> _Process:
        """Describe this one."""
        try:
            namespace = str(Path("/proc/self/ns/pid").readlink())
        except OSError:
            namespace = socket.gethostname()
        pid = os.getpid()
        return cls(socket.gethostname(), f"{boot_id()} {namespace}", pid, _start_of(pid) or "")

    def has_ended(self) -> bool:
        """Tell whether a process of this kernel and pid namespace has ended."""
        return bool(self.started) and _start_of(self.pid) != self.started


def _start_of(pid: int) -> str | None:
    """Return when a process started, in ticks since the boot; ``None`` once it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name, in parentheses, may hold anything
    return None if fields[0] in ("Z", "X") else fields[19]


class _Lives:
    """Which of the other ranks live: processes of this host by pid, others by what they show.

    A thread shows that this rank lives. It keeps nothing but the connection, so that it ends with
    the `Ranks` that made this.
    """

    def __init__(self, control: Control, name: str, rank: int, *, on_many_hosts: bool) -> None:
        self._control = control
        self._name = name
        self._myself = _Process.myself()
        self._known: dict[int, _Process] = {}
        self._shown: dict[int, tuple[bytes | None, float, float]] = {}
        self._next_look_s = 0.0
        self._stop = threading.Event()
        control.put(f"{name}/process/{rank}", json.dumps(asdict(self._myself)).encode())
        if on_many_hosts:
            work = (control, f"{name}/beat/{rank}", self._stop)
            threading.Thread(target=_beat, args=work, name="ddpsafe-lives", daemon=True).start()

    def stop(self) -> None:
        """Show nothing any more."""
        self._stop.set()

    def find_lost(
        self, ranks: Collection[int], has_come: Callable[[int], bool]
    ) -> tuple[int, str] | None:
        """Return the first of the ranks that has ended and has not come before, and how it shows."""
        now = time.monotonic()
        if now < self._next_look_s:
            return None
        self._next_look_s = now + _LOOK_S
        for rank in ranks:
            how = self._how_lost(rank, now)
            if how and not has_come(rank):
                return rank, how
        return None

    def _how_lost(self, rank: int, now: float) -> str:
        departed = self._control.departure()
        if departed is not None and departed.rank == rank:
            return f"it has failed: {departed.error}"
        if rank not in self._known:
            raw = _look(self._control, f"{self._name}/process/{rank}")
            if raw is None:
                return ""
            self._known[rank] = _Process(**json.loads(raw))
        process = self._known[rank]
        if process.kernel == self._myself.kernel:
            where = f"{process.pid} on {process.host}"
            return f"its process {where} has ended." if process.has_ended() else ""
        silent = self._is_silent(rank, now)
        return f"nothing has come from {process.host} for {SILENCE_S:g} s." if silent else ""

    def _is_silent(self, rank: int, now: float) -> bool:
        shown = _look(self._control, f"{self._name}/beat/{rank}")
        before, since_s, looked_s = self._shown.get(rank, (None, now, now))
        # Only what is seen while looking counts: between two waits, or while this process was
        # suspended, no rank looks. A rank that never showed anything does not on this network.
        if shown is None or shown != before or now - looked_s > 2 * BEAT_S:
            since_s = now
        self._shown[rank] = (shown, since_s, now)
        return now - since_s > SILENCE_S


def _beat(control: Control, key: str, stop: threading.Event) -> None:
    for number in itertools.count():
        try:
            control.put(key, str(number).encode())
        except Exception:  # noqa: BLE001 - the store has gone, and with it those who look
            return
        if stop.wait(BEAT_S):
            return


def _look(control: Control, key: str) -> bytes | None:
    return control.take(key, deadline=Deadline.after(timedelta(0)))


class Ranks:
    """This rank among the ranks of the job; alone where there is no process group.

    Args:
        timeout: How long rank 0 may take, and the others, in one exchange.

    Attributes:
        rank: This rank.
        world_size: How many there are.
        host: Name of this rank's host.
        timeout: As given.
        read_keys: Keys of the last exchange, to be removed once all are in the next one.
    """

    def __init__(self, timeout: timedelta) -> None:
        from ddpsafe._worker.join.attached import current

        self._context: RankContext = current()
        self._control: Control | None = self._context.control
        self.rank = self._context.rank
        self.world_size = self._context.world_size if self._control is not None else 1
        self.host = socket.gethostname()
        self.timeout = timeout
        self._name = f"checkpoint/{next(_number_of_ranks)}"
        self._exchanges = itertools.count()
        self.read_keys: list[str] = []
        self._lives: _Lives | None = None
        if self._control is not None and self.world_size > 1:
            several = self._context.world.local_world_size != self.world_size
            self._lives = _Lives(self._control, self._name, self.rank, on_many_hosts=several)
            weakref.finalize(self, self._lives.stop)

    @property
    def is_main(self) -> bool:
        """True on the rank that writes."""
        return self._context.is_main

    def __str__(self) -> str:
        return f"{self._context.world} on {self.host} in attempt {self._context.attempt}"

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside DDP and compile wrappers."""
        return self._context.unwrap(model)

    def note_checkpoint(self, step: int, *, is_new: bool) -> None:
        """Tell the launcher, where ddpsafe started this rank, which checkpoint it goes on from."""
        from ddpsafe._worker.environment import note_checkpoint

        note_checkpoint(step, is_new=is_new)

    def note_folder(self, path: Path) -> None:
        """Tell the launcher, where ddpsafe started this rank, where the checkpoints are."""
        from ddpsafe._worker.environment import note_checkpoint_folder

        note_checkpoint_folder(str(path))

    def note_saving(self) -> None:
        """Tell the launcher, where ddpsafe started this rank, that it has begun to save."""
        from ddpsafe._worker.environment import note_saving

        note_saving()

    def begin(self, call: str) -> Exchange:
        """Begin the next exchange; every rank does, in the same order, in the same call."""
        return Exchange(self, self._control, f"{self._name}/{next(self._exchanges)}", call)

    def forget(self, control: Control | None) -> None:
        """Remove what was said in exchanges that are over: the store would grow with every save."""
        keys, self.read_keys = self.read_keys, []
        for key in keys:
            if control is not None:
                control.drop(key)

    def deadline(self) -> Deadline:
        """Return the end of a wait that begins now."""
        return Deadline.after(self.timeout)

    def find_lost(
        self, ranks: Collection[int], has_come: Callable[[int], bool]
    ) -> tuple[int, str] | None:
        """Return one of the ranks that has ended and has not come, and how it shows, if one has."""
        return None if self._lives is None else self._lives.find_lost(ranks, has_come)

    def has_ended(self, rank: int) -> bool:
        """Tell whether a rank is known to have ended."""
        return self.find_lost([rank], lambda _: False) is not None

    def close(self) -> None:
        """Show the others no sign of life any more."""
        if self._lives is not None:
            self._lives.stop()


class Exchange:
    """All ranks send rank 0 a message, rank 0 answers all."""

    def __init__(self, ranks: Ranks, control: Control | None, name: str, call: str) -> None:
        self._ranks = ranks
        self._call = call
        self._control = control
        self._name = name
        self._mine: Message | None = None

    def send(self, message: Message) -> None:
        """Send rank 0 this rank's message, without waiting for it."""
        message = replace(message, call=self._call)
        if self._ranks.rank == 0:
            self._mine = message
        if self._control is not None:
            here = b"here" if self._ranks.rank == 0 else message.dumps()
            # A store that has gone with rank 0 shows, and is told, when this rank waits for the answer.
            with contextlib.suppress(*(() if self._ranks.is_main else (RuntimeError,))):
                self._control.put(self._key(self._ranks.rank), here)

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"

    def agree(self, decide: Decide, absent: Absent) -> dict[str, Any]:
        """Let rank 0 decide on what all ranks sent, and give every rank its answer.

        Args:
            decide: Makes the answer of the ranks' messages, on rank 0; what it raises, all raise.
            absent: Makes the error of ranks that do not come.

        Returns:
            The answer.

        Raises:
            CheckpointError: A rank failed, did not come, or rank 0 did not accept its message.
        """
        deadline = self._ranks.deadline()
        if not self._ranks.is_main:
            return self.receive(deadline, absent)
        try:
            answer = decide(self.gather(deadline, absent))
        except BaseException as exc:
            self.announce(error=exc)
            raise
        self.announce(answer)
        return answer

    def gather(self, deadline: Deadline, absent: Absent) -> dict[int, Message]:
        """Collect, on rank 0, what the ranks sent.

        Returns:
            Their messages by rank, its own included.

        Raises:
            CheckpointError: A rank failed, has ended, or did not send in time.
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
        if not missing:  # whoever is in this exchange has done with those before it
            self._ranks.forget(self._control)
        self._ranks.read_keys += [self._key(rank) for rank in messages]
        if missing:
            raise absent(Absence(ranks=missing, waited_s=deadline.waited_s(), lost=lost))
        for rank, message in messages.items():
            if message.failure is not None:
                raise from_wire(message.failure, str(self._ranks))
            self._require_same_call(rank, message)
        return messages

    def _require_same_call(self, rank: int, message: Message) -> None:
        """Refuse what was sent in another call: it would be taken for something else.

        Raises:
            CheckpointConfigError: It was.
        """
        if message.call == self._call:
            return
        raise errors.CheckpointConfigError(
            Explanation(
                f"rank {rank} calls {message.call} while {self._ranks} calls {self._call}.",
                cause="the ranks take different ways through the script, as after a condition that "
                "differs from rank to rank.",
                fix="call the methods of a Checkpointer on every rank, in the same order.",
            ),
            rank=rank,
        )

    def _wait(
        self,
        key: str,
        senders: Collection[int],
        deadline: Deadline,
        has_come: Callable[[int], bool],
    ) -> tuple[bytes | None, tuple[int, str] | None]:
        """Wait for a key; return its value, or else which sender has ended and how it shows."""
        assert self._control is not None  # noqa: S101 - a rank that waits has peers
        for pause_s in deadline.pauses_s():
            raw = _look(self._control, key)
            if raw is not None:
                return raw, None
            lost = self._ranks.find_lost(senders, has_come)
            if lost is not None:
                return None, lost
            time.sleep(pause_s)
        return None, None

    def _has_sent(self, rank: int) -> bool:
        assert self._control is not None  # noqa: S101 - a rank that waits has peers
        return _look(self._control, self._key(rank)) is not None

    def announce(
        self, answer: dict[str, Any] | None = None, *, error: BaseException | None = None
    ) -> None:
        """Answer, on rank 0, all the others."""
        if isinstance(error, errors.CheckpointError) and error.rank is None:
            error.rank = 0
        if self._control is None:
            return
        failure = None if error is None else to_wire(error, rank=0)
        message = Message(facts=answer or {}, failure=failure, call=self._call)
        self._control.put(f"{self._name}/answer", message.dumps())
        self._ranks.read_keys.append(f"{self._name}/answer")
        if error is not None:  # it may end this rank, and under torchrun the store with it
            self._control.stay(self._name, self._ranks.has_ended)

    def fail(self, error: BaseException) -> None:
        """Say, on any rank, that nothing will come of this exchange."""
        if self._ranks.is_main:
            self.announce(error=error)
        else:
            self.send(Message(facts={}, failure=to_wire(error, rank=self._ranks.rank)))

    def receive(self, deadline: Deadline, absent: Absent) -> dict[str, Any]:
        """Wait, on another rank, for the answer of rank 0.

        Raises:
            CheckpointError: Rank 0 announced that it, or another rank, failed; or it has ended, or
                did not answer in time.
        """
        from ddpsafe._worker import pending_exception

        control = self._control
        assert control is not None  # noqa: S101 - a rank other than 0 has peers
        answer = f"{self._name}/answer"
        with pending_exception.waiting():
            try:
                raw, lost = self._wait(
                    answer, [0], deadline, lambda _: _look(control, answer) is not None
                )
            except RuntimeError as exc:  # torch's, for a store that does not answer
                why = "the store that it, or the launcher, served has gone."
                gone = Absence(ranks=[0], waited_s=deadline.waited_s(), lost=why)
                raise absent(gone) from exc
        if raw is None:
            # Those that have not sent; rank 0 alone where all have, and it does not answer.
            silent = [rank for rank in range(self._ranks.world_size) if not self._has_sent(rank)]
            missing = [0] if lost else silent or [0]
            why = "" if lost is None else lost[1]
            raise absent(Absence(ranks=missing, waited_s=deadline.waited_s(), lost=why))
        message = Message.loads(raw)
        if message.failure is not None:
            with contextlib.suppress(RuntimeError):  # rank 0 may have left with the store
                control.acknowledge(self._name)
            raise from_wire(message.failure, str(self._ranks)) from None
        self._require_same_call(0, message)
        return message.facts


def to_wire(error: BaseException, *, rank: int) -> dict[str, Any]:
    """Describe an error in plain values."""
    if not isinstance(error, errors.CheckpointError):
        text = f"{type(error).__name__}: {error}"[:_MAX_TEXT]
        return {"kind": "", "said": {"what": text}, "facts": {"rank": rank}}
    facts = {name: value for name, value in vars(error).items() if name not in _NOT_FACTS}
    facts["rank"] = rank if error.rank is None else error.rank
    said = _plain(asdict(error.explanation))
    return {"kind": type(error).__name__, "said": said, "facts": _plain(facts)}


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(facts, default=str))  # type: ignore[no-any-return]


def from_wire(failure: dict[str, Any], who: str) -> errors.CheckpointError:
    """Make another rank's error again, saying that it was only seen here."""
    facts = dict(failure["facts"])
    said = Explanation(**{**failure["said"], "details": tuple(failure["said"].get("details", ()))})
    said = replace(said, what=f"{said.what} (met by rank {facts['rank']}, seen by {who})")
    kind = errors.BY_NAME.get(failure["kind"])
    error = kind(said, **facts) if kind else errors.CheckpointError(said, rank=facts["rank"])
    error.origin = "peer-lost"  # another rank failed; this one only waited for it
    return error
