"""A node leaves, is refused or cannot take part: which one, how the others continue, and what a signal does."""

from __future__ import annotations

import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cut_wire import HERE, dial, listen
from nodes_kit import parts_of
from scripts import wait_until

from ddpsafe._clock import Deadline
from ddpsafe._config import LaunchConfig
from ddpsafe._errors import (
    ConfigError,
    Explanation,
    NodeLostError,
    PreflightError,
    RendezvousTimeoutError,
    describes,
)
from ddpsafe._launcher.nodes.lobby import Lobby, Membership
from ddpsafe._launcher.nodes.node_messages import (
    CannotTakePart,
    Introduction,
    NodeFacts,
    Ready,
    RoundPlan,
    RoundResult,
    round_result_of,
)
from ddpsafe._launcher.nodes.rendezvous import NodeRendezvous
from ddpsafe._launcher.nodes.rounds import NodeLaunch, _NoRound
from ddpsafe._launcher.plan import make_plan
from ddpsafe._launcher.watch.signals import Interrupted, SignalInbox, open_inbox
from ddpsafe.doctor._findings import Finding

NODES = tuple(
    NodeFacts(
        hostname=f"h{node}", pid=1, address=HERE, nproc=1, settings={}, launcher=f"launcher {node}"
    )
    for node in range(3)
)
OLD = {"launcher 0", "launcher 1"}
UNFIT = PreflightError(Explanation("h2 cannot open a port."), kind="startup-network")
PLAN = RoundPlan(
    round_id="round", attempt=2, nodes=NODES, store_port=0, master_port=0, examines=True
)


@dataclass
class Job:
    """Node 0 of a job of three nodes, and the other ones as they see it; without torch's rendezvous."""

    inbox: SignalInbox
    findings: tuple[Finding, ...] = ()
    others: dict[int, NodeRendezvous] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = LaunchConfig(
            nnodes=3,
            nproc_per_node=1,
            backend="gloo",
            preflight="full",
            rendezvous={"endpoint": "h0:29400"},
        )
        self.channel = listen(scope="job")
        self.rendezvous: Any = NodeRendezvous(config, self.inbox)
        self.rendezvous.endpoint.serves = True
        self.rendezvous._channel = self.channel
        self.lobby = self.rendezvous.lobby = Lobby(NODES[0])
        self.launch: Any = NodeLaunch(
            parts_of(
                make_plan(config, style="launch"),
                examine_nodes=self.examine,
                directory=SimpleNamespace(path=Path("run")),
            )
        )

    def examine(self, *_: object, **__: object) -> None:
        """Replace the connection check."""
        report: Any = SimpleNamespace(findings=self.findings)
        raise PreflightError(Explanation("1 problem."), report=report)

    @property
    def forgotten(self) -> list[str]:
        """The launchers that the next round does without."""
        return [launcher for launcher in self.lobby.callers if launcher in self.lobby.out]

    def wait_until(self, holds: Callable[[], object]) -> None:
        """Let node 0 take in what arrives, until something holds."""
        self.rendezvous.wait_until(holds, Deadline.after(None))

    def dial(self, number: int, **changes: Any) -> Membership:
        """Connect as a node."""
        node = replace(NODES[number], **changes)
        other: Any = NodeRendezvous(self.rendezvous._config, self.inbox)
        other._channel = dial(self.channel.port, scope="job", node=node.launcher)
        other.membership = Membership(NODES[0])
        other.channel.send(Introduction(node=node))
        self.others[len(self.others) + 1] = other
        self.wait_until(lambda: self.lobby.has_come_or_left(node.launcher))
        return other.membership

    def refuse_unable(self) -> None:
        """Refuse who cannot take part."""
        self.rendezvous.perform(self.lobby.refuse_unable(self.rendezvous._config))

    def dial_both(self) -> None:
        """Connect nodes 1 and 2."""
        for number in (1, 2):
            self.dial(number)

    def say(self, node: int, *messages: Any) -> None:
        """Send as a node."""
        for message in messages:
            self.others[node].channel.send(message)

    def object(self, node: int, error: Any = UNFIT, round_id: str = "") -> None:
        """Tell as a node why it cannot take part."""
        result = round_result_of(error, is_final=True)
        self.say(node, CannotTakePart(node=NODES[node], result=result, round_id=round_id))

    def hears(self, node: int) -> Membership:
        """Return what a node has been told, once it has been told something."""
        member = self.others[node].membership
        wait_until(lambda: self.others[node].look() or member.is_told)
        return member


