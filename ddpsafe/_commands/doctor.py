"""``ddpsafe doctor``: turns options into fields, and shows the report on a terminal or in a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import PydanticCustomError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddpsafe import doctor
from ddpsafe._config import LaunchConfig
from ddpsafe._config.durations import parse_duration
from ddpsafe._config.endpoint import parse_endpoint
from ddpsafe._config.problems import find_near
from ddpsafe._errors import ConfigError, DDPSafeError, Explanation
from ddpsafe._job.secret import find_job_secret
from ddpsafe._text import printable
from ddpsafe._world import find_world
from ddpsafe.cli import HEALTHY, UNHEALTHY, USAGE, complain, on_terminal, say
from ddpsafe.doctor._findings import AreaStep, find_pages

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from ddpsafe._world import World
    from ddpsafe.doctor import Report
    from ddpsafe.doctor._findings import DialResult

_LAST_PORT: Final = 65535
_MARKS: Final = {"failed": "✗ failed", "warning": "! warning", "ok": "✓ ok"}
_STYLES: Final = {"failed": "bold red", "warning": "yellow", "ok": "green"}
_MAX_MATRIX_LINES: Final = 40


def examine(options: Namespace) -> int:
    """Run the checks that the options select, and show the report."""
    if options.explain is not None:
        return _explain(options.explain)
    try:
        try:
            world = find_world(os.environ)
        except ConfigError:  # reported as a finding, DS-ENV-001
            world = None
        if world is not None and world.local_rank > 0:
            return HEALTHY  # the first process of each node checks it
        config, fields = _read_options(options, world)
        report = _examine(options, config, fields)
        if options.html:
            Path(options.html).write_text(report.to_html(), encoding="utf-8")
    except DDPSafeError as error:
        complain(str(error))
        return USAGE if isinstance(error, ConfigError) else UNHEALTHY
    except OSError as error:
        complain(f"{options.html} cannot be written: {error.strerror}.")
        return USAGE
    if options.json:
        say(report.to_json())
    else:
        show_report(report, verbose=options.verbose)
    return HEALTHY if report.healthy else UNHEALTHY


def _explain(code: str) -> int:
    """Print the page of a finding."""
    pages = find_pages()
    if code.upper() not in pages:
        near = find_near(code.upper(), pages)
        hint = f" Did you mean {near}?" if near else " Codes look like DS-ENV-001."
        complain(f"--explain: there is no finding {code!r}.{hint}")
        return USAGE
    say(pages[code.upper()].read_text(encoding="utf-8").rstrip())
    return HEALTHY


def _examine(options: Namespace, config: LaunchConfig | None, fields: dict[str, Any]) -> Report:
    try:
        timeout = parse_duration(options.timeout)
    except PydanticCustomError as error:
        raise _bad_timeout(options.timeout, error.message()) from None
    if not isinstance(timeout, timedelta):
        raise _bad_timeout(options.timeout, "it is not a duration")
    path = options.secret_file
    secret = None if path is None else find_job_secret(path, setting="--secret-file")
    with progress(quiet=options.json and not options.verbose) as say_progress:
        return doctor.run(
            config,
            mesh=False if options.no_mesh else None,
            timeout=timeout,
            on_progress=say_progress,
            secret=secret,
            **fields,
        )


def _bad_timeout(text: str, why: str) -> ConfigError:
    fix = 'write seconds (30) or a text such as "30s" or "2min".'
    return ConfigError(Explanation(f"--timeout: got {text!r}.", cause=f"{why}.", fix=fix))


def _read_options(
    options: Namespace, world: World | None
) -> tuple[LaunchConfig | None, dict[str, Any]]:
    config = LaunchConfig.from_toml(options.config) if options.config else None
    names = ("nnodes", "node_rank", "backend", "nproc_per_node")
    given = {name: getattr(options, name) for name in names}
    fields = {
        **_of_launcher(world),
        **{name: value for name, value in given.items() if value is not None},
    }
    known = fields.pop("endpoint", None)
    rendezvous = {
        name: value
        for name, value in (
            ("endpoint", options.rdzv_endpoint or known),
            ("interface", options.interface),
        )
        if value is not None
    }
    return config, {**fields, **({"rendezvous": rendezvous} if rendezvous else {})}


def next_port(endpoint: str) -> str:
    """Return the endpoint with the next port.

    Raises:
        ConfigError: It has the highest port.
    """
    host, _, port = endpoint.rpartition(":")
    if int(port) >= _LAST_PORT:
        message = f"The nodes check each other on the port after that of {endpoint}: there is none."
        raise ConfigError(message)
    return f"{host}:{int(port) + 1}"


def _of_launcher(world: World | None) -> dict[str, Any]:
    """Return the fields that srun or torchrun gives about the nodes; none for a single node."""
    if world is None or world.nnodes == 1:
        return {}
    from ddpsafe._worker.join.store_endpoint import find_endpoint

    endpoint = find_endpoint(world, os.environ)
    # If the endpoint is served, torchrun's own store occupies MASTER_PORT.
    where = next_port(str(endpoint)) if endpoint.is_served else str(endpoint)
    try:
        parse_endpoint(where)
    except ValueError:  # without an endpoint the nodes cannot meet; DS-ENV-003 reports it
        return {}
    return {
        "nnodes": world.nnodes,
        "node_rank": world.node_rank,
        "nproc_per_node": world.local_world_size,
        "endpoint": where,
    }


@contextlib.contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show what the checks are waiting for: one live line on a terminal, lines elsewhere."""
    if quiet:
        yield lambda _: None
        return
    if sys.stderr is None or not sys.stderr.isatty():
        # In a log, only steps that take long are worth a line.
        yield lambda line: None if isinstance(line, AreaStep) else complain(printable(line))
        return
    with Console(stderr=True).status("starting") as status:
        yield lambda line: status.update(Text(printable(line)))


