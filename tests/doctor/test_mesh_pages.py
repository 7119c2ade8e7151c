"""Every finding of the mesh has a page, and every page a finding."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from ddpsafe.doctor import _codes

CHECKOUT: Final = Path(__file__).parents[2]
PAGES: Final = CHECKOUT / "docs" / "findings"
SOURCES: Final = CHECKOUT / "ddpsafe" / "doctor" / "_mesh"


def test_pages_and_codes_are_the_same() -> None:
    """None is missing and none is left over."""
    assert sorted(path.stem for path in PAGES.glob("DS-MESH-*.md")) == sorted(_codes.MESH)


@pytest.mark.parametrize("code", _codes.MESH)
def test_page_says_cause_how_to_confirm_and_fix(code: str) -> None:
    """The heading is the finding's; each part says something."""
    text = (PAGES / f"{code}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {code}: {_codes.MESH[code]}\n")
    parts = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    assert list(parts) == ["Cause", "How to confirm", "Fix"]
    assert all(part.strip() for part in parts.values())


def test_every_code_is_found_by_something() -> None:
    """A code that nothing finds is taken off the list."""
    names = {value: name for name, value in vars(_codes).items() if isinstance(value, str)}
    modules = [path for path in SOURCES.rglob("*.py") if path.name != "_codes.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in modules)
    assert [code for code in _codes.MESH if f"_codes.{names[code]}" not in text] == []
