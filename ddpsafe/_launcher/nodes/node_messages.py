"""The messages between the nodes of a job: frozen dataclasses, JSON on the wire, never a pickle."""

from __future__ import annotations

import bisect
import errno
import itertools
import signal
import traceback
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

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
from ddpsafe._job.channel import Codec, GarbledError, from_json, to_json
from ddpsafe._launcher.processes.rank_process import Activity  # noqa: TC001 - read by pydantic
from ddpsafe._launcher.watch.signals import Interrupted
from ddpsafe._logging import get_logger
from ddpsafe._wire.exception_facts import text_of
from ddpsafe._wire.messages import (
    AcceptsStop,
    AskedToStop,
    CheckpointFolder,
    Collective,
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
    from ddpsafe._job.channel import ClockOffset
    from ddpsafe._wire.messages import Message

logger = get_logger(__name__)


_MAX_REPORTS_PER_S: Final = 128
"""Reports of progress that node 0 reads: with more nodes, each of them reports less often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node, as it introduces itself.

    Attributes:
        pid: The pid of its launcher.
        address: Where the other nodes reach it.
        addresses: All its addresses that other hosts may reach; its ranks may use another network.
        settings: What has to be the same on all nodes, by the name of the field, as text.
        setup: What should be: the script, its arguments, and the variables of torch, gloo and NCCL.
        node_rank: The node rank that it was given, if any.
        launcher: A random id: a restarted container has the name and often the pid of its predecessor.
        is_named: Whether its job has an id, or its endpoint is on each host itself: who comes is meant.
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
    is_named: bool = False

    def __str__(self) -> str:
        return f"{self.hostname} ({self.address})"

    def is_on_host_of(self, other: NodeFacts) -> bool:
        """Return whether two launchers run on one host, or in containers that cannot be told apart."""
        return (self.hostname, self.address) == (other.hostname, other.address)

    def named(self, node_rank: int, *details: str) -> str:
        """Return its name for a message, as the node of that rank."""
        return f"node {node_rank} ({', '.join((repr(self.hostname), *details))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """A launcher says who it is: node 0 to each that connects, another one to take part in the job."""

    node: NodeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A node reads a value that node 0 keeps, or sets it.

    Attributes:
        number: Of this question; the answer has it, too.
        key: The value; empty for the state of torch's rendezvous.
        value: What to set it to; ``None`` to read it.
        token: That of the state that the node knows. It is set only if that is still the last one.
    """

    number: int
    key: str = ""
    value: str | None = None
    token: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The value, after it was set.

    Attributes:
        value: The value; ``None`` if there is none, or if it is what the node knows already.
        token: Of the state; ``None`` if there is none.
        left_s: How long a round that has enough nodes waits for more; ``None`` if it does not.
    """

    number: int
    value: str | None = None
    token: int | None = None
    left_s: float | None = None
    has_set: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsWithout:
    """A round has begun without the node that receives this, or has ended.

    Attributes:
        hosts: Those of the round, by node rank; empty once it has ended.
    """

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The node has read the plan of a round, and starts its ranks."""

    round_id: str


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """What node 0 has decided for one round, whose nodes are those that the rendezvous has found.

    Attributes:
        round_id: Random; the prefix of the keys in this round's store.
        attempt: The attempt, counted from 1, on every node.
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

    # Once, as each rank asks for it: without that, the places of all ranks of 256 nodes of 8 took
    # 1.0 s, and take 21 ms.
    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        """The first rank of each node, and the number of ranks."""
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
        """The nodes by their addresses, without those that several have."""
        owners: defaultdict[str, set[int]] = defaultdict(set)
        for node, facts in enumerate(self.nodes):
            for address in (facts.address, *facts.addresses):
                owners[address].add(node)
        # A bridge to containers has the same address on every host.
        return {address: min(nodes) for address, nodes in owners.items() if len(nodes) == 1}


def plan_of_node_0(node_0: NodeFacts) -> RoundPlan:
    """Return what is known of a round that node 0 has not planned yet: itself, and no ranks."""
    nodes = (replace(node_0, nproc=0),)
    return RoundPlan(round_id="", attempt=0, nodes=nodes, store_port=0, master_port=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderCheck:
    """What a new node has to see before it may start ranks.

    Attributes:
        file: Name of a file that node 0 has written into each folder.
        folders: Where the ranks of earlier attempts kept checkpoints.
        port: One of node 0 that it has to reach, as its ranks will have to reach their store.
    """

    file: str
    folders: tuple[str, ...]
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldersSeen:
    """What a new node found.

    Attributes:
        file: The one of the check that this answers.
        missing: The folders without node 0's file in them.
        unreached: Why the port cannot be reached, as a sentence; empty if it can.
    """

    file: str
    missing: tuple[str, ...]
    unreached: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """A message of a rank, relayed by its launcher, or an error that native code of it has printed.

    Attributes:
        name: Name of the message's class.
    """

    rank: int
    name: str
    body: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnded:
    """The process of a rank has ended.

    Attributes:
        exit_code: Exit status as `multiprocessing` gives it.
        ended_ns: When that was noticed, on the node's monotonic clock.
        oom_kills: As in `NodeOutcomes`, up to now: a host that is out of memory may send those too late.
    """

    rank: int
    exit_code: int | None
    ended_ns: int
    oom_kills: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProgress:
    """How far the ranks of a node are.

    Attributes:
        at_ns: When the launcher began to look at them, on the node's monotonic clock.
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
    """Node 0 warns of something that concerns all nodes."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest:
    """``ddpsafe status`` has been called on the node, perhaps for the stacks of all threads."""

    stacks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusAnswer:
    """What node 0 knows of all ranks: the JSON that `StatusSocket.answer` sends."""

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
        request: The bytes to write to its lifeline, in hexadecimal.
    """

    rank: int
    request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOutcomes:
    """The attempt is over: find out where the ranks are, and report their outcomes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LetRanksExit:
    """All ranks have returned: let their processes end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LetRanksRunOn:
    """A rank has failed, and the others may run on, as ``join(grace_period=…)`` asks.

    Attributes:
        grace_s: For how long, and how long they have again after SIGTERM.
    """

    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """How the attempt has ended, the same on all nodes.

    Sent twice for each failed attempt: with `is_final` None once the error is known, so that all ranks end
    together, and with True or False once the retry policy has decided. False without an error: the round did
    not begin, so the nodes join again. One launcher alone gets True, with the reason, if it is refused.

    Attributes:
        error: The error, as `to_plain` describes it; ``None`` after success, or if a signal ended the
            attempt.
        signal: The signal that ended the attempt.
        where: The node whose launcher received that.
        left: Which ranks are left running after it; see `Interrupted`.
        is_final: Whether no other attempt follows; ``None`` as long as node 0 has not decided.
    """

    error: dict[str, Any] | None = None
    signal: int | None = None
    where: str = ""
    left: str = ""
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
    """The node could not start its ranks, watch them, or load what they returned, and why, for all nodes."""

    result: RoundResult


@dataclass(frozen=True, slots=True, kw_only=True)
class CannotTakePart:
    """Why a node cannot take part in a round that has not begun.

    Attributes:
        round_id: The round, if this is about one.
    """

    node: NodeFacts
    result: RoundResult
    round_id: str = ""


_MACHINE_LIMIT: Final = "a limit of that machine (ports, open files, memory, disk)"
_MAX_CALLS: Final = 8


def as_error(
    exc: BaseException,
    node: str,
    failure: str,
    *,
    phase: Literal["start", "attempt", "retry"],
    names_node: bool = False,
) -> DDPSafeError | Interrupted:
    """Return an error that all nodes can end with, whatever was raised on one of them.

    `node` is named as a message names it, and `failure` says as a clause what it could not do. The phase is
    when the exception was raised: before the ranks ran, where another attempt may help, in the attempt, or by
    the caller's code between two attempts. With `names_node` the node is added to an error that is about a
    machine without naming it.
    """
    if isinstance(exc, (Interrupted, ConfigError, PreflightError, LaunchError)):
        if names_node and isinstance(exc, PreflightError):
            what = f"{node} {failure}: {exc.explanation.what}"
            exc.explanation = replace(exc.explanation, what=what)
        return exc
    # The other nodes do not get the traceback, a user does not see it in the error, and with
    # console="none" this launcher has no log: so the error itself shows the last calls.
    calls = [
        f"  {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(exc.__traceback__)
    ]
    details = ["It was raised there, most recent call first:", *calls[: -_MAX_CALLS - 1 : -1]]
    logger.error("%s %s", node, failure, exc_info=exc)
    what = f"{node} {failure}: {type(exc).__name__}: {text_of(exc).rstrip('.')}."
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
        return RoundResult(
            signal=int(error.signum), where=error.where, left=error.left, is_final=is_final
        )
    plain = to_plain(error)
    if failed_node is not None:
        plain["facts"]["failed_node"] = failed_node
    return RoundResult(error=plain, is_final=is_final)


def error_of(result: RoundResult, **local: object) -> DDPSafeError | Interrupted:
    """Return the error of a result, which is the one that node 0 raises.

    `local` are this node's own facts: `outcomes`, `run_dir`, `values`.

    Raises:
        GarbledError: It describes no error.
    """
    if result.signal is not None:
        return Interrupted(signal.Signals(result.signal), result.where, result.left)
    try:
        return from_plain(result.error or {}, **local)
    except ValueError as exc:
        raise GarbledError(str(exc)) from exc


NodeMessage: TypeAlias = (
    Introduction
    # Before a round, to node 0.
    | Ask
    | CannotTakePart
    | FoldersSeen
    | Ready
    # Before a round, from node 0.
    | Answered
    | RunsWithout
    | FolderCheck
    | RoundPlan
    # In an attempt, to node 0.
    | RankReport
    | RankEnded
    | NodeProgress
    | StatusRequest
    | SignalReceived
    | NodeFailed
    | NodeOutcomes
    | RanksEnded
    # In an attempt, from node 0.
    | RankRequest
    | Warned
    | StatusAnswer
    | ReportOutcomes
    | LetRanksExit
    | LetRanksRunOn
    # At the end of an attempt or of the job, from node 0.
    | RoundResult
)

CODEC: Final[Codec[NodeMessage]] = Codec(*get_args(NodeMessage), routine=(NodeProgress,))
"""What node 0 and the others say on their channel."""

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
        NativeError,
    )
}