def show_report(report: Report, *, verbose: bool) -> None:
    """Print a report; passed checks only if `verbose`."""
    findings = [finding for finding in report.findings if verbose or finding.severity != "ok"]
    is_terminal = on_terminal()
    if is_terminal:
        table = Table(show_edge=False, pad_edge=False, expand=False)
        table.add_column("result", no_wrap=True)
        table.add_column("code", no_wrap=True)
        table.add_column("what was found")
        for finding in findings:
            mark = Text(_MARKS[finding.severity], style=_STYLES[finding.severity])
            table.add_row(mark, printable(finding.code), Text(printable(finding.fact)))
        if findings:
            Console().print(table)
    else:
        for finding in findings:
            if finding.severity == "ok":  # the others are printed below in full
                say(printable(f"ok {finding.code}: {finding.fact}"))
    if report.matrix is not None:
        hosts, directions = report.matrix.hostnames, report.matrix.directions
        closed = [direction for direction in directions if direction.result != "open"]
        rows: dict[tuple[int, DialResult], list[str]] = {}
        for direction in closed:
            key = (direction.source, direction.result)
            rows.setdefault(key, []).append(hosts[direction.target])
        lines = [
            printable(f"  {hosts[source]} -> {', '.join(targets)}: {result}")
            for (source, result), targets in rows.items()
        ]
        opened = len(directions) - len(closed)
        say(f"\n{len(hosts)} hosts: {opened} of {len(directions)} directions are open")
        for line in lines[:_MAX_MATRIX_LINES]:
            say(line)
        if len(lines) > _MAX_MATRIX_LINES:
            say(f"  … and {len(lines) - _MAX_MATRIX_LINES} more")
    for number, finding in enumerate(findings):
        if finding.severity != "ok":
            if number or is_terminal or report.matrix is not None:
                say("")
            severity = "" if is_terminal else f"{finding.severity} "
            say(severity + finding.as_text())  # not through rich, which wraps commands to copy
    if findings:
        say("")
    passed = sum(1 for finding in report.findings if finding.severity == "ok")
    parts = [
        f"{len(report.failed)} failed",
        f"{len(report.warnings)} {'warning' if len(report.warnings) == 1 else 'warnings'}",
        f"{passed} passed" + ("" if verbose else " (--verbose lists them)"),
    ]
    say(f"{report.hostname}: {', '.join(parts)}, after {report.took_s:.1f} s.")
