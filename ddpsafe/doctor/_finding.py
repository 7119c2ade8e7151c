"""What one check found: a fact, its likely cause, and the line that repairs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Severity = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found.

    Attributes:
        code: Stable name of the finding, ``DS-<AREA>-<number>``; its page in the documentation
            says the cause, how to confirm it and how to repair it.
        severity: ``"failed"`` will break a job, ``"warning"`` may, ``"ok"`` is a fact.
        fact: What was seen, one sentence, no guess in it.
        cause: What most likely lies behind it; empty for ``"ok"``.
        fix: What to do; where a command or a variable repairs it, the line to copy.
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
