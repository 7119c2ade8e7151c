"""What node 0 and the others decide in an attempt: rows of events in virtual time, without a launcher."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from signal import SIGINT, SIGTERM, SIGUSR1, Signals
from typing import Any, Final

import pytest

from ddpsafe import NodeLostError, PreemptedError, PreflightError
from ddpsafe._config import LaunchConfig
from ddpsafe._errors import Explanation
from ddpsafe._job.channel import BEAT_S, Away, Back, Lost
from ddpsafe._launcher.diagnosis.attempt_error import EndedAttempt, Ending
from ddpsafe._launcher.nodes.decisions import (
    Action,
    Do,
    Follower,
    Looked,
    NodeZero,
    PutSignal,
    Send,
    Until,
    Warn,
)
from ddpsafe._launcher.nodes.node_messages import (
    LetRanksExit,
    LetRanksRunOn,
    NodeFacts,
    NodeFailed,
    NodeOutcomes,
    RankEnded,
    RanksEnded,
    ReportOutcomes,
    RoundPlan,
    RoundResult,
    SignalReceived,
    round_result_of,
)
from ddpsafe._launcher.watch.signals import Interrupted
from ddpsafe._wire.messages import RankOutcome, Unanswered

ROUND: Final = RoundPlan(
    round_id="round",
    attempt=1,
    nodes=tuple(
        NodeFacts(hostname=f"h{node}", pid=1, address=f"10.0.0.{node}", nproc=1, settings={})
        for node in range(3)
    ),
    store_port=1,
    master_port=1,
)


def config(**fields: Any) -> LaunchConfig:
    """Return the configuration of a job of three nodes."""
    return LaunchConfig.resolve(
        nnodes=3,
        nproc_per_node=1,
        backend="gloo",
        rendezvous={"endpoint": "h0:29400"} | fields.pop("rendezvous", {}),
        **fields,
    )


ELASTIC: Final = config(rendezvous={"min_nodes": 2}, retry={"attempts": 3, "on": ["peer-lost"]})

DROPPED: Final = Away(how="silence", why="no answer", limit_s=60.0)
RESET: Final = Away(how="reset", why="reset", limit_s=60.0)
BACK: Final = Back(away_s=0.3)
ENDED: Final = Lost(how="ended", why="its launcher has ended", seen_ns=1)
SILENT: Final = Lost(how="silence", why="timed out", silent_s=5.0, seen_ns=1)
REPORTED: Final = NodeOutcomes(outcomes=(), oom_kills=0)


def of_node(number: int, *, insists: bool = False) -> SignalReceived:
    """Return a signal to the launcher of a node."""
    return SignalReceived(number=number, insists=insists)


def failed(what: str = "no disk") -> PreflightError:
    """Return an error that all nodes can end with."""
    return PreflightError(Explanation(what), kind="user-error")


def outcome(rank: int, status: str, **facts: Any) -> RankOutcome:
    """Return what became of a rank, one of which each node has."""
    usual: dict[str, Any] = {"pid": 1, "phase": "running", "exit_code": None}
    return RankOutcome(
        rank=rank,
        local_rank=0,
        node_rank=rank,
        hostname=f"h{rank}",
        status=status,  # type: ignore[arg-type]  # one of its texts
        **(usual | facts),
    )


WAITS: Final = tuple(outcome(rank, "stopped") for rank in range(3))
NO_REPLY: Final = Unanswered(own="10.0.0.1", peer="10.0.0.2")
CUT: Final = (WAITS[0], replace(WAITS[1], unanswered=(NO_REPLY,), in_collective=True), WAITS[2])
KILLED: Final = (*WAITS[:2], outcome(2, "killed", exit_code=-9))


@dataclass
class Inbox:
    """The signal to node 0."""

    received: Signals | None = None
    insists: bool = False
    where: str = ""


@dataclass
class Node0:
    """Node 0, whose events happen at their times: after how many seconds, of which node, and which."""

    script: list[tuple[float, int, Any]]
    config: LaunchConfig = ELASTIC
    inbox: Inbox = field(default_factory=Inbox)
    now_s: float = 0.0
    done: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin; what the script has for time 0 happens first."""
        self.core = NodeZero(ROUND, self.config, self.inbox)
        self.advance(0.0)

    def advance(self, to_s: float) -> None:
        """Let everything happen until then."""
        self.now_s = max(self.now_s, to_s)
        while self.script and self.script[0][0] <= self.now_s:
            _, node, event = self.script.pop(0)
            if node:
                self.done += self.core.take(node, event)
            else:
                self.inbox.received, self.inbox.insists = event, event == SIGINT

    def decide(self, decision: Generator[Action, None, Any]) -> Any:
        """Perform a decision; return it."""
        try:
            while True:
                self.perform(next(decision))
        except StopIteration as end:
            return end.value

    def perform(self, action: Action) -> None:
        """Do what the core says."""
        if isinstance(action, Until):
            limit_s = math.inf if action.limit is None else action.limit.total_seconds()
            ends_s = self.now_s + limit_s
            while not action.holds() and self.now_s < ends_s:
                next_s = self.script[0][0] if self.script else math.inf
                assert min(next_s, ends_s) < math.inf, "it waits for ever"
                self.advance(min(next_s, ends_s))
            return
        self.done.append(action)
        if action is Do.GIVE_UP_AWAY:
            for node in self.core.connected - self.core.reachable:
                away = self.core.nodes[node].away
                assert away is not None
                self.done += self.core.take(node, replace(ENDED, how=away.how))


