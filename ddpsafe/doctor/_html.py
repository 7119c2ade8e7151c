"""The report as one HTML page with the matrix and the findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ddpsafe._page import draw_page

if TYPE_CHECKING:
    from ddpsafe.doctor._findings import Direction, Matrix, Report

_MEANING: Final = {
    "open": ("", "open"),
    "dropped": ("D", "dropped: no answer, packets are lost"),
    "refused": ("R", "refused: answered with a reset"),
    "no-route": ("N", "no route: the network reports it as unreachable"),
    "wrong-peer": ("W", "wrong peer: a proxy or another job answers"),
    "large-lost": ("L", "large packets are lost: an MTU black hole"),
    "absent": ("A", "absent: the host never joined, or died"),
}
"""The letter in the cell of a result, for readers who cannot tell the colours apart, and its meaning."""

_CELL_PX: Final = 22
_SMALL_CELL_PX: Final = 13
_MOST_LARGE_CELLS: Final = 24
_TOP_PX: Final = 26

_STYLE: Final = """
:root { --open: #b7e2c3; --dropped: #c2362b; --refused: #e07b00; --no-route: #8e3bb5;
  --wrong-peer: #c2187a; --large-lost: #2f6fd0; --absent: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --open: #1f5b36; --dropped: #f0685c; --refused: #f2a13c;
  --no-route: #c98be6; --wrong-peer: #f078b6; --large-lost: #78a9f5; --absent: #9aa4af; } }
svg { display: block; }
svg .letter { fill: var(--back); font-weight: 700; text-anchor: middle; }
svg .name { text-anchor: end; } svg .column { text-anchor: middle; fill: var(--dim); }
svg .small { font-size: 10px; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; list-style: none; padding: 0; }
.legend b { display: inline-block; width: 1.3em; text-align: center; border-radius: 3px;
  margin-right: .4em; color: var(--back); }
article { border-left: 4px solid var(--line); padding: .1rem 0 .1rem 1rem; margin: 1rem 0; }
article.failed { border-color: var(--dropped); } article.warning { border-color: var(--refused); }
article.ok { border-color: var(--open); }
"""


_PAGE: Final = """\
<p>{{ report.failed | length }} failed, {{ report.warnings | length }} warnings, after {{ "%.1f" | format(report.took_s) }} s.</p>
{% macro article(finding) %}
{% set lines = finding.fix.split("\n") %}
<article class="{{ finding.severity }}">
<p><b>{{ finding.code | printable }}</b>{% if finding.hosts %} on {{ finding.hosts | join(", ") | printable }}{% endif %}: {{ finding.fact | printable }}</p>
{% if finding.cause %}
<p>Likely cause: {{ finding.cause | printable }}</p><p>What to do: {{ lines[0] | printable }}</p>
{% endif %}
{% if lines[1:] %}<pre>{% for line in lines[1:] %}{{ line.strip() | printable }}
{% endfor %}</pre>{% endif %}
{% if finding.cause %}<p class="dim">Read on: {{ finding.page | printable }}</p>{% endif %}
</article>
{% endmacro %}
{% if matrix %}
<h2>Which node reaches which</h2>
<p>Rows connect, columns listen. Hover over a cell for details.</p>
<ul class="legend">
{% for entry in matrix.legend %}<li><b style="background:var(--{{ entry.result }})">{{ entry.letter or "\u00a0" }}</b>{{ entry.meaning }}</li>
{% endfor %}</ul><div class="scroll">
<svg width="{{ matrix.width }}" height="{{ matrix.height }}" viewBox="0 0 {{ matrix.width }} {{ matrix.height }}" role="img" aria-label="Which node reaches which">
{% for host in matrix.axis %}<text class="name{{ matrix.small }}" x="{{ matrix.left - 8 }}" y="{{ host.y + 4 }}">{{ host.label | printable }}</text>
{% if host.column_x is not none %}<text class="column{{ matrix.small }}" x="{{ host.column_x }}" y="{{ matrix.top - 8 }}">{{ host.node }}</text>{% endif %}
<rect x="{{ host.own_x }}" y="{{ host.own_y }}" width="{{ matrix.size }}" height="{{ matrix.size }}" fill="var(--box)"/>
{% endfor %}
{% for cell in matrix.cells %}<g><title>{{ cell.title | printable }}</title><rect x="{{ cell.x }}" y="{{ cell.y }}" width="{{ matrix.size }}" height="{{ matrix.size }}" rx="2" fill="var(--{{ cell.result }})"/>
{% if cell.letter %}<text class="letter{{ matrix.small }}" x="{{ cell.x + matrix.size / 2 }}" y="{{ cell.y + matrix.size / 2 + 4 }}">{{ cell.letter }}</text>{% endif %}</g>
{% endfor %}</svg></div>
{% endif %}
<h2>What was found</h2>
{% for finding in report.failed + report.warnings %}{{ article(finding) }}{% endfor %}
<details><summary>{{ passed | length }} passed</summary>
{% for finding in passed %}{{ article(finding) }}{% endfor %}
</details>
"""


def draw(report: Report) -> str:
    """Return the report as an HTML page."""
    return draw_page(
        _PAGE,
        style=_STYLE,
        title=f"doctor on {report.hostname}",
        report=report,
        matrix=None if report.matrix is None else _layout(report.matrix),
        passed=[finding for finding in report.findings if finding.severity == "ok"],
    )


def _layout(matrix: Matrix) -> dict[str, Any]:
    """Return the positions of all parts of the matrix, in pixels."""
    count = len(matrix.hostnames)
    cell = _SMALL_CELL_PX if count > _MOST_LARGE_CELLS else _CELL_PX
    labels = [f"{node}  {name}" for node, name in enumerate(matrix.hostnames)]
    left = 14 + 7 * max(map(len, labels), default=0)
    results = {direction.result for direction in matrix.directions}
    return {
        "width": left + count * cell + 4,
        "height": _TOP_PX + count * cell + 4,
        "left": left,
        "top": _TOP_PX,
        "size": cell - 2,
        "small": " small" if cell == _SMALL_CELL_PX else "",
        "legend": [
            {"result": result, "letter": letter, "meaning": meaning}
            for result, (letter, meaning) in _MEANING.items()
            if result in results
        ],
        "axis": [
            {
                "node": node,
                "label": label,
                "y": _TOP_PX + node * cell + cell // 2,
                # Narrow columns have room for every fourth number only.
                "column_x": left + node * cell + cell // 2
                if cell == _CELL_PX or node % 4 == 0
                else None,
                "own_x": left + node * cell + 1,
                "own_y": _TOP_PX + node * cell + 1,
            }
            for node, label in enumerate(labels)
        ],
        "cells": [
            {
                "x": left + direction.target * cell + 1,
                "y": _TOP_PX + direction.source * cell + 1,
                "result": direction.result,
                "letter": _MEANING[direction.result][0],
                "title": _tooltip(matrix, direction),
            }
            for direction in matrix.directions
        ],
    }


def _tooltip(matrix: Matrix, direction: Direction) -> str:
    meaning = _MEANING[direction.result][1]
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
