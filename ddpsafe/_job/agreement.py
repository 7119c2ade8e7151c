"""How ranks agree: each sends the leader a message, and the leader announces one answer to all.

A rank that fails reports it, and every other one raises the same error. Ranks that wait notice that
another one has ended. No rank waits in a collective, which would not end when a peer dies.

Two agreements are not made here, since no rank waits in them for an answer: at which call all ranks stop
(`_worker/stop_agreement.py`), and the name of a start, before there is a control line
(`_worker/join/store.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import ConfigError, DDPSafeError, Explanation, from_plain, to_plain
from ddpsafe._job.peers import PeerWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from contextlib import AbstractContextManager

    from ddpsafe._clock import Deadline
    from ddpsafe._errors import Origin
    from ddpsafe._job.control import Control
    from ddpsafe._world import World

    Decide = Callable[[dict[int, "Message"]], dict[str, Any]]
    MakeError = Callable[["Absence"], DDPSafeError]

_MAX_ERROR_CHARS: Final = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one rank sends the leader in an exchange.

    Attributes:
        failure: The sender's error as `RankGroup.failure_of` returns it; ``None`` if it has not failed.
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
        lost: Why the first of them will never send it; empty if it still may.
    """

    ranks: list[int]
    waited_s: float
    lost: str = ""

    @property
    def origin(self) -> Origin:
        """Whether a rank is lost or took too long, as `DDPSafeError.origin`."""
        return "peer-lost" if self.lost else "timeout"


