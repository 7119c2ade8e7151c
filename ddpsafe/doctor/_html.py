"""The report as one HTML page with the matrix and the findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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

_MOST_LARGE_CELLS: Final = 24

_STYLE: Final = """
:root { --open: #b7e2c3; --dropped: #c2362b; --refused: #e07b00; --no-route: #8e3bb5;
  --wrong-peer: #c2187a; --large-lost: #2f6fd0; --absent: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --open: #1f5b36; --dropped: #f0685c; --refused: #f2a13c;
  --no-route: #c98be6; --wrong-peer: #f078b6; --large-lost: #78a9f5; --absent: #9aa4af; } }
table { border-collapse: separate; border-spacing: 2px; overflow-wrap: normal; }
th { font-weight: 400; font-size: 12px; text-align: right; white-space: nowrap; }
td { min-width: 20px; height: 20px; padding: 0; border-radius: 2px; background: var(--box);
  color: var(--back); font: 700 12px/1 system-ui, sans-serif; text-align: center; }
.small { border-spacing: 1px; } .small td { min-width: 12px; height: 12px; }
.small td, .small th { font-size: 10px; padding: 0; }
tr:first-child th { text-align: center; color: var(--dim); }
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
{% if nodes %}
<h2>Which node reaches which</h2>
<p>Rows connect, columns listen. Hover over a cell for details.</p>
<ul class="legend">
{% for result, (letter, meaning) in legend.items() %}<li><b style="background:var(--{{ result }})">{{ letter or "\u00a0" }}</b>{{ meaning }}</li>
{% endfor %}</ul><div class="scroll"><table class="{{ size }}">
<tr><th></th>{% for node in nodes %}<th>{{ "" if size and loop.index0 % 4 else node }}</th>{% endfor %}</tr>
{% for source in nodes %}<tr><th>{{ source }}\u2002{{ report.matrix.hostnames[source] | printable }}</th>
{% for target in nodes %}{% set cell = cells.get((source, target)) %}
<td{% if cell %} style="background:var(--{{ cell.result }})" title="{{ cell.title | printable }}">{{ legend[cell.result][0] }}{% else %}>{% endif %}</td>
{% endfor %}</tr>
{% endfor %}</table></div>
{% endif %}
<h2>What was found</h2>
{% for finding in report.failed + report.warnings %}{{ article(finding) }}{% endfor %}
<details><summary>{{ passed | length }} passed</summary>
{% for finding in passed %}{{ article(finding) }}{% endfor %}
</details>
"""


def draw(report: Report) -> str:
    """Return the report as an HTML page."""
    matrix = report.matrix
    directions = () if matrix is None else matrix.directions
    # Of many hosts, only closed directions are known: those that have none are left out.
    nodes = sorted({end for each in directions for end in (each.source, each.target)})
    results = {direction.result for direction in directions}
    return draw_page(
        _PAGE,
        style=_STYLE,
        title=f"doctor on {report.hostname}",
        report=report,
        nodes=nodes,
        size="small" if len(nodes) > _MOST_LARGE_CELLS else "",
        legend={result: _MEANING[result] for result in _MEANING if result in results},
        cells={
            (each.source, each.target): {"result": each.result, "title": _tooltip(matrix, each)}
            for each in directions
            if matrix is not None
        },
        passed=[finding for finding in report.findings if finding.severity == "ok"],
    )


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