@pytest.fixture
def job() -> Iterator[Job]:
    """Open a job."""
    with open_inbox() as inbox:
        opened = Job(inbox)
        yield opened
        for other in opened.others.values():
            other.channel.close()
        opened.channel.close()


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_new_node_that_cannot_begin_joins_again_and_the_old_ones_go_on(
    job: Job, *, is_ready: bool
) -> None:
    """Whether they have begun the round already, or not."""
    job.dial_both()
    job.lobby.settled = frozenset(OLD)
    job.launch._round = job.rendezvous.send_plan(PLAN)
    if is_ready:
        job.say(1, Ready(round_id="round"))
        job.wait_until(lambda: job.lobby.is_present("launcher 1"))
    job.object(2, round_id="round")
    with pytest.raises(NodeLostError) as raised:
        job.launch._await_nodes(job.rendezvous, PLAN)
    assert raised.value.node_rank == 2
    assert "h2 cannot open a port" in raised.value.explanation.what
    assert job.forgotten == ["launcher 2"]
    told = job.hears(2).result
    assert told is not None
    assert describes(told.error, PreflightError)
    assert job.others[1].membership.result is None


def test_the_first_that_cannot_take_part_is_named() -> None:
    """What another one says later may follow from it."""
    lobby = Lobby(NODES[0])
    for node, text in ((1, "joins"), (2, "joins"), (2, "cause"), (1, "consequence")):
        launcher = NODES[node].launcher
        event: Any = Introduction(node=NODES[node])
        if text != "joins":
            result = round_result_of(PreflightError(Explanation(text)))
            event = CannotTakePart(node=NODES[node], result=result)
        assert not [*lobby.take(launcher, event)]
    with pytest.raises(PreflightError, match="cause"):
        [*lobby.refuse_unable(LaunchConfig.resolve(backend="gloo"))]


@pytest.mark.parametrize("unable", [(1,), (2, 1)])
def test_an_old_node_that_cannot_begin_ends_all(job: Job, unable: tuple[int, ...]) -> None:
    """No other node could take its place: the error is its own, on all of them."""
    job.dial_both()
    job.lobby.settled = frozenset(OLD)
    job.rendezvous.send_plan(PLAN)
    for node in unable:  # a new one may be unable as well
        job.object(node, round_id="round")
    job.wait_until(lambda: len(job.lobby.unable) == len(unable))
    with pytest.raises(PreflightError, match="cannot open a port"):
        job.launch._await_nodes(job.rendezvous, PLAN)


@pytest.mark.parametrize("was_ready", [False, True])
def test_a_node_that_has_left_is_lost_at_once(job: Job, *, was_ready: bool) -> None:
    """The others do not wait for it; if it was ready, others may still prepare."""
    job.dial_both()
    job.rendezvous.send_plan(PLAN)
    for node in (1, 2) if was_ready else (1,):
        job.say(node, Ready(round_id="round"))
    job.others.pop(2).channel.close()
    job.wait_until(lambda: job.forgotten)
    with pytest.raises(NodeLostError) as raised:
        job.launch._await_nodes(job.rendezvous, PLAN)
    assert raised.value.node_rank == 2
    assert "left the job" in str(raised.value.explanation.cause)
    assert job.forgotten == ["launcher 2"]


def test_what_a_node_says_of_an_earlier_round_does_not_count(job: Job) -> None:
    """That round was given up because of another node."""
    job.dial_both()
    job.rendezvous.send_plan(PLAN)
    job.object(1, round_id="round")
    job.wait_until(lambda: job.lobby.unable)
    job.rendezvous.perform(job.lobby.give_up_round(["launcher 1"]))
    assert job.hears(1).joins_again
    job.object(1, round_id="round")
    job.say(1, Ready(round_id="round"))
    job.object(2)
    job.wait_until(lambda: job.lobby.unable)
    assert list(job.lobby.unable) == ["launcher 2"]
    assert not job.lobby.is_present("launcher 1")


