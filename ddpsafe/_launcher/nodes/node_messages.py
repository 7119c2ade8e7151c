"""The messages between the nodes of a job: frozen dataclasses, JSON on the wire, never a pickle."""

from __future__ import annotations

import bisect
import errno
import itertools
import json
import math
import signal
import time
import traceback
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, get_args

from pydantic import TypeAdapter, ValidationError

from ddpsafe._errors import (
    ConfigError,
    DDPSafeError,
    Explanation,
    FailureKind,
    LaunchError,
    PreemptedError,
    PreflightError,
    describes,
    from_plain,
    to_plain,
)
from ddpsafe._launcher.processes.rank_process import Activity  # noqa: TC001 - read by pydantic
from ddpsafe._launcher.watch.signals import Interrupted
from ddpsafe._logging import get_logger
from ddpsafe._wire.exception_facts import text_of
from ddpsafe._wire.messages import (
    AcceptsStop,
    AskedToStop,
    CheckpointFolder,
    Entered,
    Finishing,
    LivingThreads,
    NativeError,
    Position,
    Raised,
    RankOutcome,
    Recovered,
    Returned,
    StopPromise,
    Stops,
    Unanswered,
    Whereabouts,
)
from ddpsafe._wire.rank_pipe import Progress  # noqa: TC001 - read by pydantic

if TYPE_CHECKING:
    from ddpsafe._wire.messages import Message

T = TypeVar("T")
logger = get_logger(__name__)


_MAX_REPORTS_PER_S: Final = 128
"""Reports of progress that node 0 reads: with more nodes, each of them reports less often."""


