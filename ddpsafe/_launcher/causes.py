"""Which rank broke, and which ones only lost it.

Evidence is ranked by what it can mean, and by time only within one rank of it: a rank that lost a
peer often complains before the one that broke has said anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import psutil

from ddpsafe._launcher.waits import find_behind, find_mismatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe._wire.outcome import RankOutcome

Sort = Literal["broke", "suspended", "left", "behind", "elsewhere", "mismatch", "unknown"]
"""``broke``: ended by its own fault. ``suspended``: SIGSTOP. ``left``: returned while others waited.
``behind``: fewer collectives than the others. ``elsewhere``: not in the collective the others wait
in. ``mismatch``: another collective than the others. ``unknown``: only echoes were seen."""

# Ends that are seen within so much of each other say nothing about which came first.
_TOGETHER_NS: Final = 50_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What the evidence comes to.

    Attributes:
        sort: In a word.
        root: The rank that broke or that the others waited for.
        collateral: Other ranks that failed, by rank.
    """

    sort: Sort
    root: RankOutcome
    collateral: tuple[RankOutcome, ...]


def find_cause(outcomes: Mapping[int, RankOutcome], *, is_failing: bool = False) -> Cause:
    """Weigh the evidence, strongest first.

    Args:
        outcomes: What is known of each rank, by rank.
        is_failing: Whether a rank was seen to wait with an exception in flight, and no timeout.
    """
    everyone = sorted(outcomes.values(), key=lambda outcome: outcome.rank)
    failed = [outcome for outcome in everyone if outcome.status in ("raised", "killed", "exited")]
    sort, root = _accuse(everyone, failed, is_failing=is_failing)
    others = tuple(outcome for outcome in failed if outcome.rank != root.rank)
    return Cause(sort=sort, root=root, collateral=others)


def _accuse(
    everyone: list[RankOutcome], failed: list[RankOutcome], *, is_failing: bool
) -> tuple[Sort, RankOutcome]:
    """Return the first suspicion that the evidence supports, strongest first."""
    broke = _by_likelihood([outcome for outcome in failed if is_own_fault(outcome)])
    if broke and is_failing:
        return "broke", broke[0]
    broke = [outcome for outcome in broke if not _is_common(outcome, everyone)]
    if broke and (_is_certain(broke[0]) or any(map(_crashed_inside, broke))):
        return "broke", broke[0]
    sort, suspects = _suspect_by_place(everyone) or ("unknown", broke or failed or everyone)
    rest = [outcome for outcome in everyone if outcome not in suspects]
    odd = [outcome for outcome in broke if outcome in suspects]
    if not odd and rest and all(out in broke for out in rest) and not _hangs(everyone):
        odd = broke  # it is the others that came apart from these
    if odd:
        # What may have been handled was not, or led to where this rank does not fit.
        return "broke", odd[0]
    root = min(suspects, key=_order) if sort == "unknown" else suspects[0]
    alone = not any(_wraps(outcome) for outcome in everyone if outcome is not root)
    if _wraps(root) and alone and not _hangs(everyone):
        return "broke", root  # it is not there since it had an error of its own
    return sort, root


def _wraps(outcome: RankOutcome) -> bool:
    """Tell whether a rank raised an error of its own while it handled an echo."""
    return outcome.raised is not None and outcome.raised.is_wrapped


def _hangs(everyone: list[RankOutcome]) -> bool:
    """Tell whether a rank is at work, or nowhere, while others wait."""
    return any(out.raised is None and out.in_collective is False for out in everyone)


def _crashed_inside(outcome: RankOutcome) -> bool:
    """Tell whether a rank died in a collective, as where another rank is in one that does not fit."""
    return outcome.status == "killed" and bool(outcome.in_collective)


def _is_common(outcome: RankOutcome, everyone: list[RankOutcome]) -> bool:
    """Tell whether all that raised anything handled the same error in the same place.

    As the ranks of a script do that runs inside ``except ImportError:``; it drives nobody apart.
    """
    if _is_certain(outcome) or outcome.raised is None or outcome.raised.origin == "mismatch":
        return False
    errors = [(out.raised.type_name, out.raised.where) for out in everyone if out.raised]
    return len(errors) > 1 and len(set(errors)) == 1


def _suspect_by_place(everyone: list[RankOutcome]) -> tuple[Sort, list[RankOutcome]] | None:
    """Return the first suspicion that comes of where the ranks are, and whom it is of."""
    behind = find_behind(everyone)
    suspicions: list[tuple[Sort, list[RankOutcome]]] = [
        ("suspended", [out for out in everyone if out.state == psutil.STATUS_STOPPED]),
        ("left", behind[:1] if behind and behind[0].status == "returned" else []),
        ("mismatch", find_mismatch(everyone)),
        ("behind", behind[:1]),
        ("left", [out for out in everyone if out.status == "returned"]),
        ("elsewhere", _find_elsewhere(everyone)),
    ]
    return next((pair for pair in suspicions if pair[1]), None)


def _find_elsewhere(everyone: list[RankOutcome]) -> list[RankOutcome]:
    """Return ranks that are not in a collective, if others are or timed out in one."""
    waiting = [out for out in everyone if out.in_collective or out.raised is not None]
    return [out for out in everyone if out.in_collective is False] if waiting else []


def is_own_fault(outcome: RankOutcome) -> bool:
    """Tell whether a failed rank broke by itself, as far as its words say."""
    return outcome.raised is None or not outcome.raised.is_peer_error


def _is_certain(outcome: RankOutcome) -> bool:
    """Tell whether it ended by this, and by its own doing: see `Raised.is_certain`."""
    return outcome.raised is None or outcome.raised.is_certain


def _by_likelihood(broke: list[RankOutcome]) -> list[RankOutcome]:
    """Sort ranks that failed, the likely cause first.

    A rank that exits without a word may do so since it lost another one, which the kernel shows a
    moment later: its connections are closed before its end can be seen.
    """
    in_order = sorted(broke, key=_order)
    first = in_order[:1]
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

    An error from inside a collective may be an echo after all, and one that was only seen in
    flight, or beneath an echo, may have been caught. A crash there may be one too: ranks that meet
    in different collectives of gloo write into each other's buffers.
    """
    raised = outcome.raised
    if raised is None:
        inside = _crashed_inside(outcome)
    else:
        inside = "distributed_c10d.py" in raised.traceback and not raised.hidden_by
    seen_ns = raised.at_ns if raised is not None else (outcome.ended_ns or 0)
    mismatch = raised is not None and raised.origin == "mismatch"
    return (inside, not _is_certain(outcome), mismatch, seen_ns, outcome.rank)
