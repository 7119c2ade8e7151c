"""Which rank broke, which ones failed because of it, and what kind of failure that is.

`Evidence` is computed once from the outcomes of all ranks; `RULES` are tried on it in order, and
the first one that finds a rank decides. They are ranked by what evidence can mean, not by time: a
rank that lost a peer often complains before the one that broke has said anything.

A rank "handles an error" if that may not be what ended it (`Raised.is_certain` is false): its main thread
is in an ``except`` or ``finally`` and may still catch it, the loss of a peer was raised on top of it, or its
origin is "mismatch": it came in a wait for ranks that were elsewhere, and may be their doing. Such an error
counts only together with where the ranks are, so three rules about errors ask first which ranks are "out of
place": those that the first rule with `by_place` finds.

A new case is one rule in `RULES` with its name in `RuleName`, one row in `CONCLUSIONS`, which says what
the error then tells, and one row of tests/launcher/test_root_cause.py.
"""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import psutil

from ddpsafe._errors import LaunchError, LaunchTimeoutError, RankFailedError, RankLeftEarlyError
from ddpsafe._wire.foreign_texts import find_kind, is_full_disk, says_worker_exited
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

    from ddpsafe._errors import FailureKind
    from ddpsafe._wire.messages import Raised

    Ranks = Sequence[RankOutcome]

# Ends that are seen less than this apart have no known order.
_TOGETHER_NS: Final = 50_000_000
# A rank never dies of these because it lost a peer, however late a busy machine shows its end.
_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM)
_OF_A_CONNECTION: Final = ("network", "startup-network")


class GroupPosition(NamedTuple):
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
        is_stuck_with_error: Whether the attempt was ended before any timeout because a rank with an
            exception in flight and another rank wait for each other in different places.
        failed: The ranks that raised, exited or were killed, by rank.
        blame_no_other: Those of them that do not blame another rank, the likely cause first; also those
            that were killed or exited and so raised nothing.
        suspects: `blame_no_other` without the ranks whose error every rank with an error handles, in the
            same place, as in a script that runs inside ``except ImportError``: that cannot be why one of
            them is missing.
        groups: For each process group, where the ranks that are in it are.
        awaited: The ranks that have not entered a collective that others are in, and the one whose
            send such a rank waits for; the most likely cause first.
        mismatched: The ranks whose collective is the rarest of those entered under one number.
        late: The ranks that came much later than others to a collective in which a wait timed out,
            the last one first, each with how much later in seconds.
        someone_is_outside: Whether a rank that has raised nothing is outside of any collective.
    """

    ranks: Ranks
    is_stuck_with_error: bool
    failed: Ranks
    blame_no_other: Ranks
    suspects: Ranks
    groups: Mapping[str, Sequence[GroupPosition]]
    awaited: Ranks
    mismatched: Ranks
    late: Sequence[tuple[RankOutcome, float]]
    someone_is_outside: bool

    @classmethod
    def of(
        cls, outcomes: Mapping[int, RankOutcome], *, is_stuck_with_error: bool = False
    ) -> Evidence:
        """Compute it; see the attributes."""
        ranks = sorted(outcomes.values(), key=lambda outcome: outcome.rank)
        failed = [
            out
            for out in ranks
            if out.status in ("raised", "killed", "exited") or out.native is not None
        ]
        blame_no_other = _by_likelihood([out for out in failed if is_own_fault(out)])
        errors = [(out.raised.type_name, out.raised.where) for out in ranks if out.raised]
        is_common = len(errors) > 1 and len(set(errors)) == 1
        suspects = [
            out
            for out in blame_no_other
            if not is_common or _is_certain(out) or out.origin == "mismatch"
        ]
        groups = _groups(ranks)
        return cls(
            ranks=ranks,
            is_stuck_with_error=is_stuck_with_error,
            failed=failed,
            blame_no_other=blame_no_other,
            suspects=suspects,
            groups=groups,
            awaited=_find_awaited(groups, outcomes),
            mismatched=_find_mismatched(ranks),
            late=_find_late(groups),
            someone_is_outside=any(
                out.raised is None and out.in_collective is False for out in ranks
            ),
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
            for mine in members
            if mine.outcome is root  # else it may be no member
            for place in members
            if place.at is not None
            and place.at.number > _number(mine.last)
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
    "stuck-with-error",
    "ended-by-itself",
    "error-beside-crash",
    "error-out-of-place",
    "errors-of-all-others",
    "error-after-peer-error",
    "suspended",
    "returned-behind",
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
        name: How it is called inside ddpsafe.
        sign: What is seen of the rank, for the documentation.
        why: Why that makes it the root cause, or what excludes it.
        find: Returns the ranks that it holds for, the root cause first; none if it does not apply.
        by_place: Whether it goes by where ranks are, not by their errors. One that does must not
            call `Evidence.find_out_of_place`, which tries all of them.
    """

    name: RuleName
    sign: str
    why: str
    find: Callable[[Evidence], Ranks]
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

    @property
    def conclusion(self) -> Conclusion:
        """What the error says of it."""
        return CONCLUSIONS[self.rule.name]


