"""``ddpsafe status``: shows from another terminal what the ranks of running launches do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import time
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from ddpsafe import _gpus
from ddpsafe._commands import openmetrics
from ddpsafe._launcher.watch.status_socket import SOCKET, ask
from ddpsafe._text import printable, wrapped
from ddpsafe.cli import HEALTHY, UNHEALTHY, on_terminal, say

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    Facts = dict[str, Any]

_RANKS_LOG: Final = re.compile(r"(?P<run>.+)/attempt-\d+/rank-\d+\.out(?: \(deleted\))?")
_WATCH_INTERVAL_S: Final = 1.0
_CPU_SAMPLE_S: Final = 0.1
_MIB: Final = 1 << 20
_CLEAR: Final = "\x1b[H\x1b[2J"
_COLUMNS: Final = ("rank", "pid", "phase", "steps", "steps/s", "last step", "cpu", "memory")


def show_status(options: argparse.Namespace) -> int:
    """Show one launch, or all of this user on this host."""
    try:
        while True:
            folders = [Path(options.run_dir)] if options.run_dir is not None else find_run_dirs()
            launches = [_read_any(folder, stacks=options.stacks) for folder in folders]
            # Between two attempts a launch has no socket, so it looks ended while ranks exit.
            if options.run_dir is None:
                launches = [launch for launch in launches if launch["state"] != "ended"]
            if options.json:
                say(json.dumps({"launches": launches}, ensure_ascii=False))
            elif options.openmetrics:
                say(openmetrics.render(launches))
            else:
                text = "\n\n".join("\n".join(_lines(launch)) for launch in launches)
                text = text or "no launch of this user runs on this host"
                say(f"{_CLEAR}{text}" if options.watch and on_terminal() else text)
            is_running = any(launch["state"] == "running" for launch in launches)
            code = HEALTHY if is_running else UNHEALTHY
            if not options.watch or code != HEALTHY:
                return code
            time.sleep(_WATCH_INTERVAL_S)
    except KeyboardInterrupt:
        return HEALTHY


def find_run_dirs() -> list[Path]:
    """Return the run directories of this user's launches on this host, found by their ranks."""
    run_dirs = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid != os.geteuid():
                continue
            # No launch has to register: a rank's standard output is a log file in the run directory.
            match = _RANKS_LOG.fullmatch(os.readlink(process / "fd" / "1"))  # noqa: PTH115 - text
            if match is not None:
                run_dirs.add(Path(match["run"]))
    return sorted(run_dirs)


def _read_any(folder: Path, *, stacks: bool) -> Facts:
    """Return the facts from a launcher in a run directory, of which there is one for each node on this host."""
    facts = _read(folder, stacks=stacks)
    # On a shared disk, a launcher of another host cannot be reached.
    for path in sorted(folder.glob(f"node-*{socket.gethostname()}/{SOCKET}")):
        of_node = facts if facts["state"] == "running" else _read(path.parent, stacks=stacks)
        if of_node["state"] == "running" or facts["state"] == "ended":
            facts = of_node
    return facts


def _read(folder: Path, *, stacks: bool) -> Facts:
    """Return the facts about the launch in a run directory.

    ``state`` is ``running``, ``ended``, ``dead`` (its launcher was killed), ``silent`` (the launcher
    does not answer), or ``unknown``.
    """
    place = {"run_dir": str(folder)}
    try:
        facts = ask(folder, stacks=stacks)
    except FileNotFoundError:
        report = _find_report(folder)
        has_been = report is not None or folder.is_dir()
        return {**place, "state": "ended" if has_been else "unknown", "report": report}
    except ConnectionRefusedError:
        return {**place, "state": "dead", "report": _find_report(folder)}
    except OSError as error:
        return {**place, "state": "silent", "error": str(error)}
    usage = _read_usage([rank["pid"] for rank in facts["ranks"] if rank["pid"] is not None])
    gpus = _gpus.read_use()
    for rank in facts["ranks"]:
        rank.update(usage.get(rank["pid"], {}))
        use = gpus.get(rank["pid"])
        rank["gpu_memory_bytes"] = None if use is None else use.memory_bytes
        rank["gpus"] = [] if use is None else [gpu_facts(reading) for reading in use.gpus]
    return {**facts, "state": "running"}


def _find_report(folder: Path) -> Facts | None:
    """Return the report of the newest failed attempt."""
    reports = folder.glob("attempt-*/report.json")
    # The numbers have no leading zeros: attempt-10 is newer than attempt-9.
    for path in sorted(reports, key=lambda path: (len(path.parent.name), path), reverse=True):
        with contextlib.suppress(OSError, ValueError):
            report = json.loads(path.read_text(encoding="utf-8"))
            names = ("error", "kind", "message", "attempt", "exit_code")
            return {"path": str(path), **{name: report.get(name) for name in names}}
    return None


def _read_usage(pids: Iterable[int]) -> dict[int, Facts]:
    """Return CPU and memory use of processes, including their children."""
    families: dict[int, list[psutil.Process]] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            families[pid] = [process, *process.children(recursive=True)]
    # cpu_percent() compares with its previous call, so the first one returns 0.
    for process in (process for family in families.values() for process in family):
        with contextlib.suppress(psutil.Error):
            process.cpu_percent()
    time.sleep(_CPU_SAMPLE_S)
    usage: dict[int, Facts] = {}
    for pid, family in families.items():
        cpu = memory = 0.0
        for process in family:
            with contextlib.suppress(psutil.Error):
                cpu += process.cpu_percent()
                memory += process.memory_info().rss
        usage[pid] = {"cpu_percent": round(cpu, 1), "memory_bytes": int(memory)}
    return usage


