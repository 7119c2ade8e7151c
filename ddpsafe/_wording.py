"""How a message of ddpsafe is built."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_EXPLAINED: Final = re.compile(
    r"(?P<what>.*?)\n\s*Likely cause: (?P<cause>[^\n]*)\n\s*What to do: (?P<fix>.*)", re.DOTALL
)


def explain(
    what: str,
    *,
    cause: str,
    fix: str,
    details: Sequence[str] = (),
    logs: Path | str | None = None,
) -> str:
    """Word an error so that it answers the four questions of its reader.

    Args:
        what: What happened and where: rank, host, attempt, after how long.
        cause: The likely cause.
        fix: What to do about it, to copy where possible.
        details: Further lines (ranks that only lost the first one, stacks, …).
        logs: Where to read on.

    Returns:
        The message: one line for each answer, details in between.
    """
    lines = [what, f"  Likely cause: {cause}", f"  What to do: {fix}"]
    lines += [f"  {line}" for detail in details for line in detail.splitlines()]
    if logs is not None:
        lines.append(f"  Logs: {logs}")
    return "\n".join(lines)


def take_apart(message: str) -> tuple[str, str, str] | None:
    """Undo `explain`: what happened, the cause, the fix; ``None`` for a message of somebody else's."""
    found = _EXPLAINED.fullmatch(message)
    return None if found is None else (found["what"], found["cause"], found["fix"])