def find_root_cause(
    outcomes: Mapping[int, RankOutcome], *, is_stuck_with_error: bool = False
) -> RootCause:
    """Return what the first rule that applies finds; `unknown`, the last one, always does.

    Args:
        outcomes: What is known of each rank, by rank.
        is_stuck_with_error: See `Evidence`.
    """
    evidence = Evidence.of(outcomes, is_stuck_with_error=is_stuck_with_error)
    rule, found = next((rule, found) for rule in RULES if (found := rule.find(evidence)))
    root = found[0]
    collateral = [out for out in evidence.failed if out.rank != root.rank]
    return RootCause(rule=rule, root=root, collateral=collateral, evidence=evidence)


# ---- the rules, each a question to the evidence ----


def _error_out_of_place(evidence: Evidence) -> Ranks:
    out_of_place = evidence.find_out_of_place() or evidence.suspects
    return [out for out in evidence.suspects if out in out_of_place]


def _errors_of_all_others(evidence: Evidence) -> Ranks:
    out_of_place = evidence.find_out_of_place()
    others = [out for out in evidence.ranks if out not in out_of_place]
    suspects = evidence.suspects
    if _suspended(evidence) or any(out.status == "returned" for out in out_of_place):
        # A suspended or returned rank explains the waits: only errors that nothing catches count.
        suspects = [out for out in suspects if out.raised is None or not out.raised.is_caught]
    all_others = out_of_place and others and all(out in suspects for out in others)
    return suspects if all_others and not evidence.someone_is_outside else ()


def _error_after_peer_error(evidence: Evidence) -> Ranks:
    root = (evidence.find_out_of_place() or _unknown(evidence))[0]
    others = [out for out in evidence.ranks if out is not root]
    alone = _raised_over_a_peer_error(root) and not any(map(_raised_over_a_peer_error, others))
    return [root] if alone and not evidence.someone_is_outside else ()


def _suspended(evidence: Evidence) -> Ranks:
    return [out for out in evidence.ranks if out.state == psutil.STATUS_STOPPED]


def _in_rpc(evidence: Evidence) -> Ranks:
    wait_failed = any(is_peer_origin(out.origin) for out in evidence.ranks)
    return [out for out in evidence.ranks if out.in_rpc] if wait_failed else ()


def _elsewhere(evidence: Evidence) -> Ranks:
    is_awaited = any(out.in_collective or out.raised is not None for out in evidence.ranks)
    return [out for out in evidence.ranks if out.in_collective is False] if is_awaited else ()


def _unknown(evidence: Evidence) -> Ranks:
    found = sorted(evidence.failed or evidence.ranks, key=_order)
    if found[0].origin == "peer-lost":
        # A wait that times out closes the rank's connections, and the other end may see that first.
        found.sort(key=lambda outcome: outcome.origin != "timeout")
    return found