class GarbledError(ValueError):
    """Something arrived that is not a message of ddpsafe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node, as it introduces itself.

    Attributes:
        hostname: Its name.
        pid: The pid of its launcher.
        address: Where the other nodes reach it.
        nproc: How many ranks it starts.
        addresses: All its addresses that other hosts may reach; its ranks may use another network.
        settings: What has to be the same on all nodes, by the name of the field, as text.
        setup: What should be: the script, its arguments, and the variables of torch, gloo and NCCL.
        node_rank: The node rank that it was given, if any.
        launcher: A random id: a restarted container has the name and often the pid of its predecessor.
    """

    hostname: str
    pid: int
    address: str
    nproc: int
    settings: dict[str, str]
    setup: dict[str, str] = field(default_factory=dict)
    node_rank: int | None = None
    launcher: str = ""
    addresses: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return its name for a message."""
        return f"{self.hostname} ({self.address})"

    def named(self, node_rank: int, *details: str) -> str:
        """Return its name for a message, as the node of that rank."""
        return f"node {node_rank} ({', '.join((repr(self.hostname), *details))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlAddress:
    """Where the control channel is, as node 0 publishes it at the endpoint.

    Attributes:
        node: Node 0.
        port: The port at its address.
    """

    node: NodeFacts
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """A launcher wants to take part in the job.

    Attributes:
        node: Its node.
    """

    node: NodeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsWithout:
    """A round has begun without the node that receives this, or has ended.

    Attributes:
        hosts: Those of the round, by node rank; empty once it has ended.
    """

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The node has read the plan of a round, and starts its ranks.

    Attributes:
        round_id: The round.
    """

    round_id: str


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """What node 0 has decided for one round; it overrides what the rendezvous reports.

    Attributes:
        round_id: Random; the prefix of the keys in this round's store.
        attempt: The attempt, counted from 1, on every node.
        nodes: The nodes, by node rank.
        store_port: Port of the ranks' store at node 0's address.
        master_port: A port that is reserved there, for MASTER_PORT.
        examines: Whether the nodes examine the connections between them before they start ranks.
    """

    round_id: str
    attempt: int
    nodes: tuple[NodeFacts, ...]
    store_port: int
    master_port: int
    examines: bool = False

    @property
    def address(self) -> str:
        """Where node 0 is reached."""
        return self.nodes[0].address

    @property
    def progress_every_s(self) -> float:
        """How often each node reports how far its ranks are, in seconds."""
        return max(1.0, len(self.nodes) / _MAX_REPORTS_PER_S)

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        """The first rank of each node, and the number of ranks: computed once, as each rank asks for it."""
        return (0, *itertools.accumulate(node.nproc for node in self.nodes))

    @property
    def world_size(self) -> int:
        """Number of ranks of all nodes."""
        return self._bounds[-1]

    def ranks_of(self, node_rank: int) -> range:
        """Return the ranks of a node: nodes may have different numbers of them."""
        return range(self._bounds[node_rank], self._bounds[node_rank + 1])

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return bisect.bisect_right(self._bounds, rank) - 1

    def name_of(self, node_rank: int, *details: str) -> str:
        """Return the name of a node for a message."""
        return self.nodes[node_rank].named(node_rank, *details)

    @cached_property
    def by_address(self) -> dict[str, int]:
        """The nodes by their addresses, without those that several have, such as a bridge to containers."""
        owners: defaultdict[str, set[int]] = defaultdict(set)
        for node, facts in enumerate(self.nodes):
            for address in (facts.address, *facts.addresses):
                owners[address].add(node)
        return {address: min(nodes) for address, nodes in owners.items() if len(nodes) == 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderCheck:
    """What a new node has to see before it may start ranks.

    Attributes:
        file: Name of a file that node 0 has written into each folder.
        folders: Where the ranks of earlier attempts kept checkpoints.
    """

    file: str
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldersSeen:
    """What a new node found.

    Attributes:
        missing: The folders without node 0's file in them.
    """

    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a participant: its clocks, to compare times of different hosts.

    Attributes:
        mono_ns: Its monotonic clock.
        wall_ns: Its wall clock.
    """

    mono_ns: int
    wall_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """A message of a rank, relayed by its launcher.

    Attributes:
        rank: The rank.
        name: Name of the message's class.
        body: Its fields.
    """

    rank: int
    name: str
    body: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnded:
    """The process of a rank has ended.

    Attributes:
        rank: The rank.
        exit_code: Exit status as `multiprocessing` gives it.
        ended_ns: When that was noticed, on the node's monotonic clock.
        oom_kills: As in `NodeOutcomes`, up to now: a host that is out of memory may send those too late.
    """

    rank: int
    exit_code: int | None
    ended_ns: int
    oom_kills: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNativeError:
    """Native code of a rank has printed an error that will end the process.

    Attributes:
        rank: The rank.
        native: The error.
    """

    rank: int
    native: NativeError


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProgress:
    """How far the ranks of a node are.

    Attributes:
        at_ns: When the launcher began to look at them, on the node's monotonic clock.
        ranks: The progress of each, by rank.
        activity: What the main thread of each does, by rank.
        idle_s: For how long all of them have been idle.
        unanswered: Their connections without a reply from the other host, by rank.
    """

    at_ns: int
    ranks: dict[int, Progress]
    activity: dict[int, Activity] = field(default_factory=dict)
    idle_s: float = 0.0
    unanswered: dict[int, tuple[Unanswered, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """Node 0 warns of something that concerns all nodes.

    Attributes:
        text: The warning.
    """

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest:
    """``ddpsafe status`` has been called on the node.

    Attributes:
        stacks: Whether it wants the stacks of all threads.
    """

    stacks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusAnswer:
    """What node 0 knows of all ranks.

    Attributes:
        facts: As `StatusSocket.answer` sends them, in JSON.
    """

    facts: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOutcomes:
    """What became of the ranks of a node.

    Attributes:
        outcomes: One for each rank, without pickled objects.
        oom_kills: How many processes the node's kernel killed for memory during the attempt.
        retried: Ranks whose exception is of a type in `RetryPolicy.on`; the exception is not sent.
        grace_s: What the caller of ``join(grace_period=…)`` on this node asks for; ``None`` for nothing.
    """

    outcomes: tuple[RankOutcome, ...]
    oom_kills: int
    retried: tuple[int, ...] = ()
    grace_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalReceived:
    """The launcher of a node has received a signal.

    Attributes:
        number: The signal.
        insists: Whether the sender does not want to wait for the ranks.
    """

    number: int
    insists: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksEnded:
    """No process of the node's ranks is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """Node 0 sends a request such as `ASK_POSITION` to a rank of the node.

    Attributes:
        rank: The rank.
        request: The bytes to write to its lifeline, in hexadecimal.
    """

    rank: int
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """The launcher runs. Two of these, one in each direction, compare the clocks of two hosts.

    Attributes:
        sent_ns: The sender's monotonic clock.
        epoch_ns: Its wall clock minus its monotonic one.
        heard_sent_ns: `sent_ns` of the last one that the sender has received; 0 before the first.
        heard_at_ns: When that one arrived, on the sender's monotonic clock.
        received: How many messages have arrived at the sender, apart from those of routine.
    """

    sent_ns: int
    epoch_ns: int
    heard_sent_ns: int = 0
    heard_at_ns: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The launcher leaves the channel; the end of the connection that follows is not a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collect:
    """The attempt is over: find out where the ranks are, and report their outcomes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """All ranks have returned: let their processes end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue:
    """A rank has failed, and the others may run on, as ``join(grace_period=…)`` asks.

    Attributes:
        grace_s: For how long, and how long they have again after SIGTERM.
    """

    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """How the attempt has ended, the same on all nodes.

    Attributes:
        error: The error, as `to_plain` describes it; ``None`` after success, or if a signal ended the
            attempt.
        signal: The signal that ended the attempt.
        where: The node whose launcher received that.
        is_final: Whether no other attempt follows; ``None`` as long as node 0 has not decided.
    """

    error: dict[str, Any] | None = None
    signal: int | None = None
    where: str = ""
    is_final: bool | None = None

    @property
    def is_good(self) -> bool:
        """Whether neither an error nor a signal ended the attempt."""
        return self.error is None and self.signal is None

    @property
    def failed_node(self) -> int | None:
        """The node that reported the error, if node 0 did not find it itself."""
        return None if self.error is None else self.error["facts"].get("failed_node")

    @property
    def is_preempted(self) -> bool:
        """Whether the ranks have stopped because they were asked to."""
        return describes(self.error, PreemptedError)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailed:
    """The node could not start its ranks, watch them, or load what they returned.

    Attributes:
        result: Why not, as node 0 sends it to all nodes.
    """

    result: RoundResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Objection:
    """Why a node cannot take part in a round that has not begun.

    Attributes:
        node: The node.
        result: Its error.
        round_id: The round, if this is about one.
    """

    node: NodeFacts
    result: RoundResult
    round_id: str = ""


_MACHINE_LIMIT: Final = "a limit of that machine (ports, open files, memory, disk)"
_MAX_CALLS: Final = 8


def as_error(
    exc: BaseException, node: str, did: str, *, phase: Literal["start", "attempt", "retry"]
) -> DDPSafeError | Interrupted:
    """Return an error that all nodes can end with, whatever was raised on one of them.

    Args:
        exc: What was raised there.
        node: The node, as a message names it.
        did: What it could not do, as a clause.
        phase: When it was raised: before the ranks ran, where another attempt may help, in the
            attempt, or by the caller's code between two attempts.
    """
    if isinstance(exc, (Interrupted, ConfigError, PreflightError, LaunchError)):
        return exc
    # The other nodes do not get the traceback, a user does not see it in the error, and with
    # console="none" this launcher has no log: so the error itself shows the last calls.
    calls = [
        f"  {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(exc.__traceback__)
    ]
    details = ["It was raised there, most recent call first:", *calls[: -_MAX_CALLS - 1 : -1]]
    logger.error("%s %s", node, did, exc_info=exc)
    what = f"{node} {did}: {type(exc).__name__}: {text_of(exc).rstrip('.')}."
    kind: FailureKind = "user-error"
    cause = f"{_MACHINE_LIMIT}, or a bug in ddpsafe."
    if phase == "retry":
        cause = "the caller's on_retry raised it, or it is a bug in ddpsafe."
    elif phase == "start" and isinstance(exc, (OSError, RuntimeError)):  # torch's are RuntimeErrors
        is_port = getattr(exc, "errno", None) in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
        kind = "port" if is_port else "startup-network"
        cause = f"{_MACHINE_LIMIT}, or a missing file."
    fix = "see the whole traceback in the log of that node's launcher."
    error = PreflightError(Explanation(what, cause=cause, fix=fix, details=details), kind=kind)
    error.__cause__ = exc
    return error


def round_result_of(
    error: DDPSafeError | Interrupted,
    *,
    is_final: bool | None = None,
    failed_node: int | None = None,
) -> RoundResult:
    """Return an error as it is sent to the other nodes; for the arguments see `RoundResult`.

    `failed_node` becomes a fact of the error, with which node 0 sends it to all nodes.
    """
    if isinstance(error, Interrupted):
        return RoundResult(signal=int(error.signum), where=error.where, is_final=is_final)
    plain = to_plain(error)
    if failed_node is not None:
        plain["facts"]["failed_node"] = failed_node
    return RoundResult(error=plain, is_final=is_final)


def error_of(result: RoundResult, **local: object) -> DDPSafeError | Interrupted:
    """Return the error of a result, which is the one that node 0 raises.

    Args:
        result: The result of an attempt that failed.
        **local: This node's own facts: `outcomes`, `run_dir`, `values`.

    Raises:
        GarbledError: It describes no error.
    """
    if result.signal is not None:
        return Interrupted(signal.Signals(result.signal), result.where)
    try:
        return from_plain(result.error or {}, **local)
    except ValueError as exc:
        raise GarbledError(str(exc)) from exc


NodeMessage: TypeAlias = (
    Hello
    | Joining
    | Objection
    | FolderCheck
    | FoldersSeen
    | RoundPlan
    | RunsWithout
    | Ready
    | NodeFailed
    | RankReport
    | RankEnded
    | RankNativeError
    | NodeProgress
    | NodeOutcomes
    | StatusRequest
    | StatusAnswer
    | SignalReceived
    | RanksEnded
    | RankRequest
    | Alive
    | Goodbye
    | Collect
    | Continue
    | Leave
    | Warned
    | RoundResult
)

_NODE_MESSAGES: Final[dict[str, Any]] = {cls.__name__: cls for cls in get_args(NodeMessage)}
_RANK_MESSAGES: Final[dict[str, Any]] = {
    cls.__name__: cls
    for cls in (
        CheckpointFolder,
        Entered,
        Position,
        Returned,
        Raised,
        Recovered,
        AcceptsStop,
        AskedToStop,
        StopPromise,
        Stops,
        Finishing,
        LivingThreads,
        Whereabouts,
    )
}

_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(cls: Any) -> TypeAdapter[Any]:
    """Return the adapter that reads and writes a class; it is kept, as making it takes milliseconds."""
    if cls not in _adapters:
        _adapters[cls] = TypeAdapter(cls)
    return _adapters[cls]


def prepare() -> None:
    """Make all adapters now: pydantic imports modules for it, which fails once descriptors run out."""
    for cls in (*_NODE_MESSAGES.values(), *_RANK_MESSAGES.values(), ControlAddress):
        _adapter(cls)


def to_json(value: object) -> Any:
    """Return a dataclass as plain JSON values, without those that are the default anyway."""
    return _adapter(type(value)).dump_python(value, mode="json", exclude_defaults=True)


def from_json(cls: type[T], value: object) -> T:
    """Return the dataclass that plain JSON values describe.

    Raises:
        GarbledError: They do not fit the class.
    """
    try:
        read: T = _adapter(cls).validate_python(value)
    except (ValidationError, RecursionError) as exc:
        msg = f"not a {cls.__name__}"
        raise GarbledError(msg) from exc
    return read


def pack(message: NodeMessage) -> bytes:
    """Return a message as one line."""
    return json.dumps([type(message).__name__, to_json(message)]).encode() + b"\n"


def unpack(line: bytes) -> NodeMessage:
    """Return the message that one line holds.

    Raises:
        GarbledError: The line is not a message.
    """
    try:
        name, body = json.loads(line)
        cls = _NODE_MESSAGES[name]
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        msg = "not a message"
        raise GarbledError(msg) from exc
    message: NodeMessage = from_json(cls, body)
    return message


def rank_report(rank: int, message: Message) -> RankReport:
    """Return a rank's message as it is sent, without pickled objects: no node unpickles from the network."""
    if isinstance(message, Returned):
        message = replace(message, payload=b"")
    elif isinstance(message, Raised):
        message = replace(message, payload=None)
    return RankReport(rank=rank, name=type(message).__name__, body=to_json(message))


def read_rank_report(report: RankReport) -> Message:
    """Return the message that a rank of another node has sent.

    Raises:
        GarbledError: It is of an unknown kind, or does not fit its class.
    """
    cls = _RANK_MESSAGES.get(report.name)
    if cls is None:
        raise GarbledError(report.name)
    message: Message = from_json(cls, report.body)
    return message


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """What to add to the times of another host to convert them to this host's clocks.

    Attributes:
        mono_ns: For its monotonic clock.
        wall_ns: For its wall clock.
    """

    mono_ns: int = 0
    wall_ns: int = 0

    def shift(self, message: Message) -> Message:
        """Return a rank's message with its times on this host's clocks."""
        if isinstance(message, Raised):
            return replace(
                message,
                at_ns=message.at_ns + self.mono_ns,
                wall_ns=message.wall_ns + self.wall_ns if message.wall_ns else 0,
                position=self.shift_position(message.position),
            )
        if isinstance(message, Returned):
            return replace(message, position=self.shift_position(message.position))
        if isinstance(message, Whereabouts):
            return replace(message, position=self.shift_position(message.position))
        return self.shift_position(message) if isinstance(message, Position) else message

    def shift_position(self, position: Position) -> Position:
        """Return a position with its times on this host's clocks."""
        entered = [
            replace(each, entered_ns=each.entered_ns + self.wall_ns if each.entered_ns else 0)
            for each in position.collectives
        ]
        arrivals = tuple((number, at_ns + self.wall_ns) for number, at_ns in position.arrivals)
        return replace(position, collectives=tuple(entered), arrivals=arrivals)

    def shift_outcome(self, outcome: RankOutcome) -> RankOutcome:
        """Return an outcome with its times on this host's clocks."""
        raised = None if outcome.raised is None else self.shift(outcome.raised)
        ended_ns = None if outcome.ended_ns is None else outcome.ended_ns + self.mono_ns
        at = None if outcome.position is None else self.shift_position(outcome.position)
        progress = self.shift_progress(outcome.progress)
        return replace(outcome, raised=raised, ended_ns=ended_ns, position=at, progress=progress)  # type: ignore[arg-type]

    def shift_progress(self, progress: Progress) -> Progress:
        """Return the progress of a rank, with its time on this host's clock."""
        if not progress.last_ns:
            return progress
        return replace(progress, last_ns=progress.last_ns + self.mono_ns)


_SAMPLES: Final = 60
"""A minute of beats: in an hour, two clocks may drift apart by a third of a second."""


class ClockComparison:
    """Compares this host's clocks with those of another one, as NTP does (RFC 5905, section 8).

    The difference is least certain by half a round trip, so that of the shortest round trip counts.
    """

    def __init__(self) -> None:
        """Know nothing yet: the clocks count as equal."""
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)
        self._epochs_ns = 0
        self.heard_sent_ns, self.heard_at_ns = 0, 0

    def note_hello(self, hello: Hello, at_ns: int) -> None:
        """Take in the first message, which has made one way only; `at_ns` is when it arrived here."""
        self._note(math.inf, at_ns - hello.mono_ns, hello.wall_ns - hello.mono_ns)

    def note_alive(self, alive: Alive, at_ns: int) -> None:
        """Take in a beat and when it arrived here."""
        self.heard_sent_ns, self.heard_at_ns = alive.sent_ns, at_ns
        if alive.heard_sent_ns:
            there_ns = alive.sent_ns - alive.heard_at_ns
            round_trip_ns = at_ns - alive.heard_sent_ns - there_ns
            ahead_ns = (alive.heard_sent_ns - alive.heard_at_ns + at_ns - alive.sent_ns) // 2
            if round_trip_ns >= 0:
                self._note(round_trip_ns, ahead_ns, alive.epoch_ns)

    def answer(self) -> Alive:
        """Return the next beat to send."""
        return Alive(
            sent_ns=time.monotonic_ns(),
            epoch_ns=_epoch_ns(),
            heard_sent_ns=self.heard_sent_ns,
            heard_at_ns=self.heard_at_ns,
        )

    def offset(self) -> ClockOffset:
        """Return what to add to the other host's times."""
        if not self._samples:
            return ClockOffset()
        ahead_ns = min(self._samples)[1]
        return ClockOffset(mono_ns=ahead_ns, wall_ns=ahead_ns + self._epochs_ns)

    def _note(self, round_trip_ns: float, ahead_ns: int, epoch_ns: int) -> None:
        self._samples.append((round_trip_ns, ahead_ns))
        self._epochs_ns = _epoch_ns() - epoch_ns


def _epoch_ns() -> int:
    return time.time_ns() - time.monotonic_ns()
