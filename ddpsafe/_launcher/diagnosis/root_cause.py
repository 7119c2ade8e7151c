"""Find which rank broke, which ranks failed because of it, and what kind of failure it was.

`Evidence` is computed once from the outcomes of all ranks. `RULES` are then tried on it in order, and the
first rule that finds a rank decides. They are ordered by how much they prove, errors before places before
guesses, and not by time: a rank that lost a peer often fails before the rank that broke has reported anything.

A rank's error is "uncertain" if it may not be what ended the rank (`Raised.is_certain` is false): the main
thread is in an ``except`` or ``finally`` and may still catch it, a peer error was raised on top of it, or
its origin is "mismatch", so that it may be the fault of ranks that were elsewhere. Three rules therefore
compare uncertain errors with the ranks that are "out of place", which are the ones that the first matching
rule with `by_place` finds: mostly ranks that the others need and that are not there.

To cover a new case, add a rule to `RULES`, its name to `RuleName`, what the error then says to `CONCLUSIONS`,
and a row to tests/launcher/test_root_cause.py.
"""

from __future__ import annotations

import math
import re
import signal
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import psutil

from ddpsafe._errors import LaunchError, LaunchTimeoutError, RankFailedError, RankLeftEarlyError
from ddpsafe._launcher.diagnosis.wait_graph import Deadlock, differ, family
from ddpsafe._wire.exception_facts import MONITORED_BARRIER
from ddpsafe._wire.foreign_texts import (
    find_fingerprint,
    find_kind,
    has_no_descriptors,
    is_full_disk,
    is_full_shared_memory,
    is_late_worker,
    is_read_only,
    is_unfinished_reduction,
    says_worker_exited,
)
from ddpsafe._wire.messages import (
    MAIN_GROUP,
    UNKNOWN_COLLECTIVE,
    Collective,
    RankOutcome,
    is_peer_origin,
    last_in_main,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ddpsafe._errors import FailureKind
    from ddpsafe._wire.messages import Raised

    Ranks = Sequence[RankOutcome]

# A dying process closes its connections before its end can be seen. A peer that exits because of that may
# be seen to end first, so two ends less than this apart have no known order.
_SAME_TIME_NS: Final = 50_000_000
# A lost peer never leads to these, so such a rank is a cause however late a busy machine shows its end.
_SIGNALS_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM)
CONNECTION_KINDS: Final = ("network", "startup-network")


