"""Finds the rules that a line matches, and in a large log the lines that any rule may match."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._explain import tracebacks
from ddpsafe._explain.catalogue import GRAM, LEVELS, compiled, grams_of
from ddpsafe._explain.normalise import is_nothing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpsafe._explain.catalogue import Catalogue, LogRule

_ANSI_BYTES: Final = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\n]*\x07")
_CONTROL_BYTES: Final = bytes(code for code in (*range(32), 127) if code not in b"\t\n")
_CUDA_SIGNS: Final = ("cudaerror", "hiperror", "cuda_error_", "cuda error", "cuda failure")
"""Parts of lines that `normalise.in_usual_form` words in another way."""
# Parts of lines that say what came of the failure in the line before or after them.
_HANDLED_SIGNS: Final = (
    *("skipping", "skipped", "ignoring", "continuing", "falling back", "retrying", "trying again"),
    "reducing batch",
)

Match = tuple["LogRule", "re.Match[str]"]
"""A rule and the match of one of its signs."""


@dataclass(slots=True, kw_only=True)
class Matched:
    """What a line matches.

    Attributes:
        waiting: Rules that count only if another line follows.
        ended: Codes of causes that it takes back.
    """

    best: Match | None = None
    waiting: list[Match] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


class Matcher:
    """Matches lines with rules, and remembers of which rules the other line has been read.

    Attributes:
        completed: Codes of rules whose `also` has matched a line.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.completed: set[str] = set()

    def candidates(self, body: str, grams: Iterable[str] | None = None) -> Iterator[LogRule]:
        """Yield the rules that may match a line, in their order.

        `grams` are those of its grams that are keys of rules; looked up if not given.
        """
        lowered, by_gram = body.lower(), self.catalogue.grams
        numbers: set[int] = set()
        for gram in grams_of(lowered) & by_gram.keys() if grams is None else grams:
            for word, number in by_gram.get(gram, ()):
                if number not in numbers and word in lowered:
                    numbers.add(number)
        for number in sorted(numbers):
            yield self.catalogue.rules[number]

    def match(
        self, body: str, innermost: str | None, grams: Iterable[str] | None, *, is_exception: bool
    ) -> Matched:
        """Return what a line matches.

        The body is the line without what a launcher or a logger puts before it; `innermost` is the call that
        raised the exception, if it is one. The words of an exception are always meant.
        """
        matched = Matched()
        for rule in self.candidates(body, grams):
            if rule.also is not None and compiled(rule.also).search(body):
                self.completed.add(rule.code)
            if rule.until is not None and compiled(rule.until).search(body):
                matched.ended.append(rule.code)
            # A rule that needs another line may still replace an earlier rule, by its `over`.
            is_settled = matched.best is not None and strength(matched.best[0]) == (False, 0)
            if (is_settled and rule.also is None) or (match := rule.find(body)) is None:
                continue
            if not is_exception and is_nothing(match):
                continue
            if not rule.fallback and rule.is_raised_in(innermost) and not is_settled:
                matched.best = (rule, match)
                break
            if rule.raised_in is not None and rule.also is None and not rule.fallback:
                continue
            if rule.also is not None and (is_settled or rule.code not in self.completed):
                matched.waiting.append((rule, match))
            elif matched.best is None or strength(rule) < strength(matched.best[0]):
                matched.best = (rule, match)
        return matched

    def find_by_place(self, raised: re.Match[str], innermost: str | None) -> Match | None:
        """Return the rule for any exception that is raised in a certain call."""
        rules = (rule for rule in self.catalogue.by_place if rule.is_raised_in(innermost))
        return next(((rule, raised) for rule in rules), None)

    def order(self, rule: LogRule) -> tuple[bool, int, int]:
        """Return the full order of rules that match one line: their strength, then their place."""
        return *strength(rule), self.catalogue.place[rule.code]


def strength(rule: LogRule) -> tuple[bool, int]:
    """Return the order of rules that match one line: fallbacks last, then by how much they prove."""
    return rule.fallback, LEVELS[rule.level]


class Sieve:
    """Finds the lines of a large chunk that rules may match, with a few passes of numpy.

    Every four consecutive bytes are looked up in a table of the rules' grams.
    """

    # Knuth's factor for multiplicative hashing: 2**32 divided by the golden ratio.
    _FACTOR: Final = 2_654_435_761
    _BITS: Final = 18

    def __init__(self, catalogue: Catalogue) -> None:
        import numpy as np

        self._np = np
        signs = (*tracebacks.SIGNS, *catalogue.english, *_CUDA_SIGNS, *_HANDLED_SIGNS)
        others = [sign.encode().lower() for sign in signs]
        grams = {*catalogue.grams, *(sign[:GRAM].decode("latin-1") for sign in others)}
        self._gram_of = {int.from_bytes(gram.encode("latin-1"), "little"): gram for gram in grams}
        self._words: dict[str, list[bytes]] = {gram: [] for gram in grams}
        for gram, entries in catalogue.grams.items():
            # The lines that they are searched in have lost their control characters, too.
            words = (word.encode().translate(None, _CONTROL_BYTES) for word, _ in entries)
            self._words[gram] += words
        for sign in others:
            self._words[sign[:GRAM].decode("latin-1")].append(sign)
        self._table = np.zeros(1 << self._BITS, dtype=bool)
        self._table[self._hash(np.array(list(self._gram_of), dtype="<u4"))] = True

    def _hash(self, codes: Any) -> Any:
        return (codes * self._np.uint32(self._FACTOR)) >> self._np.uint32(32 - self._BITS)

    def find(self, chunk: bytes) -> dict[int, set[str]]:
        """Return the lines to read, by their number from 0, with the grams found in them."""
        np = self._np
        clean = _ANSI_BYTES.sub(b"", chunk) if b"\x1b" in chunk else chunk
        clean = clean.translate(None, _CONTROL_BYTES).lower()
        ends = np.flatnonzero(np.frombuffer(clean, dtype=np.uint8) == ord("\n"))
        bounds = [0, *ends.tolist(), len(clean)]
        grams_of_line: dict[int, set[str]] = {}
        # A view of the chunk as numbers of 32 bits has every fourth gram; four views have all.
        for offset in range(GRAM):
            count = (len(clean) - offset) // GRAM
            if count <= 0:
                continue
            codes = np.frombuffer(clean, dtype="<u4", offset=offset, count=count)
            hits = np.flatnonzero(self._table[self._hash(codes)])
            # Most lines of any log have no gram of a rule, so no Python code runs for them.
            lines = np.searchsorted(ends, hits * GRAM + offset)
            for line, code in zip(lines.tolist(), codes[hits].tolist(), strict=True):
                if (gram := self._gram_of.get(code)) is None:
                    continue  # another gram has the same hash
                # Most of the remaining lines have none of the words that the grams come from.
                start, end = bounds[line], bounds[line + 1]
                if any(clean.find(word, start, end) >= 0 for word in self._words[gram]):
                    grams_of_line.setdefault(line, set()).add(gram)
        return grams_of_line