RULES: Final = (
    Rule(
        name="stuck-with-error",
        sign="has an error and waits, in an `except` or a `finally`, while another rank waits for it in a "
        "different place",
        why="neither wait can succeed, so its error is reported without waiting for a timeout",
        find=lambda evidence: evidence.blame_no_other if evidence.is_stuck_with_error else (),
    ),
    Rule(
        name="ended-by-itself",
        sign="was killed, exited, or raised an error that surely ended it, and no likelier rank handles an "
        "error",
        why="it broke by itself. Of several, the earliest; errors and crashes inside a collective come last, "
        "since they may follow from another rank. A killed rank comes before one whose own connection "
        "broke, and before one that exited without a report at most 50 ms earlier, for its connections are "
        "closed before its end can be seen; after SIGKILL or SIGTERM, which no crash sends, however much "
        "earlier",
        find=lambda evidence: [out for out in evidence.suspects[:1] if _is_certain(out)],
    ),
    Rule(
        name="error-beside-crash",
        sign="handles an error while another rank crashes in a collective",
        why="its `finally` calls a collective while the others are in a different one, and gloo then "
        "writes into their buffers, which crashes them",
        find=lambda evidence: (
            evidence.suspects if any(map(_crashed_inside, evidence.suspects)) else ()
        ),
    ),
    Rule(
        name="error-out-of-place",
        sign="handles an error, and is out of place, or no rank is",
        why="an error that is handled may be harmless, but here it explains why the rank did not "
        "come; it counts for nothing where all ranks handle the same error in the same place",
        find=_error_out_of_place,
    ),
    Rule(
        name="errors-of-all-others",
        sign="handles an error, as does every rank that is not out of place, and no rank without an error is "
        "outside of a collective. Errors after which the program continues do not count where a rank is "
        "suspended or the one out of place has returned",
        why="they have left the collective in which another rank still waits, so that one only looks out of "
        "place",
        find=_errors_of_all_others,
    ),
    Rule(
        name="error-after-peer-error",
        sign="is out of place (if no rank is: is what `unknown` would find), and is the only one that raised "
        "an error of its own while it handled the loss of a peer; no rank without an error is outside of a "
        "collective",
        why="no rank hangs, and no other rank raised an error on top of a lost peer, so this one is why "
        "it is missing",
        find=_error_after_peer_error,
    ),
    Rule(
        name="suspended",
        sign="is stopped (SIGSTOP)",
        why="it is what the others wait for",
        find=_suspended,
        by_place=True,
    ),
    Rule(
        name="returned-behind",
        sign="has returned, and is the rank that `behind` would find",
        why="it left early",
        find=lambda evidence: [out for out in evidence.awaited[:1] if out.status == "returned"],
        by_place=True,
    ),
    Rule(
        name="mismatch",
        sign="has called a different collective than most ranks at the same position in the sequence",
        why="neither ends, or both end with wrong data",
        find=lambda evidence: evidence.mismatched,
        by_place=True,
    ),
    Rule(
        name="behind",
        sign="has not reached a collective of its groups that another rank is in, or has not sent what "
        "such a rank waits for",
        why="the others wait for it; of several such ranks, it is the one that waits for no other",
        find=lambda evidence: evidence.awaited[:1],
        by_place=True,
    ),
    Rule(
        name="late",
        sign="entered the collective in which others timed out later than they did, by more than half "
        "of the time that they waited",
        why="it was at work for longer than the others wait",
        find=lambda evidence: [out for out, _ in evidence.late],
        by_place=True,
    ),
    Rule(
        name="stuck-on-gpu",
        sign="has queued the collective that all other ranks of its group have queued too, and that "
        "does not end",
        why="no rank is missing: a GPU, or the link between GPUs, is stuck",
        find=lambda evidence: [out for out, _ in find_stuck_on_gpu(evidence)],
        by_place=True,
    ),
    Rule(
        name="returned",
        sign="has returned",
        why="it left early; where the ranks are in the sequence of collectives is not known, or the rules above "
        "would have told",
        find=lambda evidence: [out for out in evidence.ranks if out.status == "returned"],
        by_place=True,
    ),
    Rule(
        name="in-rpc",
        sign="executes a call that came by RPC, while a wait of a rank failed",
        why="its main thread is waiting for all calls to finish, and this one takes long",
        find=_in_rpc,
        by_place=True,
    ),
    Rule(
        name="elsewhere",
        sign="is outside of a collective, while another rank is in one or raised an error",
        why="it is busy or hangs where it is",
        find=_elsewhere,
        by_place=True,
    ),
    Rule(
        name="timed-out",
        sign="shows only that a wait of its own timed out",
        why="no rank is known to hang: each waited for others",
        find=lambda evidence: [out for out in _unknown(evidence)[:1] if out.origin == "timeout"],
    ),
    Rule(
        name="unknown",
        sign="failed, or is any rank where none did",
        why="a peer error is blamed only when there is no other evidence. One that timed out comes before one "
        "that lost a peer: a wait that times out closes connections, and the other end may see that first",
        find=_unknown,
    ),
)

Advice = tuple[str, str]
"""Likely cause, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What the error of an attempt says where a rule has found a rank.

    Attributes:
        error: Its base class. Of `RankFailedError` the way in which the rank ended decides which
            subclass is raised, of `LaunchTimeoutError` the wait that timed out.
        kind: Its kind; ``None`` for the one of the rank's exception or signal.
        blames: ``rank``: the one that was found; ``several``: it and the others that the rule found;
            ``gpu``: a GPU or a link between two; ``nothing``: no rank is known to be the cause.
        did: What the rank did, after its name.
        advice: The likely cause and what to do.
        is_start_likelier: Whether a rank that never began to join is reported instead, if there is one.
    """

    error: type[LaunchError] = RankFailedError
    kind: FailureKind | None = None
    blames: Literal["rank", "several", "gpu", "nothing"] = "rank"
    did: str = ""
    advice: Advice = (
        "it was still handling the error in its line below, in an except or a finally.",
        "fix that error first; then see what takes so long in handling it.",
    )
    is_start_likelier: bool = False