ONE_REPORTS: Final = [(1.0, 1, REPORTED)]
ALL_REPORT: Final = [*ONE_REPORTS, (2.0, 2, REPORTED)]
OWN_FAILURE: Final = NodeFailed(result=round_result_of(failed()))

GATHERS: Final = {
    # What happens, why the attempt ended, what ranks say; what it is then, after how long, which nodes are
    # lost, and whether the ranks were asked.
    "all report": (ALL_REPORT, "failed", KILLED, "failed", 2.0, [], True),
    "no cause, late": ([*ONE_REPORTS, (9.0, 2, REPORTED)], "failed", WAITS, "failed", 9.0, [], True),
    "no cause, never": (ONE_REPORTS, "failed", WAITS, "failed", 15.0, [], True),
    "a cause is enough": (ONE_REPORTS, "failed", KILLED, "failed", 3.0, [], True),
    "Ctrl-C": ([(0.3, 0, SIGINT)], "failed", WAITS, "signal", 0.3, [], True),
    "SIGTERM later": ([(4.0, 0, SIGTERM)], "failed", WAITS, "signal", 4.0, [], True),
    "a second one": ([(0.0, 0, SIGTERM), (0.3, 0, SIGINT)], "failed", WAITS, "signal", 0.3, [], True),
    "only the one before": ([(0.0, 0, SIGTERM)], "failed", WAITS, "failed", 15.0, [], True),
    "SIGUSR1 only warns": ([(0.3, 0, SIGUSR1)], "failed", WAITS, "failed", 15.0, [], True),
    "a signal hides no cause": ([(0.3, 0, SIGTERM)], "failed", KILLED, "failed", 0.3, [], True),
    "lost before": ([(0.0, 1, ENDED)], "failed", WAITS, "failed", 0.0, [1], False),
    "silent before": ([(0.0, 1, SILENT)], "failed", WAITS, "failed", 2 * BEAT_S, [1], False),
    "all silent": ([(0.0, 1, SILENT), (1.0, 2, SILENT)], "failed", WAITS, "failed", 1.0, [1, 2], False),
    "away before": ([(0.0, 1, DROPPED)], "failed", WAITS, "failed", 2 * BEAT_S, [1], False),
    "away meanwhile": ([(0.3, 1, DROPPED), (1.0, 2, REPORTED)], "failed", WAITS, "failed", 1.0, [1], True),
    "lost meanwhile": ([(0.3, 1, ENDED), (1.0, 2, REPORTED)], "failed", WAITS, "failed", 1.0, [1], True),
    "reset, and back": ([(0.0, 1, RESET), (0.4, 1, BACK), *ALL_REPORT], "failed", WAITS, "failed", 2.0, [], True),
    "reset, not back": ([(0.0, 1, RESET), (5.0, 1, BACK)], "failed", WAITS, "failed", 0.7, [1], False),
    "done": ([(0.0, 1, DROPPED)], "done", WAITS, "done", 0.0, [], False),
    "a signal": ([(0.0, 1, DROPPED)], "signal", WAITS, "signal", 0.0, [], False),
    "own failure of a node": ([(0.0, 1, OWN_FAILURE)], "node-lost", WAITS, "node-lost", 0.0, [], False),
}  # fmt: skip