def prepare() -> None:
    """Make all adapters now."""
    # pydantic imports modules for it, which fails once descriptors run out.
    CODEC.prepare(*_RANK_MESSAGES.values())


def rank_report(rank: int, message: Message | NativeError) -> RankReport:
    """Return a rank's message as it is sent, without pickled objects."""
    # No node unpickles what comes from the network.
    if isinstance(message, Returned):
        message = replace(message, payload=b"")
    elif isinstance(message, Raised):
        message = replace(message, payload=None)
    return RankReport(rank=rank, name=type(message).__name__, body=to_json(message))


def read_rank_report(report: RankReport) -> Message | NativeError:
    """Return what a launcher has reported of its rank.

    Raises:
        GarbledError: It is of an unknown kind, or does not fit its class.
    """
    cls = _RANK_MESSAGES.get(report.name)
    if cls is None:
        raise GarbledError(report.name)
    message: Message | NativeError = from_json(cls, report.body)
    return message


def shift(message: Message, offset: ClockOffset) -> Message:
    """Return a rank's message with its times on this host's clocks."""
    if isinstance(message, Raised):
        return replace(
            message,
            at_ns=message.at_ns + offset.mono_ns,
            wall_ns=message.wall_ns + offset.wall_ns if message.wall_ns else 0,
            position=shift_position(message.position, offset),
        )
    if isinstance(message, (Returned, Whereabouts)):
        return replace(message, position=shift_position(message.position, offset))
    return shift_position(message, offset) if isinstance(message, Position) else message


