"""Read logs of any launcher, of any size, and rank what the catalogue knows of them.

A log is read once, in chunks. Of lines that differ in nothing but digits only the first few are
looked at, which is most of any log; of the others, a rule's patterns are tried only where a literal
part of them occurs.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ddpsafe._explain.rules import LEVELS, RULES, Level, Retry, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from ddpsafe._errors import FailureKind

_CHUNK_BYTES: Final = 1 << 20
_LONGEST_LINE: Final = 4_000
_SAME_LINES: Final = 3
"""Of lines that differ in numbers only, so many are matched; a loop prints the same one for hours."""
_MOST_SHAPES: Final = 50_000
_EVIDENCE: Final = 3

_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f\x7f]")
_RANK: Final = re.compile(
    r"\[rank(?P<a>\d+)\]|\[Rank (?P<b>\d+)\]|\[default(?P<c>\d+)\]|^(?P<d>\d{1,5}): "
    r"|^\[1,(?P<e>\d+)\]<std|(?i:\blocal_rank: ?(?P<f>\d+))|\brank ?: ?(?P<g>\d+) "
    r"|\bprocess (?P<h>\d+) terminated|\bRank (?P<i>\d+)\]|^rank-?(?P<j>\d+)[ :|]"
)
_PREFIX: Final = re.compile(
    r"^(?:\[(?:rank|default)\d+\]:?\s*|\[1,\d+\]<std\w+>:\s?|\d{1,5}: |[\w.-]+\s+\| ?"
    r"|\(\w+ pid=\d+(?:, ip=[\d.]+)?\)\s*|\[[\d\-T:., ]+\]\s*|\d{4}-\d\d-\d\d[T ][\d:.,]+Z?\s*)+"
)
_EXCEPTION: Final = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Fault|Timeout))"
    r"(?:: (?P<text>.*)|:?\s*)$"
)
_FRAME: Final = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_LIBRARY: Final = re.compile(r"site-packages|dist-packages|/lib/python\d|<frozen|\\lib\\|/torch/")
_SEQUENCE: Final = re.compile(r"SeqNum=(\d+)")


@dataclass(slots=True, kw_only=True)
class Cause:
    """One explanation of a log.

    Attributes:
        code: Of the catalogue.
        kind: The failure kind.
        level: How much its lines prove.
        retry: Whether trying again can help.
        cause: What happened.
        fix: What to do.
        page: Where to read on.
        rank: The rank whose lines show it first; ``None`` where no line tells.
        evidence: The lines it rests on, the first few, as ``(line number from 1, text)``.
        count: How many lines show it.
    """

    code: str
    kind: FailureKind
    level: Level
    retry: Retry
    cause: str
    fix: str
    page: str
    rank: int | None = None
    evidence: list[tuple[int, str]] = field(default_factory=list)
    count: int = 0

    def as_json(self) -> dict[str, object]:
        """Return what ``ddpsafe explain --json`` prints of it."""
        return {
            "code": self.code,
            "cause": self.cause,
            "fix": self.fix,
            "rank": self.rank,
            "evidence": [{"line": number, "text": text} for number, text in self.evidence],
            "retry": self.retry,
            "kind": self.kind,
            "page": self.page,
        }


class LogReader:
    """Reads lines and keeps what the catalogue knows of them."""

    def __init__(self) -> None:
        self._found: dict[str, Cause] = {}
        self._waiting: dict[str, Cause] = {}  # rules that need another line too
        self._also: set[str] = set()
        self._shapes: dict[bytes, int] = {}
        self._cause_of_shape: dict[bytes, Cause] = {}
        self._frame: re.Match[str] | None = None
        self._in_traceback = False
        self._lowest: tuple[int, int | None] | None = None
        self.lines = 0

    def read(self, stream: BinaryIO) -> None:
        """Read a log to its end; a line that is longer than any message is cut."""
        rest = b""
        while chunk := stream.read(_CHUNK_BYTES):
            chunk = rest + chunk
            end = chunk.rfind(b"\n") + 1
            if not end and len(chunk) < 2 * _CHUNK_BYTES:
                rest = chunk
                continue
            end = end or len(chunk)
            self._read_chunk(chunk[:end])
            rest = chunk[end:]
        self._read_chunk(rest)

    def read_text(self, text: str) -> None:
        """Read a log that is a text already."""
        self._read_chunk(text.encode("utf-8", "replace"))

    def _read_chunk(self, chunk: bytes) -> None:
        first = self.lines
        self.lines += chunk.count(b"\n") + (not chunk.endswith(b"\n") and chunk != b"")
        for number, raw in enumerate(chunk.split(b"\n"), start=first + 1):
            # Deleting the digits runs in C, and most lines of a log end here.
            shape = raw[:_LONGEST_LINE].translate(None, b"0123456789")
            seen = self._shapes.get(shape, 0)
            if seen >= _SAME_LINES and b'File "' not in raw:
                self._repeat(shape)
                continue
            if len(self._shapes) < _MOST_SHAPES:
                self._shapes[shape] = seen + 1
            # A carriage return redraws a progress bar: what follows it is a line of its own.
            for part in raw.split(b"\r"):
                self._read_line(number, part[:_LONGEST_LINE].decode("utf-8", "replace"), shape)

    def _repeat(self, shape: bytes) -> None:
        if (cause := self._cause_of_shape.get(shape)) is not None:
            cause.count += 1

    def _read_line(self, number: int, line: str, shape: bytes) -> None:
        line = _ANSI.sub("", line).rstrip()
        said = _PREFIX.sub("", line)
        frame = _FRAME.match(said)
        if frame is not None:
            self._in_traceback = True
            if not _LIBRARY.search(frame["file"]):
                self._frame = frame
        elif said.startswith("Traceback (most recent call last)"):
            self._in_traceback, self._frame = True, None
        else:
            cause = self._match(number, line, said)
            if cause is not None and len(self._cause_of_shape) < _MOST_SHAPES:
                self._cause_of_shape[shape] = cause

    def _match(self, number: int, line: str, said: str) -> Cause | None:
        best = self._find_best(number, line, said)
        raised = _EXCEPTION.match(said)
        was_in_traceback = self._in_traceback
        if raised is not None:
            self._in_traceback = False
        if best is not None:
            rule, match = best
            if rule.code == "DS-HANG-watchdog":
                self._compare_sequence(said, _rank_of(line))
            return self._note(self._found, rule, match, number, line, said)
        if raised is not None and was_in_traceback:
            return self._note_exception(raised, number, line, said)
        return None

    def _find_best(self, number: int, line: str, said: str) -> tuple[Rule, re.Match[str]] | None:
        """Return the rule that a line proves the most of; rules in need of another line are noted."""
        best: tuple[Rule, re.Match[str]] | None = None
        for rule in _candidates(said):
            if rule.also is not None and rule.also.search(said):
                self._also.add(rule.code)
            match = next((found for sign in rule.signs if (found := sign.search(said))), None)
            if match is None or (rule.check is not None and not rule.check(match)):
                continue
            if rule.also is not None:  # it stands only if the other line comes, so look on
                self._note(self._waiting, rule, match, number, line, said)
            elif best is None or LEVELS[rule.level] < LEVELS[best[0].level]:
                best = (rule, match)
                if rule.level == "cause":
                    break
        return best

    def _note(
        self,
        where: dict[str, Cause],
        rule: Rule,
        match: re.Match[str],
        number: int,
        line: str,
        said: str,
    ) -> Cause:
        facts = {name: value or "" for name, value in match.groupdict().items()}
        cause = where.get(rule.code)
        if cause is None:
            cause = where[rule.code] = Cause(
                code=rule.code,
                kind=rule.kind,
                level=rule.level,
                retry=rule.retry,
                cause=rule.cause.format(**facts) if facts else rule.cause,
                fix=rule.fix.format(**facts) if facts else rule.fix,
                page=rule.page,
            )
        if cause.rank is None:
            cause.rank = int(facts["rank"]) if facts.get("rank") else _rank_of(line)
        cause.count += 1
        if len(cause.evidence) < _EVIDENCE:
            cause.evidence.append((number, said[:400]))
        return cause

    def _note_exception(self, raised: re.Match[str], number: int, line: str, said: str) -> Cause:
        if (known := self._found.get("DS-USER-exception")) is not None:
            known.count += 1
            return known
        at = ""
        if self._frame is not None:
            at = f" at {self._frame['file']}:{self._frame['line']} in {self._frame['function']}"
        text = f": {raised['text'][:300]}" if raised["text"] else ""
        cause = self._found["DS-USER-exception"] = Cause(
            code="DS-USER-exception",
            kind="user-error",
            level="exception",
            retry="never",
            cause=f"The script raised {raised['type']}{text}{at}.",
            fix="Fix that line; ranks that complain of a lost peer failed because of it.",
            page="docs/reference/failures.md#ds-user-exception",
            rank=_rank_of(line),
            evidence=[(number, said[:400])],
            count=1,
        )
        return cause

    def _compare_sequence(self, said: str, rank: int | None) -> None:
        """Keep the rank that is behind: of the watchdog's lines the one of the lowest number."""
        match = _SEQUENCE.search(said)
        if match is not None and (self._lowest is None or int(match[1]) < self._lowest[0]):
            self._lowest = (int(match[1]), rank)

    def causes(self) -> list[Cause]:
        """Return the causes, best first; noise only where there is nothing else."""
        found = dict(self._found)
        for code, cause in self._waiting.items():
            if code in self._also:
                found.setdefault(code, cause)
        if self._lowest is not None and self._lowest[1] is not None:
            found["DS-HANG-watchdog"].rank = self._lowest[1]
        ranked = sorted(found.values(), key=lambda each: (LEVELS[each.level], each.evidence[0][0]))
        general = {code for rule in RULES if rule.code in found for code in rule.over}
        kept = [cause for cause in ranked if cause.code not in general]
        real = [cause for cause in kept if cause.level != "noise"]
        return real or kept


