"""Which rank broke, and which ones failed because of it.

`Evidence` is computed once from the outcomes of all ranks; `RULES` are tried on it in order, and
the first one that finds a rank decides. They are ranked by what evidence can mean, not by time: a
rank that lost a peer often complains before the one that broke has said anything.

A new case is one rule here and one row of tests/launcher/test_root_cause.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import psutil

from ddpsafe._launcher.diagnosis.failure_kind import kind_of
from ddpsafe._wire.messages import (
    MAIN_GROUP,
    UNKNOWN_COLLECTIVE,
    Collective,
    RankOutcome,
    is_peer_origin,
    last_in_main,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Ranks = Sequence[RankOutcome]

# Ends that are seen within so much of each other say nothing about which came first.
_TOGETHER_NS: Final = 50_000_000
_OF_A_CONNECTION: Final = ("network", "startup-network")


class Place(NamedTuple):
    """Where a rank is in one process group.

    Attributes:
        outcome: The rank.
        last: The last collective that it has entered there, or queued; ``None`` for none.
        at: The one that it is at: under NCCL the first that has not ended, else the last.
    """

    outcome: RankOutcome
    last: Collective | None
    at: Collective | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the outcomes of an attempt tell, computed once.

    Attributes:
        ranks: The outcome of every rank, by rank.
        is_failing: Whether a rank was seen to wait with an exception in flight, and no timeout.
        failed: The ranks that raised, exited or were killed, by rank.
        broke: Those of them that blame no other rank, the likely cause first.
        errors: `broke` without the errors that all ranks handle in the same place.
        groups: For each process group, where the ranks that are in it are.
        awaited: The ranks that have not entered a collective that others are in, and the one whose
            send such a rank waits for; the most likely cause first.
        mismatched: The ranks that entered another collective than most under one number.
        late: The ranks that came much later than others to a collective in which a wait timed out,
            the last one first, each with how much later in seconds.
        someone_hangs: Whether a rank is at work, or nowhere, while others wait.
    """

    ranks: Ranks
    is_failing: bool
    failed: Ranks
    broke: Ranks
    errors: Ranks
    groups: Mapping[str, Sequence[Place]]
    awaited: Ranks
    mismatched: Ranks
    late: Sequence[tuple[RankOutcome, float]]
    someone_hangs: bool

    @classmethod
    def of(cls, outcomes: Mapping[int, RankOutcome], *, is_failing: bool = False) -> Evidence:
        """Compute it; see the attributes."""
        ranks = sorted(outcomes.values(), key=lambda outcome: outcome.rank)
        failed = [
            out
            for out in ranks
            if out.status in ("raised", "killed", "exited") or out.native is not None
        ]
        broke = _by_likelihood([out for out in failed if is_own_fault(out)])
        groups = _groups(ranks)
        return cls(
            ranks=ranks,
            is_failing=is_failing,
            failed=failed,
            broke=broke,
            errors=[out for out in broke if not _is_common(out, ranks)],
            groups=groups,
            awaited=_find_awaited(groups, outcomes),
            mismatched=_find_mismatched(ranks),
            late=_find_late(groups),
            someone_hangs=any(out.raised is None and out.in_collective is False for out in ranks),
        )

    def find_out_of_place(self) -> Ranks:
        """Return the ranks that the first rule about places finds; none where places tell nothing."""
        return next((found for rule in RULES if rule.by_place and (found := rule.find(self))), ())

    def find_who_waited(self, root: RankOutcome) -> tuple[list[int], Collective | None]:
        """Return the ranks that waited for `root` in one collective, and which one that is.

        Where numbers tell nothing it is the one that ranks are in while `root` is in none. Ranks
        in a send or a receive are in no collective.
        """
        pairs = [
            (place.outcome.rank, place.at)
            for members in self.groups.values()
            for mine in _numbers_of(root, members)
            for place in members
            if place.at is not None
            and place.at.number > mine
            and not place.outcome.sends_or_receives
        ]
        if not pairs and not is_waiting(root):
            pairs = [
                (out.rank, last)
                for out in self.ranks
                if out.rank != root.rank
                and is_waiting(out)
                and not out.sends_or_receives
                and (last := newest_collective(out))
            ]
            if len({each.group for _, each in pairs}) > 1:  # each waits in a group of its own
                pairs = []
        if not pairs:
            return [], None
        goal = max(
            (each for _, each in pairs), key=lambda each: (each.group == MAIN_GROUP, each.number)
        )
        there = (goal.group, goal.number)
        return sorted(rank for rank, each in pairs if (each.group, each.number) == there), goal