@pytest.mark.parametrize(
    ("hosts", "known", "refused"),
    [
        (("h0", "h2"), OLD, 2),
        (("h1",), OLD, None),
        ((), OLD, None),
        (("h0", "h2"), {"launcher 0"}, 2),
        (("h0", "h1"), {"launcher 0"}, 1),
    ],
)
def test_a_new_node_joins_again_if_a_finding_names_it(
    job: Job, hosts: tuple[str, ...], known: set[str], refused: int | None
) -> None:
    """Otherwise the error ends the job, because another new node would change nothing."""
    job.dial_both()
    job.lobby.settled = frozenset(known)
    job.rendezvous.send_plan(PLAN)
    job.findings = (Finding(code="DS-MESH-010", severity="failed", fact="lost", hosts=hosts),)
    for node in (1, 2):
        job.object(node, round_id="round")
    if refused is None:
        with pytest.raises(PreflightError):
            job.launch._examine_with_new_nodes(job.rendezvous, PLAN)
        assert job.forgotten == []
        return
    assert job.launch._examine_with_new_nodes(job.rendezvous, PLAN) is False
    assert job.forgotten == [f"launcher {refused}"]
    assert job.hears(refused).result is not None
    other = job.hears(3 - refused)
    assert (other.result, other.joins_again) == (None, True)
    assert not job.lobby.unable


@pytest.mark.parametrize(
    ("hosts", "refusal", "cause"),
    [
        ((), "", "a node has not started its launcher, or cannot reach the endpoint."),
        (("h1",), "secret", "the launcher on 'h1' was refused: it has another job secret or id."),
        (
            ("h1", "h2"),
            "version",
            "the launchers on 'h1' and 'h2' were refused: they have another version of ddpsafe.",
        ),
    ],
)
def test_a_launcher_that_was_refused_is_the_likely_cause_of_a_missing_node(
    job: Job, hosts: tuple[str, ...], refusal: Any, cause: str
) -> None:
    """The refused node is the one that is missing, not a node that never started."""
    job.channel.refused.extend((refusal, {"hostname": host}) for host in hosts)
    job.rendezvous._warn_of_refused()
    job.rendezvous._join_by = Deadline.after(timedelta(0))
    with pytest.raises(RendezvousTimeoutError) as raised:
        job.rendezvous._require_more_time()
    assert raised.value.explanation.cause == cause


@dataclass
class Follower:
    """Another node of the job, which cannot begin a round."""

    job: Job
    launch: Any
    rendezvous: Any

    def fails(self, error: BaseException) -> Any:
        """Return what it ends with; ``None`` if it joins again."""
        return self.launch._failed_to_begin(self.rendezvous, error)


@pytest.fixture
def follower(job: Job) -> Follower:
    """Let node 1 begin a round that node 0 gives up."""
    job.dial_both()
    job.lobby.settled = frozenset(OLD)
    job.rendezvous.send_plan(PLAN)
    rendezvous = job.others[1]
    wait_until(lambda: rendezvous.look() or rendezvous.membership.plan)
    job.rendezvous.perform(job.lobby.give_up_round(["launcher 1"]))
    return Follower(job, NodeLaunch(job.launch._parts), rendezvous)


@pytest.mark.parametrize(
    ("error", "received"),
    [(UNFIT, None), (UNFIT, signal.SIGTERM), (Interrupted(signal.SIGTERM), signal.SIGTERM)],
)
def test_a_signal_to_a_node_that_has_to_join_again_ends_it(
    follower: Follower, error: BaseException, received: signal.Signals | None
) -> None:
    """Whether it arrived before the refusal of the other node or after it."""
    if received is None:
        assert follower.fails(error) is None
        return
    follower.job.inbox.put(received, None)
    with pytest.raises(Interrupted):
        follower.fails(error)


def test_a_signal_to_an_old_node_that_has_to_join_again_ends_all(follower: Follower) -> None:
    """Node 0 waits for that node, receives the signal and passes it to the others."""
    job = follower.job
    follower.launch._earlier.append(UNFIT)
    job.inbox.put(signal.SIGTERM, None)
    with pytest.raises(Interrupted):
        follower.fails(UNFIT)
    wait_until(lambda: job.rendezvous.look() or job.lobby.unable)  # it has the same inbox
    with pytest.raises(Interrupted) as raised:
        job.refuse_unable()
    assert raised.value.signum == signal.SIGTERM


@pytest.mark.parametrize("error", [UNFIT, Interrupted(signal.SIGTERM)])
def test_what_ends_the_job_reaches_every_launcher(job: Job, error: Any) -> None:
    """Those of the round, and those that wait for the next one."""
    job.dial_both()

    def fail(*_: object) -> None:
        raise _NoRound(error)

    job.launch._attempt_as_node_0 = fail
    with pytest.raises(type(error)):
        job.launch._lead(job.rendezvous)
    for node in (1, 2):
        result = job.hears(node).result
        expected = round_result_of(error, is_final=True)
        if isinstance(error, Interrupted):  # the others do not know where it arrived
            expected = replace(expected, where=f"node 0 ({socket.gethostname()!r})")
        assert result == expected