class GroupPosition(NamedTuple):
    """Where a rank is in one process group.

    Attributes:
        outcome: The rank.
        last: The last collective that it has entered or queued in the group, if any.
        current: The collective that it is in: under NCCL the first that has not ended, else `last`.
    """

    outcome: RankOutcome
    last: Collective | None
    current: Collective | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the outcomes of an attempt show, computed once.

    Attributes:
        ranks: The outcome of every rank, sorted by rank.
        is_stuck_with_error: Whether the attempt was ended before any timeout because a rank with an
            exception in flight and another rank wait for each other in different places.
        failed: The ranks that raised, exited or were killed, sorted by rank. An exception that was seen in
            flight counts as raised, and so does an error that only native code reported.
        blame_no_other: The `failed` ranks that do not blame another rank, the most likely cause first;
            includes ranks that were killed or exited and so raised nothing.
        suspects: `blame_no_other` without the ranks whose uncertain error all ranks with an error share, in
            the same place. A mismatch stays.
        groups: For each process group, where its members are.
        awaited: The rank that others wait for: it has not entered a collective that they are in, or has not
            sent what one of them waits to receive. Of several, the most likely cause.
        mismatched: The ranks whose collective is the rarest of those entered under one number.
        calls: Which collective each rank has entered under that number, if there are such ranks.
        late: The ranks that entered a collective much later than others, whose wait in it timed out;
            the latest first, each with its delay in seconds.
        has_rank_outside: Whether a rank that raised nothing is outside any collective.
        missed_barrier: The ranks that did not reach torch's monitored barrier in time: those that its first rank
            names, or else that first rank, for which the others wait there.
    """

    ranks: Ranks
    is_stuck_with_error: bool
    failed: Ranks
    blame_no_other: Ranks
    suspects: Ranks
    groups: Mapping[str, Sequence[GroupPosition]]
    awaited: RankOutcome | None
    mismatched: Ranks
    calls: Sequence[tuple[RankOutcome, Collective]]
    late: Sequence[tuple[RankOutcome, float]]
    has_rank_outside: bool
    missed_barrier: Ranks

    @classmethod
    def of(
        cls, outcomes: Mapping[int, RankOutcome], *, is_stuck_with_error: bool = False
    ) -> Evidence:
        """Compute the evidence; see the attributes."""
        ranks = sorted(outcomes.values(), key=lambda outcome: outcome.rank)
        failed = [
            out
            for out in ranks
            if out.status in ("raised", "killed", "exited") or out.native is not None
        ]
        blame_no_other = _by_likelihood([out for out in failed if is_own_fault(out)])
        errors = [(out.raised.type_name, out.raised.where) for out in ranks if out.raised]
        # An error that all of them have in the same place, as in a script that runs inside
        # `except ImportError`, cannot explain why one of them is missing.
        is_common = len(errors) > 1 and len(set(errors)) == 1
        suspects = [
            out
            for out in blame_no_other
            if not is_common or _is_certain(out) or out.origin == "mismatch"
        ]
        groups = _groups(ranks)
        mismatched, calls = _find_mismatched(ranks)
        return cls(
            ranks=ranks,
            is_stuck_with_error=is_stuck_with_error,
            failed=failed,
            blame_no_other=blame_no_other,
            suspects=suspects,
            groups=groups,
            awaited=_find_awaited(groups, outcomes),
            mismatched=mismatched,
            calls=calls,
            late=_find_late(groups),
            has_rank_outside=any(
                out.raised is None and out.in_collective is False for out in ranks
            ),
            missed_barrier=_find_missed_barrier(outcomes),
        )

    def find_out_of_place(self) -> Ranks:
        """Return the ranks found by the first rule with `by_place`; none if places show nothing."""
        return next((ranks for rule in RULES if rule.by_place and (ranks := rule.find(self))), ())

    def find_who_waited(self, root: RankOutcome) -> tuple[list[int], Collective | None]:
        """Return the ranks that waited for `root` in one collective, and that collective.

        If numbers show no such collective, return the one that others are in while `root` is in none.
        """
        waiting = [
            (place.outcome.rank, place.current)
            for members in self.groups.values()
            for own_place in members
            if own_place.outcome is root  # `root` may be no member
            for place in members
            if place.current is not None
            and place.current.number > _number(own_place.last)
            # torch's recorder shows such a rank in the last collective before the send or the
            # receive.
            and not place.outcome.sends_or_receives
        ]
        if not waiting and not is_waiting(root):
            passed = find_passed(self.ranks, newest_collective)
            waiting = [
                (out.rank, last)
                for out in self.ranks
                if out.rank != root.rank
                and is_waiting(out)
                and not out.sends_or_receives
                and (last := newest_collective(out))
                # One that has passed waits after that, as in new_group.
                and (last.group, last.number) not in passed
            ]
            if len({call.group for _, call in waiting}) > 1:  # there is no one collective to name
                waiting = []
        if not waiting:
            return [], None
        goal = max(
            (call for _, call in waiting), key=lambda call: (call.group == MAIN_GROUP, call.number)
        )
        key = (goal.group, goal.number)
        return sorted(rank for rank, call in waiting if (call.group, call.number) == key), goal


RuleName = Literal[
    "stuck-with-error",
    "ended-by-itself",
    "error-beside-crash",
    "error-out-of-place",
    "errors-of-all-others",
    "error-after-peer-error",
    "suspended",
    "returned-behind",
    "missed-barrier",
    "mismatch",
    "behind",
    "late",
    "stuck-on-gpu",
    "returned",
    "in-rpc",
    "elsewhere",
    "timed-out",
    "unknown",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One way to find the rank that broke.

    Attributes:
        name: Its name in the code, the tests and the documentation.
        sign: What the rank did or shows, for the documentation.
        why: Why that makes it the root cause, or when it does not; for the documentation.
        find: Returns the ranks that match, the root cause first; none if the rule does not apply.
        by_place: Whether it looks at where ranks are, not at their errors. Such a rule must not call
            `Evidence.find_out_of_place`, which tries all of these.
    """

    name: RuleName
    sign: str
    why: str
    find: Callable[[Evidence], Ranks]
    by_place: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """The rank that is to blame, and the rule and the evidence that show it.

    Attributes:
        rule: The rule that found it.
        root: The rank that broke or that the others waited for.
        collateral: The other ranks that failed, sorted by rank.
        evidence: The evidence that the rule was tried on.
    """

    rule: Rule
    root: RankOutcome
    collateral: Ranks
    evidence: Evidence

    @property
    def conclusion(self) -> Conclusion:
        """What the error says about it."""
        return CONCLUSIONS[self.rule.name]


def find_root_cause(
    outcomes: Mapping[int, RankOutcome], *, is_stuck_with_error: bool = False
) -> RootCause:
    """Return what the first matching rule finds; the last one, `unknown`, always matches.

    Args:
        outcomes: What is known of each rank, by rank.
        is_stuck_with_error: See `Evidence`.
    """
    evidence = Evidence.of(outcomes, is_stuck_with_error=is_stuck_with_error)
    rule, ranks = next((rule, ranks) for rule in RULES if (ranks := rule.find(evidence)))
    root = ranks[0]
    collateral = [out for out in evidence.failed if out.rank != root.rank]
    return RootCause(rule=rule, root=root, collateral=collateral, evidence=evidence)


