"""What a report means for those who wait for it: warnings in the log, an error where it fails."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ddpsafe._errors import PreflightError

if TYPE_CHECKING:
    from ddpsafe.doctor._report import Finding, Report

logger = logging.getLogger(__name__)


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
        logger.warning("%s", _in_one_line(finding))
    if report.failed:
        count = len(report.failed)
        problems = "1 problem" if count == 1 else f"{count} problems"
        named = who or f"{report.hostname} is"
        what = f"{named} not ready for this launch: {problems}; {outcome}."
        told = [what, *(finding.as_text() for finding in report.failed)]
        raise PreflightError("\n".join(told), report=report)


def _in_one_line(finding: Finding) -> str:
    fix = " ".join(finding.fix.split())
    return f"{finding.code}: {finding.fact} What to do: {fix} ({finding.page})"
