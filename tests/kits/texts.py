"""Texts for tests: from a file with headings, and for hypothesis, of chosen characters.

`st.text()` draws what UTF-8 can encode. On a machine where hypothesis has no cache yet, its first draw tries
that for all of Unicode, which takes seconds to minutes and fails a health check.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Final

from hypothesis import strategies as st

ENCODABLE: Final = (
    string.printable
    + "\0\x1b\x7f\x85\xa0\xad"  # control characters, blanks and a soft hyphen
    + "²½٣०Ⅷ０𝟡"  # digits elsewhere; int() reads some of them
    + "äßİıſéøñ你好はшא"  # letters; some change their length in another case
    + "\u0301\u200b\u202e\u2028\ufeff\ufffd"  # combining, invisible, right to left, a line's end
    + "😀\U0010ffff"
)
"""Characters that have an encoding in UTF-8."""

CHARACTERS: Final = ENCODABLE + "\ud800\udfff"
"""The same with two surrogates, which os.fsdecode makes of other bytes, and which no file can hold."""


def any_text(*, max_size: int | None = None) -> st.SearchStrategy[str]:
    """Return a strategy for texts of these characters."""
    return st.text(CHARACTERS, max_size=max_size)


def read_sections(file: Path) -> dict[str, list[str]]:
    """Return the lines below each heading, a line that begins with ``## ``."""
    sections: dict[str, list[str]] = {}
    for line in file.read_text("utf-8").splitlines():
        if line.startswith("## "):
            sections[line[3:]] = []
        else:
            sections[list(sections)[-1]].append(line)
    return sections
