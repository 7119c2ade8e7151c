"""The findings of one examination, in the order of what to repair first, and who reaches whom."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from ddpsafe._errors import Explanation, PreflightError
from ddpsafe.doctor._codes import page_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe._secrets import Mask


logger = logging.getLogger(__name__)

Severity = Literal["ok", "warning", "failed"]

_UNPRINTABLE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""What moves the cursor, changes colours or titles, turns the direction of writing, or is not seen."""


class AreaStep(str):
    """A line of progress on the checks of one area, which take no time worth a line in a log."""

    __slots__ = ()


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
    """Return a fix: a sentence, and the lines to copy below it.

    A line that anything but this source has a part in is made by `shlex.join` or with `shlex.quote`.
    """
    return "\n".join([what, *(f"    {line}" for line in lines)])


DialResult = Literal[
    "open",
    "dropped",  # no answer before the deadline: packets vanish
    "refused",  # answered with a reset although a process listens there
    "no-route",  # the network says that it cannot be reached
    "wrong-peer",  # what answered does not know the nonce: a proxy, another job
    "large-lost",  # the connection opens and large packets vanish: an MTU hole
    "absent",  # the host never came, or died during the check
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """One probed direction.

    Attributes:
        source: Node rank of the host that dials.
        target: Node rank of the host that listens.
        result: What became of the connection.
        latency_s: Round trip of a small message, or None where nothing came through.
        bandwidth_bytes_per_s: Rough, of one short burst; None where it was not measured.
        said: What the operating system said, for a reader who knows it.
    """

    source: int
    target: int
    result: DialResult
    latency_s: float | None = None
    bandwidth_bytes_per_s: float | None = None
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Who reaches whom.

    Attributes:
        hostnames: Names of the hosts, by node rank.
        addresses: The address each host listened on, by node rank; empty where it never came.
        directions: Every probed direction; beyond 64 hosts not every pair is probed.
    """

    hostnames: tuple[str, ...]
    addresses: tuple[str, ...]
    directions: tuple[Direction, ...]


_ORDER: dict[Severity, int] = {"failed": 0, "warning": 1, "ok": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the doctor found.

    Attributes:
        findings: All findings, the worst first, otherwise in the order of the checks.
        hostname: The host that this report was made on.
        matrix: Who reaches whom, when several hosts were examined.
        took_s: How long the examination took.
    """

    findings: tuple[Finding, ...]
    hostname: str
    matrix: Matrix | None = None
    took_s: float = 0.0

    @property
    def failed(self) -> tuple[Finding, ...]:
        """What will break a job."""
        return tuple(finding for finding in self.findings if finding.severity == "failed")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What may break a job."""
        return tuple(finding for finding in self.findings if finding.severity == "warning")

    @property
    def healthy(self) -> bool:
        """Whether nothing was found that will break a job."""
        return not self.failed

    def __str__(self) -> str:
        """Return what is not well as text, the worst first."""
        problems = [*self.failed, *self.warnings]
        head = (
            f"ddpsafe doctor on {self.hostname}: {len(self.failed)} failed, "
            f"{len(self.warnings)} warnings, {len(self.findings) - len(problems)} passed"
        )
        return "\n\n".join([printable(head), *(each.as_text() for each in problems)])

    def to_json(self) -> str:
        """Return the report as JSON text: fields as here, units in their names."""
        return json.dumps(asdict(self), indent=2, default=str)

    def to_html(self) -> str:
        """Return the report as one HTML page that loads nothing: who reaches whom, and findings."""
        from ddpsafe.doctor._html import draw

        return draw(self)


def worst_first(findings: list[Finding]) -> tuple[Finding, ...]:
    """Order findings by what to repair first, keeping the order of the checks within that."""
    return tuple(sorted(findings, key=lambda finding: _ORDER[finding.severity]))


def masked(finding: Finding, mask: Mask) -> Finding:
    """Return a finding without the secrets of the environment."""
    return replace(
        finding,
        fact=mask.text(finding.fact),
        cause=mask.text(finding.cause),
        fix=mask.text(finding.fix),
        details={name: mask.value(value) for name, value in finding.details.items()},
    )


def require_healthy(
    report: Report, *, who: str | None = None, outcome: str, speaks: bool = True
) -> None:
    """Refuse to go on where something was found that will break the job.

    Args:
        report: What was found.
        who: Who is not ready then; this host by default.
        outcome: What did not happen therefore.
        speaks: Whether to log the warnings; others of this host do it.

    Raises:
        PreflightError: Something was.
    """
    for finding in report.warnings if speaks else ():
        fix = " ".join(finding.fix.split())
        logger.warning("%s: %s What to do: %s (%s)", finding.code, finding.fact, fix, finding.page)
    if report.failed:
        count = len(report.failed)
        problems = "1 problem" if count == 1 else f"{count} problems"
        named = who or f"{report.hostname} is"
        what = f"{named} not ready for this launch: {problems}; {outcome}."
        told = [finding.as_text() for finding in report.failed]
        raise PreflightError(Explanation(what, details=told), report=report)