# ---- the rules ----


def _error_out_of_place(evidence: Evidence) -> Ranks:
    out_of_place = evidence.find_out_of_place() or evidence.suspects
    return [out for out in evidence.suspects if out in out_of_place]


def _errors_of_all_others(evidence: Evidence) -> Ranks:
    out_of_place = evidence.find_out_of_place()
    others = [out for out in evidence.ranks if out not in out_of_place]
    suspects = evidence.suspects
    if any(out.status == "returned" or out.state == psutil.STATUS_STOPPED for out in out_of_place):
        # A suspended or returned rank explains the waits, so errors that are caught do not count.
        suspects = [out for out in suspects if out.raised is None or not out.raised.is_caught]
    all_others = out_of_place and others and all(out in suspects for out in others)
    return suspects if all_others and not evidence.has_rank_outside else ()


def _error_after_peer_error(evidence: Evidence) -> Ranks:
    root = (evidence.find_out_of_place() or _unknown(evidence))[0]
    wrapping = [out for out in evidence.ranks if out.raised and out.raised.wraps_peer_error]
    return wrapping if wrapping == [root] and not evidence.has_rank_outside else ()


def _returned_behind(evidence: Evidence) -> Ranks:
    awaited = [] if evidence.awaited is None else [evidence.awaited]
    return [out for out in (*evidence.missed_barrier, *awaited) if out.status == "returned"]


def _missed_barrier(evidence: Evidence) -> Ranks:
    awaited, missed = evidence.awaited, evidence.missed_barrier
    # They may have waited for one that is busy: in a smaller group, that only they are in.
    is_explained = awaited is not None and not is_waiting(awaited) and all(map(is_waiting, missed))
    return () if is_explained else missed


def _elsewhere(evidence: Evidence) -> Ranks:
    is_awaited = any(out.in_collective or out.raised is not None for out in evidence.ranks)
    return [out for out in evidence.ranks if out.in_collective is False] if is_awaited else ()


def _unknown(evidence: Evidence) -> Ranks:
    in_order = sorted(evidence.failed or evidence.ranks, key=_order)
    if in_order[0].origin == "peer-lost":
        # A wait that times out closes the rank's connections, and a peer may report that first.
        return [out for out in in_order if out.origin == "timeout"] or in_order
    return in_order