_ENDED: Final = Conclusion()
"""The rank broke, so its own exception, signal or exit tells the rest."""

_LEFT: Final = Conclusion(
    error=RankLeftEarlyError,
    kind="user-error",
    advice=(
        "the ranks had different numbers of batches or took different branches.",
        "give every rank the same number of steps: drop_last, DistributedSampler or torch's Join.",
    ),
)

_WAITED: Final = Conclusion(error=LaunchTimeoutError, kind="hang")

_NONE_SAYS_WHY: Final[Advice] = (
    "every rank only saw another one disconnect or hang, and none reported why.",
    "compare where the ranks were, in the logs.",
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
        did="is stopped",
        advice=(
            "SIGSTOP was sent to it, or a debugger or a container runtime froze it.",
            "kill -CONT {pid} would have resumed it; find out what stops processes on {host}.",
        ),
    ),
    "returned-behind": _LEFT,
    "mismatch": replace(
        _WAITED,
        blames="several",
        did="entered another collective than the others",
        advice=(
            "the ranks called different collectives or shapes, or one rank alone ran the DDP model.",
            "call the same collectives in the same order; use ctx.unwrap(model) on one rank alone.",
        ),
    ),
    "behind": replace(
        _WAITED,
        did="is behind",
        advice=(
            "the rank hangs or works at its line, or skipped a collective that the others entered.",
            (
                "see its line below. If it works there, move that work away from the others' collectives "
                "or raise timeouts.{setting}. Else call the same collectives in the same order on every "
                "rank."
            ),
        ),
    ),
    "late": replace(
        _WAITED,
        did="came {delay_s:.1f} s after {first} to {newest}",
        advice=(
            "the rank worked longer than the others wait: loading, evaluating or saving, on one rank.",
            "divide that work among the ranks, or raise timeouts.{setting} above the time it takes.",
        ),
    ),
    "stuck-on-gpu": replace(
        _WAITED,
        blames="gpu",
        did="all wait in {newest}, which does not end",
        advice=(
            "a GPU or a link between GPUs (NVLink, InfiniBand, the network) is stuck.",
            (
                "see dmesg for Xid and `nvidia-smi nvlink -s` on {host}; NCCL_DEBUG=INFO shows the links, "
                "TORCH_NCCL_ENABLE_TIMING=1 which GPU has not begun."
            ),
        ),
    ),
    "returned": _LEFT,
    "in-rpc": replace(
        _WAITED,
        did="was executing a call of another rank",
        advice=(
            "the call that it executes for another rank (RPC) hangs or takes long.",
            "see its line below; raise the rpc_timeout of init_rpc if the call takes that long.",
        ),
    ),
    "elsewhere": replace(
        _WAITED,
        did="was not in the collective of the others",
        advice=(
            "the rank was busy outside of the collective that the others waited in.",
            (
                "see its line below. Keep long work of one rank away from the others' collectives, or "
                "raise timeouts.{setting}."
            ),
        ),
        is_start_likelier=True,
    ),
    "timed-out": replace(
        _WAITED,
        blames="nothing",
        did="timed out in {wait}",
        advice=_NONE_SAYS_WHY,
        is_start_likelier=True,
    ),
    "unknown": replace(
        _ENDED,
        blames="nothing",
        did="timed out in {wait}",
        advice=_NONE_SAYS_WHY,
        is_start_likelier=True,
    ),
}
"""What each rule leads to; `attempt_error.conclude` makes the error out of it."""


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


def _raised_over_a_peer_error(outcome: RankOutcome) -> bool:
    """Tell whether a rank raised an error of its own while it handled a peer error."""
    return outcome.raised is not None and outcome.raised.wraps_peer_error


def _crashed_inside(outcome: RankOutcome) -> bool:
    """Tell whether a rank died in a collective, as where another rank is in one that does not fit."""
    return (
        outcome.status == "killed"
        and bool(outcome.in_collective)
        and not _was_killed_from_outside(outcome)
    )


def _was_killed_from_outside(outcome: RankOutcome) -> bool:
    """Tell whether SIGKILL or SIGTERM ended the rank, which no crash sends."""
    return outcome.status == "killed" and -(outcome.exit_code or 0) in _FROM_OUTSIDE