@pytest.mark.parametrize("row", GATHERS.values(), ids=GATHERS)
def test_evidence_is_gathered_until_the_cause_can_be_known(row: tuple[Any, ...]) -> None:
    """A silent launcher has 15 s, what cannot be reached none, and a signal that ends the job ends the wait."""
    script, reason, outcomes, is_then, took_s, lost, is_asked = row
    node_0 = Node0([*script])
    decision = node_0.core.gather_evidence(reason, hears=lambda: False, outcomes=lambda: outcomes)
    assert node_0.decide(decision) == is_then
    assert node_0.now_s == pytest.approx(took_s)
    assert list(node_0.core.lost) == lost
    assert (Send(ReportOutcomes()) in node_0.done) is is_asked
    assert (Do.ASK_RANKS in node_0.done) is is_asked


def test_a_silent_node_is_the_one_that_is_cut_off_if_another_still_sends() -> None:
    """So the wait for other losses ends as soon as a kernel has sent something."""
    node_0 = Node0([(0.0, 1, SILENT), (0.5, 2, REPORTED)])
    node_0.decide(
        node_0.core.gather_evidence("failed", hears=lambda: node_0.now_s >= 0.5, outcomes=tuple)
    )
    assert node_0.now_s == 0.5


def ended(reason: Any, outcomes: tuple[RankOutcome, ...] = WAITS) -> EndedAttempt:
    """Return what is known at the end of an attempt."""
    return EndedAttempt(
        outcomes={each.rank: each for each in outcomes},
        ending=Ending(reason=reason, waited_s=1.0),
        attempt=1,
        retry=ELASTIC.retry,
        run_dir=None,
        oom_kills=0,
        timeouts=ELASTIC.timeouts,
        nnodes=3,
    )


LEAVES: Final = (0.0, 1, of_node(SIGTERM))
LEAVES_AT_ONCE: Final = (0.0, 1, of_node(SIGTERM, insists=True))

ERRORS: Final = {
    # What has happened, why the attempt ended, what ranks say; the error, and what it names.
    "all well": ([], "done", WAITS, None, None),
    "a rank, not its lost node": ([(0.0, 1, ENDED)], "failed", KILLED, None, None),
    "a link between two others": ([], "no-progress", CUT, NodeLostError, 2),
    "not after a signal": ([], "signal", CUT, None, None),
    "a lost node": ([(0.0, 2, ENDED)], "node-lost", WAITS, NodeLostError, 2),
    "the first of two": ([(0.0, 1, replace(ENDED, seen_ns=2)), (0.0, 2, ENDED)], "node-lost", WAITS, NodeLostError, 2),
    "a node's own failure": ([(0.0, 1, OWN_FAILURE), (0.0, 2, ENDED)], "node-lost", WAITS, PreflightError, "no disk"),
    "a node leaves at once": ([LEAVES_AT_ONCE], "node-lost", WAITS, Interrupted, SIGTERM),
    "it left at once, and is gone": ([LEAVES_AT_ONCE, (0.1, 1, ENDED)], "node-lost", WAITS, Interrupted, SIGTERM),
    "a node leaves in time": ([LEAVES], "done", WAITS, None, None),
    "it ended alone, as told": ([(0.0, 0, SIGTERM), LEAVES_AT_ONCE, (0.1, 1, ENDED)], "signal", WAITS, Interrupted, SIGTERM),
    "and another one is lost": ([(0.0, 0, SIGTERM), LEAVES_AT_ONCE, (0.1, 1, ENDED), (0.1, 2, ENDED)], "signal", WAITS, NodeLostError, 2),
}  # fmt: skip


