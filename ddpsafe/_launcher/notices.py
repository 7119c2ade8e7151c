"""What the launcher itself says on stderr."""

from __future__ import annotations

import contextlib
import sys


def say(line: str) -> None:
    """Write a line, if there is a stderr that takes it.

    It may be closed, a broken pipe, or a program's own object with half of a stream's methods;
    nothing that the launcher has to do may fail over that.
    """
    with contextlib.suppress(Exception):
        sys.stderr.write(f"ddpsafe: {line}\n")
        sys.stderr.flush()