RULES: Final = (
    Rule(
        name="stuck-with-error",
        sign="has an error in flight and waits in its `except` or `finally`, while another rank waits for it "
        "in a different place",
        why="neither wait can succeed, so the error is reported without waiting for a timeout",
        find=lambda evidence: evidence.blame_no_other if evidence.is_stuck_with_error else (),
    ),
    Rule(
        name="ended-by-itself",
        sign="was killed, exited, or raised an error that certainly ended it, and no rank with an uncertain "
        "error is a likelier cause",
        why="it broke by itself. Of several such ranks, the earliest is the root cause. Errors and crashes "
        "inside a collective come last, because another rank may have caused them. A killed rank comes "
        "before one whose own connection broke. It also comes before one that exited without a report up to "
        "50 ms earlier, because a dying process closes its connections before its end can be seen; this "
        "limit does not apply to SIGKILL and SIGTERM, which no crash sends",
        find=lambda evidence: [out for out in evidence.suspects[:1] if _is_certain(out)],
    ),
    Rule(
        name="error-beside-crash",
        sign="has an uncertain error, while another rank crashed in a collective",
        why="its `finally` called a collective while the others were in a different one, and gloo then "
        "wrote into their buffers, which crashed them",
        find=lambda evidence: (
            evidence.suspects if any(map(_crashed_inside, evidence.suspects)) else ()
        ),
    ),
    Rule(
        name="error-out-of-place",
        sign="has an uncertain error and is out of place, or no rank is out of place",
        why="an uncertain error may be harmless, but this one explains why the rank is missing. It does not "
        "count if all ranks with an error have the same one in the same place",
        find=_error_out_of_place,
    ),
    Rule(
        name="errors-of-all-others",
        sign="is one of the ranks that are not out of place, all of which have an uncertain error, while no "
        "rank without an error is outside a collective. If the rank out of place is stopped or has returned, "
        "errors after which the program continues do not count",
        why="these ranks left the collective that another rank still waits in, so that rank only looks out of "
        "place",
        find=_errors_of_all_others,
    ),
    Rule(
        name="error-after-peer-error",
        sign="is out of place (or, if no rank is, is the rank that `unknown` would find), and is the only one "
        "that raised an error of its own while it handled a peer error; no rank without an error is outside a "
        "collective",
        why="no rank hangs, and no other rank raised an error on top of a peer error, so this error explains "
        "why the rank is missing",
        find=_error_after_peer_error,
    ),
    Rule(
        name="suspended",
        sign="is stopped (SIGSTOP)",
        why="the others wait for it",
        find=lambda evidence: [out for out in evidence.ranks if out.state == psutil.STATUS_STOPPED],
        by_place=True,
    ),
    Rule(
        name="returned-behind",
        sign="has returned, and is a rank that `missed-barrier` or `behind` would find",
        why="it returned too early. This rule precedes `mismatch`, because the last call of such a rank may "
        "seem not to match",
        find=_returned_behind,
        by_place=True,
    ),
    Rule(
        name="missed-barrier",
        sign="did not reach torch's `monitored_barrier` in time, by torch's own error, and did not wait for a rank "
        "that is busy and that `behind` would find",
        why="torch has seen which ranks were there. Its sends and receives have no numbers in the sequence of "
        "collectives, by which the ranks in the barrier may seem to be behind",
        find=_missed_barrier,
        by_place=True,
    ),
    Rule(
        name="mismatch",
        sign="called a different collective than most ranks at the same position in the sequence, or the same "
        "one with another shape or dtype",
        why="neither collective ends, or both end with wrong data",
        find=lambda evidence: evidence.mismatched,
        by_place=True,
    ),
    Rule(
        name="behind",
        sign="has not entered a collective of one of its groups that another rank is in, or has not sent what "
        "such a rank waits to receive",
        why="the others wait for it; of several such ranks, it is the one that waits for no other",
        find=lambda evidence: [evidence.awaited] if evidence.awaited else (),
        by_place=True,
    ),
    Rule(
        name="late",
        sign="entered a collective after the others, whose wait in it timed out, and was late by more than "
        "half of that wait",
        why="it was busy for longer than the others wait",
        find=lambda evidence: [out for out, _ in evidence.late],
        by_place=True,
    ),
    Rule(
        name="stuck-on-gpu",
        sign="has queued a collective that all other ranks of its group have queued too and that does not "
        "end",
        why="no rank is missing: a GPU, or the link between GPUs, is stuck",
        find=lambda evidence: [out for out, _ in find_stuck_on_gpu(evidence)],
        by_place=True,
    ),
    Rule(
        name="returned",
        sign="has returned",
        why="it returned too early; a rule above would have decided if the positions of the ranks in the "
        "sequence of collectives were known",
        find=lambda evidence: [out for out in evidence.ranks if out.status == "returned"],
        by_place=True,
    ),
    Rule(
        name="in-rpc",
        sign="executes an RPC call from another rank, while the wait of some rank failed",
        why="its main thread waits for all RPC calls to finish, and this one takes long",
        find=lambda evidence: [
            out
            for out in evidence.ranks
            if out.in_rpc and any(is_peer_origin(other.origin) for other in evidence.ranks)
        ],
        by_place=True,
    ),
    Rule(
        name="elsewhere",
        sign="is outside any collective, while another rank is in one or raised an error",
        why="it is busy or hangs at its line",
        find=_elsewhere,
        by_place=True,
    ),
    Rule(
        name="timed-out",
        sign="timed out while it waited for others, and there is no other evidence",
        why="no rank is known to hang: each of them waited for others",
        find=lambda evidence: [out for out in _unknown(evidence)[:1] if out.origin == "timeout"],
    ),
    Rule(
        name="unknown",
        sign="failed, or is any rank if none failed",
        why="a peer error is blamed only if there is no other evidence. A rank that timed out comes before one "
        "that lost a peer: a wait that times out closes connections, and a peer may report that first",
        find=_unknown,
    ),
)

Advice = tuple[str, str]
"""The likely cause, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What the error of an attempt says after a rule has found a rank.

    Attributes:
        error: Its base class. Which subclass is raised depends for `RankFailedError` on how the rank
            ended, and for `LaunchTimeoutError` on which wait timed out.
        kind: Its kind; ``None`` to take it from the rank's exception or signal.
        blames: ``rank``: the rank that was found; ``several``: it is one of those that disagree;
            ``gpu``: a GPU or a link between two; ``nothing``: no rank is known to be the cause.
        behaviour: What the rank did; follows its name in the message.
        advice: The likely cause, and what to do.
        is_start_likelier: Whether a rank that never began to join is reported instead, if there is one.
    """

    error: type[LaunchError] = RankFailedError
    kind: FailureKind | None = None
    blames: Literal["rank", "several", "gpu", "nothing"] = "rank"
    behaviour: str = ""
    advice: Advice = (
        "it was still handling the error on its line below, in an except or a finally.",
        "fix that error first, then find out why handling it takes so long.",
    )
    is_start_likelier: bool = False


_ENDED: Final = Conclusion()
"""The rank broke, so the message comes from its exception, signal or exit code."""