@pytest.mark.parametrize("row", ERRORS.values(), ids=ERRORS)
def test_a_lost_node_is_the_error_only_if_no_rank_broke_by_itself(row: tuple[Any, ...]) -> None:
    """A node that has ended as a signal told it to is not lost."""
    script, reason, outcomes, error, named = row
    node_0 = Node0([*script])
    node_0.advance(1.0)
    found = node_0.core.find_error(ended(reason, outcomes))
    if error is None:
        assert found is None
        return
    assert isinstance(found, error)
    if error is NodeLostError:
        assert found.node_rank == named
    elif error is Interrupted:
        assert found.signum == named
    else:
        assert named in str(found)


SIGNALS: Final = {
    # The signals, the configuration; which count for node 0 as well, and which nodes leave alone.
    "elastic": ([LEAVES], ELASTIC, 0, {1: SIGTERM}),
    "two leave, one would stay": ([LEAVES, (0.0, 2, of_node(SIGTERM))], ELASTIC, 1, {1: SIGTERM}),
    "Ctrl-C is for the job": ([(0.0, 1, of_node(SIGINT, insists=True))], ELASTIC, 1, {}),
    "fixed size": ([LEAVES], config(retry={"attempts": 3, "on": ["peer-lost"]}), 1, {}),
    "no attempt left": ([LEAVES], config(rendezvous={"min_nodes": 2}), 1, {}),
    "node 0 has one": ([(0.0, 0, SIGTERM), LEAVES], ELASTIC, 0, {}),
    "node 0 was warned": ([(0.0, 0, SIGUSR1), LEAVES], ELASTIC, 1, {}),
    "a repetition": ([(0.0, 0, SIGTERM), LEAVES_AT_ONCE], ELASTIC, 1, {}),
}  # fmt: skip


@pytest.mark.parametrize("row", SIGNALS.values(), ids=SIGNALS)
def test_a_signal_to_a_node_is_for_it_alone_or_for_the_job(row: tuple[Any, ...]) -> None:
    """A starved node 0 may read two SIGTERMs at once; the sender marks which one is a repetition."""
    script, asked, count, leaving = row
    node_0 = Node0([*script], asked)
    assert [type(each) for each in node_0.done] == [PutSignal] * count
    assert node_0.core.leaving == leaving
    assert node_0.core.has_lost_node is False


STOPPED: Final = PreemptedError(Explanation("stopped"), values={}, unfinished_ranks=[])
FINISH: Final = ELASTIC.model_copy(
    update={"timeouts": ELASTIC.timeouts.model_copy(update={"finish": timedelta(seconds=100)})}
)
LIMIT_S: Final = 10.0  # for SIGKILL and what the ranks left behind, after their grace period
NODE_1_ENDS: Final = (2.0, 1, RanksEnded())
ALL_END: Final = [NODE_1_ENDS, (3.0, 2, RanksEnded())]

