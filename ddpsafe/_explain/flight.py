"""torch's flight-recorder dumps: which rank is missing in a collective, or called another one.

Each rank writes what it last enqueued on each group, as a pickle of plain values or as JSON. A
pickle may come from anywhere, so the unpickler refuses every class and function.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ddpsafe._text import MAY_DIFFER_IN_SIZE, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_MAX_DUMP_BYTES: Final = 256 << 20
_HEAD_BYTES: Final = 512
_JSON: Final = re.compile(
    rb'^\s*\{\s*"(?:entries|pg_config|pg_status|comm_lib_version|nccl_version|version)"'
)
_PICKLE: Final = re.compile(rb"^\x80[\x02-\x05]")
_LAST_NUMBER: Final = re.compile(r"(\d+)(?:\.\w+)?$")
_LIBRARY: Final = re.compile(r"site-packages|dist-packages|/lib/python\d|<frozen|/torch/")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFailure:
    """What the dumps show: a code of the catalogue, the facts for its text, and the evidence."""

    code: str
    facts: dict[str, str]
    rank: int | None
    evidence: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """One call of a collective, as recorded by one rank."""

    number: int
    record: int
    name: str
    sizes: str
    dtypes: str
    state: str
    is_over: bool
    where: str

    def __str__(self) -> str:
        return f"number {self.number}, {self.call} ({self.state})"

    @property
    def call(self) -> str:
        """What was called with what, and where."""
        dtype = f" and dtype {self.dtypes}" if self.dtypes else ""
        return f"{self.name} of shape {self.sizes}{dtype}{self.where}"

    def matches(self, other: _Recorded) -> bool:
        """Return whether two ranks' calls may belong to the same collective."""
        if self.name != other.name or self.dtypes != other.dtypes:
            return False
        return self.sizes == other.sizes or MAY_DIFFER_IN_SIZE.search(self.name) is not None


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, strings, lists, tuples and dicts, and refuses a pickle with anything else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse: a pickle can only call a function that it has looked up here."""
        msg = f"a flight recording has only plain values, but this file refers to {module}.{name}"
        raise pickle.UnpicklingError(msg)


class FlightRecordings:
    """The dumps of the ranks of one job."""

    def __init__(self) -> None:
        self._members: dict[str, set[int]] = {}
        self._calls: dict[str, dict[int, dict[int, _Recorded]]] = {}
        self._dumped: set[int] = set()

    def read(self, path: Path) -> bool:
        """Read a file if it is a dump; else return ``False``: it may be a log.

        Raises:
            OSError: It cannot be read.
        """
        # A named pipe without a writer would block.
        if not path.is_file() or path.stat().st_size > _MAX_DUMP_BYTES:
            return False
        with path.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
            if not (_PICKLE.match(head) or _JSON.match(head)):
                return False
            data = head + stream.read()
        try:
            dump: Any = (
                _PlainUnpickler(io.BytesIO(data)).load()
                if _PICKLE.match(head)
                else json.loads(data)
            )
            return self._add_dump(dump, path)
        except (pickle.UnpicklingError, ValueError, EOFError, KeyError, IndexError, TypeError):
            return False
        except (AttributeError, MemoryError, OverflowError, RecursionError):
            return False

    def _add_dump(self, dump: Any, path: Path) -> bool:
        entries = dump["entries"] if isinstance(dump, dict) else dump
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            return False
        groups = dump.get("pg_config", {}) if isinstance(dump, dict) else {}
        rank = dump.get("rank") if isinstance(dump, dict) else None
        if not isinstance(rank, int):
            # torch names the file after the rank: TORCH_NCCL_DEBUG_INFO_TEMP_FILE, then its number.
            match = _LAST_NUMBER.search(path.name)
            rank = int(match[1]) if match else max(self._dumped, default=-1) + 1
        calls = []
        for entry in entries:
            # Sends and receives are between two ranks, and have numbers of their own.
            if not entry.get("is_p2p"):
                named = entry.get("process_group")
                is_named = isinstance(named, (list, tuple)) and named
                group = str(named[0] if is_named else entry.get("pg_id", "0"))
                calls.append((group, _call_of(entry)))
        # A dump has the ranks of a group as a string: "[0, 1]".
        members = {
            str(group.get("name", name)): set(
                map(int, re.findall(r"\d+", str(group.get("ranks", ""))))
            )
            for name, group in groups.items()
        }
        # The whole file could be read. Only now keep it, so that nothing of a refused file stays.
        for group, call in calls:
            self._calls.setdefault(group, {}).setdefault(rank, {})[call.number] = call
        for name, ranks in members.items():
            self._members.setdefault(name, set()).update(ranks)
        self._dumped.add(rank)
        return True

    def findings(self) -> Iterator[RecordedFailure]:
        """Yield what each group shows, beginning with the group that stopped first."""
        for group, calls in sorted(self._calls.items(), key=lambda item: _first_stuck(item[1])):
            failure = self._examine(group, calls)
            if failure is not None:
                yield failure

    def _examine(
        self, group: str, calls: dict[int, dict[int, _Recorded]]
    ) -> RecordedFailure | None:
        # gloo's dumps give the default group, "0", an empty name.
        members = self._members.get(group) or (group == "0" and self._members.get("")) or set(calls)
        mismatch, stuck = _find_mismatch(group, calls), _first_stuck(calls)
        if mismatch is not None or stuck == _NEVER:
            return mismatch
        inside = {rank: own[stuck] for rank, own in calls.items() if stuck in own}
        # A rank with a later call has completed this one, even if its ring buffer dropped the call.
        missing = {
            rank for rank in members & self._dumped if max(calls.get(rank, {}), default=0) < stuck
        }
        queued = {rank for rank, entry in inside.items() if entry.state == "scheduled"}
        if missing:
            code, awaited = "FLIGHT-missing", missing
        elif silent := members - self._dumped:
            code, awaited = "FLIGHT-no-dump", silent
        elif queued and len(queued) < len(inside):
            code, awaited = "FLIGHT-not-started", queued
        else:
            code, awaited = "FLIGHT-stuck", set()
        call = next(iter(inside.values()))
        waiting = sorted(rank for rank, entry in inside.items() if entry.state != "completed")
        facts = {
            "call": f"{call.name} number {stuck}",
            "group": group,
            "waiting": ranks_text(waiting),
        }
        evidence = [
            (entry.record, f"rank {rank}: {entry}") for rank, entry in sorted(inside.items())
        ]
        if awaited:
            facts["missing"] = ranks_text(sorted(awaited))
        if missing:
            evidence[:0] = [
                (own[max(own)].record, f"rank {rank}, its last: {own[max(own)]}")
                for rank in sorted(missing)
                if (own := calls.get(rank))
            ]
        return RecordedFailure(
            code=code,
            facts=facts,
            rank=min(awaited) if awaited else None,
            evidence=evidence[:_MAX_EVIDENCE],
        )


_MAX_EVIDENCE: Final = 4
_NEVER: Final = 1 << 62


def _first_stuck(calls: dict[int, dict[int, _Recorded]]) -> int:
    """Return the number of the first collective that a rank has not completed, or not called."""
    pending = [call.number for own in calls.values() for call in own.values() if not call.is_over]
    if pending:
        return min(pending)
    last = [max(own) for own in calls.values()]
    if not last or min(last) == max(last):
        return _NEVER
    # Every call is over, probably with an error, and one rank has made fewer calls.
    return min(last) + 1


def _find_mismatch(group: str, calls: dict[int, dict[int, _Recorded]]) -> RecordedFailure | None:
    for number in sorted({number for own in calls.values() for number in own}):
        inside = {rank: own[number] for rank, own in calls.items() if number in own}
        if all(entry.state == "completed" for entry in inside.values()):
            continue
        usual = max(
            inside.values(), key=lambda call: sum(call.matches(other) for other in inside.values())
        )
        others = {rank: entry for rank, entry in inside.items() if not entry.matches(usual)}
        if others:
            rank, other = min(others.items())
            facts = {
                "group": group,
                "number": str(number),
                "rank": str(rank),
                "call": other.call,
                "waiting": ranks_text(sorted(set(inside) - set(others))),
                "usual": usual.call,
            }
            lines = [
                (entry.record, f"rank {who}: {entry}") for who, entry in sorted(inside.items())
            ]
            return RecordedFailure(
                code="FLIGHT-mismatch", facts=facts, rank=rank, evidence=lines[:_MAX_EVIDENCE]
            )
    return None


def _call_of(entry: dict[str, Any]) -> _Recorded:
    number = entry.get("collective_seq_id", entry.get("seq_id"))
    sizes = entry.get("input_sizes") or ()
    return _Recorded(
        number=int(number if number is not None else entry["record_id"]),
        record=int(entry.get("record_id", entry.get("id", 0))),
        name=str(entry.get("profiling_name", "?")).partition(":")[2] or "?",
        sizes=", ".join(str([int(length) for length in size]) for size in sizes) or "[]",
        dtypes=",".join(map(str, entry.get("input_dtypes") or ())),
        state=str(entry.get("state", "?")),
        # gloo never records "completed"; a call that is over, also by an error, is "retired".
        is_over=entry.get("state") == "completed" or bool(entry.get("retired")),
        where=_where(entry.get("frames") or ()),
    )


def _where(frames: Iterable[dict[str, Any]]) -> str:
    """Return the innermost call outside of libraries; frames are listed innermost first."""
    for frame in frames:
        file = str(frame.get("filename", ""))
        if file and not _LIBRARY.search(file):
            return f" at {file}:{frame.get('line')} in {frame.get('name')}"
    return ""