def _literal_of(alternative: str) -> str:
    """Return the longest text that a line has to hold for one alternative of a pattern to match."""
    runs, run, depth = [], "", 0
    parts = re.findall(r"\\.|\[(?:\\.|[^\]])+\]|\{[\d,]+\}|.", alternative)
    for part, after in zip(parts, [*parts[1:], ""], strict=True):
        depth += (part == "(") - (part == ")")
        literal = part[1:] if len(part) == 2 and not part[1].isalnum() else part  # noqa: PLR2004 - an escape
        optional = after in ("?", "*") or after.startswith("{")
        if (
            depth == 0
            and len(literal) == 1
            and (literal != part or part not in ".^$|?*+()")
            and not optional
        ):
            run += literal.lower()
        else:
            runs.append(run)
            run = ""
    return max([*runs, run], key=len)


def _alternatives_of(pattern: str) -> list[str]:
    """Split a pattern where it branches outside of any group."""
    found, depth = [""], 0
    for part in re.findall(r"\\.|\[(?:\\.|[^\]])+\]|.", re.sub(r"^\(\?i\)", "", pattern)):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += part
    return found


_GRAM: Final = 4


def _index_rules() -> tuple[frozenset[int], dict[str, frozenset[int]]]:
    """Return which rules any line may match, and which only one that holds certain four letters.

    Of a rule's literal texts those four letters are taken that the fewest rules have: a line's
    fours are looked up at once, where searching it for each of 300 texts would take ten times as long.
    """
    literals: dict[int, list[str]] = {}
    for number, rule in enumerate(RULES):
        patterns = [*rule.signs, *([rule.also] if rule.also else [])]
        literals[number] = [
            _literal_of(alternative)
            for pattern in patterns
            for alternative in _alternatives_of(pattern.pattern)
        ]
    always = {number for number, texts in literals.items() if min(map(len, texts)) < _GRAM}
    counts = Counter(gram for texts in literals.values() for text in texts for gram in _grams(text))
    keyed: dict[str, set[int]] = {}
    for number in literals.keys() - always:
        for text in literals[number]:
            keyed.setdefault(min(_grams(text), key=lambda gram: counts[gram]), set()).add(number)
    return frozenset(always), {gram: frozenset(numbers) for gram, numbers in keyed.items()}


def _grams(text: str) -> set[str]:
    return {text[start : start + _GRAM] for start in range(len(text) - _GRAM + 1)}


_ALWAYS, _BY_GRAM = _index_rules()


def _candidates(said: str) -> Iterator[Rule]:
    """Yield the rules that may match a line, in their order."""
    numbers = set(_ALWAYS)
    for gram in _grams(said.lower()) & _BY_GRAM.keys():
        numbers |= _BY_GRAM[gram]
    for number in sorted(numbers):
        yield RULES[number]


def _rank_of(line: str) -> int | None:
    match = _RANK.search(line)
    return None if match is None else int(match[match.lastgroup or 0])


def explain_text(text: str) -> list[Cause]:
    """Explain a log that is at hand as a text."""
    reader = LogReader()
    reader.read_text(text)
    return reader.causes()