RuleName = Literal[
    "stuck-on-gpu",
    "stuck-with-error",
    "ended-by-itself",
    "error-beside-crash",
    "error-where-missed",
    "errors-of-all-others",
    "error-after-peer-error",
    "suspended",
    "returned-behind",
    "mismatch",
    "behind",
    "late",
    "returned",
    "in-rpc",
    "elsewhere",
    "unknown",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One way to find the rank that broke.

    Attributes:
        name: How it is called inside ddpsafe.
        sign: What is seen of the rank, for the documentation.
        why: Why that makes it the root cause, or what excludes it.
        find: Returns the ranks that it holds for, the root cause first; none if it does not apply.
        blames: What becomes of it: how a rank ended, that it returned, or that it kept others waiting.
        by_place: Whether it is about where the ranks are in the sequence of collectives.
    """

    name: RuleName
    sign: str
    why: str
    find: Callable[[Evidence], Ranks]
    blames: Literal["end", "return", "wait"] = "end"
    by_place: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """What follows from the evidence.

    Attributes:
        rule: The rule that found it.
        root: The rank that broke or that the others waited for.
        collateral: Other ranks that failed, by rank.
        evidence: What it was found in.
    """

    rule: Rule
    root: RankOutcome
    collateral: Ranks
    evidence: Evidence


def find_root_cause(outcomes: Mapping[int, RankOutcome], *, is_failing: bool = False) -> RootCause:
    """Return what the first rule that applies finds.

    Args:
        outcomes: What is known of each rank, by rank.
        is_failing: Whether a rank was seen to wait with an exception in flight, and no timeout.
    """
    evidence = Evidence.of(outcomes, is_failing=is_failing)
    rule, found = next((rule, found) for rule in RULES if (found := rule.find(evidence)))
    root = found[0]
    collateral = [out for out in evidence.failed if out.rank != root.rank]
    return RootCause(rule=rule, root=root, collateral=collateral, evidence=evidence)


# ---- the rules, each a question to the evidence ----


def _stuck_with_error(evidence: Evidence) -> Ranks:
    return evidence.broke if evidence.is_failing else ()


def _ended_by_itself(evidence: Evidence) -> Ranks:
    return [out for out in evidence.errors[:1] if _is_certain(out)]


def _error_beside_crash(evidence: Evidence) -> Ranks:
    return evidence.errors if any(map(_crashed_inside, evidence.errors)) else ()


def _error_where_missed(evidence: Evidence) -> Ranks:
    missed = evidence.find_out_of_place() or evidence.errors
    return [out for out in evidence.errors if out in missed]


def _errors_of_all_others(evidence: Evidence) -> Ranks:
    missed = evidence.find_out_of_place()
    others = [out for out in evidence.ranks if out not in missed]
    errors = evidence.errors
    if _suspended(evidence) or any(out.status == "returned" for out in missed):
        # Which explains as well why the others wait, unless their errors are on their way out.
        errors = [out for out in errors if out.raised is None or not out.raised.goes_on]
    all_others = missed and others and all(out in errors for out in others)
    return errors if all_others and not evidence.someone_hangs else ()


def _error_after_peer_error(evidence: Evidence) -> Ranks:
    root = (evidence.find_out_of_place() or _unknown(evidence))[0]
    others = [out for out in evidence.ranks if out is not root]
    alone = _handled_a_peer_error(root) and not any(map(_handled_a_peer_error, others))
    return [root] if alone and not evidence.someone_hangs else ()


def _suspended(evidence: Evidence) -> Ranks:
    return [out for out in evidence.ranks if out.state == psutil.STATUS_STOPPED]


def _returned_behind(evidence: Evidence) -> Ranks:
    return [out for out in evidence.awaited[:1] if out.status == "returned"]


def _mismatch(evidence: Evidence) -> Ranks:
    return evidence.mismatched


def _behind(evidence: Evidence) -> Ranks:
    return evidence.awaited[:1]


def _late(evidence: Evidence) -> Ranks:
    return [out for out, _ in evidence.late]


def _in_rpc(evidence: Evidence) -> Ranks:
    someone_waits = any(is_peer_origin(out.origin) for out in evidence.ranks)
    return [out for out in evidence.ranks if out.in_rpc] if someone_waits else ()


def _stuck_on_gpu(evidence: Evidence) -> Ranks:
    return [outcome for outcome, _ in find_stuck_on_gpu(evidence)]


def _returned(evidence: Evidence) -> Ranks:
    return [out for out in evidence.ranks if out.status == "returned"]


def _elsewhere(evidence: Evidence) -> Ranks:
    someone_waits = any(out.in_collective or out.raised is not None for out in evidence.ranks)
    return [out for out in evidence.ranks if out.in_collective is False] if someone_waits else ()


def _unknown(evidence: Evidence) -> Ranks:
    return sorted(evidence.failed or evidence.ranks, key=_order)


RULES: Final = (
    Rule(
        name="stuck-with-error",
        sign="waits at a barrier in an `except` or a `finally` while the others wait for it elsewhere",
        why="neither wait can succeed, so its error is reported without waiting for a timeout",
        find=_stuck_with_error,
    ),
    Rule(
        name="ended-by-itself",
        sign="was killed, exited, or raised an error of its own",
        why="it broke; a kill comes before an exit without a report within 50 ms, for the kernel "
        "closes a process's connections before its end can be seen, and before any broken connection "
        "of another rank",
        find=_ended_by_itself,
    ),
    Rule(
        name="error-beside-crash",
        sign="handles an error while another rank crashes in a collective",
        why="a collective in `finally` meets another one of the others, and gloo then writes into "
        "their buffers",
        find=_error_beside_crash,
    ),
    Rule(
        name="error-where-missed",
        sign="handles an error, and is the rank that the others wait for, or nothing tells where "
        "the ranks are",
        why="the error may have been handled, but here it is why the rank did not come; not when "
        "all ranks handle the same error in the same place",
        find=_error_where_missed,
    ),
    Rule(
        name="errors-of-all-others",
        sign="handles an error, as do all ranks but the one that seems to be out of place",
        why="the others have left the place where that rank still waits",
        find=_errors_of_all_others,
    ),
    Rule(
        name="error-after-peer-error",
        sign="raised an error of its own while it handled the loss of a peer, it alone",
        why="no rank hangs and no other rank has an error, so this one is why it is missing",
        find=_error_after_peer_error,
    ),
    Rule(
        name="suspended",
        sign="is stopped (SIGSTOP)",
        why="it is what the others wait for",
        find=_suspended,
        blames="wait",
        by_place=True,
    ),
    Rule(
        name="returned-behind",
        sign="has returned, while another rank is in a later collective",
        why="it left early; told without a timeout, within about a second, or ten where the other "
        "comes there much later: to answer, a rank reads all of the recorder, so it is asked ever "
        "more rarely",
        find=_returned_behind,
        blames="return",
        by_place=True,
    ),
    Rule(
        name="mismatch",
        sign="is in another collective than most, under the same number",
        why="neither ends, or both end with wrong data",
        find=_mismatch,
        blames="wait",
        by_place=True,
    ),
    Rule(
        name="behind",
        sign="has not entered a collective, of any group it is in, that another rank has, or has not "
        "sent what such a rank waits to receive",
        why="the others wait for it; of several such ranks, it is the one that waits for no other",
        find=_behind,
        blames="wait",
        by_place=True,
    ),
    Rule(
        name="late",
        sign="entered the collective in which others timed out later than they did, by more than half "
        "of the time that they waited",
        why="it was at work for longer than the others wait",
        find=_late,
        blames="wait",
        by_place=True,
    ),
    Rule(
        name="stuck-on-gpu",
        sign="has queued the collective that all other ranks of its group have queued too, and that "
        "does not end",
        why="no rank is missing: a GPU, or the link between GPUs, is stuck",
        find=_stuck_on_gpu,
        blames="wait",
        by_place=True,
    ),
    Rule(
        name="returned",
        sign="has returned, while others failed in a wait",
        why="it left early; the flight recorder does not show where the ranks are",
        find=_returned,
        blames="return",
        by_place=True,
    ),
    Rule(
        name="in-rpc",
        sign="executes a call that came by RPC, while another rank's wait failed",
        why="its main thread is waiting for all calls to finish, and this one takes long",
        find=_in_rpc,
        blames="wait",
        by_place=True,
    ),
    Rule(
        name="elsewhere",
        sign="is outside of a collective, while others wait in one or timed out there",
        why="it is busy or hangs where it is",
        find=_elsewhere,
        blames="wait",
        by_place=True,
    ),
    Rule(
        name="unknown",
        sign="shows only that it lost a peer, or that a wait timed out",
        why="a peer error is blamed only when there is no other evidence",
        find=_unknown,
        blames="wait",
    ),
)


# ---- what the rules ask of one rank ----


def find_stuck_on_gpu(evidence: Evidence) -> list[tuple[RankOutcome, Collective]]:
    """Return all ranks of a group that are at one collective which does not end, and it."""
    for members in evidence.groups.values():
        stuck = [
            (place.outcome, place.at)
            for place in members
            if place.at is not None and not place.at.done
        ]
        is_same = len({at.number for _, at in stuck}) == 1 and stuck[0][1].is_queued_ahead
        if is_same and len(stuck) == len(members) > 1:
            return stuck
    return []


def newest_collective(outcome: RankOutcome) -> Collective | None:
    """Return the last collective the rank entered, in whichever group."""
    return None if outcome.position is None else outcome.position.newest()


def is_own_fault(outcome: RankOutcome) -> bool:
    """Tell whether a failed rank broke by itself, as far as the rank could tell."""
    return not is_peer_origin(outcome.origin)


def is_waiting(outcome: RankOutcome) -> bool:
    """Tell whether a rank waits for others, or did so until that failed."""
    if outcome.raised is not None or outcome.native is not None:
        return is_peer_origin(outcome.origin)
    return bool(outcome.in_collective)


def _is_certain(outcome: RankOutcome) -> bool:
    """Tell whether it ended by this, and by its own doing: see `Raised.is_certain`."""
    return outcome.raised is None or outcome.raised.is_certain


def _handled_a_peer_error(outcome: RankOutcome) -> bool:
    """Tell whether a rank raised an error of its own while it handled a peer error."""
    return outcome.raised is not None and outcome.raised.is_wrapped


def _crashed_inside(outcome: RankOutcome) -> bool:
    """Tell whether a rank died in a collective, as where another rank is in one that does not fit."""
    return outcome.status == "killed" and bool(outcome.in_collective)


def _is_common(outcome: RankOutcome, ranks: Ranks) -> bool:
    """Tell whether all ranks that raised anything handle the same error in the same place.

    A script may run as a whole inside ``except ImportError:``. All of its ranks then handle that
    error, so it cannot be why one of them is missing.
    """
    if _is_certain(outcome) or outcome.raised is None or outcome.raised.origin == "mismatch":
        return False
    errors = [(out.raised.type_name, out.raised.where) for out in ranks if out.raised]
    return len(errors) > 1 and len(set(errors)) == 1


def _by_likelihood(broke: Ranks) -> Ranks:
    """Sort ranks that failed, the likely cause first.

    A rank that exits without a report may do so because it lost another one, whose end the kernel
    shows a moment later: its connections are closed before its end can be seen. A broken connection
    of the script's own may have led to a rank that was killed, in whatever order they are seen.
    """
    in_order = sorted(broke, key=_order)
    first = in_order[:1]
    if first and first[0].raised is not None and kind_of(first[0].raised) in _OF_A_CONNECTION:
        killed = [out for out in in_order if out.status == "killed" and not _crashed_inside(out)]
        return sorted(in_order, key=lambda outcome: outcome not in killed)
    if first and first[0].status == "exited":
        until_ns = (first[0].ended_ns or 0) + _TOGETHER_NS
        killed = [out for out in in_order if _was_killed_by(out, until_ns)]
        return sorted(in_order, key=lambda outcome: outcome not in killed)
    return in_order


def _was_killed_by(outcome: RankOutcome, moment_ns: int) -> bool:
    if outcome.status != "killed" or _crashed_inside(outcome) or outcome.ended_ns is None:
        return False
    return outcome.ended_ns <= moment_ns


def _order(outcome: RankOutcome) -> tuple[bool, bool, bool, int, int]:
    """Order ranks that failed.

    An error from inside a collective may be a peer error after all, and one that was only seen in
    flight, or beneath a peer error, may have been caught. A crash there may be one too: ranks that
    meet in different collectives of gloo write into each other's buffers.
    """
    raised = outcome.raised
    if raised is None:
        inside = _crashed_inside(outcome)
    else:
        inside = "distributed_c10d.py" in raised.traceback and not raised.hidden_by
    seen_ns = raised.at_ns if raised is not None else (outcome.ended_ns or 0)
    mismatch = raised is not None and raised.origin == "mismatch"
    return (inside, not _is_certain(outcome), mismatch, seen_ns, outcome.rank)


# ---- where the ranks are in the sequences of collectives ----


def _groups(ranks: Ranks) -> dict[str, list[Place]]:
    """Return the members of each group that a rank has entered a collective in.

    Every rank is in the group of all ranks; in another one only those that have entered something.
    """
    known = [(out, out.position) for out in ranks if out.position is not None]
    groups: dict[str, list[Place]] = defaultdict(list)
    for group in {each.group for _, position in known for each in position.collectives}:
        for out, position in known:
            last = position.in_group(group)
            if group == MAIN_GROUP or last is not None:
                groups[group].append(Place(out, last, position.reached(group)))
    return groups


def _number(last: Collective | None) -> int:
    return 0 if last is None else last.number


def _numbers_of(outcome: RankOutcome, members: Sequence[Place]) -> list[int]:
    """Return how many collectives a rank has entered in a group; nothing if it may be no member."""
    return [_number(place.last) for place in members if place.outcome is outcome]


def _find_awaited(
    groups: Mapping[str, Sequence[Place]], outcomes: Mapping[int, RankOutcome]
) -> Ranks:
    """Return the ranks that others wait for, the most likely cause of it first.

    That is one that has not entered what another rank is at. Of several it is one that waits for no
    other itself, as a rank of a smaller group does for another one of it; then the furthest behind
    in the group of all ranks. If all of them wait, the first one may do so in a receive from a rank
    that does not, which is then what all wait for, wherever it is in the collectives.
    """
    awaited: dict[int, RankOutcome] = {}
    waiting: set[int] = set()
    for members in groups.values():
        most = max(_number(place.at) for place in members)
        least = min(_number(place.last) for place in members)
        awaited |= {out.rank: out for out, last, _ in members if _number(last) < most}
        waiting |= {out.rank for out, _, at in members if _number(at) > least}

    def likelihood(outcome: RankOutcome) -> tuple[bool, bool, int, int]:
        number = _number(last_in_main(outcome.position))
        return (outcome.rank in waiting, is_waiting(outcome), number, outcome.rank)

    found = sorted(awaited.values(), key=likelihood)
    sender = _find_sender(found[0], outcomes) if found else None
    return found if sender is None else [sender, *(out for out in found if out is not sender)]


def _find_sender(first: RankOutcome, outcomes: Mapping[int, RankOutcome]) -> RankOutcome | None:
    """Go from receive to receive; return the rank at the end if it waits for no other."""
    at: RankOutcome | None = first
    seen: set[int] = set()
    while at is not None and is_waiting(at) and at.rank not in seen:
        seen.add(at.rank)
        at = None if at.awaited_sender is None else outcomes.get(at.awaited_sender)
    return None if at is None or is_waiting(at) else at


def _find_late(groups: Mapping[str, Sequence[Place]]) -> list[tuple[RankOutcome, float]]:
    """Return the ranks that came too late to the last collective of a group, and by how much.

    How long the others wait is not known here, for scripts set timeouts of their own; what is known
    is when the first one gave up.
    """
    found: list[tuple[RankOutcome, float]] = []
    for members in groups.values():
        number = max(_number(place.at) for place in members)
        there = [
            (place.outcome, place.at)
            for place in members
            if place.at is not None
            and place.at.number == number
            and not place.outcome.sends_or_receives
        ]
        if not there or len(there) < len(members):  # some have not come at all
            continue
        first_ns = min(at.entered_ns for _, at in there)
        gave_up_ns = [
            out.raised.wall_ns
            for out, _ in there
            if out.raised is not None and out.raised.origin == "timeout" and out.raised.wall_ns
        ]
        if not first_ns or not gave_up_ns:
            continue
        patience_ns = min(gave_up_ns) - first_ns
        found += [
            (out, (at.entered_ns - first_ns) / 1e9)
            for out, at in there
            if at.entered_ns - first_ns > patience_ns / 2
        ]
    return sorted(found, key=lambda pair: -pair[1])


def _find_mismatched(ranks: Ranks) -> Ranks:
    """Return the ranks that entered another collective than most under one number.

    Where there is no majority, those are all of them.

    Looked at is the number that the hindmost rank is in: a rank that skips one pairs its next
    with the others' present one, and all go on until two do not fit. Sizes count only while a
    collective is under way, for gather and all-to-all may differ in them and end well.

    Under NCCL a rank is where its GPU waits, however many more it has queued. The counters and the
    watchdog of NCCL name what they count in another way, or not at all.
    """
    positions = [
        (out, out.position, at)
        for out in ranks
        if out.position is not None and (at := out.position.reached(MAIN_GROUP)) is not None
    ]
    hindmost = min((at.number for _, _, at in positions), default=0)
    entered = [
        (out, collective)
        for out, position, _ in positions
        if (collective := position.numbered(MAIN_GROUP, hindmost)) is not None
    ]
    named = [(out, each) for out, each in entered if each.name != UNKNOWN_COLLECTIVE]
    of_recorder = [(out, each) for out, each in named if not each.is_of_watchdog]
    entered = of_recorder or named
    under_way = not any(collective.done for _, collective in entered)
    calls = [
        (out, (each.name, each.sizes if under_way and each.has_one_size else ""))
        for out, each in entered
    ]
    counts = Counter(call for _, call in calls)
    if len(counts) < 2:  # noqa: PLR2004 - they all agree
        return ()
    rarest = min(counts.values())
    return [out for out, call in reversed(calls) if counts[call] == rarest]
