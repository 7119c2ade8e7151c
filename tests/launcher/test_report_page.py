"""``report.html`` shows how a run failed, in one file that loads nothing."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import hang_programs as programs
import pytest
from browser import Browser
from fault_kit import World

from ddpsafe._launcher.diagnosis.report_page import PAGE, draw
from ddpsafe.cli import main

HOSTILE = "<script>alert(1)</script>\"'&\x1b[2J\u202egnp."


class Page(HTMLParser):
    """The page as a browser parses it: its elements, its text, and everything it would load."""

    VOID = frozenset({"meta", "line", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record an element, and what it would load or run."""
        self.tags.append(tag)
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset")]
        self.loads += [f"{tag} {name}" for name, _ in attrs if name.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the last element."""
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Record the text."""
        self.words.append(data)

    @property
    def text(self) -> str:
        """All visible text."""
        return " ".join(self.words)


def report(**facts: Any) -> dict[str, Any]:
    """Return a report of an attempt with one rank."""
    rank = {
        "rank": 0, "hostname": HOSTILE, "status": "raised", "steps": 3, "where": HOSTILE,
        "raised": {"traceback": HOSTILE},
        "collectives": [{"name": HOSTILE, "number": 1, "done": False}],
        "timeline_s": {"starting": 0.0, "joining": 1.0, "running": 2.0, "waiting": 3.0, "end": 9.0},
    }  # fmt: skip
    return {"error": "RankRaisedError", "what": HOSTILE, "cause": HOSTILE, "ranks": [rank], **facts}


def write(folder: Path, number: int, facts: object) -> None:
    """Write the report of an attempt, and logs beside it."""
    attempt = folder / f"attempt-{number}"
    attempt.mkdir()
    (attempt / "report.json").write_text(json.dumps(facts))
    (attempt / "rank-0.err").write_bytes(b"first\n" * 5000 + HOSTILE.encode() + b"\xff\n")
    (attempt / "rank-0.stacks").write_text(HOSTILE)


def test_text_from_scripts_and_hosts_is_escaped(tmp_path: Path) -> None:
    """None of their tags, attributes and control characters becomes part of the page."""
    write(tmp_path, 1, report())
    text = draw(tmp_path)
    page = Page(text)
    assert "script" not in page.tags
    assert page.loads == []
    assert "default-src 'none'" in text
    assert not {"\x1b", "\u202e"} & set(text)
    assert page.text.count("<script>alert(1)</script>") >= 7


def test_the_newest_attempt_comes_first_and_all_have_a_timeline(tmp_path: Path) -> None:
    """Attempt 10 is newer than attempt 9; the bars have words and can be read without colours."""
    for number in (1, 9, 10):
        write(tmp_path, number, report(what=f"failure {number}"))
    page = Page(draw(tmp_path))
    assert page.tags.count("svg") == 3
    assert (
        page.text.index("failure 10") < page.text.index("failure 9") < page.text.index("failure 1 ")
    )
    assert {"start", "join", "run", "wait"} <= set(page.words)
    assert len(draw(tmp_path)) < 200_000


def test_the_page_names_the_ranks_that_made_others_wait(tmp_path: Path) -> None:
    """It has the lines of `ddpsafe status` at the end of the attempt."""
    late = {"text": "all others waited for rank 3 14 % of the time"}
    write(tmp_path, 1, report(stragglers=[late]))
    assert late["text"] in Page(draw(tmp_path)).text


def test_damaged_reports_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    """The directory may still be written to, or a report be truncated."""
    write(tmp_path, 1, report())
    write(tmp_path, 2, [])
    write(tmp_path, 3, {"ranks": [{}, 7]})
    (tmp_path / "attempt-3" / "report.json").write_text('{"error": "Ra')
    page = Page(draw(tmp_path))
    assert "attempt-3/report.json cannot be read" in page.text


@pytest.mark.recorder
def test_a_failed_run_has_a_page(tmp_path: Path) -> None:
    """It has the cause, and each rank's timeline and position."""
    error = World(folder=tmp_path).launch_fails(
        "collective", programs.cross_two_groups, within_s=5.0
    )
    page = Page((tmp_path / "run" / PAGE).read_text())
    assert error.explanation.what in page.text
    assert error.explanation.fix in page.text
    assert {"rank 0", "rank 1", "wait", "run"} <= set(page.words)
    assert "in cross_two_groups" in page.text
    assert (tmp_path / "run" / PAGE).stat().st_mode & 0o077 == 0


def test_a_successful_run_has_a_page_on_request(tmp_path: Path, capsys: Any) -> None:
    """Only ``ddpsafe report`` writes it, with the timeline of each rank and without a cause."""
    World(folder=tmp_path).launch(programs.reduce_often, 0.0)
    assert not (tmp_path / "run" / PAGE).exists()
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run' / PAGE}\n"
    page = Page((tmp_path / "run" / PAGE).read_text())
    assert {"rank 0", "rank 1", "run"} <= set(page.words)
    assert page.tags.count("svg") == 1
    assert "no attempt of this run has failed" in page.words
    assert "Likely cause" not in page.text


def test_the_page_can_be_written_again(tmp_path: Path, capsys: Any) -> None:
    """``ddpsafe report`` builds it from the files in the run directory."""
    write(tmp_path, 1, report())
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / PAGE}\n"
    assert (tmp_path / PAGE).read_text() == draw(tmp_path)
    assert main(["report", str(tmp_path / "attempt-1")]) == 2
    other = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--html", str(other)]) == 0
    assert capsys.readouterr().out == f"{other}\n"
    assert other.read_text() == draw(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("width", "dark"), [(1300, False), (1300, True), (390, False)])
def test_a_browser_shows_the_whole_page(tmp_path: Path, width: int, dark: bool) -> None:  # noqa: FBT001 - a row
    """On a screen and a phone, in light and dark mode, nothing is cut off or unreadable."""
    write(tmp_path, 1, report(details=["rank 1 is at train.py:31 in train, " * 6] * 3))
    (tmp_path / PAGE).write_text(draw(tmp_path))
    with Browser() as browser:
        page = browser.open(tmp_path / PAGE, width=width, dark=dark)
        assert page.overflow() == []
        assert page.poor_contrast() == []
        assert page.complaints() == []
        # The end of each rank is the last thing in the timeline, and the cause often ends a line.
        wider = "e => e.scrollWidth > e.clientWidth + 1 && !e.querySelector('table')"
        cut = f"[...document.querySelectorAll('pre, .scroll')].filter({wider}).length"
        assert page.evaluate(cut) == 0
        # Phases differ in black and white, too, and words of the table are not broken.
        shown = page.evaluate("[...document.querySelectorAll('svg text')].map(e => e.textContent)")
        assert {"start", "join", "run"} <= set(shown)
        heads = page.evaluate("[...document.querySelectorAll('th')].map(e => e.offsetHeight)")
        assert max(heads) < 60, heads
