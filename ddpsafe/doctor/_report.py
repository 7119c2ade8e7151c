"""The findings of one examination, in the order of what to repair first."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpsafe._secrets import Mask
    from ddpsafe.doctor._finding import Finding, Severity
    from ddpsafe.doctor._matrix import Matrix

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

    def to_json(self) -> str:
        """Return the report as JSON text: fields as here, units in their names."""
        return json.dumps(asdict(self), indent=2, default=str)

    def to_html(self) -> str:
        """Return the report as one HTML page that loads nothing: who reaches whom, and findings."""
        from ddpsafe.doctor._picture import draw

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
