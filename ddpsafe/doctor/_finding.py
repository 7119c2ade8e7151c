"""What one check found: a fact, its likely cause, and the line that repairs it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from ddpsafe.doctor._codes import page_of

if TYPE_CHECKING:
    from collections.abc import Mapping

Severity = Literal["ok", "warning", "failed"]

_UNPRINTABLE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""What moves the cursor, changes colours or titles, turns the direction of writing, or is not seen."""


def printable(text: str) -> str:
    """Return a text in one line that a terminal shows as it is: the rest as Python escapes it."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found.

    Attributes:
        code: Stable name of the finding, ``DS-<AREA>-<number>``; its page in the documentation
            says the cause, how to confirm it and how to repair it.
        severity: ``"failed"`` will break a job, ``"warning"`` may, ``"ok"`` is a fact.
        fact: What was seen, one sentence, no guess in it.
        cause: What most likely lies behind it; empty for ``"ok"``.
        fix: What to do; lines to copy stand by themselves, indented by four blanks.
        hosts: Names of the hosts concerned; empty means the one that the check ran on.
        details: The numbers behind the fact, as JSON would take them, units in their names.
    """

    code: str
    severity: Severity
    fact: str
    cause: str = ""
    fix: str = ""
    hosts: tuple[str, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def page(self) -> str:
        """The command that prints the page of the documentation on this code."""
        return page_of(self.code)

    def as_text(self) -> str:
        """Return the finding as lines of plain text: fact, cause, fix, and where to read on."""
        what, *to_paste = self.fix.split("\n")
        where = f" ({', '.join(self.hosts)})" if self.hosts else ""
        lines = [f"{self.code}{where}: {self.fact}"]
        if self.cause:
            lines += [f"  Likely cause: {self.cause}", f"  What to do: {what}"]
            lines += [f"  {line}" for line in to_paste]
            lines.append(f"  Read on: {self.page}")
        return "\n".join(map(printable, lines))


def ok(code: str, fact: str, **details: object) -> Finding:
    """Return a fact that is as it should be."""
    return Finding(code=code, severity="ok", fact=fact, details=details)


def warning(code: str, fact: str, *, cause: str, fix: str, **details: object) -> Finding:
    """Return what may break a job."""
    return Finding(code=code, severity="warning", fact=fact, cause=cause, fix=fix, details=details)


def failed(code: str, fact: str, *, cause: str, fix: str, **details: object) -> Finding:
    """Return what will break a job."""
    return Finding(code=code, severity="failed", fact=fact, cause=cause, fix=fix, details=details)


def to_copy(what: str, *lines: str) -> str:
    """Word a fix as a sentence and the lines to copy below it.

    A line that anything but this source has a part in is made by `shlex.join` or with `shlex.quote`.
    """
    return "\n".join([what, *(f"    {line}" for line in lines)])
