"""The documentation as a site: links, anchors, search, signatures, and its look in a browser.

``nox -s docs`` builds it, which takes half a minute, and passes its folder; `test_documentation` checks
the links of the pages without it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import os
import re
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import pytest
from browser import Browser

import ddpsafe

pytestmark = pytest.mark.extra("docs")

DOCS: Final = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def site() -> Path:
    """The folder of the built site."""
    return Path(os.environ["DDPSAFE_SITE"])


class Parsed(HTMLParser):
    """The links of a page, and its link targets."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect links, pictures, styles and anchors."""
        for name, value in attrs:
            if name in ("href", "src") and value and (tag, value) != ("a", "#"):
                self.links.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


def test_every_internal_link_has_a_target(site: Path) -> None:
    """The file exists, and so does the anchor if the link has one."""
    pages = {path: Parsed(path) for path in site.rglob("*.html")}
    assert len(pages) > 100
    dead, tried = [], 0
    for path, parsed in pages.items():
        for link in parsed.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "search.html":
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            tried += 1
            anchors = pages[target].anchors if target in pages else None
            # The top of a page needs no anchor.
            wants = unquote(parts.fragment)
            if not target.exists() or (wants and anchors is not None and wants not in anchors):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert tried > 1000
    assert sorted(set(dead)) == []


def test_every_public_name_has_its_signature_on_the_site(site: Path) -> None:
    """Each is an entry that search and links can reach."""
    anchors = Parsed(site / "reference" / "signatures.html").anchors
    names = [name for name in ddpsafe.__all__ if not name.startswith("__")]
    assert [name for name in names if f"ddpsafe.{name}" not in anchors] == []


def test_every_name_in_a_public_signature_is_explained() -> None:
    """`Unpack[LaunchFields]` is useless without an entry for LaunchFields."""
    page = (DOCS / "reference" / "signatures.md").read_text(encoding="utf-8")
    known = {*vars(builtins), *ddpsafe.__all__, *vars(importlib.import_module("typing"))}
    known |= {
        *vars(importlib.import_module("collections.abc")),
        *vars(importlib.import_module("torch")),
    }
    known |= {"Path", "PathLike", "P", "R", "T", "M", "X", "Unpack", "Self", "TracebackType"}
    unknown = set()
    for name in ddpsafe.__all__:
        if not inspect.isfunction(function := getattr(ddpsafe, name)):
            continue
        for each in inspect.signature(function).parameters.values():
            tree = ast.parse(str(each.annotation), mode="eval")
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            unknown |= {word for word in used - known if f".. py:data:: {word}\n" not in page}
    assert unknown == set()


def test_site_shows_its_version_and_has_a_search_index(site: Path) -> None:
    """A reader sees which version a page describes; the index contains the words of the pages."""
    text = (site / "how-to" / "doctor.html").read_text(encoding="utf-8")
    assert f"version {version('ddpsafe')}" in text
    assert 'role="search"' in text
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert all(word in index for word in ("torchrun", "gloo_socket_ifnam", "checkpoint"))


def test_benchmark_pages_are_on_the_site(site: Path) -> None:
    """They include their pictures."""
    for page in sorted((DOCS / "benchmarks").glob("*.md")):
        built = site / "benchmarks" / f"{page.stem}.html"
        assert built.is_file()
        pictures = re.findall(r"!\[[^]]*\]\(", page.read_text(encoding="utf-8"))
        assert built.read_text(encoding="utf-8").count("<img") >= len(pictures)


PHONE_PX: Final = 390
PAGES_TO_VIEW: Final = (
    "index", "guarantees", "tutorial/first-run", "how-to/doctor", "how-to/watch", "how-to/porting",
    "how-to/coming-from", "reference/api", "reference/signatures", "reference/config",
    "reference/data", "findings/index", "findings/DS-MESH-036", "explanation/faq",
    "benchmarks/mesh", "benchmarks/faults",
)  # fmt: skip
_CUT_MESSAGES: Final = """
[...document.querySelectorAll('.highlight-text pre')].filter(each => each.scrollWidth > each.clientWidth + 1)
  .map(each => each.innerText.slice(0, 60))
"""
_CUT_TABLES: Final = """
[...document.querySelectorAll('.table-wrapper')].filter(each => each.scrollWidth > each.clientWidth + 1)
  .map(each => each.innerText.slice(0, 60))
"""


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (PHONE_PX, False)])
def test_pages_are_readable_in_a_browser(
    site: Path, tmp_path: Path, *, width: int, dark: bool
) -> None:
    """On a screen and a phone nothing is cut off or missing, and all text contrasts with its background."""
    found = {}
    with Browser() as browser:
        for name in PAGES_TO_VIEW:
            page = browser.open(site / f"{name}.html", width=width, dark=dark)
            found[name] = [
                *page.overflow(),
                # On a phone they can be scrolled sideways.
                *(page.evaluate(_CUT_TABLES) if width > PHONE_PX else ()),
                *(page.evaluate(_CUT_MESSAGES) if width > PHONE_PX else ()),
                *page.poor_contrast(),
                *page.complaints(),
            ]
            # Of a light and a dark picture, only the matching one may be visible.
            shown = "dark" if dark else "light"
            for picture in page.evaluate(
                "[...document.images].filter(e => e.offsetParent).map(e => e.src)"
            ):
                if (fits := re.search(r"-(light|dark)\.\w+$", picture)) and fits[1] != shown:
                    found[name].append(picture)
            page.screenshot(tmp_path / f"{name.replace('/', '-')}.png")
    assert {name: each for name, each in found.items() if each} == {}
    assert len(list(tmp_path.glob("*.png"))) == len(PAGES_TO_VIEW)