_RETURNED: Final = Conclusion(
    error=RankLeftEarlyError,
    kind="user-error",
    advice=(
        (
            "different numbers of batches, different branches, or an error that an except swallowed on one "
            "rank."
        ),
        (
            "give every rank the same number of steps: drop_last, DistributedSampler or torch's Join; let "
            "errors through, or skip a batch on all ranks."
        ),
    ),
)

_WAITED: Final = Conclusion(error=LaunchTimeoutError, kind="hang")

_NO_REASON_REPORTED: Final[Advice] = (
    "every rank only saw another one disconnect or hang, and none reported why.",
    "compare where the ranks were, and read their logs.",
)

CONCLUSIONS: Final[dict[RuleName, Conclusion]] = {
    "stuck-with-error": _ENDED,
    "ended-by-itself": _ENDED,
    "error-beside-crash": _ENDED,
    "error-out-of-place": _ENDED,
    "errors-of-all-others": _ENDED,
    "error-after-peer-error": _ENDED,
    "suspended": replace(
        _WAITED,
        behaviour="is stopped",
        advice=(
            "SIGSTOP was sent to it, or a debugger or a container runtime froze it.",
            (
                "kill -CONT {pid} would have resumed it; find out what stops processes on {host}. With "
                "timeouts.collective set, the others wait for it that long."
            ),
        ),
    ),
    "returned-behind": _RETURNED,
    "missed-barrier": replace(
        _WAITED,
        behaviour="did not reach torch's monitored barrier in time",
        advice=(
            "the rank is busy or hangs at its line, or does not make the call in which the others waited.",
            (
                "see its line below. Every rank of the group has to call monitored_barrier, with a timeout above "
                "the time that the slowest one needs to get there."
            ),
        ),
    ),
    "mismatch": replace(
        _WAITED,
        blames="several",
        behaviour="entered a different collective than the others",
        advice=(
            (
                "the ranks took different branches, one swallowed an error and skipped a call, or only one "
                "ran the DDP model."
            ),
            (
                "call the same collectives in the same order, also after an except; to run the model on one "
                "rank, use the model inside DDP, model.module."
            ),
        ),
    ),
    "behind": replace(
        _WAITED,
        behaviour="is behind",
        advice=(
            "the rank is busy or hangs at its line, or skipped a collective that the others entered.",
            (
                "see its line below. If it is busy there, move that work to where no rank waits for it, or "
                "raise timeouts.{setting}. Otherwise call the same collectives in the same order on every "
                "rank."
            ),
        ),
    ),
    "late": replace(
        _WAITED,
        behaviour="entered {newest} {delay_s:.1f} s after {first}",
        advice=(
            "the rank loaded, evaluated or saved something for longer than the others wait.",
            "divide that work among the ranks, or raise timeouts.{setting} above the time it takes.",
        ),
    ),
    "stuck-on-gpu": replace(
        _WAITED,
        blames="gpu",
        behaviour="all wait in {newest}, which does not end",
        advice=(
            "a GPU or a link between GPUs (NVLink, InfiniBand, the network) is stuck.",
            (
                "look for Xid in dmesg and run `nvidia-smi nvlink -s` on {host}; NCCL_DEBUG=INFO shows the "
                "links, TORCH_NCCL_ENABLE_TIMING=1 shows which GPU has not started."
            ),
        ),
    ),
    "returned": _RETURNED,
    "in-rpc": replace(
        _WAITED,
        behaviour="was executing an RPC call from another rank",
        advice=(
            "the RPC call that the rank executes for another one hangs or takes long.",
            "see its line below; raise the rpc_timeout of init_rpc if the call needs that long.",
        ),
    ),
    "elsewhere": replace(
        _WAITED,
        behaviour="was not in the collective that the others waited in",
        advice=(
            "the rank was busy outside the collective that the others waited in.",
            (
                "see its line below. Do long work of one rank where no other rank waits for it, or raise "
                "timeouts.{setting}."
            ),
        ),
        is_start_likelier=True,
    ),
    "timed-out": replace(
        _WAITED,
        blames="nothing",
        behaviour="timed out in {wait}",
        advice=_NO_REASON_REPORTED,
        is_start_likelier=True,
    ),
    "unknown": replace(
        _ENDED,
        blames="nothing",
        behaviour="timed out in {wait}",
        advice=_NO_REASON_REPORTED,
        is_start_likelier=True,
    ),
}
"""What each rule leads to; `attempt_error.make_error` makes the error from it."""


# ---- single ranks ----


def find_stuck_on_gpu(evidence: Evidence) -> list[tuple[RankOutcome, Collective]]:
    """Return the members of a group that are all in one collective that does not end, each with it."""
    for members in evidence.groups.values():
        stuck = [
            (place.outcome, place.current)
            for place in members
            if place.current is not None and not place.current.done
        ]
        is_same = len({call.number for _, call in stuck}) == 1 and stuck[0][1].is_queued_ahead
        if is_same and len(stuck) == len(members) > 1:
            return stuck
    return []


