"""The page of every finding: its first line has the code and the title, the failure it stands for.

Each code has a page, ``docs/findings/CODE.md``, which is shipped in the wheel. A code is the same
whether the failure was found or not; the finding's severity tells. A number is never reused, even
after its check is removed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__)
# A checkout has the pages in docs/, a wheel beside this file.
_FOLDERS: Final = (_HERE.parents[2] / "docs" / "findings", _HERE.with_name("pages"))


def find_pages() -> dict[str, Path]:
    """Return the page of each code."""
    return {path.stem: path for folder in _FOLDERS for path in sorted(folder.glob("DS-*.md"))}
