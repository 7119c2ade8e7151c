"""``ddpsafe explain``: finds what went wrong in the logs of any launcher."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import FAILURE_KINDS, ConfigError
from ddpsafe._explain.flight import FlightRecordings
from ddpsafe._explain.reader import LogReader
from ddpsafe._text import wrapped
from ddpsafe.cli import HEALTHY, UNHEALTHY, USAGE, complain, say

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from ddpsafe._explain.catalogue import Catalogue
    from ddpsafe._explain.ranking import Cause

_SHOWN: Final = 5
_LOGS: Final = {".log", ".out", ".err", ".txt", ".json", ".stacks", ".pkl", ".pickle", ""}
# The timeline of an attempt without a failure: it holds no log lines.
_NO_LOGS: Final = {"ranks.json"}
_NOT_THE_END: Final = "Nothing in the log shows that it ended the job."
_MIN_COLUMNS: Final = 60
# What a pyproject.toml has that names rules in [tool.ddpsafe.explain].
_MAY_NAME_RULES: Final = re.compile(rb"^\s*\[tool(?:\.ddpsafe\b|\])", re.MULTILINE)
_RETRY_TEXTS: Final = {
    "never": "Starting it again will not help.",
    "once": "Starting it again may help, once.",
    "yes": "It can be started again as it is.",
    "elsewhere": "Start it again on other hardware only.",
}


def explain_logs(options: argparse.Namespace) -> int:
    """Read logs, and print what went wrong, the most likely cause first."""
    try:
        reader = LogReader(_find_catalogue([Path(name) for name in options.rules]))
    except ConfigError as error:
        complain(str(error))
        return USAGE
    if not options.logs or options.logs == ["-"]:
        if sys.stdin.isatty():
            complain("reading the log from the terminal; end it with Ctrl-D")
        reader.read(sys.stdin.buffer)
    else:
        recordings = FlightRecordings()
        for path in _files(options.logs):
            try:
                report = _read_report(path)
                if report is not None:
                    reader.findings.add_report(report)
                elif not recordings.read(path):
                    with path.open("rb") as stream:
                        reader.read(stream)
            except OSError as error:  # noqa: PERF203 - a file costs far more
                complain(
                    f"ddpsafe explain: {error.filename or path} cannot be read: {error.strerror}"
                )
                # Files of a folder may vanish or be unreadable; one that was named must not.
                if str(path) in options.logs:
                    return USAGE
        for finding in recordings.findings():
            reader.findings.add(finding)
    causes = reader.causes()
    if options.json:
        say(json.dumps({"findings": [cause.as_json() for cause in causes]}, ensure_ascii=False))
    elif options.markdown:
        say("\n".join(_markdown(causes)))
    else:
        say("\n".join(_lines(causes, reader.lines)))
    return UNHEALTHY if causes else HEALTHY


def _find_catalogue(paths: list[Path]) -> Catalogue | None:
    """Return the catalogue with the user's own rules, or None if there are none."""
    project = Path("pyproject.toml")
    text = project.read_bytes() if not paths and project.is_file() else b""
    # Reading the configuration and checking rules takes pydantic, which most calls need not import.
    if _MAY_NAME_RULES.search(text) and b"explain" in text:
        from ddpsafe._config.sources import read_explain_rules

        paths = read_explain_rules()
    if not paths:
        return None
    from ddpsafe._explain.rule_files import read_rule_files

    return read_rule_files(paths)


def _read_report(path: Path) -> dict[str, Any] | None:
    """Return the report of a launch of ddpsafe, if the file is one."""
    if path.name != "report.json":
        return None
    try:
        report: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    needed = {"what", "cause", "fix", "kind", "attempt", "details"}
    is_one = isinstance(report, dict) and needed <= report.keys()
    return report if is_one and report["kind"] in FAILURE_KINDS else None


def _files(names: list[str]) -> Iterator[Path]:
    """Yield the named files, and of a folder those that look like logs; it may be a run directory."""
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = (
                file
                for file in path.rglob("*")
                if file.suffix in _LOGS
                and file.is_file()
                # report.txt has the facts of report.json once more.
                and not (file.name == "report.txt" and file.with_suffix(".json").exists())
                and file.name not in _NO_LOGS
            )
            yield from sorted(inside)
        else:
            yield path


def _lines(causes: list[Cause], lines: int) -> Iterator[str]:
    if not causes:
        read = "this line" if lines == 1 else f"these {lines} lines"
        yield f"No known failure was found in {read}."
        yield "Read the end of each rank's log: the first error of all ranks counts, not the last one."
        return
    columns = max(_MIN_COLUMNS, shutil.get_terminal_size().columns)
    for number, cause in enumerate(causes[:_SHOWN]):
        rank = "" if cause.rank is None else f" (rank {cause.rank})"
        if number == 1:
            yield "Also found, and less likely the cause:"
        yield from wrapped(f"{cause.code}{rank}: {cause.cause}", columns)
        yield from wrapped(f"What to do: {cause.fix}", columns, first="  ", others="    ")
        yield f"  {_RETRY_TEXTS[cause.retry] if cause.ended_job else _NOT_THE_END}"
        for line, text in cause.evidence:
            shown = f"  line {line}: {text}" if line else f"  {text}"
            yield shown if len(shown) <= columns else f"{shown[: columns - 1]}…"
        if cause.count > len(cause.evidence):
            yield f"  and {cause.count - len(cause.evidence)} more such lines"
        yield ""


def _markdown(causes: list[Cause]) -> Iterator[str]:
    if not causes:
        yield "No known failure was found in the log."
        return
    yield "| code | rank | cause | what to do |"
    yield "|---|---|---|---|"
    for cause in causes[:_SHOWN]:
        rank = "" if cause.rank is None else str(cause.rank)
        cells = (cause.code, rank, cause.cause, cause.fix)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""
    yield "```text"
    for _, text in causes[0].evidence:
        yield text.replace("```", "'''")
    yield "```"