def _by_likelihood(broke: Ranks) -> Ranks:
    """Sort ranks that failed, the likely cause first.

    A rank that exits without a report may do so because it lost another one, whose end the kernel
    shows a moment later: its connections are closed before its end can be seen. A broken connection
    of the script's own may have led to a rank that was killed, in whatever order they are seen.
    """
    in_order = sorted(broke, key=_order)
    first = in_order[:1]
    killed = [out for out in in_order if out.status == "killed" and not _crashed_inside(out)]
    if first and first[0].raised is not None and kind_of(first[0].raised) in _OF_A_CONNECTION:
        return sorted(in_order, key=lambda outcome: outcome not in killed)
    if first and first[0].status == "exited":
        latest_ns = (first[0].ended_ns or 0) + _TOGETHER_NS
        before = [
            out
            for out in killed
            if out.ended_ns is not None
            and (_was_killed_from_outside(out) or out.ended_ns <= latest_ns)
        ]
        return sorted(in_order, key=lambda outcome: outcome not in before)
    return in_order


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


def _groups(ranks: Ranks) -> dict[str, list[GroupPosition]]:
    """Return the members of each group that a rank has entered a collective in.

    Every rank is in the group of all ranks; in another one only those that have entered something.
    """
    known = [(out, out.position) for out in ranks if out.position is not None]
    groups: dict[str, list[GroupPosition]] = defaultdict(list)
    for group in {each.group for _, position in known for each in position.collectives}:
        for out, position in known:
            last = position.in_group(group)
            if group == MAIN_GROUP or last is not None:
                groups[group].append(GroupPosition(out, last, position.reached(group)))
    return groups


def _number(last: Collective | None) -> int:
    return 0 if last is None else last.number


def _find_awaited(
    groups: Mapping[str, Sequence[GroupPosition]], outcomes: Mapping[int, RankOutcome]
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
    # Go from receive to receive; the rank at the end comes first if it waits for no other.
    sender = found[0] if found else None
    seen: set[int] = set()
    while sender is not None and is_waiting(sender) and sender.rank not in seen:
        seen.add(sender.rank)
        awaited_rank = sender.awaited_sender
        sender = None if awaited_rank is None else outcomes.get(awaited_rank)
    if sender is None or is_waiting(sender):
        return found
    return [sender, *(out for out in found if out is not sender)]


def _find_late(groups: Mapping[str, Sequence[GroupPosition]]) -> list[tuple[RankOutcome, float]]:
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
    """Return the ranks whose collective is the rarest of those entered under one number.

    Where several are as rare, those are the ranks of all of them, the last rank first.

    Looked at is the number that the hindmost rank is in. Rank 1 skips number 3: its 4th call is counted as
    3 and meets the others' 3rd, and so on, until two do not fit. Sizes count only while a collective is
    under way, for gather and all-to-all may differ in them and end well.

    Under NCCL a rank is where its GPU waits, however many more it has queued. Names come from the
    recorder where it has any: NCCL's watchdog uses other ones, and its counters none.
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


# ---- what kind of failure an exception of a rank is ----


Topic = Literal["port", "disk", "worker-exit"]
"""What an exception is about, where there is advice for it, whatever kind of failure that makes."""


def find_topic(raised: Raised) -> Topic | None:
    """Return what the exception is about, if there is advice for just that."""
    if raised.explanation is not None:  # it brings its advice along
        return None
    line = _line_of(raised)
    if find_kind(line) == "port":
        return "port"
    if says_worker_exited(raised.traceback):
        return "worker-exit"
    return "disk" if is_full_disk(line) else None


def kind_of(raised: Raised) -> FailureKind:
    """Return the kind: what the exception's class tells, else what its text does."""
    kind: FailureKind
    broke_off = raised.type_name in ("ConnectionResetError", "ConnectionRefusedError", "EOFError")
    if raised.is_peer_error:
        kind = "hang" if raised.origin == "timeout" else "peer-lost"
    elif raised.kind is not None:
        kind = raised.kind
    elif says_worker_exited(raised.traceback):
        kind = "user-error"
    elif broke_off and "torch/utils/data/dataloader.py" in raised.traceback:
        kind = "killed"  # a read from a worker of a DataLoader, which has died then
    else:
        kind = find_kind(_line_of(raised)) or "user-error"
    before = raised.phase in ("starting", "loading", "joining")
    if before and kind in ("network", "peer-lost", "hang"):
        return "startup-network"
    # "port" is tried again by default, which is safe only while the function has not run.
    return "network" if kind == "port" and not before else kind


def _line_of(raised: Raised) -> str:
    return f"{raised.type_name}: {raised.message}"
