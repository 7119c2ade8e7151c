"""The lines of a message: who only lost whom, and where each rank was."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import psutil

from ddpsafe._launcher.causes import is_own_fault
from ddpsafe._launcher.evidence import CRASH
from ddpsafe._launcher.logs import read_log
from ddpsafe._launcher.waits import newest_collective
from ddpsafe._wire.exceptions import is_library

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ddpsafe._launcher.causes import Cause
    from ddpsafe._wire.outcome import RankOutcome

_LAST_LINES: Final = 8
_LAST_COMPLAINT: Final = 4
_SHOWN_RANKS: Final = 16
_WIDTH: Final = 100
_GLOO_SOURCE: Final = re.compile(r"\[\S*/gloo/\S+:\d+\] ")
_FRAME: Final = re.compile(r'^\s*File "(?P<file>.+)", line \d+ in ')


def where(outcome: RankOutcome) -> str:
    """Say where a rank was: the line that raised, or the line it was at when it was asked."""
    if outcome.raised is None or outcome.state == psutil.STATUS_STOPPED:
        return outcome.stack
    return outcome.raised.where


def others(outcomes: Collection[RankOutcome], cause: Cause) -> list[str]:
    """Name the ranks that only lost the one that broke."""
    lines = [
        f"rank {out.rank} {'also failed' if is_own_fault(out) else 'only lost it'}: "
        f"{_first_line(out)}"
        for out in cause.collateral[:_SHOWN_RANKS]
    ]
    stopped = [outcome for outcome in outcomes if outcome.status == "stopped"]
    for outcome in stopped[:_SHOWN_RANKS]:
        at = f" at {outcome.stack}" if outcome.stack else ""
        lines.append(f"rank {outcome.rank} was stopped by the launcher{at}")
    return lines


def _first_line(outcome: RankOutcome) -> str:
    raised = outcome.raised
    if raised is None:
        return outcome.status if outcome.signal_name is None else f"killed by {outcome.signal_name}"
    text = _GLOO_SOURCE.sub("", f"{raised.type_name}: {raised.message}".splitlines()[0])
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def positions(outcomes: Collection[RankOutcome]) -> list[str]:
    """Say of each rank where it was, in the code and in the sequence of collectives."""
    return [_position(outcome) for outcome in list(outcomes)[:_SHOWN_RANKS]]


def _position(outcome: RankOutcome) -> str:
    parts = [f"rank {outcome.rank}"]
    if outcome.state == psutil.STATUS_STOPPED:
        parts.append("is stopped (SIGSTOP)")
    elif outcome.state == psutil.STATUS_DISK_SLEEP:
        parts.append("waited in the kernel, for a disk or a device")
    elif outcome.status == "returned":
        parts.append("has returned")
    raised = outcome.raised
    if raised is not None and (not raised.is_peer_error or raised.is_wrapped):
        did = "raised" if raised.final and not raised.hidden_by else "was handling"
        parts.append(f"{did} {_first_line(outcome)}")
    if text := where(outcome):
        parts.append(f"at {text}")
    last = newest_collective(outcome)
    if last is not None:
        parts.append(f"{_relation(outcome, done=last.done)} {last}")
    return ", ".join(parts)


def _relation(outcome: RankOutcome, *, done: bool) -> str:
    """Say how a rank stands to its last collective; torch marks one that failed as done too."""
    if outcome.status == "returned":
        return "after"
    raised = outcome.raised
    if raised is not None and raised.hidden_by:
        return "in"
    if raised is not None and raised.is_peer_error:
        return "timed out in" if raised.origin == "timeout" else "lost a peer in"
    return "after" if done else "in"


def listed(ranks: Iterable[int]) -> str:
    """List ranks for a message."""
    return ", ".join(map(str, ranks))


def last_words(outcome: RankOutcome) -> list[str]:
    """Show the last lines a rank wrote to stderr, when nothing else says why it ended.

    Of the stacks that faulthandler writes at a crash only the user's lines are shown.
    """
    if outcome.stderr is None or outcome.raised is not None:
        return []
    said, _, stacks = read_log(outcome.stderr).partition(CRASH)
    lines = said.splitlines()[-_LAST_LINES:]
    lines += [line for line in stacks.splitlines() if _is_users_frame(line)]
    if not lines:
        return []
    return ["last lines of its stderr:", *(f"| {line.rstrip()[:160]}" for line in lines)]


def last_complaint(outcome: RankOutcome) -> list[str]:
    """Show the end of a traceback that a rank has printed, as of a thread that died, if it hangs."""
    if outcome.stderr is None or outcome.raised is not None:
        return []
    _, mark, trace = read_log(outcome.stderr).rpartition("Traceback (most recent call last):")
    lines = [line for line in trace.splitlines() if line.strip()][-_LAST_COMPLAINT:]
    return ["it has printed a traceback:", *(f"| {line[:160]}" for line in lines)] if mark else []


def _is_users_frame(line: str) -> bool:
    frame = _FRAME.match(line)
    return frame is not None and frame["file"] != "<string>" and not is_library(frame["file"])