def newest_collective(outcome: RankOutcome) -> Collective | None:
    """Return the collective that the rank is in or entered last, in any group."""
    return None if outcome.position is None else outcome.position.newest()


def find_passed(
    outcomes: Iterable[RankOutcome], last_of: Callable[[RankOutcome], Collective | None]
) -> set[tuple[str, int]]:
    """Return the collectives, by group and number, that ranks have passed which saw nothing of a failure.

    So these are not what failed on the others, where one that has failed counts as done, too.
    """
    return {
        (last.group, last.number)
        for outcome in outcomes
        if is_own_fault(outcome)
        and not (outcome.raised is not None and outcome.raised.handled)
        and (last := last_of(outcome)) is not None
        and last.done
    }


def is_own_fault(outcome: RankOutcome) -> bool:
    """Return whether a failed rank broke by itself, as far as the rank knew."""
    return not is_peer_origin(outcome.origin)


def is_waiting(outcome: RankOutcome) -> bool:
    """Return whether a rank was waiting for others when it was asked, or failed in such a wait."""
    if outcome.raised is not None or outcome.native is not None:
        return is_peer_origin(outcome.origin)
    return bool(outcome.in_collective)


def _is_certain(outcome: RankOutcome) -> bool:
    """Return whether what is known certainly ended the rank; says nothing of whose fault it is."""
    return outcome.raised is None or outcome.raised.is_certain


def _crashed_inside(outcome: RankOutcome) -> bool:
    """Return whether a rank crashed in a collective, as when another rank is in a different one."""
    return (
        outcome.status == "killed"
        and bool(outcome.in_collective)
        and not _was_killed_from_outside(outcome)
    )


def _was_killed_from_outside(outcome: RankOutcome) -> bool:
    """Return whether SIGKILL or SIGTERM ended the rank, which no crash sends."""
    return outcome.status == "killed" and -(outcome.exit_code or 0) in _SIGNALS_FROM_OUTSIDE


def _by_likelihood(failed: Ranks) -> Ranks:
    """Sort ranks that failed, the most likely cause first."""
    in_order = sorted(failed, key=_order)
    if not in_order:
        return []
    first = in_order[0]
    killed = [out for out in in_order if out.status == "killed" and not _crashed_inside(out)]
    if first.raised is not None and kind_of(first.raised) in CONNECTION_KINDS:
        # The connection may have broken because a rank was killed, whichever was seen first.
        likelier = killed
    elif first.status == "exited":
        # It may have exited because it lost a rank whose end was seen a moment later.
        latest_ns = (first.ended_ns or 0) + _SAME_TIME_NS
        likelier = [
            out
            for out in killed
            if out.ended_ns is not None
            and (_was_killed_from_outside(out) or out.ended_ns <= latest_ns)
        ]
    else:
        likelier = []
    return sorted(in_order, key=lambda outcome: outcome not in likelier)


def _order(outcome: RankOutcome) -> tuple[bool, bool, bool, int, int]:
    """Return the sort key of a rank that failed: likelier causes first, then earlier ones."""
    raised = outcome.raised
    if raised is None:
        # Another rank may be the cause: gloo ranks in different collectives overwrite each other's buffers.
        inside = _crashed_inside(outcome)
    else:
        # An error raised in a collective may still be a peer error, with a text that is not known.
        inside = "distributed_c10d.py" in raised.traceback and not raised.hidden_by
    seen_ns = raised.at_ns if raised is not None else (outcome.ended_ns or 0)
    mismatch = raised is not None and raised.origin == "mismatch"
    # An error seen in flight, or hidden by a peer error, may have been caught, so it is not certain.
    return (inside, not _is_certain(outcome), mismatch, seen_ns, outcome.rank)


# ---- positions in the sequence of collectives ----


def _groups(ranks: Ranks) -> dict[str, list[GroupPosition]]:
    """Return the known members of each group in which a rank has entered a collective.

    Every rank is a member of the group of all ranks. Of another group, the known members are the ranks
    that have entered a collective in it.
    """
    known = [(out, out.position) for out in ranks if out.position is not None]
    groups: dict[str, list[GroupPosition]] = defaultdict(list)
    for group in {call.group for _, position in known for call in position.collectives}:
        for out, position in known:
            last = position.in_group(group)
            if group == MAIN_GROUP or last is not None:
                groups[group].append(GroupPosition(out, last, position.reached(group)))
    return groups


def _number(last: Collective | None) -> int:
    return 0 if last is None else last.number