def test_a_second_start_of_a_node_replaces_the_first(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so on node 0 and to the first one."""
    job.dial(1, node_rank=1)
    job.dial(2, node_rank=1, hostname="h1")
    assert list(job.lobby.nodes) == ["launcher 2"]
    assert job.forgotten == ["launcher 1"]
    assert "node rank 1 was started again on h1: the second start replaces the first" in caplog.text
    told = job.hears(1).result
    assert told is not None
    assert describes(told.error, ConfigError)
    assert not job.lobby.unable


@pytest.mark.parametrize("of", [0, 1])
def test_a_host_that_comes_twice_is_an_error_that_names_both(job: Job, of: int) -> None:
    """As if two jobs used one endpoint: neither is preferred."""
    job.dial(1)
    job.dial(2, hostname=f"h{of}", pid=77)
    with pytest.raises(ConfigError, match=rf"h{of} \(.*\) comes twice to this job: pids 1 and 77"):
        job.refuse_unable()


@pytest.mark.parametrize(
    "changes", [{"is_named": True}, {"address": "10.0.0.9"}, {"node_rank": 2}], ids=str
)
def test_a_host_may_come_twice_where_that_is_meant(job: Job, changes: dict[str, Any]) -> None:
    """The job has an id, or node ranks were given; or the two only have the same name."""
    job.dial(1, node_rank=1)
    job.dial(2, **{"hostname": "h1", **changes})
    assert not job.lobby.unable
    assert list(job.lobby.nodes) == ["launcher 1", "launcher 2"]


def test_two_hosts_with_one_node_rank_are_an_error(job: Job) -> None:
    """Neither is preferred."""
    job.dial(1, node_rank=1)
    job.dial(2, node_rank=1)
    with pytest.raises(ConfigError, match=r"two nodes have node rank 1: h1 .* and h2"):
        job.refuse_unable()


def test_a_node_that_comes_while_a_round_runs_is_told_so(job: Job) -> None:
    """It may wait for the next one; those of the round hear nothing of it."""
    job.dial(1)
    plan = replace(PLAN, nodes=NODES[:2])
    job.rendezvous.send_plan(plan)
    job.rendezvous.begin(plan)
    late = job.dial(2)
    wait_until(lambda: job.others[2].look() or late.running)
    assert late.running is not None
    assert late.running.hosts == ("h0", "h1")
    job.others[1].look()
    assert job.others[1].membership.running is None
    job.rendezvous.perform(job.lobby.end_round())
    wait_until(lambda: job.others[2].look() or late.running is None)


def test_what_a_new_node_says_is_not_the_error_of_the_job(job: Job) -> None:
    """It may be a mistyped command, which has nothing to do with what happened."""
    job.dial_both()
    job.lobby.settled = frozenset(OLD)
    job.object(2)
    job.wait_until(lambda: job.lobby.unable)
    own = PreflightError(Explanation("no port."), kind="port")
    assert job.launch._reason(job.rendezvous, own) is own
    job.object(2, Interrupted(signal.SIGTERM))
    job.wait_until(lambda: job.lobby.unable["launcher 2"].result.signal is not None)
    job.refuse_unable()
    assert job.hears(2).result is not None


def test_messages_of_a_round_that_come_before_it_begins_are_kept_in_order(job: Job) -> None:
    """Its nodes start their ranks as soon as they have the plan; what is of an earlier round is dropped."""
    job.dial_both()
    for node in (1, 2):
        job.say(node, RoundResult(where="earlier"))
    channel = job.rendezvous.send_plan(PLAN)
    for node in (1, 2):
        job.say(node, Ready(round_id="round"), RoundResult(where="a"), RoundResult(where="b"))
    job.launch._await_nodes(job.rendezvous, PLAN)
    job.rendezvous.begin(PLAN)
    heard: list[tuple[int, str]] = []

    def hear() -> bool:
        heard.extend(
            (node, each.where) for node, each in channel.events() if hasattr(each, "where")
        )
        return len(heard) >= 4

    wait_until(hear)
    assert Counter(heard) == Counter([(node, text) for node in (1, 2) for text in "ab"])
    for node in (1, 2):
        assert [text for number, text in heard if number == node] == ["a", "b"]