def _lines(launch: Facts) -> list[str]:
    folder, state = printable(launch["run_dir"]), launch["state"]
    if state == "running":
        head = (
            f"{launch['world_size']} ranks, attempt {launch['attempt']}, launcher {launch['pid']}, "
            f"{launch['run_dir']}"
        )
        if launch["longest_step_s"]:
            head += f", longest time between steps {launch['longest_step_s']:.1f} s"
        for resumed in sorted({rank.get("resumed_from", "") for rank in launch["ranks"]} - {""}):
            head += f", continued from {resumed}"
        stragglers = launch.get("stragglers", ())
        waits = [*launch.get("unanswered", ())]
        waits += [straggler["text"] for straggler in stragglers]
        # Add the GPUs of the ranks that others wait for, and GPUs that are throttled.
        late = {rank for straggler in stragglers for rank in straggler.get("ranks", ())}
        waits += [
            f"rank {rank['rank']} is on {gpu['text']}"
            for rank in launch["ranks"]
            for gpu in rank.get("gpus", ())
            if rank["rank"] in late or gpu["is_throttled"]
        ]
        has_gpus = any(rank.get("gpu_memory_bytes") for rank in launch["ranks"])
        hosts = {rank["hostname"] for rank in launch["ranks"]}
        if len(hosts) > 1:
            # Show the host beside the pid. The pid is unknown for processes on other hosts.
            ranks = [
                {**rank, "pid": f"{rank['hostname']} {rank['pid'] or ''}".rstrip()}
                for rank in launch["ranks"]
            ]
            launch = {**launch, "ranks": ranks}
        columns = [*_COLUMNS, *(["gpu memory"] if has_gpus else []), "collective", "where"]
        rows = [_row(rank, has_gpus=has_gpus) for rank in launch["ranks"]]
        widths = [
            max(len(row[column]) for row in [columns, *rows]) for column in range(len(columns) - 1)
        ]
        table = [
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]
            )
            for row in [columns, *rows]
        ]
        width = shutil.get_terminal_size().columns
        if max(map(len, table)) > width:  # what a rank does, and where, in lines of its own
            table = []
            for row in [columns, *rows]:
                cells = (cell.ljust(size) for cell, size in zip(row[:-2], widths, strict=False))
                table.append("  ".join(cells).rstrip())
                doing = ", ".join(filter(None, row[-2:])) if row is not columns else ""
                table += wrapped(doing, width, first=" " * 6, others=" " * 8)
        stacks = []
        for rank in launch["ranks"]:
            for what, kind in (("threads", "thread"), ("loader_workers", "DataLoader worker")):
                for thread in filter(itemgetter("frames"), rank[what]):
                    name = f"{kind} {thread['name']}"
                    stacks += ["", f"rank {rank['rank']}, {name}, the last call first:"]
                    stacks += [
                        f"  {file}:{line} in {call}" for file, line, call in thread["frames"]
                    ]
        below = (part for line in waits for part in wrapped(line, width))
        return [printable(line) for line in [*wrapped(head, width), *table, *below, *stacks]]
    line = {
        "ended": f"no launch is running in {folder}",
        "dead": f"the launcher of {folder} died without cleaning up; its ranks end with it",
        "silent": f"the launcher of {folder} does not answer: {launch.get('error')}",
        "unknown": f"there is no directory {folder}",
    }[state]
    report = launch.get("report")
    if not report:
        return [line]
    first = str(report["message"]).partition("\n")[0]
    return [
        line,
        printable(f"attempt {report['attempt']} failed: {report['error']}: {first}"),
        printable(f"see {report['path']}"),
    ]


def gpu_facts(reading: _gpus.GpuReading) -> Facts:
    """Return the facts about a GPU: what was read, and what follows from it."""
    facts = asdict(reading)
    del facts["slowdowns"]
    derived = {"slowed_by": reading.slowed_by, "is_throttled": reading.is_throttled}
    return {**facts, **derived, "text": str(reading)}


def _row(rank: Facts, *, has_gpus: bool) -> list[str]:
    state = "stopped" if rank["state"] in ("T", "stopped") else rank["phase"]
    ago, collective = rank["last_step_s"], rank["collective"]
    gpu = [_mib(rank.get("gpu_memory_bytes"))] if has_gpus else []
    where = rank["where"] or (
        "" if rank["answered"] or rank["phase"] == "returned" else "no answer"
    )
    return [
        str(rank["rank"]),
        str(rank["pid"]),
        state,
        str(rank["steps"]),
        f"{rank['steps_per_s']:.1f}",
        "" if ago is None else f"{ago:.1f} s ago",
        f"{rank['cpu_percent']:.0f} %" if "cpu_percent" in rank else "",
        _mib(rank.get("memory_bytes")),
        *gpu,
        ""
        if collective is None
        else f"{'after' if collective['done'] else 'in'} {collective['text']}",
        where,
    ]


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / _MIB:.0f} MiB"
