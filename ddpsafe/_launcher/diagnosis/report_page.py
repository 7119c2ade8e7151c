"""Write the reports of all attempts of a run as one HTML page, the cause first.

The page is made only from the run directory: ``report.json`` (``ranks.json`` if no rank failed) and the
ranks' logs of each attempt. So it can be made later or on another machine.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._launcher.diagnosis.report_files import RANKS, replace_file
from ddpsafe._page import draw_page
from ddpsafe._wire.spec import read_log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    Facts = Mapping[str, Any]

PAGE: Final = "report.html"

_PHASES: Final = {
    "starting": ("start", "starting: the new process imports the script"),
    "loading": ("load", "loading what it is to run"),
    "joining": ("join", "joining the process group"),
    "running": ("run", "running the training code"),
    "waiting": ("wait", "waiting for other ranks in a collective"),
    "leaving": ("leave", "leaving after that has ended"),
}
"""Each phase's word in its bar, because not every reader and printer shows the colours, and its meaning."""

_WIDTH_PX: Final = 860
_LABEL_PX: Final = 70
_ROW_PX: Final = 24
_LETTER_PX: Final = 8
_TICKS: Final = 5
_OUTPUT_BYTES: Final = 8_192
_OUTPUT_LINES: Final = 25
_STACKS_BYTES: Final = 60_000
_MAX_ATTEMPTS: Final = 50
_MAX_RANKS: Final = 256
_STYLE: Final = """
:root { --starting: #e3e6ea; --loading: #d3d9e0; --joining: #c4d7f2; --running: #cfe8d5;
  --waiting: #fff; --leaving: #e3e6ea; }
@media (prefers-color-scheme: dark) { :root { --starting: #2b3036; --loading: #353c44;
  --joining: #2b4468; --running: #1f4d30; --waiting: #14171a; --leaving: #2b3036; } }
.cause { border-left: 5px solid var(--bad); padding: .1rem 0 .1rem 1rem; }
table { border-collapse: collapse; } td, th { text-align: left; vertical-align: top;
  padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); overflow-wrap: normal; }
td { min-width: 2rem; max-width: 30rem; }
svg { max-width: 100%; height: auto; }
svg rect { stroke: var(--line); } svg line { stroke: var(--line); }
svg .end { stroke: var(--bad); stroke-width: 3; } svg .waiting { stroke-dasharray: 4 3; }
@media print { details { display: block; } }
"""

_TEMPLATE: Final = """\
{% for attempt in attempts %}{% if loop.first %}
<div{% if attempt.has_failed %} class="cause"{% endif %}><p><b>{{ attempt.report.what | printable }}</b></p>
{% if attempt.report.cause %}<p>Likely cause: {{ attempt.report.cause | printable }}</p>{% endif %}
{% if attempt.report.fix %}<p>What to do: {{ attempt.report.fix | printable }}</p>{% endif %}</div>
{% if attempt.report.details %}<pre>{{ attempt.report.details | join("\n") | printable }}</pre>{% endif %}
{% endif %}{% endfor %}
<p class="dim">{{ summary | printable }}</p>
{% if legend %}<h2>Timeline</h2>
<p>{% for word, meaning in legend %}<b>{{ word }}</b>: {{ meaning }}{{ "; " if not loop.last }}{% endfor %}.
The thick line is a rank's end, the thin one its last step.</p>{% endif %}
{% for attempt in attempts %}
<h2>Attempt {{ attempt.number }}</h2>
{% if not loop.first %}<p>{{ attempt.report.what | printable }}</p>{% endif %}
{% if attempt.chart %}<div class="scroll"><svg viewBox="0 0 {{ attempt.chart.width }} {{ attempt.chart.height }}" width="{{ attempt.chart.width }}" height="{{ attempt.chart.height }}" role="img" aria-label="Timeline of attempt {{ attempt.number }}">
{% for row in attempt.chart.rows %}<text x="0" y="{{ row.y + 15 }}">{{ row.label }}</text>
{% for bar in row.bars %}<g><title>{{ bar.title }}</title><rect class="{{ bar.phase }}" x="{{ bar.x }}" y="{{ row.y + 2 }}" width="{{ bar.width }}" height="18" fill="var(--{{ bar.phase }})"/>{% if bar.word %}<text x="{{ bar.x + 4 }}" y="{{ row.y + 15 }}">{{ bar.word }}</text>{% endif %}</g>
{% endfor %}{% if row.step_x is not none %}<line x1="{{ row.step_x }}" x2="{{ row.step_x }}" y1="{{ row.y + 6 }}" y2="{{ row.y + 16 }}"/>{% endif %}
<line class="end" x1="{{ row.end_x }}" x2="{{ row.end_x }}" y1="{{ row.y }}" y2="{{ row.y + 22 }}"/>
{% endfor %}{% for tick in attempt.chart.ticks %}<text x="{{ tick.x }}" y="{{ attempt.chart.height - 4 }}">{{ tick.label }}</text>{% endfor %}</svg></div>{% endif %}
{% for late in attempt.report.stragglers or [] %}<p>Before that, {{ late.text | printable }}.</p>
{% endfor %}<div class="scroll"><table><tr><th>rank</th><th>host</th><th>status</th><th>steps</th><th>where it was</th><th>collective</th></tr>
{% for rank in attempt.ranks %}<tr><td>{{ rank.rank }}</td><td>{{ rank.hostname | printable }}</td><td>{{ rank.status | printable }}{% if rank.signal %} ({{ rank.signal | printable }}){% endif %}</td><td>{{ rank.steps }}</td><td>{{ rank.where | printable }}</td><td>{{ rank.last | printable }}</td></tr>
{% endfor %}</table></div>
{% for rank in attempt.ranks %}{% if rank.raised or rank.output or rank.stacks %}
<details{% if rank.rank == attempt.report.rank or rank.rank in (attempt.report.missing_ranks or []) %} open{% endif %}><summary>rank {{ rank.rank }}: exception, output and stacks</summary>
{% if rank.raised %}<pre>{{ rank.raised.traceback | printable }}</pre>{% endif %}
{% if rank.output %}<p>Last lines of its stderr:</p><pre>{{ rank.output | printable }}</pre>{% endif %}
{% if rank.stacks %}<p>All threads, the last call first:</p><pre>{{ rank.stacks | printable }}</pre>{% endif %}
</details>{% endif %}{% endfor %}{% endfor %}
"""


