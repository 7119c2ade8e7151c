"""The report of one examination: its findings, worst first, and which node reaches which."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from ddpsafe._errors import Explanation, PreflightError
from ddpsafe._text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe._secrets import Mask


logger = logging.getLogger(__name__)

Severity = Literal["failed", "warning", "ok"]
"""The worst first."""


class AreaStep(str):
    """A progress line about one area. Its checks are too quick for a line in a log."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found.

    Attributes:
        code: Stable name of the finding, ``DS-<AREA>-<number>``, the same whether the failure was
            found or not. A number is never reused, even after its check is removed. Its documentation
            page has the title, gives the cause, how to confirm it and how to fix it.
        severity: ``"failed"`` will break a job, ``"warning"`` may, ``"ok"`` is a fact.
        fact: What was observed, in one sentence without guesses.
        cause: The most likely cause; empty for ``"ok"``.
        fix: What to do. Lines to copy follow on their own, indented by four spaces.
        hosts: Names of the affected hosts; empty means the host that ran the check.
        details: The numbers behind the fact, JSON-serializable, with units in their names.
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
        """The command that prints the documentation page of this code, without network access."""
        return f"ddpsafe doctor --explain {self.code}"

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


_HERE: Final = Path(__file__)
# A checkout has the pages in docs/, a wheel beside this file.
_PAGES: Final = (_HERE.parents[2] / "docs" / "findings", _HERE.with_name("pages"))


def find_pages() -> dict[str, Path]:
    """Return the documentation page of each code."""
    return {path.stem: path for folder in _PAGES for path in sorted(folder.glob("DS-*.md"))}


def ok(code: str, fact: str, **details: object) -> Finding:
    """Return a finding about something that is as it should be."""
    return Finding(code=code, severity="ok", fact=fact, details=details)


def warning(
    code: str, fact: str, *, cause: str, fix: str, hosts: tuple[str, ...] = (), **details: object
) -> Finding:
    """Return a finding that may break a job."""
    return Finding(
        code=code, severity="warning", fact=fact, cause=cause, fix=fix, hosts=hosts, details=details
    )


def failed(
    code: str, fact: str, *, cause: str, fix: str, hosts: tuple[str, ...] = (), **details: object
) -> Finding:
    """Return a finding that will break a job."""
    finding = warning(code, fact, cause=cause, fix=fix, hosts=hosts, **details)
    return replace(finding, severity="failed")


def to_copy(what: str, *lines: str) -> str:
    """Return a fix: a sentence and the lines to copy below it.

    A line with any part from outside this source is built with `shlex.join` or `shlex.quote`.
    """
    return "\n".join([what, *(f"    {line}" for line in lines)])


DialResult = Literal[
    "open",
    "dropped",  # no answer before the deadline: packets are lost
    "refused",  # answered with a reset although a process listens there
    "no-route",  # the network reports that the host is unreachable
    "wrong-peer",  # whatever answered does not know the nonce: a proxy, another job
    "large-lost",  # the connection opens but large packets are lost: an MTU black hole
    "absent",  # the host never joined, or died during the check
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """One probed direction.

    Attributes:
        source: Node rank of the host that dials.
        target: Node rank of the host that listens.
        result: How the connection attempt ended.
        latency_s: Round trip of a small message, or None if nothing got through.
        bandwidth_bytes_per_s: A rough value from one short burst; None if it was not measured.
        said: What the operating system reported, for readers who know its terms.
    """

    source: int
    target: int
    result: DialResult
    latency_s: float | None = None
    bandwidth_bytes_per_s: float | None = None
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Which node reaches which.

    Attributes:
        hostnames: Host names, by node rank.
        addresses: The address each host listened on, by node rank; empty if it never joined.
        directions: Every probed direction. Beyond 64 hosts not every pair is probed.
    """

    hostnames: tuple[str, ...]
    addresses: tuple[str, ...]
    directions: tuple[Direction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The doctor's report.

    Attributes:
        findings: All findings, worst first, otherwise in the order of the checks.
        hostname: The host that this report was made on.
        matrix: Which node reaches which, if several hosts were examined.
        took_s: How long the examination took.
    """

    findings: tuple[Finding, ...]
    hostname: str
    matrix: Matrix | None = None
    took_s: float = 0.0

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The findings that will break a job."""
        return tuple(finding for finding in self.findings if finding.severity == "failed")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that may break a job."""
        return tuple(finding for finding in self.findings if finding.severity == "warning")

    @property
    def healthy(self) -> bool:
        """Whether nothing was found that will break a job."""
        return not self.failed

    def __str__(self) -> str:
        """Return the problems as text, worst first."""
        problems = [*self.failed, *self.warnings]
        head = (
            f"ddpsafe doctor on {self.hostname}: {len(self.failed)} failed, "
            f"{len(self.warnings)} warnings, {len(self.findings) - len(problems)} passed"
        )
        return "\n\n".join([printable(head), *(finding.as_text() for finding in problems)])

    def to_json(self) -> str:
        """Return the report as JSON with the same field names."""
        return json.dumps(asdict(self), indent=2, default=str)

    def to_html(self) -> str:
        """Return the report as one self-contained HTML page: the matrix and the findings."""
        from ddpsafe.doctor._html import draw

        return draw(self)


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
    """Raise if the report has a finding that will break the job.

    `who` is subject and verb of the message, e.g. "the nodes of this job are"; by default this host.
    `outcome` is what did not happen because of it. Only one process of a host `speaks`: it logs the warnings.

    Raises:
        PreflightError: There is such a finding.
    """
    for finding in report.warnings if speaks else ():
        what_to_do, *to_paste = (" ".join(line.split()) for line in finding.fix.split("\n"))
        fix = " ".join([what_to_do, " ; ".join(to_paste)]).strip()
        logger.warning("%s: %s What to do: %s (%s)", finding.code, finding.fact, fix, finding.page)
    if report.failed:
        count = len(report.failed)
        problems = "1 problem" if count == 1 else f"{count} problems"
        named = who or f"{report.hostname} is"
        what = f"{named} not ready for this launch: {problems}; {outcome}."
        details = [finding.as_text() for finding in report.failed]
        raise PreflightError(Explanation(what, details=details), report=report)
