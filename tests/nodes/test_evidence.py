"""What a launcher concludes from what other launchers report about their ranks, or no longer report.

Only the two ends of a control channel are real: the test sends the messages that a launcher would.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import pytest
from cut_wire import HERE, Wire
from machine import require_in_time
from nodes_kit import parts_of
from scripts import wait_until

from ddpsafe import PreflightError, RankKilledError
from ddpsafe._clock import Deadline
from ddpsafe._config import LaunchConfig
from ddpsafe._job.channel import _RESET_S, Channel, Hello
from ddpsafe._launcher.diagnosis import attempt_error
from ddpsafe._launcher.nodes.node_messages import (
    CODEC,
    NodeFacts,
    RankEnded,
    RoundPlan,
    RoundResult,
    rank_report,
)
from ddpsafe._launcher.nodes.node_zero import OtherNodes
from ddpsafe._launcher.nodes.other_node import Participant
from ddpsafe._launcher.plan import make_plan
from ddpsafe._launcher.run_directory import open_run_directory
from ddpsafe._launcher.watch.signals import SignalInbox, open_inbox
from ddpsafe._launcher.watch.supervisor import Ending
from ddpsafe._wire.messages import Position, Raised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ddpsafe._launcher.nodes.node_messages import NodeMessage
    from ddpsafe._launcher.plan import LaunchPlan

WAITS_S: Final = 15
"""How long node 0 waits for outstanding reports of a launcher."""

SOON_S: Final = 0.3


def node(name: str) -> NodeFacts:
    """Return a node with one rank."""
    return NodeFacts(hostname=name, pid=1, address="127.0.0.1", nproc=1, settings={})


ROUND: Final = RoundPlan(
    round_id="round",
    attempt=1,
    nodes=(node("h0"), node("h1")),
    store_port=1,
    master_port=1,
)
LOST_A_PEER: Final = Raised(
    type_name="RuntimeError",
    message="Connection closed by peer",
    traceback="",
    payload=None,
    phase="running",
    where="",
    position=Position(collectives=()),
    at_ns=1,
    origin="peer-lost",
)
KILLED: Final = RankEnded(rank=1, exit_code=-signal.SIGKILL, ended_ns=1, oom_kills=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Both ends of a control channel, and the signals that one of the launchers receives."""

    node_0: Channel
    node_1: Channel
    inbox: SignalInbox
    plan: LaunchPlan
    opened: list[Channel]
    wire: Wire

    def cut(self) -> None:
        """Have node 1 away: its connection ends, and it cannot dial again."""
        self.wire.drops = math.inf
        self.wire.cut()

    def close(self, channel: Channel) -> None:
        """End a launcher, as the other one sees it."""
        self.opened.remove(channel)
        channel.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Two connected nodes."""
    asked: dict[str, Any] = {
        "nnodes": 2,
        "nproc_per_node": 1,
        "rendezvous": {"endpoint": "h0:29400"},
    }
    plan = make_plan(LaunchConfig.resolve(backend="gloo", **asked), style="launch")
    with open_inbox() as inbox:
        node_0 = Channel.listen("127.0.0.1", secret=b"secret", scope="round", codec=CODEC, nnodes=2)
        wire = Wire(node_0.port)
        node_1 = Channel.dial(
            (HERE, wire.port),
            secret=b"secret",
            scope="round",
            codec=CODEC,
            node=1,
            hello=lambda: Hello(mono_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
            deadline=Deadline.after(timedelta(seconds=20)),
        )
        opened = [node_1, node_0]
        yield Ends(node_0=node_0, node_1=node_1, inbox=inbox, plan=plan, opened=opened, wire=wire)
        for channel in opened:
            channel.close()
        wire.close()


@contextmanager
def soon(act: Callable[[], object]) -> Iterator[None]:
    """Run something in another thread after a short time."""
    timer = threading.Timer(SOON_S, act)
    timer.start()
    yield
    timer.join()


def collected(
    ends: Ends,
    folder: Path,
    said: NodeMessage,
    then: Callable[[], object],
) -> tuple[attempt_error.EndedAttempt, OtherNodes, float]:
    """Let node 0 collect evidence of a failure reported by node 1; return the result and the time it took."""
    nodes = OtherNodes(ends.node_0, ROUND, ends.inbox, parts_of(ends.plan))
    ends.node_1.send(said)
    rank = nodes.ranks[0]
    wait_until(lambda: nodes.take_news() or rank.raised is not None or rank.ended_ns is not None)
    began_s = time.monotonic()
    with soon(then):
        ending = nodes.gather_evidence(Ending(reason="failed", waited_s=1.0), [], lambda _: None)
    config = ends.plan.config
    ended = attempt_error.EndedAttempt(
        outcomes=nodes.outcomes(),
        ending=ending,
        attempt=1,
        retry=config.retry,
        run_dir=folder,
        oom_kills=nodes.oom_kills(),
        timeouts=config.timeouts,
        nnodes=2,
    )
    return ended, nodes, time.monotonic() - began_s


def test_a_node_whose_loss_is_noticed_only_then_is_not_waited_for(
    ends: Ends, tmp_path: Path
) -> None:
    """A rank may give up waiting before a kernel notices that a host is away; that one is the cause."""
    _, nodes, took_s = collected(ends, tmp_path, rank_report(1, LOST_A_PEER), ends.cut)
    assert list(nodes.core.lost) == [1]
    require_in_time(took_s, _RESET_S, "node 1 is given up")


def test_a_signal_ends_the_wait_for_a_launcher_that_does_not_answer(
    ends: Ends, tmp_path: Path
) -> None:
    """And blames no rank that may have failed because of another one; the rows of this are in test_decisions."""
    report = rank_report(1, LOST_A_PEER)
    ended, _, took_s = collected(
        ends, tmp_path, report, lambda: os.kill(os.getpid(), signal.SIGINT)
    )
    assert ended.ending.reason == "signal"
    assert took_s < WAITS_S - 2


def test_an_out_of_memory_kill_is_reported_even_if_its_node_is_lost_afterwards(
    ends: Ends, tmp_path: Path
) -> None:
    """The launcher's count of such kills arrives with the end of the rank."""
    ended, nodes, took_s = collected(ends, tmp_path, KILLED, lambda: ends.close(ends.node_1))
    assert took_s < WAITS_S - 2
    assert list(nodes.core.lost) == [1]
    error = attempt_error.make_error(ended)
    assert isinstance(error, RankKilledError)
    assert (error.kind, error.rank, error.exit_code) == ("out-of-memory", 1, 137)


@pytest.mark.parametrize("said", [RoundResult(is_final=True), None], ids=["all is well", "nothing"])
def test_a_node_that_could_not_start_its_ranks_reports_that_whatever_node_0_decides(
    ends: Ends, tmp_path: Path, said: RoundResult | None
) -> None:
    """Node 0 may have ended the round before the report arrived, or may have exited."""

    def answer() -> None:
        if said is None:
            ends.close(ends.node_0)
        else:
            ends.node_0.send(said)

    with open_run_directory(tmp_path / "run") as directory, soon(answer):
        directory.make_attempt_folder(1)  # blocks the folder that the participant creates
        participant = Participant(
            1,
            parts_of(ends.plan, directory=directory),
            round_plan=ROUND,
            channel=ends.node_1,
            inbox=ends.inbox,
        )
        result = participant.run()
    assert result.values is None
    assert isinstance(result.error, PreflightError)
    assert "node 0 ('h0') could not start its ranks" in str(result.error)
    assert not result.is_another_to_follow
