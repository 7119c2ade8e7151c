"""What ranks have written, read for the post-mortem."""

from __future__ import annotations

from pathlib import Path


def read_log(path: Path | str) -> str:
    """Return a rank's log file, as far as it is text; nothing where it has gone."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
