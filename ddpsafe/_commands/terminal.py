"""What a report looks like: a table on a terminal, plain lines in a pipe."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddpsafe.cli import complain, say
from ddpsafe.doctor._findings import AreaStep, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpsafe.doctor import Report
    from ddpsafe.doctor._findings import DialResult

_MARKS: Final = {"failed": "✗ failed", "warning": "! warning", "ok": "✓ ok"}
_STYLES: Final = {"failed": "bold red", "warning": "yellow", "ok": "green"}
_MOST_LINES: Final = 40


@contextlib.contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show what is being waited for: one live line on a terminal, lines elsewhere."""
    if quiet:
        yield lambda _: None
        return
    if not sys.stderr.isatty():
        # In a log only what takes long is worth a line.
        yield lambda line: None if isinstance(line, AreaStep) else complain(printable(line))
        return
    with Console(stderr=True).status("starting") as status:
        yield lambda line: status.update(Text(printable(line)))


def show_report(report: Report, *, verbose: bool) -> None:
    """Print a report; what is well only where `verbose`."""
    shown = [each for each in report.findings if verbose or each.severity != "ok"]
    on_terminal = sys.stdout.isatty()
    if on_terminal:
        table = Table(show_edge=False, pad_edge=False, expand=False)
        table.add_column("result", no_wrap=True)
        table.add_column("code", no_wrap=True)
        table.add_column("what was found")
        for finding in shown:
            mark = Text(_MARKS[finding.severity], style=_STYLES[finding.severity])
            table.add_row(mark, printable(finding.code), Text(printable(finding.fact)))
        if shown:
            Console().print(table)
    for finding in shown if not on_terminal else ():
        if finding.severity == "ok":  # the others come below, whole
            say(printable(f"ok {finding.code}: {finding.fact}"))
    if report.matrix is not None:
        hosts, directions = report.matrix.hostnames, report.matrix.directions
        closed = [each for each in directions if each.result != "open"]
        rows: dict[tuple[int, DialResult], list[str]] = {}
        for each in closed:
            rows.setdefault((each.source, each.result), []).append(hosts[each.target])
        lines = [
            printable(f"  {hosts[source]} -> {', '.join(targets)}: {result}")
            for (source, result), targets in rows.items()
        ]
        opened = len(directions) - len(closed)
        say(f"\n{len(hosts)} hosts: {opened} of {len(directions)} directions are open")
        for line in lines[:_MOST_LINES]:
            say(line)
        if len(lines) > _MOST_LINES:
            say(f"  … and {len(lines) - _MOST_LINES} more")
    for number, finding in enumerate(shown):
        if finding.severity != "ok":
            if number or on_terminal or report.matrix is not None:
                say("")
            severity = "" if on_terminal else f"{finding.severity} "
            say(severity + finding.as_text())  # not through rich: a line to copy must not be broken
    if shown:
        say("")
    fine = sum(1 for each in report.findings if each.severity == "ok")
    parts = [
        f"{len(report.failed)} failed",
        f"{len(report.warnings)} {'warning' if len(report.warnings) == 1 else 'warnings'}",
        f"{fine} passed" + ("" if verbose else " (--verbose lists them)"),
    ]
    say(f"{report.hostname}: {', '.join(parts)}, after {report.took_s:.1f} s.")