def _find_awaited(
    groups: Mapping[str, Sequence[GroupPosition]], outcomes: Mapping[int, RankOutcome]
) -> RankOutcome | None:
    """Return the rank that has not entered a collective that another rank is in, if there is one.

    Of several, it is one that waits for no other itself, for example in a smaller group, then the one
    furthest behind in the group of all ranks. If all of them wait, follow the receives from that one.
    """
    awaited: dict[int, RankOutcome] = {}
    ahead_of_others: set[int] = set()
    for members in groups.values():
        most = max(_number(place.current) for place in members)
        least = min(_number(place.last) for place in members)
        awaited |= {out.rank: out for out, last, _ in members if _number(last) < most}
        ahead_of_others |= {out.rank for out, _, current in members if _number(current) > least}

    def likelihood(outcome: RankOutcome) -> tuple[bool, bool, int, int]:
        number = _number(last_in_main(outcome.position))
        return (outcome.rank in ahead_of_others, is_waiting(outcome), number, outcome.rank)

    return _sender_behind(min(awaited.values(), key=likelihood), outcomes) if awaited else None


def _find_missed_barrier(outcomes: Mapping[int, RankOutcome]) -> Ranks:
    """Return the ranks that did not reach torch's monitored barrier in time, if a rank has raised an error there."""
    raised = [out.raised for out in outcomes.values() if out.raised and out.raised.is_peer_error]
    named = {rank for each in raised for rank in each.missed_barrier}
    if not named:  # only the first rank of a group names others; these wait for it
        calls = [each.point_to_point for each in raised if each.point_to_point is not None]
        first = {call.sender for call in calls if call.call == MONITORED_BARRIER}
        named = {rank for rank in first if rank is not None}
        named -= {out.rank for out in outcomes.values() if out.awaited_sender == out.rank}
    missed = [outcomes[rank] for rank in sorted(named) if rank in outcomes]
    return missed if len(missed) > 1 else [_sender_behind(out, outcomes) for out in missed]


def _sender_behind(first: RankOutcome, outcomes: Mapping[int, RankOutcome]) -> RankOutcome:
    """Return the rank that works elsewhere while `first` waits to receive from it, if there is one, else `first`."""
    # A rank in a receive is behind the others while the rank that it receives from works elsewhere:
    # that one is what all of them wait for, whatever collective it has reached.
    candidate: RankOutcome | None = first
    for _ in outcomes:  # a cycle of receives has no end
        if candidate is None or not is_waiting(candidate):
            break
        candidate = (
            None if candidate.awaited_sender is None else outcomes.get(candidate.awaited_sender)
        )
    return first if candidate is None or is_waiting(candidate) else candidate


def _find_late(groups: Mapping[str, Sequence[GroupPosition]]) -> list[tuple[RankOutcome, float]]:
    """Return the ranks that entered the last collective of a group too late, each with its delay in s."""
    late: list[tuple[RankOutcome, float]] = []
    for members in groups.values():
        number = max(_number(place.current) for place in members)
        entered = [
            (place.outcome, place.current)
            for place in members
            if place.current is not None
            and place.current.number == number
            and not place.outcome.sends_or_receives
        ]
        if not entered or len(entered) < len(members):  # a rank that never entered it is `awaited`
            continue
        first_ns = min(current.entered_ns for _, current in entered)
        gave_up_ns = [
            out.raised.wall_ns
            for out, _ in entered
            if out.raised is not None and out.raised.origin == "timeout" and out.raised.wall_ns
        ]
        if not first_ns or not gave_up_ns:
            continue
        # The timeout of the others is unknown, because scripts set their own: this is an estimate.
        timeout_ns = min(gave_up_ns) - first_ns
        late += [
            (out, (current.entered_ns - first_ns) / 1e9)
            for out, current in entered
            if current.entered_ns - first_ns > timeout_ns / 2
        ]
    return sorted(late, key=lambda pair: -pair[1])


def _find_mismatched(ranks: Ranks) -> tuple[Ranks, Sequence[tuple[RankOutcome, Collective]]]:
    """Return the ranks whose collective is the rarest of those entered under one number, and all of these.

    If several collectives are equally rare, the ranks in any of them are returned, the last rank first.
    """
    positions = [
        (out, out.position, current)
        for out in ranks
        if out.position is not None and (current := out.position.reached(MAIN_GROUP)) is not None
    ]
    # The number of the rank furthest behind. If rank 1 skips its third call, its fourth is counted
    # as number 3 and meets the others' third, and so on until two do not match. Under NCCL a rank
    # is in the collective that its GPU waits in, however many more it has queued.
    lowest = min((current.number for _, _, current in positions), default=0)
    entered = [
        (out, collective)
        for out, position, _ in positions
        if (collective := position.numbered(MAIN_GROUP, lowest)) is not None
    ]
    # NCCL's watchdog has other names than the recorder, and NCCL's counters have none.
    named = [(out, call) for out, call in entered if call.name != UNKNOWN_COLLECTIVE]
    of_recorder = [(out, call) for out, call in named if not call.is_of_watchdog]
    entered = of_recorder or named
    # Shapes and dtypes tell nothing once the collective has ended on every rank; one that has failed counts as done.
    under_way = not all(call.done and not is_peer_origin(out.origin) for out, call in entered)
    has_dtypes = all(call.dtypes for _, call in entered)
    calls = [
        (
            out,
            (family(call), call.sizes, call.dtypes if has_dtypes else "")
            if under_way and call.has_one_size
            else (family(call),),
        )
        for out, call in entered
    ]
    counts = Counter(call for _, call in calls)
    if len(counts) < 2:  # noqa: PLR2004 - they all agree
        return (), ()
    rarest = min(counts.values())
    return [out for out, call in reversed(calls) if counts[call] == rarest], entered