class RankGroup:
    """One rank among those that agree with each other; a group of one without a control line.

    A subclass may have errors of its own (`as_own_error`, `other_call_error`).

    Args:
        name: The same for all ranks of the group, and new on that line.
        ranks: All of the group, the ranks of a node or of the job. The first of them leads.
        first: The number of the first exchange, if earlier groups of that name had some.
        sends_beats: Whether ranks on other hosts can be found lost by their silence; see `PeerWatch`.
        error_type: What the other ranks raise for an exception that is not ddpsafe's.
        waiting: Encloses a wait for the leader's answer.

    Attributes:
        about: What follows its calls in the text of a wait, to tell them from those of another group.
        may_give_up: Whether the script may go on after a wait that fails. No such wait is part of a proof
            that ranks wait for each other forever.
        read_keys: Keys that the leader has written or read, to be removed once all ranks are in the
            next exchange.
    """

    def __init__(
        self,
        control: Control | None,
        name: str,
        world: World,
        ranks: Sequence[int],
        *,
        first: int = 0,
        sends_beats: bool = False,
        error_type: type[DDPSafeError] = DDPSafeError,
        waiting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.control = control if len(ranks) > 1 else None
        self.rank = world.rank
        self.ranks = ranks
        self.about = ""
        self.may_give_up = False
        self.read_keys: list[str] = []
        self.waiting = waiting
        self._world = world
        self._error_type = error_type
        self._name = name
        self._exchanges = itertools.count(first)
        self._peers = None
        # In a group that a script has made, where a launcher numbers ranks across the nodes, those of this
        # node are not known.
        is_known = bool(world.known_ranks_of_node)
        if self.control is not None and (is_known or ranks[0] in (0, world.node_rank * len(ranks))):
            has_others = len(ranks) > world.local_world_size
            beats = name if sends_beats and has_others else ""
            self._peers = PeerWatch(self.control, world.rank, beats=beats)
            weakref.finalize(self, self._peers.stop)
        self._received: tuple[weakref.ref[DDPSafeError], dict[str, Any]] | None = None

    def __str__(self) -> str:
        return str(self._world)

    @property
    def leader(self) -> int:
        """The rank that decides."""
        return self.ranks[0]

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.rank == self.leader

    def close(self) -> None:
        """Stop this rank's heartbeat."""
        if self._peers is not None:
            self._peers.stop()

    def begin(self, call: str) -> Exchange:
        """Begin the next exchange. Every rank must begin the same ones in the same order."""
        return Exchange(self, self._name, next(self._exchanges), call)

    def find_lost(
        self, ranks: Collection[int], has_sent: Callable[[int], bool]
    ) -> tuple[int, str] | None:
        """Return a rank that is lost and has not sent its message, and why it is lost, if any."""
        return None if self._peers is None else self._peers.find_lost(ranks, has_sent)

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank is known to be lost, or has never come."""
        if self._peers is None:
            return False
        return not self._peers.knows(rank) or self.find_lost([rank], lambda _: False) is not None

    def failure_of(self, error: BaseException) -> dict[str, Any]:
        """Return an error of this rank, or one that it received, as plain values for `peer_error`."""
        # Passed on as it came: it names the rank that has raised it first.
        if self._received is not None and self._received[0]() is error:
            return self._received[1]
        error = self.as_own_error(error)
        raised_on = getattr(error, "rank", None)
        return {**to_plain(error), "raised_on": self.rank if raised_on is None else raised_on}

    def as_own_error(self, error: BaseException) -> DDPSafeError:
        """Return the error as the other ranks are to raise it."""
        if isinstance(error, DDPSafeError):
            return error
        return self._error_type(as_line(error))

    def peer_error(self, failure: dict[str, Any]) -> DDPSafeError:
        """Return another rank's error, with a note on which rank raised it first."""
        error = from_plain(failure)
        what = f"{error.explanation.what} (raised on rank {failure['raised_on']}, seen by {self})"
        error.explanation = replace(error.explanation, what=what)
        error.origin = "peer-lost"  # another rank failed; this one only waited for it
        self._received = (weakref.ref(error), failure)
        return error

    def other_call_error(self, rank: int, call: str, own: str) -> DDPSafeError:
        """Return the error for a rank that is in another call than this one."""
        return ConfigError(
            Explanation(
                f"rank {rank} calls {call} while {self} calls {own}.",
                cause="the ranks take different paths through the script, for example after a "
                "condition that differs from rank to rank.",
                fix="make the same calls on every rank, in the same order.",
            )
        )


class Exchange:
    """All ranks send the leader a message, and the leader sends all of them one answer."""

    def __init__(self, group: RankGroup, name: str, index: int, call: str) -> None:
        self._group = group
        self._name = f"{name}/{index}"
        self._answer = f"{self._name}/answer"
        self._sent, self._answered, self._number = f"{name}/sent", f"{name}/answer", index + 1
        self._call = call
        self._mine: Message | None = None
        self._sends = False

    def send(self, message: Message) -> None:
        """Send this rank's message to the leader without waiting."""
        group, message = self._group, replace(message, call=self._call)
        self._sends = True
        if group.control is not None:
            group.control.waits.do(self._sent, self._number)
        if group.leads:
            self._mine = message
        if group.control is not None:
            data = b"here" if group.leads else message.dumps()
            # If the store ended with the leader, this rank reports it when it waits for the answer.
            with contextlib.suppress(*(() if group.leads else (RuntimeError,))):
                group.control.put(self._key(group.rank), data)

    def agree(self, decide: Decide, absence_error: MakeError, deadline: Deadline) -> dict[str, Any]:
        """Let the leader decide by the messages of all ranks, and return its answer on every rank.

        A rank whose deadline passes first raises alone, and the others miss it in what they do next.

        `decide` makes the answer from the messages, on the leader. If it raises, every rank raises.

        Raises:
            DDPSafeError: A rank failed, or sent nothing, or the leader rejected its message.
        """
        if not self._group.leads:
            # Not told to the leader, which may still receive all messages.
            return self.receive(deadline, absence_error)
        return self.lead(lambda: decide(self.gather(deadline, absence_error)))

    def lead(self, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Decide on the leader, and announce the answer, or the error; return the answer."""
        with self.leading() as answer:
            answer.update(decide())
        return answer

    @contextlib.contextmanager
    def leading(self) -> Iterator[dict[str, Any]]:
        """Yield an answer for the leader to fill, then announce it to the others, or the error."""
        answer: dict[str, Any] = {}
        try:
            yield answer
        except BaseException as exc:
            self.announce(error=exc)
            raise
        self.announce(answer)

    def gather(self, deadline: Deadline, absence_error: MakeError) -> dict[int, Message]:
        """Collect the ranks' messages on the leader, by rank and including its own.

        Raises:
            DDPSafeError: A rank failed, is lost, or did not send in time.
        """
        group = self._group
        messages = {} if self._mine is None else {group.rank: self._mine}
        missing = list(group.ranks[1:])
        lost = ""
        with self._waiting(self._sent, missing):
            while missing:
                raw, peer = self._wait(self._key(missing[0]), missing, deadline, self._has_sent)
                if peer is not None:
                    missing, lost = [peer[0]], peer[1]
                    break
                if raw is None:
                    missing = [rank for rank in missing if not self._has_sent(rank)]
                    break
                messages[missing.pop(0)] = Message.loads(raw)
        # All ranks are in this exchange, so no rank reads earlier ones, with which the store would grow.
        while not missing and group.read_keys:
            key = group.read_keys.pop(0)
            if group.control is not None:
                group.control.drop(key)
        group.read_keys += [self._key(rank) for rank in messages]
        if missing:
            raise absence_error(Absence(ranks=missing, waited_s=deadline.waited_s(), lost=lost))
        for rank, message in messages.items():
            if message.failure is not None:
                raise group.peer_error(message.failure)
            self._require_same_call(rank, message)
        return messages

    def _waiting(self, key: str, ranks: Sequence[int]) -> AbstractContextManager[None]:
        """Return what encloses a wait until these ranks have done that in this exchange."""
        control = self._group.control
        if control is None or self._group.may_give_up:
            return contextlib.nullcontext()
        text = f"{self._call}{self._group.about}"
        return control.waits.inside(key, self._number, text, ranks)

    def announce(
        self, answer: dict[str, Any] | None = None, *, error: BaseException | None = None
    ) -> None:
        """Send the leader's answer, or its error, to all other ranks."""
        group = self._group
        if group.control is None:
            return
        group.control.waits.do(self._answered, self._number)
        failure = None if error is None else group.failure_of(error)
        message = Message(facts=answer or {}, failure=failure, call=self._call)
        # Where the store has ended with rank 0, the others notice that themselves; the error counts here.
        with contextlib.suppress(*(() if error is None and group.rank == 0 else (RuntimeError,))):
            group.control.put(self._answer, message.dumps())
            group.read_keys.append(self._answer)
            # The error may end this rank, and under torchrun the store with it, before others read it.
            if error is not None and not isinstance(error, KeyboardInterrupt):
                group.control.stay(self._name, group.ranks[1:], group.is_gone)

    def fail(self, error: BaseException) -> None:
        """Report on any rank that this exchange has failed."""
        if self._group.leads:
            self.announce(error=error)
        else:
            self.send(Message(facts={}, failure=self._group.failure_of(error)))

    def receive(self, deadline: Deadline, absence_error: MakeError) -> dict[str, Any]:
        """Wait for the leader's answer on another rank.

        Raises:
            DDPSafeError: The leader announced a failure of its own or of another rank; or it is lost,
                or did not answer in time.
        """
        group = self._group
        control = group.control
        assert control is not None  # noqa: S101 - a rank that does not lead has a leader
        with group.waiting(), self._waiting(self._answered, (group.leader,)):
            try:
                raw, lost = self._wait(
                    self._answer,
                    [group.leader],
                    deadline,
                    lambda _: control.find(self._answer) is not None,
                )
                # Name the ranks that have not sent; if all have, the leader alone, which has not answered.
                senders = group.ranks if self._sends and raw is None and lost is None else ()
                silent = [rank for rank in senders if not self._has_sent(rank)]
            except RuntimeError as exc:  # torch raises it when the store does not respond
                why = "the store, which it or the launcher served, is no longer reachable."
                raise absence_error(
                    Absence(ranks=[group.leader], waited_s=deadline.waited_s(), lost=why)
                ) from exc
        if raw is None:
            missing = silent or [group.leader]
            why = "" if lost is None else lost[1]
            raise absence_error(Absence(ranks=missing, waited_s=deadline.waited_s(), lost=why))
        message = Message.loads(raw)
        if message.failure is not None:
            # The leader may have exited, and the store with it.
            with contextlib.suppress(RuntimeError):
                control.acknowledge(self._name)
            raise group.peer_error(message.failure) from None
        self._require_same_call(group.leader, message)
        return message.facts

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"

    def _has_sent(self, rank: int) -> bool:
        assert self._group.control is not None  # noqa: S101 - a rank that waits has peers
        return self._group.control.find(self._key(rank)) is not None

    def _require_same_call(self, rank: int, message: Message) -> None:
        """Refuse a message from another call: its facts would be misread."""
        if message.call != self._call:
            raise self._group.other_call_error(rank, message.call, self._call)

    def _wait(
        self,
        key: str,
        senders: Collection[int],
        deadline: Deadline,
        has_sent: Callable[[int], bool],
    ) -> tuple[bytes | None, tuple[int, str] | None]:
        """Wait for a key; return its value, or else a sender that is lost and why."""
        assert self._group.control is not None  # noqa: S101 - a rank that waits has peers
        for pause_s in deadline.pauses_s():
            raw = self._group.control.find(key)
            if raw is not None:
                return raw, None
            lost = self._group.find_lost(senders, has_sent)
            if lost is not None:
                return None, lost
            time.sleep(pause_s)
        return None, None


def as_line(error: BaseException) -> str:
    """Return an exception that is not ddpsafe's as the others are to read it."""
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