def shift_position(position: Position, offset: ClockOffset) -> Position:
    """Return a position with its times on this host's clocks."""

    def shifted(call: Collective) -> Collective:
        return replace(call, entered_ns=call.entered_ns + offset.wall_ns if call.entered_ns else 0)

    entered = map(shifted, position.collectives)
    in_store = None if position.in_store is None else shifted(position.in_store)
    arrivals = tuple((number, at_ns + offset.wall_ns) for number, at_ns in position.arrivals)
    return replace(position, collectives=tuple(entered), in_store=in_store, arrivals=arrivals)


def shift_outcome(outcome: RankOutcome, offset: ClockOffset) -> RankOutcome:
    """Return an outcome with its times on this host's clocks."""
    raised = None if outcome.raised is None else shift(outcome.raised, offset)
    ended_ns = None if outcome.ended_ns is None else outcome.ended_ns + offset.mono_ns
    position = None if outcome.position is None else shift_position(outcome.position, offset)
    progress = shift_progress(outcome.progress, offset)
    return replace(outcome, raised=raised, ended_ns=ended_ns, position=position, progress=progress)  # type: ignore[arg-type]


def shift_progress(progress: Progress, offset: ClockOffset) -> Progress:
    """Return the progress of a rank, with its time on this host's clock."""
    if not progress.last_ns:
        return progress
    return replace(progress, last_ns=progress.last_ns + offset.mono_ns)
