"""Write the report of a failed attempt into its log directory: one for readers and one for programs.

For an attempt in which no rank failed, only ``ranks.json`` is written.
"""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import headline, to_plain
from ddpsafe._launcher.diagnosis.attempt_error import where
from ddpsafe._launcher.diagnosis.stragglers import find_stragglers_of
from ddpsafe._wire.spec import open_log, read_log

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpsafe._errors import LaunchError
    from ddpsafe._wire.messages import RankOutcome

SCHEMA: Final = 1
"""Incremented when a field of the JSON changes its meaning, not for new fields."""

RANKS: Final = "ranks.json"
"""The file of an attempt in which no rank failed, for its report page."""

_FACTS: Final = ("attempt", "attempts", "rank", "waited_s", "missing_ranks")
"""The attributes of the error that ``report.json`` has, where the error has them."""

_FACTS_OF_RANK: Final = (
    *("rank", "local_rank", "hostname", "pid", "status", "phase", "exit_code", "steps", "state"),
    *("in_collective", "stdout", "stderr"),
)
_FACTS_OF_ERROR: Final = ("message", "where", "origin", "traceback")
_FACTS_OF_CALL: Final = ("group", "number", "name", "sizes", "done")

_RULE: Final = "=" * 78


def write_report(error: LaunchError, folder: Path) -> None:
    """Write ``report.txt`` and ``report.json``, each whole or not at all.

    Raises:
        OSError: A file cannot be written.
    """
    plain = to_plain(error)
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "written_at": _now(),
        **headline(plain),
        "message": str(error),
        **{name: plain["explanation"][name] for name in ("what", "cause", "fix", "details")},
        **{name: plain["facts"][name] for name in _FACTS if name in plain["facts"]},
    }
    facts |= _facts_of_ranks(error.outcomes)
    replace_file(folder / "report.txt", _text(error) + "\n")
    replace_file(folder / "report.json", json.dumps(facts, indent=1, ensure_ascii=False) + "\n")


def write_ranks(outcomes: Mapping[int, RankOutcome], folder: Path) -> None:
    """Write ``ranks.json`` of an attempt in which no rank failed, whole or not at all.

    Raises:
        OSError: A file cannot be written.
    """
    facts = {
        "schema": SCHEMA,
        "written_at": _now(),
        "what": f"no rank failed (world_size {len(outcomes)}).",
        **_facts_of_ranks(outcomes),
    }
    replace_file(folder / RANKS, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def replace_file(path: Path, text: str) -> None:
    """Write a file in an attempt's directory or the one above, whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = open_log(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(fd, "w", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - a file descriptor
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _text(error: LaunchError) -> str:
    sections = [f"{type(error).__name__}: {error}"]
    for outcome in error.outcomes.values():
        head = f"rank {outcome.rank} (pid {outcome.pid} on {outcome.hostname}): {outcome.status}"
        if outcome.signal_name is not None:
            head += f" by {outcome.signal_name}"
        parts = [f"{head}, while {outcome.phase}, after {outcome.steps} optimizer steps"]
        if outcome.progress.resumed_from:
            parts[0] += f", continued from {outcome.progress.resumed_from}"
        if outcome.raised is not None:
            parts.append(outcome.raised.traceback.rstrip())
        if outcome.stack:
            parts.append(f"at {outcome.stack}")
        if outcome.position is not None and outcome.position.collectives:
            parts.append("last collectives:")
            parts += [
                f"  {call}, {'ended' if call.done else 'not ended'}"
                for call in outcome.position.collectives
            ]
        log = None if outcome.stderr is None else Path(outcome.stderr).with_suffix(".stacks")
        stacks = "" if log is None else read_log(log).rstrip()
        if stacks:
            parts += ["all threads, the last call first:", stacks]
        sections.append("\n".join(parts))
    return f"\n\n{_RULE}\n".join(sections)


def _facts_of_ranks(outcomes: Mapping[int, RankOutcome]) -> dict[str, Any]:
    began = [out.began_ns["starting"] for out in outcomes.values() if out.began_ns]
    return {
        "stragglers": [straggler.as_json() for straggler in find_stragglers_of(outcomes)],
        "ranks": [
            {**_facts_of_rank(outcome), "timeline_s": _timeline(outcome, min(began, default=0))}
            for outcome in outcomes.values()
        ],
    }


def _timeline(outcome: RankOutcome, start_ns: int) -> dict[str, float]:
    """Return when a rank's phases began, in seconds since the first rank of the attempt was started.

    ``waiting`` is when it entered the collective that did not end, ``step`` when it made its last step.
    """
    if not outcome.began_ns:  # the rank is on another host, with another clock
        return {}
    now_ns, wall_ns = time.monotonic_ns(), time.time_ns()
    moments: dict[str, int] = {name: at_ns for name, at_ns in outcome.began_ns.items()}  # noqa: C416 - its keys are any text here
    last = None if outcome.position is None else outcome.position.current()
    if last is not None and not last.done and 0 < last.entered_ns < wall_ns:
        # torch records this time on the wall clock only.
        moments["waiting"] = now_ns - (wall_ns - last.entered_ns)
    if outcome.progress.last_ns:
        moments["step"] = outcome.progress.last_ns
    ended_ns = outcome.ended_ns if outcome.raised is None else outcome.raised.at_ns
    moments["end"] = ended_ns or now_ns
    return {name: round((at_ns - start_ns) / 1e9, 3) for name, at_ns in moments.items()}


def _facts_of_rank(outcome: RankOutcome) -> dict[str, Any]:
    raised, position = outcome.raised, outcome.position
    return {
        **_attributes(outcome, _FACTS_OF_RANK),
        "signal": outcome.signal_name,
        "resumed_from": outcome.progress.resumed_from,
        "where": where(outcome),
        "raised": raised and {"type": raised.type_name, **_attributes(raised, _FACTS_OF_ERROR)},
        "collectives": [
            _attributes(call, _FACTS_OF_CALL)
            for call in (() if position is None else position.collectives)
        ],
    }


def _attributes(holder: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(holder, name) for name in names}