ENDS: Final = {
    # What happens, why the attempt ended, its error; the configuration, the final error, and when.
    "all end": (ALL_END, "done", None, ELASTIC, None, 3.0),
    "after a failure": (ALL_END, "failed", failed(), ELASTIC, "no disk", 3.0),
    "one does not": ([NODE_1_ENDS], "failed", failed(), ELASTIC, "no disk", LIMIT_S),
    "one is lost": ([NODE_1_ENDS, (4.0, 2, ENDED)], "failed", failed(), ELASTIC, "no disk", 4.0),
    "what ranks finish": ([NODE_1_ENDS, (900.0, 2, RanksEnded())], "done", None, ELASTIC, None, 900.0),
    "at most timeouts.finish": ([NODE_1_ENDS], "done", None, FINISH, None, LIMIT_S + 130.0),
    "a stop does not wait": ([(1.0, 2, DROPPED), NODE_1_ENDS], "signal", Interrupted(SIGTERM), ELASTIC, SIGTERM, 2.0),
    "a failure does": ([(1.0, 2, DROPPED), NODE_1_ENDS, (5.0, 2, BACK), (6.0, 2, RanksEnded())], "failed", failed(), ELASTIC, "no disk", 6.0),
    "a late signal": ([NODE_1_ENDS, (4.0, 0, SIGTERM)], "done", None, ELASTIC, SIGTERM, 4.0),
    "a value that cannot be loaded": ([NODE_1_ENDS, (2.5, 2, OWN_FAILURE), (3.0, 2, RanksEnded())], "done", None, ELASTIC, "no disk", 3.0),
}  # fmt: skip


@pytest.mark.parametrize("row", ENDS.values(), ids=ENDS)
def test_an_attempt_ends_once_the_ranks_of_all_nodes_have(row: tuple[Any, ...]) -> None:
    """Each node within its limits; who cannot be reached is waited for, but not after a stop."""
    script, reason, error, asked, final, at_s = row
    node_0 = Node0([*script], asked)
    attempt = ended(reason)
    if error is not None:
        error = node_0.decide(node_0.core.announce(error, attempt))
    found = node_0.decide(node_0.core.await_ends(attempt, error, timedelta(0)))
    assert node_0.now_s == pytest.approx(at_s)
    assert (found.signum if isinstance(found, Interrupted) else found and str(found)[:7]) == final
    sent = [each.message for each in node_0.done if isinstance(each, Send)]
    assert sent == ([] if found is None else [round_result_of(found)])


@pytest.mark.parametrize("error", [STOPPED, Interrupted(SIGTERM)], ids=["saved", "not saved"])
def test_who_leaves_is_sent_the_end_of_the_job_and_the_others_another_attempt(error: Any) -> None:
    """The error of those that stay names who has left, and can be retried."""
    node_0 = Node0([LEAVES])
    left = node_0.decide(node_0.core.announce(error, ended("done")))
    assert isinstance(left, NodeLostError)
    assert (left.node_rank, left.kind) == (1, "peer-lost")
    assert ("all ranks have stopped at one step" in str(left)) is (error is STOPPED)
    own, shared = (each for each in node_0.done if isinstance(each, Send))
    assert (own.to, own.message.is_final) == ((1,), True)  # type: ignore[union-attr]
    assert (shared.to, shared.message) == (None, round_result_of(left))


def test_a_stop_names_the_ranks_that_may_still_run() -> None:
    """Those of nodes that cannot be reached, unless they have ended before."""
    node_0 = Node0([(0.0, 1, RanksEnded()), (0.1, 1, ENDED), (0.1, 2, DROPPED)])
    node_0.advance(1.0)
    stop = node_0.decide(node_0.core.announce(Interrupted(SIGINT), ended("signal")))
    assert "but those of node 2 ('h2'), which cannot be reached, may be for up to" in stop.left


def test_kills_for_memory_are_counted_also_if_the_node_is_lost_then() -> None:
    """They arrive with the end of the rank."""
    killed = RankEnded(rank=1, exit_code=-9, ended_ns=1, oom_kills=1)
    node_0 = Node0([(0.0, 1, killed), (0.0, 1, ENDED), (0.0, 2, replace(REPORTED, oom_kills=2))])
    assert node_0.core.oom_kills == 3


# Another node.

GOOD, BAD = RoundResult(is_final=True), round_result_of(failed())
AGAIN: Final = replace(BAD, is_final=False)
SIGNALLED: Final = of_node(SIGTERM)
INSISTED: Final = of_node(SIGINT, insists=True)
FAILS: Final = "a rank fails"
FAILED: Final = NodeFailed(result=round_result_of(failed(), failed_node=1))
SILENCE: Final = "silence of node 0"
ENDS_HERE: Final = RanksEnded()
AFTER: Final = 150.0 + ELASTIC.timeouts.grace.total_seconds()  # a decision, and what leaving takes