def write_page(run_dir: Path, path: Path | None = None) -> Path:
    """Write the page of a run directory, there as ``report.html`` by default, whole or not at all; return its path.

    Raises:
        OSError: The file cannot be written.
    """
    path = path or run_dir / PAGE
    replace_file(path, draw(run_dir))
    return path


def draw(run_dir: Path) -> str:
    """Return the page of a run directory, the newest attempt first."""
    attempts = [_attempt(path) for path in _reports(run_dir)]
    count = sum(attempt["has_failed"] for attempt in attempts)
    failed = f"{count} failed attempt{'s' if count != 1 else ''}"
    newest = attempts[0]["report"] if attempts else {}
    phases = {
        bar["phase"]
        for attempt in attempts
        for row in attempt["chart"]["rows"]
        for bar in row["bars"]
    }
    return draw_page(
        _TEMPLATE,
        style=_STYLE,
        title=newest.get("error")
        or ("the newest attempt did not fail" if count else "no attempt of this run has failed"),
        has_all=False,  # what a damaged file lacks is left out
        summary=f"{failed}, {newest.get('written_at', '')} {run_dir}",
        attempts=attempts,
        legend=[_PHASES[phase] for phase in _PHASES if phase in phases],
    )


def _reports(run_dir: Path) -> list[Path]:
    reports = {
        _number(path): path
        for name in (RANKS, "report.json")
        for path in run_dir.glob(f"attempt-*/{name}")
        if _number(path)
    }
    return [reports[number] for number in sorted(reports, reverse=True)][:_MAX_ATTEMPTS]


def _number(path: Path) -> int:
    text = path.parent.name.removeprefix("attempt-")
    return int(text) if text.isdecimal() else 0


def _attempt(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        report = content if isinstance(content, dict) else {}
    report.setdefault("what", report.get("message", f"{path} cannot be read"))
    ranks = [facts for facts in report.get("ranks", []) if isinstance(facts, dict)][:_MAX_RANKS]
    return {
        "number": _number(path),
        "has_failed": path.name != RANKS,
        "report": report,
        "ranks": [_rank(facts, path.parent) for facts in ranks],
        "chart": _chart(ranks),
    }


def _rank(facts: Facts, folder: Path) -> dict[str, Any]:
    stem = folder / f"rank-{facts.get('rank')}"
    output = read_log(stem.with_suffix(".err"), _OUTPUT_BYTES)
    collectives = facts.get("collectives") or []
    last = collectives[-1] if collectives else None
    return {
        **facts,
        "last": last
        and f"{'after' if last['done'] else 'in'} {last['name']} number {last['number']}",
        "output": "\n".join(output.splitlines()[-_OUTPUT_LINES:]),
        "stacks": read_log(stem.with_suffix(".stacks"), _STACKS_BYTES).strip(),
    }


def _chart(ranks: Sequence[Facts]) -> dict[str, Any]:
    """Return the coordinates of an attempt's timeline."""
    timelines = [facts["timeline_s"] for facts in ranks if facts.get("timeline_s")]
    lasts_s: float = max([1e-3, *(line.get("end", 0.0) for line in timelines)])
    scale = (_WIDTH_PX - _LABEL_PX) / lasts_s

    def x(moment_s: float) -> float:
        return float(round(_LABEL_PX + min(max(moment_s, 0.0), lasts_s) * scale, 1))

    rows: list[dict[str, Any]] = []
    for facts in ranks:
        line = facts.get("timeline_s")
        if not line:
            continue
        end_s = line.get("end", lasts_s)
        begun = sorted((line[name], name) for name in _PHASES if name in line)
        bars = []
        for (from_s, phase), after in zip(begun, [*begun[1:], (end_s, "")], strict=True):
            width = max(1.0, round(x(min(after[0], end_s)) - x(from_s), 1))
            word = _PHASES[phase][0]
            bars.append(
                {
                    "phase": phase,
                    "x": x(from_s),
                    "width": width,
                    "word": word if width > _LETTER_PX * len(word) else "",
                    "title": f"{_PHASES[phase][1]}: {from_s:.1f} s to {after[0]:.1f} s",
                }
            )
        rows.append(
            {
                "y": len(rows) * _ROW_PX,
                "label": f"rank {facts.get('rank')}",
                "bars": bars,
                "step_x": x(line["step"]) if "step" in line else None,
                "end_x": x(end_s),
            }
        )
    ticks_s = [lasts_s * number / _TICKS for number in range(_TICKS + 1)] if rows else []
    return {
        "width": _WIDTH_PX + 50,
        "height": len(rows) * _ROW_PX + 22,
        "rows": rows,
        "ticks": [{"x": x(tick_s), "label": f"{tick_s:.1f} s"} for tick_s in ticks_s],
    }
