"""A new node is refused: which one, how the others continue, and what a signal does meanwhile."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from nodes_kit import parts_of
from scripts import wait_until

from ddpsafe._clock import Deadline
from ddpsafe._config import LaunchConfig
from ddpsafe._errors import (
    Explanation,
    NodeLostError,
    PreflightError,
    RendezvousTimeoutError,
    describes,
)
from ddpsafe._launcher.nodes.control_channel import Channel
from ddpsafe._launcher.nodes.node_messages import (
    Hello,
    NodeFacts,
    RoundPlan,
    RoundResult,
    round_result_of,
)
from ddpsafe._launcher.nodes.rendezvous import (
    _OBJECTION,
    _OVER,
    _REFUSED_NAME,
    Board,
    NodeRendezvous,
    Seat,
)
from ddpsafe._launcher.nodes.rounds import _FAILED, _REFUSAL, NodeLaunch
from ddpsafe._launcher.plan import make_plan
from ddpsafe._launcher.watch.signals import Interrupted, SignalInbox, open_inbox
from ddpsafe.doctor._findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = "127.0.0.1"
NODES = tuple(
    NodeFacts(
        hostname=f"h{node}", pid=1, address=HERE, nproc=1, settings={}, launcher=f"launcher {node}"
    )
    for node in range(3)
)
OLD = {"launcher 0", "launcher 1"}
UNFIT = PreflightError(Explanation("h2 reached no control channel."), kind="startup-network")


@dataclass
class Round:
    """A round of three nodes on one of them, with a store in memory and without torch's rendezvous.

    Attributes:
        forgotten: The launchers that the next round does without.
        findings: The findings of the connection check.
    """

    inbox: SignalInbox
    forgotten: list[str] = field(default_factory=list)
    findings: tuple[Finding, ...] = ()

    def __post_init__(self) -> None:
        """Open it."""
        from torch.distributed import HashStore

        config = LaunchConfig(
            nnodes=3,
            nproc_per_node=1,
            backend="gloo",
            preflight="full",
            rendezvous={"endpoint": "h0:29400"},
        )
        self.rendezvous: Any = NodeRendezvous(config, self.inbox)
        self.rendezvous.serves, self.rendezvous._store = True, HashStore()
        state = SimpleNamespace(participants={"h0"}, wait_list=set(), redundancy_list=set())
        self.rendezvous._backend = SimpleNamespace(
            state=state, forget=lambda member: self.forgotten.append(member[0].split()[-1])
        )
        self.board = Board(HashStore(), self.rendezvous._signer, self.rendezvous)
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

    def seat(self, node: int = 0) -> Seat:
        """Return the place of a node."""
        return Seat(node_rank=node, nnodes=3, board=self.board)

    def plan(self, channel_port: int = 0) -> RoundPlan:
        """Return what node 0 has decided."""
        return RoundPlan(
            round_id="round",
            attempt=2,
            nodes=NODES,
            store_port=0,
            channel_port=channel_port,
            master_port=0,
            examines=True,
        )


@pytest.fixture
def opened() -> Iterator[Round]:
    """Open a round."""
    with open_inbox() as inbox:
        yield Round(inbox)


@pytest.mark.parametrize("comes", ["late", "again"])
def test_a_late_old_node_is_awaited_when_a_new_one_cannot_connect(
    opened: Round, comes: str
) -> None:
    """Only the new one is dropped: the old one has connected, or has read that it has to join again."""
    secret = opened.rendezvous.secret
    listening = Channel.listen(HERE, secret=secret, round_id="round", nnodes=3)
    opened.launch._channel = listening
    opened.board.put(_FAILED, round_result_of(UNFIT, is_final=True, failed_node=2))
    dialled: list[Channel] = []

    def follow() -> None:
        wait_until(lambda: opened.board.has(_REFUSAL), otherwise=lambda: "not refused")
        if comes == "again":
            opened.board.put(f"{_REFUSAL}/1", RoundResult())
            return
        channel = Channel.dial(
            (HERE, listening.port),
            secret=secret,
            round_id="round",
            node=1,
            hello=lambda: Hello(mono_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
            deadline=Deadline.after(timedelta(seconds=20)),
        )
        dialled.append(channel)

    following = threading.Thread(target=follow)
    following.start()
    with pytest.raises(NodeLostError) as raised:
        opened.launch._await_nodes(opened.rendezvous, opened.seat(), opened.plan(), OLD)
    connected = listening.connected()
    following.join()
    for channel in (*dialled, listening):
        channel.close()
    assert raised.value.node_rank == 2
    assert connected == ({1} if comes == "late" else set())
    assert opened.forgotten == ["2"]
    refusal = opened.board.find(_REFUSAL, RoundResult)
    assert refusal is not None
    assert (refusal.is_final, refusal.failed_node) == (False, 2)


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
def test_a_new_node_is_refused_if_a_finding_names_it(
    opened: Round, hosts: tuple[str, ...], known: set[str], refused: int | None
) -> None:
    """Otherwise the error ends the job, because another new node would change nothing."""
    opened.findings = (Finding(code="DS-MESH-010", severity="failed", fact="lost", hosts=hosts),)
    opened.board.count("ddpsafe/examined", 2)
    for node in (1, 2):
        opened.board.put(f"{_REFUSAL}/{node}", RoundResult())

    def examine() -> bool:
        found: bool = opened.launch._examine_with_new_nodes(
            opened.rendezvous, opened.seat(), opened.plan(), known
        )
        return found

    if refused is None:
        with pytest.raises(PreflightError):
            examine()
        assert not opened.board.has(_REFUSAL)
        return
    assert examine() is False
    assert opened.forgotten == [str(refused)]


@pytest.mark.parametrize(
    ("hosts", "cause"),
    [
        ((), "a node has not started its launcher, or cannot reach the endpoint."),
        (("h1",), "the launcher on 'h1' was refused: it has another job secret or id."),
        (
            ("h1", "h2"),
            "the launchers on 'h1' and 'h2' were refused: they have another job secret or id.",
        ),
    ],
)
def test_a_launcher_without_the_secret_is_the_likely_cause_of_a_missing_node(
    opened: Round, hosts: tuple[str, ...], cause: str
) -> None:
    """The refused node is the one that is missing, not a node that never started."""
    for host in hosts:
        opened.rendezvous._root.put_plain(_REFUSED_NAME, host)
        opened.rendezvous._warn_of_refused_names()
    with pytest.raises(RendezvousTimeoutError) as raised:
        opened.rendezvous._require_more_time(Deadline.after(timedelta(0)))
    assert raised.value.explanation.cause == cause


@pytest.mark.parametrize(
    ("error", "received"),
    [
        (UNFIT, None),
        (UNFIT, signal.SIGTERM),
        (Interrupted(signal.SIGTERM), signal.SIGTERM),
    ],
)
def test_a_signal_to_a_node_that_has_to_join_again_ends_it(
    opened: Round, error: BaseException, received: signal.Signals | None
) -> None:
    """Whether it arrived before the refusal of the other node or after it."""
    opened.board.put(_REFUSAL, round_result_of(UNFIT, is_final=False, failed_node=2))
    if received is not None:
        opened.inbox.put(received, None)
        with pytest.raises(Interrupted):
            opened.launch._failed_to_begin(opened.rendezvous, opened.seat(1), error)
        return
    assert opened.launch._failed_to_begin(opened.rendezvous, opened.seat(1), error) is None
    assert opened.rendezvous.takes_signals


def test_a_signal_to_an_old_node_that_has_to_join_again_ends_all(opened: Round) -> None:
    """Node 0 waits for that node, receives the signal and passes it to the others."""
    opened.board.put(_REFUSAL, round_result_of(UNFIT, is_final=False, failed_node=2))
    opened.launch._earlier.append(UNFIT)
    opened.inbox.put(signal.SIGTERM, None)
    raised: list[BaseException] = []

    def be_node_0() -> None:
        wait_until(lambda: opened.rendezvous._root.has(_OBJECTION))
        try:
            opened.rendezvous._check_nodes(0)
        except Interrupted as exc:
            raised.append(exc)

    waiting = threading.Thread(target=be_node_0)
    waiting.start()
    with pytest.raises(Interrupted):
        opened.launch._failed_to_begin(opened.rendezvous, opened.seat(1), UNFIT)
    waiting.join()
    assert isinstance(raised[0], Interrupted)
    assert raised[0].signum == signal.SIGTERM


def test_an_error_after_a_refusal_reaches_the_nodes_that_join_again(opened: Round) -> None:
    """They wait for the next round and no longer read the channel of this one."""
    opened.launch._channel = Channel.listen(HERE, secret=b"x", round_id="round", nnodes=3)
    opened.board.put(_FAILED, round_result_of(UNFIT, is_final=True, failed_node=2))
    opened.board.put(f"{_REFUSAL}/1", RoundResult())
    opened.launch._attempt_as_node_0 = lambda rendezvous, _: opened.launch._await_nodes(
        rendezvous, opened.seat(), opened.plan(), OLD
    )
    with pytest.raises(NodeLostError):
        opened.launch._lead(opened.rendezvous)
    opened.launch._channel.close()
    over = opened.rendezvous._root.find(_OVER, RoundResult)
    assert over is not None
    assert describes(over.error, NodeLostError)


def test_a_signal_to_node_0_during_a_refusal_reaches_the_nodes_that_join_again(
    opened: Round,
) -> None:
    """They have read of the refusal and wait for the next round."""
    opened.inbox.put(signal.SIGTERM, None)
    with pytest.raises(Interrupted) as raised:
        opened.launch._refuse_new_node(opened.rendezvous, opened.seat(), NODES, 2, UNFIT)
    for node in (1, 2):
        opened.board.put(f"{_REFUSAL}/{node}", RoundResult())
    assert opened.launch._refuse(opened.rendezvous, opened.seat(), raised.value) is raised.value
    over = opened.rendezvous._root.find(_OVER, RoundResult)
    assert over is not None
    assert over.signal == signal.SIGTERM
