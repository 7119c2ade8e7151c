"""The report as one HTML file: who reaches whom, and what was found. It loads nothing."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe.doctor._finding import Finding
    from ddpsafe.doctor._matrix import Direction, Matrix
    from ddpsafe.doctor._report import Report

_MEANING: Final = {
    "open": ("", "open"),
    "dropped": ("D", "dropped: no answer, packets vanish"),
    "refused": ("R", "refused: answered with a reset"),
    "no-route": ("N", "no route: the network says that it cannot be reached"),
    "wrong-peer": ("W", "wrong peer: a proxy or another job answers"),
    "large-lost": ("L", "large packets are lost: an MTU hole"),
    "absent": ("A", "absent: the host never came, or died"),
}
"""Verdict to the letter in its cell, as colours are not for everybody, and to its meaning."""

_CELL: Final = 22
_SMALL_CELL: Final = 13
_MANY: Final = 24
_TOP: Final = 26

_STYLE: Final = """
:root { color-scheme: light dark; --text: #1c2024; --back: #ffffff; --line: #d0d5db; --dim: #5b6470;
  --open: #b7e2c3; --dropped: #c2362b; --refused: #e07b00; --no-route: #8e3bb5;
  --wrong-peer: #c2187a; --large-lost: #2f6fd0; --absent: #6b7280; --self: #e9ecef; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ec; --back: #14171a; --line: #3a4149;
  --dim: #9aa4af; --open: #1f5b36; --dropped: #f0685c; --refused: #f2a13c; --no-route: #c98be6;
  --wrong-peer: #f078b6; --large-lost: #78a9f5; --absent: #9aa4af; --self: #23282d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
svg { display: block; } svg text { fill: var(--text); font: 12px system-ui, sans-serif; }
svg .letter { fill: var(--back); font-weight: 700; text-anchor: middle; }
svg .name { text-anchor: end; } svg .column { text-anchor: middle; fill: var(--dim); }
svg .small { font-size: 10px; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; list-style: none; padding: 0; }
.legend b { display: inline-block; width: 1.3em; text-align: center; border-radius: 3px;
  margin-right: .4em; color: var(--back); }
article { border-left: 4px solid var(--line); padding: .1rem 0 .1rem 1rem; margin: 1rem 0; }
article.failed { border-color: var(--dropped); } article.warning { border-color: var(--refused); }
article.ok { border-color: var(--open); }
pre { background: var(--self); padding: .6rem .8rem; overflow-x: auto; border-radius: 4px; }
.dim { color: var(--dim); }
"""


def draw(report: Report) -> str:
    """Return the page of a report."""
    title = f"ddpsafe doctor on {escape(report.hostname)}"
    verdict = f"{len(report.failed)} failed, {len(report.warnings)} warnings"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{title}</h1><p>{verdict}, after {report.took_s:.1f} s.</p>",
            *(_matrix(report.matrix) if report.matrix is not None else ()),
            *_findings(report),
            "</body></html>",
        ]
    )


def _findings(report: Report) -> Iterator[str]:
    fine = [each for each in report.findings if each.severity == "ok"]
    yield "<h2>What was found</h2>"
    yield from map(_article, [*report.failed, *report.warnings])
    yield f"<details><summary>{len(fine)} checks are well</summary>"
    yield from map(_article, fine)
    yield "</details>"


def _article(finding: Finding) -> str:
    what, *to_copy = finding.fix.splitlines() or [""]
    where = f" on {', '.join(finding.hosts)}" if finding.hosts else ""
    body = [f"<p><b>{finding.code}</b>{escape(where)}: {escape(finding.fact)}</p>"]
    if finding.cause:
        body.append(
            f"<p>Likely cause: {escape(finding.cause)}</p><p>What to do: {escape(what)}</p>"
        )
    if to_copy:
        body.append(f"<pre>{escape(chr(10).join(line.strip() for line in to_copy))}</pre>")
    if finding.cause:
        body.append(f'<p class="dim">Read on: {finding.page}</p>')
    return f'<article class="{finding.severity}">{"".join(body)}</article>'


def _matrix(matrix: Matrix) -> Iterator[str]:
    seen = {each.verdict for each in matrix.directions}
    yield "<h2>Who reaches whom</h2>"
    yield "<p>Each row dials, each column listens. Point at a cell to read it.</p>"
    yield '<ul class="legend">'
    for verdict, (letter, meaning) in _MEANING.items():
        if verdict in seen:
            yield f'<li><b style="background:var(--{verdict})">{letter or "&nbsp;"}</b>{meaning}</li>'
    yield f'</ul><div class="scroll">{"".join(_svg(matrix))}</div>'


def _svg(matrix: Matrix) -> Iterator[str]:
    count = len(matrix.hostnames)
    cell = _SMALL_CELL if count > _MANY else _CELL
    left = 14 + 7 * max((len(_label(matrix, node)) for node in range(count)), default=0)
    width, height = left + count * cell + 4, _TOP + count * cell + 4
    yield f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="Who reaches whom">'
    for node in range(count):
        yield _axis(matrix, node, cell, left)
    for direction in matrix.directions:
        yield _cell(matrix, direction, cell, left)
    yield "</svg>"


def _label(matrix: Matrix, node: int) -> str:
    return f"{node}  {matrix.hostnames[node]}"


def _axis(matrix: Matrix, node: int, cell: int, left: int) -> str:
    small = " small" if cell == _SMALL_CELL else ""
    middle = node * cell + cell // 2
    row = f'<text class="name{small}" x="{left - 8}" y="{_TOP + middle + 4}">{escape(_label(matrix, node))}</text>'
    # In narrow columns every fourth number has room.
    shown = cell == _CELL or node % 4 == 0
    column = f'<text class="column{small}" x="{left + middle}" y="{_TOP - 8}">{node}</text>'
    place = f'x="{left + node * cell + 1}" y="{_TOP + node * cell + 1}"'
    own = f'<rect {place} width="{cell - 2}" height="{cell - 2}" fill="var(--self)"/>'
    return row + (column if shown else "") + own


def _cell(matrix: Matrix, direction: Direction, cell: int, left: int) -> str:
    x, y = left + direction.target * cell + 1, _TOP + direction.source * cell + 1
    letter, meaning = _MEANING[direction.verdict]
    size = cell - 2
    text = ""
    if letter:
        small = " small" if cell == _SMALL_CELL else ""
        text = (
            f'<text class="letter{small}" x="{x + size / 2}" y="{y + size / 2 + 4}">{letter}</text>'
        )
    return (
        f"<g><title>{escape(_tooltip(matrix, direction, meaning))}</title>"
        f'<rect x="{x}" y="{y}" width="{size}" height="{size}" rx="2" fill="var(--{direction.verdict})"/>'
        f"{text}</g>"
    )


def _tooltip(matrix: Matrix, direction: Direction, meaning: str) -> str:
    parts = [
        f"{matrix.hostnames[direction.source]} → {matrix.hostnames[direction.target]}: {meaning}"
    ]
    if direction.latency_s is not None:
        parts.append(f"{direction.latency_s * 1000:.2f} ms")
    if direction.bandwidth_bytes_per_s is not None:
        parts.append(f"{direction.bandwidth_bytes_per_s / 1e6:.0f} MB/s")
    if direction.said:
        parts.append(direction.said)
    return ", ".join(parts)