FOLLOWS: Final = {
    # What happens; whether the ranks have to end, how it ends for this node, when that is known, what is done.
    "good": ([(1, LetRanksExit()), (2, ENDS_HERE), (3, GOOD)], "returned", 3, [Send]),
    "bad": ([(1, BAD), (2, ENDS_HERE), (3, AGAIN)], "decided", 3, [Send]),
    "bad, then lost": ([(1, BAD), (2, ENDS_HERE), (3, ENDED)], "decided", 3, [Send]),
    "bad, no decision": ([(1, BAD), (2, ENDS_HERE)], "decided", 2 + AFTER, [Send]),
    "lost": ([(1, ENDED), (2, ENDS_HERE)], "node-0-lost", 2, [Send]),
    "lost after the last return": ([(1, LetRanksExit()), (2, ENDED), (3, ENDS_HERE)], "returned", 3, [Warn, Send]),
    "no word after it": ([(1, LetRanksExit()), (2, ENDS_HERE), (5000, GOOD)], "returned", 5000, [Send]),
    "own failure": ([(1, FAILED), (1, ENDS_HERE), (2, BAD), (3, AGAIN)], "decided", 3, [Send, Send]),
    "own failure, lost": ([(1, FAILED), (1, ENDS_HERE), (2, ENDED)], "own-failure", 2, [Send, Send]),
    "own failure, too late": ([(1, LetRanksExit()), (2, FAILED), (2, ENDS_HERE), (3, GOOD)], "own-failure", 3, [Send, Send]),
    "asked": ([(1, ReportOutcomes()), (2, BAD), (3, ENDS_HERE), (4, AGAIN)], "decided", 4, [Do.ASK_RANKS, Send]),
    "run on": ([(1, LetRanksRunOn(grace_s=9.0)), (2, BAD), (3, ENDS_HERE), (4, AGAIN)], "decided", 4, [Do.LET_RANKS_RUN, Send]),
    # Outages: node 0 is given up only for a rank that has failed, after a reset not at once.
    "away": ([(1, DROPPED), (50, BACK), (51, BAD), (52, ENDS_HERE), (53, AGAIN)], "decided", 53, [Send]),
    "a rank fails, away": ([(1, DROPPED), (5, FAILS), (6, ENDED), (7, ENDS_HERE)], "node-0-lost", 7, [Do.GIVE_UP_AWAY, Send]),
    "a rank fails by a reset": ([(1, FAILS), (1, RESET), (1.4, BACK), (2, BAD), (3, ENDS_HERE), (4, AGAIN)], "decided", 4, [Send]),
    "a rank fails, reset": ([(1, FAILS), (1, RESET), (1.8, ENDED), (7, ENDS_HERE)], "node-0-lost", 7, [Do.GIVE_UP_AWAY, Send]),
    # Signals: node 0 decides, unless it does not answer.
    "signal": ([(1, SIGNALLED), (2, BAD), (3, ENDS_HERE), (4, AGAIN)], "decided", 4, [Send, Send]),
    "the same one": ([(1, SIGNALLED), (2, SIGNALLED), (3, BAD), (4, ENDS_HERE), (5, AGAIN)], "decided", 5, [Send, Send]),
    "signal, silence": ([(1, SILENCE), (2, SIGNALLED), (9, BAD), (9, ENDS_HERE), (9, AGAIN)], "decided", 9, [Send, Warn, Send]),
    "Ctrl-C, silence": ([(1, SILENCE), (2, INSISTED), (9, ENDS_HERE)], "interrupted", 9, [Send, Warn, Send]),
    "both": ([(1, SILENCE), (2, SIGNALLED), (9, INSISTED), (20, ENDS_HERE)], "interrupted", 20, [Send, Warn, Send, Warn, Send]),
    "Ctrl-C, node 0 blocked": ([(1, INSISTED), (125, ENDS_HERE)], "interrupted", 125, [Send, Warn, Send]),
    "Ctrl-C, node 0 has answered": ([(1, INSISTED), (2, BAD), (3, ENDS_HERE), (140, AGAIN)], "decided", 140, [Send, Send]),
    "Ctrl-C after the answer, silence": ([(1, BAD), (2, ENDS_HERE), (3, SILENCE), (4, INSISTED)], "decided", 7, [Send, Send, Warn]),
    "signal, no silence since": ([(1, SILENCE), (100, SIGNALLED), (102, BAD), (102, ENDS_HERE), (102, AGAIN)], "decided", 102, [Send, Send]),
    "Ctrl-C, answered late": ([(100, INSISTED), (150, BAD), (151, ENDS_HERE), (152, AGAIN)], "decided", 152, [Send, Send]),
    "signal, lost": ([(1, SIGNALLED), (2, ENDED), (3, ENDS_HERE)], "node-0-lost", 3, [Send, Send]),
    "signal, silence, lost": ([(1, SILENCE), (2, SIGNALLED), (6, ENDED), (7, ENDS_HERE)], "interrupted", 7, [Send, Warn, Warn, Send]),
}  # fmt: skip


