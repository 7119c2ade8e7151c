"""How names, ranks and signals are written in a message."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAY_DIFFER_IN_SIZE: Final = re.compile(r"(?:^|:)(?:gather|scatter|all_?to_?all)")
"""How torch records collectives in which ranks may pass different shapes; uneven lists of all_gather have another name."""


def name_cells(text: str) -> str:
    """Replace the file names of notebook cells with ``Cell In[5]``, as IPython shows them.

    Such a file does not exist, and its name changes with the kernel. Outside a notebook the text is
    returned unchanged.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    if name_of is None:
        return text

    def named(match: re.Match[str]) -> str:
        label = name_of(match[0])
        return match[0] if label is None else " ".join(label)

    # ipykernel names the files after the pid of the kernel, and the launcher runs in the kernel.
    return re.sub(rf"[^\s\"']*/ipykernel_{os.getpid()}/\d+\.py", named, text)


def signal_name(number: int) -> str:
    """Return a signal's name for a message: ``SIGKILL``, or ``signal 35`` if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks for a message: ``rank 1``, ``ranks 0, 2 and 3``."""
    names = [str(rank) for rank in ranks]
    return f"rank{'s' if len(names) > 1 else ''} {listed(names)}"


def listed(names: Sequence[str], *, last: str = " and ") -> str:
    """Return names for a message: ``a``, ``a, b and c``, with `last` before c; empty if there are none."""
    return last.join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def shortened(lines: Sequence[str], most: int) -> list[str]:
    """Return the first lines of a message's list, and of a longer one how many are left out."""
    more = len(lines) - most
    return [*lines[:most], f"… and {more} more"] if more > 0 else list(lines)


def wrapped(text: str, columns: int, *, first: str = "", others: str = "  ") -> list[str]:
    """Return the lines of a text for a terminal: words, paths and options stay whole.

    `first` and `others` are what the first line and all others begin with.
    """
    return textwrap.wrap(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


_HIDDEN: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""Characters that move the cursor, change colours or titles, reverse the text direction, or are invisible."""


def printable(text: object, *, keep: str = "") -> str:
    """Return a text that is safe to show: its hidden characters, except for `keep`, as Python escapes."""
    return _HIDDEN.sub(
        lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1],
        "" if text is None else str(text),
    )
