"""Reads logs of any launcher and any size, and ranks the known failures found in them.

A log is read once, in chunks. A rule's patterns are tried only on lines that have one of its keywords.
In a large log, numpy finds these lines without a Python loop over all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpsafe._explain import normalise, ranking
from ddpsafe._explain.catalogue import built_in
from ddpsafe._explain.match import Matcher, Sieve, strength
from ddpsafe._explain.normalise import Folds, Line
from ddpsafe._explain.tracebacks import CHAINED, HANDLING, Tracebacks, exception_of

if TYPE_CHECKING:
    import re
    from collections.abc import Collection
    from typing import BinaryIO

    from ddpsafe._explain.catalogue import Catalogue
    from ddpsafe._explain.match import Match
    from ddpsafe._explain.ranking import Cause

_CHUNK_BYTES: Final = 1 << 20
_MAX_LINE_BYTES: Final = 4_000
# How many lines that differ only in digits are matched: a loop prints the same one for hours.
_MAX_SAME_LINES: Final = 3
# Smaller chunks are read line by line, which takes less time than importing numpy.
_SMALL_BYTES: Final = 1 << 16
_TAIL_BYTES: Final = 1 << 14
# After so many lines with the same grams of rules, each of which had a cause, further ones are
# skipped as having the same cause, so that no log takes a minute per GB.
_MAX_ALIKE: Final = 1_000


class LogReader:
    """Reads lines and keeps the causes that the catalogue finds in them."""

    def __init__(self, catalogue: Catalogue | None = None) -> None:
        """Begin a log; by default with the catalogue that comes with ddpsafe."""
        self._catalogue = built_in() if catalogue is None else catalogue
        self._matcher = Matcher(self._catalogue)
        # Flight recordings and reports of ddpsafe are added to it.
        self.findings = ranking.Findings(self._catalogue)
        self._tracebacks = Tracebacks()
        self._sieve: Sieve | None = None
        # A shape is a line without its digits.
        self._shapes: dict[bytes, int] = {}
        self._cause_of_shape: dict[bytes, Cause] = {}
        # Codes of the causes that the current line takes back, and that all lines of a shape do.
        self._ended: list[str] = []
        self._ended_by_shape: dict[bytes, tuple[str, ...]] = {}
        self._alike: dict[frozenset[str], int] = {}
        # The lines after the current one, and its rest if a terminal or a paste has folded it.
        self._following: list[str] = []
        self._folded: list[str] = []
        self._skipped = 0
        self._tail = b""
        self._before = ""
        self._handled_at = -1  # the line in which a program said that it handles something
        # The last line that shows a cause: its number, its rank, and the cause.
        self._noted: tuple[int, int | None, Cause] | None = None
        self.lines = 0

    def read(self, stream: BinaryIO) -> None:
        """Read a log to its end; overlong lines are cut."""
        rest = tail = b""
        while chunk := stream.read(_CHUNK_BYTES):
            tail = (tail + chunk)[-_TAIL_BYTES:]
            chunk = rest + chunk
            end = chunk.rfind(b"\n") + 1
            if not end and len(chunk) < 2 * _CHUNK_BYTES:
                rest = chunk
                continue
            end = end or len(chunk)
            self._read_chunk(chunk[:end])
            rest = chunk[end:]
        self._read_chunk(rest)
        self._tail = tail

    def read_text(self, text: str) -> None:
        """Read a log that is already a string."""
        log = text.encode("utf-8", "replace")
        self._read_chunk(log)
        self._tail = log[-_TAIL_BYTES:]

    def causes(self) -> list[Cause]:
        """Return the causes, most likely first; noise only if there is nothing else."""
        texts = self._tail.decode("utf-8", "replace").splitlines()
        # The first one may have lost its beginning.
        texts = texts[1:] if len(texts) < self.lines else texts
        tail = normalise.read_tail(texts, self.lines)
        return self.findings.causes(self._matcher.completed, tail)

    def _read_chunk(self, chunk: bytes) -> None:
        first = self.lines + 1
        self.lines += chunk.count(b"\n") + (not chunk.endswith(b"\n") and chunk != b"")
        lines = chunk.split(b"\n")
        if len(chunk) < _SMALL_BYTES:
            folds = Folds(lines)
            for index, raw in enumerate(lines):
                if self._skipped:
                    self._skipped -= 1
                    continue
                self._following, self._folded = folds.following(index), folds.rest(index)
                self._read_raw(first + index, raw, None)
            self._following, self._folded = [], []
            return
        self._sieve = self._sieve or Sieve(self._catalogue)
        grams = self._sieve.find(chunk)
        number = 0
        for index in (*sorted(grams), len(lines)):
            # Read every line of a traceback: its exception may match no rule.
            while self._tracebacks.is_open and not self._tracebacks.skips_calls and number < index:
                self._read_raw(first + number, lines[number], ())
                number += 1
            if index < len(lines):
                self._read_raw(first + index, lines[index], grams[index])
            number = index + 1

    def _read_raw(self, number: int, raw: bytes, grams: Collection[str] | None) -> None:
        """Read one line; `grams` are those of its grams that rules need, if they are known."""
        is_call = b'File "' in raw
        if is_call and not self._tracebacks.count_call():
            return
        if grams and self._alike and self._alike.get(frozenset(grams), 0) >= _MAX_ALIKE:
            return
        # Most lines of any log differ from earlier ones only in digits. Deleting these runs in C, and
        # most lines of a log end here.
        shape = raw[:_MAX_LINE_BYTES].translate(None, b"0123456789")
        seen = self._shapes.get(shape, 0)
        is_frequent = seen >= _MAX_SAME_LINES and not (
            is_call or self.findings.expects_rank or b"he above exception" in raw
        )
        if is_frequent and self._is_known(number, raw, shape):
            return
        if len(self._shapes) < ranking.MAX_DISTINCT:
            self._shapes[shape] = seen + 1
        self._tracebacks.next_line()
        # A carriage return redraws a progress bar: what follows it is a new line.
        for part in raw.split(b"\r"):
            text = part[:_MAX_LINE_BYTES].decode("utf-8", "replace")
            self._read_line(number, text, shape, grams)
            if len(part) > _MAX_LINE_BYTES and "Traceback (most" in text:
                # A traceback in JSON, with its exception at the end of the line.
                end = part[_MAX_LINE_BYTES:][-_MAX_LINE_BYTES:].decode("utf-8", "replace")
                prefix = text.removesuffix(normalise.without_prefix(text))
                self._read_line(number, f"{prefix}{end}", shape, grams)
        if self._ended:
            if len(self._ended_by_shape) < ranking.MAX_DISTINCT:
                self._ended_by_shape[shape] = tuple(self._ended)
            self._ended.clear()

    def _is_known(self, number: int, raw: bytes, shape: bytes) -> bool:
        """Count a line that differs from earlier ones only in digits; return False to match it again."""
        for code in self._ended_by_shape.get(shape, ()):
            self._take_back(code)
        cause = self._cause_of_shape.get(shape)
        if cause is None:
            return True
        if self.findings.note_again(cause, number):
            # Lines of the watchdog differ in the numbers that matter: who is behind in which call.
            if ranking.differs_by_rank(cause.code):
                text = raw[:_MAX_LINE_BYTES].decode("utf-8", "replace")
                rank, _ = normalise.rank_of(text)
                line = Line(number=number, text=text, body=text, rank=rank)
                self.findings.note_rank(cause.code, line)
            return True
        return False

    def _take_back(self, code: str) -> None:
        if self.findings.take_back(code):
            # Lines that were skipped as alike may show the cause again.
            self._alike.clear()

    def _read_line(
        self, number: int, text: str, shape: bytes, grams: Collection[str] | None
    ) -> None:
        text = normalise.clean(text)
        if (message := normalise.record_text(text)) is not None:
            for part in message.splitlines():
                self._read_line(number, part, shape, None)
            return
        bare = normalise.without_prefix(text)
        prefix = text.removesuffix(bare)
        body = normalise.in_usual_form(bare, self._catalogue)
        if body != bare:
            grams = None
        body = normalise.without_hedge(body)
        parts = normalise.unfolded(body)
        if parts is None:
            self._read_body(number, text, body, shape, grams)
            return
        for part in parts:
            self._read_body(number, prefix + part, normalise.without_prefix(part), shape, grams)

    def _read_body(
        self, number: int, text: str, body: str, shape: bytes, grams: Collection[str] | None
    ) -> None:
        """Read the body of a line, or of a part of one."""
        rank, is_local = normalise.rank_of(text)
        line = Line(number=number, text=text, body=body, rank=rank, has_local_rank=is_local)
        after_call = self._tracebacks.read_call(body, rank)
        if after_call is not None:
            if after_call:  # the newline after the call was lost
                line.body = after_call
                self._match(line, None)
            return
        if body.startswith(CHAINED):
            self.findings.note_chain(rank, is_handling=body.startswith(HANDLING))
            self._tracebacks.skips_calls = False
            return
        has_following, is_handled = bool(self._following), self._handled_at == number - 1
        if self._tracebacks.read_start(
            body, rank, has_following=has_following, is_handled=is_handled
        ):
            return
        cause = self._match(line, grams)
        if cause is not None and len(self._cause_of_shape) < ranking.MAX_DISTINCT:
            self._cause_of_shape[shape] = cause
        if grams:
            key = frozenset(grams)
            self._alike[key] = self._alike.get(key, 0) + 1 if cause is not None else -_MAX_ALIKE

    def _match(self, line: Line, grams: Collection[str] | None) -> Cause | None:
        """Record the cause that a line shows, and return it."""
        traceback = self._tracebacks.of(line.rank)
        innermost = None if traceback is None else traceback.innermost
        before, self._before = self._before, line.body
        if innermost is None and normalise.is_talk(line, before, self._following):
            return None
        self.findings.read_line(line)
        is_logged, is_decorated = "ERROR" in line.text, False
        raised = exception_of(line.body, is_in_traceback=False)
        if raised is None and (bare := normalise.undecorated(line.body)) is not None:
            line.body, is_logged, is_decorated = bare, True, True
        raised = raised or exception_of(line.body, is_in_traceback=innermost is not None)
        best = self._find_best(line, raised, innermost, grams)
        if raised is not None and traceback is not None:
            self._tracebacks.end(line.rank)
            if traceback.is_ignored:
                return None
        is_own = raised is not None and (traceback is not None or not is_decorated)
        if not is_own and self._is_handled(line, best, is_failure=bool(best or raised)):
            return None
        if best is not None:
            is_aftermath = self.findings.is_aftermath(best)
            # A program only tells of what is no more than likely to be a failure.
            is_told = best[0].level == "likely" and normalise.weight_of(line, best[1]) == "info"
            if normalise.is_passed_test(line.body) or is_aftermath or is_told:
                return None
            cause = self.findings.note(best, line, traceback if raised is not None else None)
        elif raised is None:
            self.findings.note_logged(line)
            return None
        else:
            whole = " ".join((line.body, *self._folded))
            raised = exception_of(whole, is_in_traceback=False) or raised
            cause = self.findings.note_exception(raised, line, traceback, is_logged=is_logged)
            if traceback is not None and not cause.is_wrapper:
                self._tracebacks.skips_calls = True
        if raised is not None and traceback is not None:
            self.findings.note_raised(cause, line)
        self._noted = (line.number, line.rank, cause)
        return cause

    def _is_handled(self, line: Line, best: Match | None, *, is_failure: bool) -> bool:
        """Return whether a line says that its program went on, about a failure in it or one before it."""
        is_noise = best is not None and best[0].level == "noise"
        match = None if best is None else best[1]
        is_handled = normalise.is_handled(line, match) and not is_noise
        if not is_handled and not normalise.is_retried(line):
            return False
        self._handled_at = line.number
        # Advice below an error, which may have such words, is indented.
        if not is_failure and self._noted is not None and not line.body[:1].isspace():
            number, rank, cause = self._noted
            if (number, rank) == (line.number - 1, line.rank):
                self.findings.withdraw(cause, is_over=is_handled)
        return is_handled

    def _find_best(
        self,
        line: Line,
        raised: re.Match[str] | None,
        innermost: str | None,
        grams: Collection[str] | None,
    ) -> Match | None:
        """Return the rule that says most about a line, alone or with the lines that continue it."""
        innermost = None if raised is None else innermost
        best = self._match_rules(line, line.body, innermost, grams, raised)
        if self._folded:
            whole = self._find_broken(line, self._folded, innermost, raised, own=best)
            order = self._matcher.order
            if whole is not None and (best is None or order(best[0]) > order(whole[0])):
                self._skipped, best = len(self._folded), whole
        if raised is None:
            return best
        if self._following and (best is None or best[0].fallback):
            rest = normalise.continuing(self._following)
            best = self._find_broken(line, rest, innermost, raised, own=best) or best
        # Where it was raised says more than words that any exception may have.
        is_by_words = best is None or (
            best[0].fallback and (best[0].raised_in is not None or best[0].level == "exception")
        )
        if is_by_words and not ranking.is_passed_on(raised):
            return self._matcher.find_by_place(raised, innermost) or best
        return best

    def _match_rules(
        self,
        line: Line,
        body: str,
        innermost: str | None,
        grams: Collection[str] | None,
        raised: re.Match[str] | None,
    ) -> Match | None:
        """Return the best rule for a line; record those that wait, and what the line takes back."""
        matched = self._matcher.match(body, innermost, grams, is_exception=raised is not None)
        for code in matched.ended:
            self._take_back(code)
            self._ended.append(code)
        for waiting in matched.waiting:
            self.findings.note_waiting(waiting, line)
        return matched.best

    def _find_broken(
        self,
        line: Line,
        rest: list[str],
        innermost: str | None,
        raised: re.Match[str] | None,
        *,
        own: Match | None,
    ) -> Match | None:
        """Return the rule that a message matches which is broken between words or within one.

        `own` is the match of the first line alone.
        """
        if not rest:
            return None
        is_message = bool(self._folded) and own is None
        matches, end = list["Match"](), len(line.body)
        for joint in (" ", ""):
            text = joint.join((line.body, *rest))
            text = normalise.without_hedge(text) if self._folded else text
            best = self._match_rules(line, text, innermost, None, raised)
            # The match must reach past the first line, and begin in it unless this is a folded message:
            # the longest line of a log looks folded, and would hide what the next one says itself.
            if best is not None and best[1].end() > end and (is_message or best[1].start() < end):
                matches.append(best)
        return min(matches, key=lambda match: strength(match[0]), default=None)


def explain_text(text: str, catalogue: Catalogue | None = None) -> list[Cause]:
    """Return the causes found in a log that is a string."""
    reader = LogReader(catalogue)
    reader.read_text(text)
    return reader.causes()
