"""Follows the tracebacks of all ranks through a log, where their lines may be mixed."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ddpsafe._explain.catalogue import compiled

if TYPE_CHECKING:
    from ddpsafe._explain.catalogue import Catalogue

# Calls show only where the exception was raised, and reading all of them nearly doubled the time for a
# log of tracebacks.
MAX_CALLS: Final = 20_000
"""How many calls of tracebacks are read; none after the script's own exception is known."""
_MAX_CALLS_OF_TRACEBACK: Final = 50
"""How many of a traceback's last calls are kept, to find out what the script was doing."""
_MAX_LINES_AFTER_CALL: Final = 200
"""How many lines after a traceback's last call its exception may follow."""

FRAME: Final = re.compile(
    r'^(?:E|\|)?\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)'
    r"|^│ (?P<file2>[^│\s]+\.py):(?P<line2>\d+) in (?P<function2>\w+)"
    r"|^File (?P<file3>(?:[A-Za-z]:)?[^\s:]+\.py):(?P<line3>\d+), in (?P<function3>\w+)"
    r"|^(?P<file4>(?:~|/|[A-Za-z]:\\)[^\s:]+\.pyc?)(?P<line4>) in (?P<function4>\w+)\("
)
"""A call as printed by Python, rich (in a box) and IPython; old ones have the number below it."""
SIGNS: Final = ('file "', "traceback (most", "ror: ", "xception", "root cause")
"""Parts of lines that no rule is about, but that lead to the exception of a traceback."""
_STARTS: Final = ("Traceback (most recent", "Original Traceback (most")
# The DataLoader of torch up to 1.1 raises a worker's exception with its traceback as the text.
_RAISED_AGAIN: Final = re.compile(
    r"^(?:\w+\.)*\w*(?:Error|Exception): Traceback \(most recent call last\):$"
)
HANDLING: Final = "During handling of the above exception, another"
CHAINED: Final = (HANDLING, "The above exception was the direct cause")
"""How the lines begin that Python prints between the exceptions of a chain."""
_IGNORED: Final = re.compile(
    r"^(?:Exception ignored (?:in|while)|Error in atexit|--- Logging error ---)"
)
_EXCEPTION: Final = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Fault|Timeout)|Exception|(?<=\.)Error))"
    r"(?:: (?P<text>.*)|:?\s*)$"
)
_ANY_EXCEPTION: Final = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w+)(?:: (?P<text>.*)|:?\s*)$"
)
"""The last line of a traceback, whatever its class is called."""
_LIBRARY: Final = re.compile(r"site-packages|dist-packages|/lib/python\d|<frozen|\\lib\\|/torch/")


@dataclass(slots=True, kw_only=True)
class Traceback:
    """A traceback of one rank that has not ended yet.

    Attributes:
        frame: The last call so far outside of libraries.
        innermost: The line of the last call so far, with slashes; ``None`` before the first.
        calls: The last calls so far, in the form of `innermost`.
        is_ignored: Whether Python reports the exception as ignored, or its program as handled.
        is_original: Whether a worker or a replica raised it, and it is part of a wrapper's text.
    """

    frame: str | None = None
    innermost: str | None = None
    calls: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_CALLS_OF_TRACEBACK))
    is_ignored: bool = False
    is_original: bool = False


class Tracebacks:
    """The tracebacks that are being printed, by rank.

    Attributes:
        is_open: Whether one of them has begun a few lines ago and has not ended.
        skips_calls: Whether further calls are skipped: see `MAX_CALLS`.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.skips_calls = False
        self._of_rank: dict[int | None, Traceback] = {}
        self._since_frame = 0
        self._calls = 0

    def count_call(self) -> bool:
        """Count a line that has a call; return whether it should be read."""
        if self.skips_calls:
            return False
        self._calls += 1
        self.skips_calls = self._calls >= MAX_CALLS
        return True

    def next_line(self) -> None:
        """Note that another line is read."""
        if self.is_open:
            self._since_frame += 1
            self.is_open = self._since_frame < _MAX_LINES_AFTER_CALL

    def of(self, rank: int | None) -> Traceback | None:
        """Return the open traceback of a rank, if there is one."""
        return self._of_rank.get(rank) if self.is_open else None

    def read_call(self, body: str, rank: int | None) -> str | None:
        """Add a line if it is a call; return what follows the call in it, or None if it is none."""
        frame = FRAME.match(body)
        if frame is None:
            return None
        self._touch()
        traceback = self._of_rank.setdefault(rank, Traceback())
        file, line, function = (group for group in frame.groups() if group is not None)
        traceback.innermost = frame[0].replace("\\", "/")
        traceback.calls.append(traceback.innermost)
        if not _LIBRARY.search(file):
            place = f"{file}:{line}" if line else file
            traceback.frame = f"{place} in {function}"
        rest = body[frame.end() :].strip()
        return "" if rest.startswith("(") else rest

    def read_start(
        self, body: str, rank: int | None, *, has_following: bool, is_handled: bool
    ) -> bool:
        """Begin a traceback if a line is the first one of it; return whether it is.

        With `is_handled`, the line before it says that its program handles what is raised.
        """
        if body.startswith("Stack (most recent"):  # of a log message, without an exception
            self._of_rank[rank] = Traceback()
            return True
        if not body.lstrip(" ╭─").startswith(_STARTS) and not (
            has_following and _RAISED_AGAIN.match(body)
        ):
            if _IGNORED.match(body):  # the traceback of an exception that Python ignores follows
                self._of_rank[rank] = Traceback(is_ignored=True)
                self._touch()
            return False
        before = self._of_rank.get(rank)
        is_original = "Original Traceback" in body or ": Traceback" in body
        self._of_rank[rank] = Traceback(
            is_ignored=is_handled
            or (before is not None and before.is_ignored and before.innermost is None),
            is_original=is_original,
        )
        self._touch()
        return True

    def end(self, rank: int | None) -> None:
        """Forget the traceback of a rank: its exception has been read."""
        del self._of_rank[rank]
        self.is_open = bool(self._of_rank)

    def _touch(self) -> None:
        self.is_open, self._since_frame = True, 0


def exception_of(body: str, *, is_in_traceback: bool) -> re.Match[str] | None:
    """Return the ``type`` and ``text`` of the exception that a line is, or None."""
    return _EXCEPTION.match(body) or (_ANY_EXCEPTION.match(body) if is_in_traceback else None)


FIX_OF_USER: Final = "Fix that line: print what goes into it, on this rank and on one that works, in one process and with num_workers=0 if it comes from data; ranks that complain of a lost peer failed because of it."


def read_calls(calls: tuple[str, ...], catalogue: Catalogue) -> tuple[str, str]:
    """Return what raised an exception that no rule matches, and what to do.

    The calls of its traceback end with the innermost.
    """
    for call in reversed(calls):
        for stage in catalogue.stages:
            if compiled(stage["call"]).search(call):
                return stage["who"], stage["fix"]
    return "The script raised", FIX_OF_USER