def find_proof_of_torch(root: RankOutcome, outcomes: Mapping[int, RankOutcome]) -> Deadlock | None:
    """Return the mismatch that torch has found and raised on the ranks (TORCH_DISTRIBUTED_DEBUG=DETAIL), if any.

    Args:
        root: The rank that broke, as far as the rules know, which take these errors for the ranks' own.
        outcomes: What is known of each rank.
    """
    calls = [
        (
            out.rank,
            Collective(
                group=MAIN_GROUP,
                number=seen.number,
                name=f"torch:{seen.operation}",
                sizes="" if seen.shape is None else f"[{seen.shape}]",
                numel=math.prod(seen.shape or [0]),
                state="started",
                entered_ns=out.raised.wall_ns,
            ),
        )
        for out in outcomes.values()
        if out.raised is not None and (seen := find_fingerprint(out.raised.message)) is not None
    ]
    kinds = {(call.name, call.number, call.sizes) for _, call in calls}
    is_known = len(kinds) > 1 and root.rank in dict(calls)
    return differ(calls) if is_known else None


# ---- the kind of failure that an exception is ----


Topic = Literal[
    "port",
    "worker-exit",
    "worker-timeout",
    "unfinished-reduction",
    "descriptors",
    "shared-memory",
    "disk",
    "read-only",
    "pipe",
]
"""What an exception is about, if there is special advice for it whatever its kind."""


_READS_FROM_WORKER: Final = ("torch/utils/data/dataloader.py", "/multiprocessing/")
_FILE: Final = re.compile(r'^ +File "(.+?)", line \d+', re.MULTILINE)


def find_topic(raised: Raised) -> Topic | None:
    """Return what the exception is about, if there is special advice for that."""
    if raised.explanation is not None:  # it has its own advice
        return None
    line = _line_of(raised)
    if find_kind(line) == "port":
        return "port"
    if _is_worker_exit(raised):
        return "worker-exit"
    if is_late_worker(line):
        return "worker-timeout"
    if is_unfinished_reduction(raised.message):
        return "unfinished-reduction"
    if has_no_descriptors(line):
        return "descriptors"
    if raised.type_name == "BrokenPipeError":
        return "pipe"
    files = _FILE.findall(raised.traceback)
    if is_full_shared_memory(line, files[-1] if files else ""):
        return "shared-memory"
    if is_full_disk(line):
        return "disk"
    return "read-only" if is_read_only(line) else None


_LOST_WORKER: Final = re.compile(
    # The last is a socket of the worker, which has no name there.
    r"(?:ConnectionResetError|ConnectionRefusedError|EOFError)\b|FileNotFoundError: [^:]*$"
)
"""What a rank raises that reads from a worker of its DataLoader, which has died."""


def _is_worker_exit(raised: Raised) -> bool:
    """Return whether a worker of a DataLoader has exited by itself, whatever its rank has raised for that."""
    line = _line_of(raised)
    may_be = line.startswith("RuntimeError") or _LOST_WORKER.match(line) is not None
    has_exited = bool(raised.dead_worker) and not raised.child_signal
    return says_worker_exited(raised.traceback) or (may_be and has_exited)


def kind_of(raised: Raised) -> FailureKind:
    """Return the kind of an exception, from its class if that shows it, else from its text."""
    kind: FailureKind
    if raised.is_peer_error:
        kind = "hang" if raised.origin == "timeout" else "peer-lost"
    elif raised.kind is not None:
        kind = raised.kind
    elif _is_worker_exit(raised):
        kind = "user-error"
    elif _LOST_WORKER.match(_line_of(raised)) and all(
        part in raised.traceback for part in _READS_FROM_WORKER
    ):
        kind = "killed"  # it read from a DataLoader worker, which has died
    else:
        kind = find_kind(_line_of(raised)) or "user-error"
    is_startup = raised.phase in ("starting", "loading", "joining")
    if is_startup and kind in ("network", "peer-lost", "hang"):
        return "startup-network"
    # "port" is retried by default, which is safe only before the function has run.
    return "network" if kind == "port" and not is_startup else kind


def _line_of(raised: Raised) -> str:
    return f"{raised.type_name}: {raised.message}"