@pytest.mark.parametrize("row", FOLLOWS.values(), ids=FOLLOWS)
def test_another_node_follows_node_0_as_long_as_it_can_decide(row: tuple[Any, ...]) -> None:
    """And concludes for itself alone only once node 0 is lost, or does not answer a signal."""
    script, conclusion, at_s, done = [*row[0]], *row[1:]
    core = Follower("node 0 ('h0')", ELASTIC.timeouts)
    found: list[Action] = []
    now_s, silent_since_s, has_failed, has_ended = 0.0, math.inf, False, False
    assert not core.is_over
    # As its shell: it looks after every event, and from time to time.
    while not has_ended or core.waits_for_decision(now_s):
        next_s = script[0][0] if script else math.inf
        now_s = min(next_s, now_s + min(1.0, core.until_look_s(now_s)))
        assert now_s < 10_000, "it waits for ever"
        while script and script[0][0] <= now_s:
            event = script.pop(0)[1]
            assert event != ENDS_HERE or core.is_over or core.may_leave or core.has_failed
            has_failed |= event == FAILS
            has_ended |= event == ENDS_HERE
            if event == SILENCE:
                silent_since_s = now_s
            elif isinstance(event, RoundResult):
                silent_since_s = math.inf
            found += core.take(event, now_s)
        looked = Looked(
            has_failed=has_failed and not core.is_over, silent_s=max(0.0, now_s - silent_since_s)
        )
        found += core.take(looked, now_s)
    assert core.conclude(is_stopping=False) == conclusion
    assert now_s == pytest.approx(at_s, abs=1.0)
    # As long as the channel has not, a look gives up again.
    repeated = {
        at for at, each in enumerate(found) if at and each == found[at - 1] == Do.GIVE_UP_AWAY
    }
    kept = [each for at, each in enumerate(found) if at not in repeated]
    assert [each if isinstance(each, Do) else type(each) for each in kept] == done


def test_ranks_that_have_agreed_to_stop_have_not_returned_at_the_end_of_the_job() -> None:
    """Without node 0, the other ranks may not have."""
    core = Follower("node 0 ('h0')", ELASTIC.timeouts)
    for event in (LetRanksExit(), ENDED):
        assert len([*core.take(event, 1.0)]) == isinstance(event, Lost)
    assert core.conclude(is_stopping=True) == "node-0-lost"
    assert core.conclude(is_stopping=False) == "returned"


def test_whether_another_attempt_follows_is_known_alone_only_if_node_0_was_lost() -> None:
    """A node that is alone joins again; one that node 0 has refused another attempt does not."""
    core = Follower("node 0 ('h0')", ELASTIC.timeouts)
    states = [core.is_alone]
    for event in (BAD, ENDED, AGAIN):
        assert not [*core.take(event, 1.0)]
        states.append(core.is_alone)
    assert states == [True, False, True, False]
