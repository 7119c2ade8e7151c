"""The ranks that save and restore together, and how they talk: over the store, in rounds.

In a round every rank tells rank 0 something, and rank 0 announces one answer. A rank that failed
says so and leaves; nobody waits in a collective for it.
"""

from __future__ import annotations

import itertools
import json
import socket
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._clock import Deadline
from ddpsafe._errors import Explanation
from ddpsafe.checkpoint import errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from ddpsafe._worker.context import RankContext
    from ddpsafe._worker.control import Control

    Judge = Callable[[dict[int, "Word"]], dict[str, Any]]
    Absent = Callable[[list[int], Deadline], errors.CheckpointError]

_MAX_TEXT: Final = 4_000
_NOT_FACTS: Final = {"explanation", "exit_code", "origin"}
_number_of_party = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What one rank tells rank 0 in a round.

    Attributes:
        facts: Plain values.
        data: Bytes that go with them.
        failure: What it failed with, as `to_wire` has it; ``None`` where it did not.
    """

    facts: dict[str, Any]
    data: bytes = b""
    failure: dict[str, Any] | None = None

    def dumps(self) -> bytes:
        """Return it as bytes: a line of JSON and what goes with it."""
        head = {"facts": self.facts, "failure": self.failure}
        return json.dumps(head).encode() + b"\n" + self.data

    @classmethod
    def loads(cls, raw: bytes) -> Word:
        """Read it back."""
        head, _, data = raw.partition(b"\n")
        return cls(data=data, **json.loads(head))


class Party:
    """This rank among the ranks of the job; alone where there is no process group.

    Args:
        timeout: How long rank 0 may take, and the others, in one round.

    Attributes:
        rank: This rank.
        world_size: How many there are.
        host: Name of this rank's host.
        timeout: As given.
        read_keys: Keys of the last round, to be removed once all are in the next one.
    """

    def __init__(self, timeout: timedelta) -> None:
        from ddpsafe._worker.attached import current

        self._context: RankContext = current()
        self._control: Control | None = self._context.control
        self.rank = self._context.rank
        self.world_size = self._context.world_size if self._control is not None else 1
        self.host = socket.gethostname()
        self.timeout = timeout
        self._name = f"checkpoint/{next(_number_of_party)}"
        self._rounds = itertools.count()
        self.read_keys: list[str] = []

    @property
    def is_main(self) -> bool:
        """True on the rank that writes."""
        return self._context.is_main

    def __str__(self) -> str:
        return f"{self._context.world} on {self.host} in attempt {self._context.attempt}"

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside DDP and compile wrappers."""
        return self._context.unwrap(model)

    def begin(self) -> Round:
        """Begin the next round; every rank does, in the same order."""
        return Round(self, self._control, f"{self._name}/{next(self._rounds)}")

    def forget(self, control: Control | None) -> None:
        """Remove what was said in rounds that are over: the store would grow with every save."""
        keys, self.read_keys = self.read_keys, []
        for key in keys:
            if control is not None:
                control.drop(key)

    def deadline(self) -> Deadline:
        """Return the end of a wait that begins now."""
        return Deadline.after(self.timeout)


class Round:
    """One exchange: all tell rank 0, rank 0 answers all."""

    def __init__(self, party: Party, control: Control | None, name: str) -> None:
        self._party = party
        self._control = control
        self._name = name
        self._mine: Word | None = None

    def tell(self, word: Word) -> None:
        """Tell rank 0, without waiting for it."""
        if self._party.rank == 0:
            self._mine = word
        if self._control is not None:
            here = b"here" if self._party.rank == 0 else word.dumps()
            self._control.put(self._key(self._party.rank), here)

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"

    def settle(self, judge: Judge, absent: Absent) -> dict[str, Any]:
        """Let rank 0 judge what all ranks told, and give every rank its answer.

        Args:
            judge: Makes the answer of the ranks' words, on rank 0; what it raises, all raise.
            absent: Words the error of ranks that do not come.

        Returns:
            The answer.

        Raises:
            CheckpointError: A rank failed, did not come, or rank 0 did not accept its word.
        """
        deadline = self._party.deadline()
        if not self._party.is_main:
            return self.learn(deadline, absent)
        try:
            answer = judge(self.hear(deadline, absent))
        except BaseException as exc:
            self.announce(error=exc)
            raise
        self.announce(answer)
        return answer

    def hear(self, deadline: Deadline, absent: Absent) -> dict[int, Word]:
        """Collect, on rank 0, what the ranks told.

        Returns:
            Their words by rank, its own included.

        Raises:
            CheckpointError: A rank failed, or did not tell in time.
        """
        words = {} if self._mine is None else {0: self._mine}
        missing: list[int] = []
        for rank in range(1, self._party.world_size):
            raw = None
            if self._control is not None:
                raw = self._control.take(self._key(rank), deadline=deadline)
            if raw is None:
                missing.append(rank)
            else:
                words[rank] = Word.loads(raw)
        if not missing:  # whoever is in this round has done with those before it
            self._party.forget(self._control)
        self._party.read_keys += [self._key(rank) for rank in words]
        if missing:
            raise absent(missing, deadline)
        for word in words.values():
            if word.failure is not None:
                raise from_wire(word.failure, str(self._party))
        return words

    def announce(
        self, answer: dict[str, Any] | None = None, *, error: BaseException | None = None
    ) -> None:
        """Answer, on rank 0, all the others."""
        if isinstance(error, errors.CheckpointError) and error.rank is None:
            error.rank = 0
        if self._control is None:
            return
        failure = None if error is None else to_wire(error, rank=0)
        word = Word(facts=answer or {}, failure=failure)
        self._control.put(f"{self._name}/answer", word.dumps())
        self._party.read_keys.append(f"{self._name}/answer")
        if error is not None:  # it may end this rank, and under torchrun the store with it
            self._control.stay(self._name)

    def fail(self, error: BaseException) -> None:
        """Say, on any rank, that nothing will come of this round."""
        if self._party.is_main:
            self.announce(error=error)
        else:
            self.tell(Word(facts={}, failure=to_wire(error, rank=self._party.rank)))

    def learn(self, deadline: Deadline, absent: Absent) -> dict[str, Any]:
        """Wait, on another rank, for the answer of rank 0.

        Raises:
            CheckpointError: Rank 0 announced that it, or another rank, failed; or it did not
                answer in time.
        """
        from ddpsafe._worker import in_flight

        assert self._control is not None  # noqa: S101 - a rank other than 0 has peers
        with in_flight.waiting():
            raw = self._control.take(f"{self._name}/answer", deadline=deadline)
        if raw is None:
            raise absent(self._find_missing(), deadline)
        word = Word.loads(raw)
        if word.failure is not None:
            self._control.acknowledge(self._name)
            raise from_wire(word.failure, str(self._party)) from None
        return word.facts

    def _find_missing(self) -> list[int]:
        """Return the ranks that have not told; rank 0 alone where all have and it does not answer."""
        assert self._control is not None  # noqa: S101 - a rank that waits has peers
        ranks = range(self._party.world_size)
        now = Deadline.after(timedelta(0))
        silent = [
            rank for rank in ranks if self._control.take(self._key(rank), deadline=now) is None
        ]
        return silent or [0]


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
