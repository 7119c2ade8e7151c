"""The HTML page of a report shows at a glance which host reaches which, for any number of hosts."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import permutations
from pathlib import Path
from typing import Final

import pytest
from browser import Browser

from ddpsafe.doctor import Direction, Finding, Matrix, Report
from ddpsafe.doctor._findings import DialResult, to_copy

SVG: Final = "{http://www.w3.org/2000/svg}"


def page(count: int, closed: dict[tuple[int, int], DialResult]) -> str:
    """Return the page of a matrix in which some directions are closed."""
    directions = tuple(
        Direction(source=a, target=b, result=closed.get((a, b), "open"), latency_s=0.0002)
        for a, b in permutations(range(count), 2)
    )
    names = tuple(f"gpu-<{node:02d}>" for node in range(count))
    matrix = Matrix(hostnames=names, addresses=("",) * count, directions=directions)
    return Report(findings=(), hostname="gpu", matrix=matrix).to_html()


def cells(text: str) -> dict[str, tuple[float, float, str]]:
    """Return the cells by their tooltips: column, row and letter."""
    svg = text[text.index("<svg") : text.index("</svg>") + len("</svg>")]
    groups = ET.fromstring(svg).iter("g")
    found = {}
    for group in groups:
        rect, letter = group.find("rect"), group.find("text")
        assert rect is not None
        place = float(rect.get("x", "")), float(rect.get("y", ""))
        found[group.findtext("title", "")] = (*place, "" if letter is None else str(letter.text))
    return found


def test_closed_direction_is_in_the_row_of_the_host_that_dials() -> None:
    """Only one of a pair's two directions may be closed."""
    found = cells(page(3, {(2, 0): "dropped"}))
    assert len(found) == 6
    (closed,) = [each for title, each in found.items() if "dropped" in title]
    (other,) = [each for title, each in found.items() if title.startswith("gpu-<00> → gpu-<02>")]
    assert closed[2] == "D"
    assert (other[2], closed[0] < other[0], closed[1] > other[1]) == ("", True, True)


@pytest.mark.parametrize("count", [2, 24, 25, 64])
def test_no_two_cells_overlap(count: int) -> None:
    """Every pair has its own place at any size."""
    found = cells(page(count, {}))
    assert len({place[:2] for place in found.values()}) == count * (count - 1)


def test_legend_explains_only_results_that_occur() -> None:
    """The six other results would be noise."""
    text = page(2, {(0, 1): "large-lost"})
    assert "an MTU black hole" in text
    assert "a proxy" not in text


def a_report(count: int) -> Report:
    """Return a report with a matrix, a finding with lines to paste, and a long name."""
    directions = tuple(
        Direction(
            source=a,
            target=b,
            result="dropped" if b == 1 else "large-lost" if a == 0 else "open",
            latency_s=0.0002,
        )
        for a, b in permutations(range(count), 2)
    )
    names = tuple(f"gpu-{node:02d}.rack-7.cluster.example.org" for node in range(count))
    matrix = Matrix(hostnames=names, addresses=("",) * count, directions=directions)
    closed = Finding(
        code="DS-MESH-031",
        severity="failed",
        fact=f"No host can open a connection TO {names[1]}: dropped (no answer).",
        cause="the packet filter of the host drops what is not on its list.",
        fix=to_copy(
            "Let the packets of the job through, as root:",
            f"nft insert rule inet filter input ip saddr 10.77.0.0/24 tcp dport 32768-60999 accept    # on {names[1]}",
        ),
        hosts=names[1:2],
    )
    well = Finding(code="DS-ENV-001", severity="ok", fact="No launcher's variables are set.")
    return Report(findings=(closed, well), hostname="gpu-00", matrix=matrix, took_s=3.1)


@pytest.mark.full(but=["3-light"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("count", [3, 64])
def test_page_is_readable_in_a_browser(tmp_path: Path, count: int, *, dark: bool) -> None:
    """Nothing is cut off, all text contrasts with its background, and the browser blocks nothing."""
    file = tmp_path / "report.html"
    file.write_text(a_report(count).to_html(), encoding="utf-8")
    with Browser() as browser:
        page = browser.open(file, width=1000, dark=dark)
        assert page.overflow() == []
        assert page.poor_contrast() == []
        assert page.complaints() == []
        assert "No host can open a connection TO gpu-01" in page.text()
        assert page.screenshot(tmp_path / "page.png").stat().st_size > 10_000
