"""What ddpsafe does on GPUs: the tests that need one, then a step and a restart, on one page.

The page is written again after each row, so a run that is cut off is worth what it has shown. The files of
tests come in the order of their worth; a part that does not end in its time is ended, and the next one runs.
Two ranks share the GPU of a machine that has only one, which NCCL allows between different "hosts".

Run ``nox -s gpu``. ``--rehearse`` runs the same on a machine without a GPU, with gloo: each test goes as far
as the line that needs one, so that none fails there for want of a package, a fixture or a version.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT: Final = Path(__file__).parents[1]
TESTS: Final = ROOT / "tests" / "gpu"
LIMIT_S: Final = 480
FOR_BENCHMARKS_S: Final = 100
ENDS_WITHIN_S: Final = 10
TOO_LONG: Final = 124
REHEARSES: Final = "DDPSAFE_REHEARSE_GPU"
SHARING: Final = "_DDPSAFE_TEST_RANKS_SHARE_GPUS"

SECTIONS: Final = {
    "test_faults.py": "Faults, and what ranks do beside them",
    "test_gpu.py": "Devices, training, the exit",
    "test_memory_checkpoints.py": "Checkpoints in pinned memory",
    "test_devices.py": "Which rank gets which GPU",
    "test_doctor.py": "The doctor",
    "step.py": "A healthy step",
    "restart.py": "From a crash to the next step",
}
"""The parts of the page, most important first: a file of tests/gpu, or a benchmark."""
MEASURED: Final = {
    "step.py": "One launch of two ranks, in which blocks of 20 steps alternate: with all that ddpsafe adds to a"
    " step, and without it. The interval is that of the median.",
    "restart.py": "From the SIGKILL of rank 1 (world\\_size 2) until both ranks have made the first step of the next"
    " attempt: the median of three crashes, and their range.",
}
"""What the tables of a benchmark compare."""
ROUND: Final = re.compile(r"\bround \d+ of \d+: ")
"""What a benchmark says after each measurement, so that one that is cut off has shown something."""
BENCHMARKS: Final = {
    "step.py": ["--only", "switched"],
    "restart.py": ["--rounds", "3", "--only", "ddpsafe, spawn", "--only", "ddpsafe, forkserver"],
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the page.

    Attributes:
        part: The key of its section.
        name: What holds.
        outcome: ``passed``, ``failed``, ``skipped``, ``measured`` or ``not reached``.
        took_s: How long it took.
        said: The first line of the error that a user would see, or why it failed or was skipped.
    """

    part: str
    name: str
    outcome: str
    took_s: float = 0.0
    said: str = ""


class Page:
    """The rows so far, in a file that the parts append to, and the page made of them."""

    def __init__(self, rows: Path, save: Path) -> None:
        """Continue with the rows in that file."""
        self.rows, self.save = rows, save

    def add(self, rows: Iterable[Row]) -> None:
        """Append rows, and write the page."""
        with self.rows.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
        fresh = self.save.with_suffix(".new")
        fresh.write_text(self.text(), encoding="utf-8")
        fresh.replace(self.save)

    def read(self) -> tuple[str, list[Row]]:
        """Return the facts, and the rows; a later one of a test replaces an earlier one."""
        facts, *lines = self.rows.read_text(encoding="utf-8").splitlines()
        found = [Row(**json.loads(line)) for line in lines]
        return facts, [*{(row.part, row.name): row for row in found}.values()]

    def outcomes(self) -> set[str]:
        """Return the outcomes that there are so far."""
        return {row.outcome for row in self.read()[1]}

    def text(self) -> str:
        """Return the page."""
        facts, last = self.read()
        counts = [
            f"{sum(row.outcome == outcome for row in last)} {outcome}"
            for outcome in ("passed", "failed", "skipped", "measured", "not reached")
        ]
        text = f"---\norphan: true\n---\n\n# On GPUs\n\n{facts}\n\n{', '.join(counts)}.\n"
        for part, title in SECTIONS.items():
            text += f"\n## {title}\n\n"
            rows = [row for row in last if row.part == part]
            if not rows:
                exists = part in BENCHMARKS or (TESTS / part).exists()
                text += "Not reached.\n" if exists else "There is no test of it yet.\n"
            elif part in BENCHMARKS:
                text += f"{MEASURED[part]}\n\n"
                text += "\n\n".join(row.said or f"{row.name}: {row.outcome}" for row in rows) + "\n"
            else:
                text += "| what holds | outcome | seconds | what was said |\n|---|---|--:|---|\n"
                text += "".join(
                    f"| {row.name} | {row.outcome} | {row.took_s:.1f} | {in_cell(row.said)} |\n"
                    for row in rows
                )
        return text + "\nTo repeat: `nox -s gpu`.\n"


def in_cell(text: str) -> str:
    """Return a text as one cell of a table, without this machine's paths."""
    text = re.sub(r"/\S+/", "…/", " ".join(text.split()))
    return "".join(f"\\{each}" if each in "|<>*_`[]$" else each for each in text[:300])


class Recorder:
    """A plugin of pytest that writes a row when a test ends."""

    def __init__(self, page: Page) -> None:
        """Write to that page."""
        self.page = page

    def pytest_collection_finish(self, session: Any) -> None:
        """List all tests, before they run; under xdist, see the next hook."""
        self._list(item.nodeid for item in session.items)

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """List all tests that a worker has collected; each of them has the same."""
        self._list(ids)

    def _list(self, ids: Iterable[str]) -> None:
        known = self.page.rows.read_text(encoding="utf-8")
        if "not reached" not in known:
            self.page.add(Row(**named(nodeid), outcome="not reached") for nodeid in ids)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write what a test has shown; a failed teardown is a failure too."""
        if report.when != "call" and report.passed:
            return
        said = str(dict(report.user_properties).get("said", ""))
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = f"{said} {crash.message if crash else report.longreprtext[-300:]}"
        elif report.skipped and isinstance(report.longrepr, tuple):
            said = report.longrepr[2].removeprefix("Skipped: ")
        row = Row(**named(report.nodeid), outcome=report.outcome, took_s=report.duration, said=said)
        self.page.add([row])
        if report.failed:
            print(report.longreprtext, flush=True)


def named(nodeid: str) -> dict[str, str]:
    """Return the section and the sentence of a test."""
    file, _, test = nodeid.partition("::")
    sentence = re.sub(r"^test_", "", test).replace("_", " ")
    return {"part": Path(file).name, "name": sentence}


def run_tests(page: Page, workers: str) -> int:
    """Run the tests in this process and its workers; a free worker takes the next test."""
    import pytest

    files = [str(TESTS / part) for part in SECTIONS if (TESTS / part).exists()]
    options = ["-c", str(ROOT / "pyproject.toml"), "-q", "--tb=short", "-m", "gpu"]
    options += ["--installed", "-n", workers, "--dist", "load", "--maxschedchunk", "1", *files]
    return int(pytest.main(options, plugins=[Recorder(page)]))


def measure(part: str, page: Page, limit_s: float) -> None:
    """Run a benchmark with NCCL, and add its tables."""
    began_s = time.monotonic()
    backend = "gloo" if REHEARSES in os.environ else "nccl"
    command = [sys.executable, str(ROOT / "benchmarks" / part), *BENCHMARKS[part]]
    ended, out = run_within([*command, "--backend", backend], limit_s, captures=True)
    name = f"python benchmarks/{part} {' '.join(BENCHMARKS[part])} --backend {backend}"
    took_s = time.monotonic() - began_s
    rounds = [f"\n- {in_cell(line)}" for line in out.splitlines() if ROUND.search(line)]
    so_far = f"Ended after {took_s:.0f} s, all that it was given.\n{''.join(rounds)}".rstrip()
    outcomes = {0: ("measured", table_of(out)), TOO_LONG: ("not reached", so_far)}
    outcome, said = outcomes.get(ended, ("failed", f"It failed: {in_cell(out[-300:])}"))
    page.add([Row(part=part, name=name, outcome=outcome, took_s=took_s, said=said)])


def table_of(out: str) -> str:
    """Return what a benchmark printed, without what makes a page of it."""
    lines = out.splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith(("A step", "|"))), 0)
    last = max((n for n, line in enumerate(lines) if line.startswith("|")), default=len(lines))
    return "\n".join(lines[first : last + 1])


def run_within(command: list[str], limit_s: float, *, captures: bool = False) -> tuple[int, str]:
    """Run a command in a session of its own, and end all of it if it takes too long; return its exit code."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out:
        streams = {"stdout": out, "stderr": out} if captures else {}
        process = subprocess.Popen(command, start_new_session=True, **streams)  # type: ignore[call-overload]
        try:
            code = process.wait(max(1, limit_s))
        except BaseException as exc:
            is_late = isinstance(exc, subprocess.TimeoutExpired)
            # Ctrl-C does not reach that session, and nox kills this process soon after it.
            for signum in (signal.SIGTERM, signal.SIGKILL)[not is_late :]:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signum)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ENDS_WITHIN_S)
            if not is_late:
                raise
            code = TOO_LONG
        out.seek(0)
        return code, out.read()


def facts(*, rehearses: bool) -> str:
    """Return when and on what this was run."""
    import torch

    today = datetime.now(tz=timezone.utc).date().isoformat()
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    if rehearses:
        return (
            f"**Not run on a GPU**, as of {today}: there was none. On that day the same run was rehearsed with "
            f"{versions} and gloo on CPUs: a test that passed needs nothing of a GPU to do so, and one that was "
            "skipped went as far as the reason beside it."
        )
    driver = "unknown"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        asked = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        driver = asked.stdout.split()[0]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return (
        f"Run on {today}: {names[0]} ({len(names)} of it), driver {driver}, CUDA {torch.version.cuda}, NCCL {nccl}, "
        f"{versions}, {os.cpu_count()} cores."
    )


def main() -> int:
    """Read the command line and run; the exit code is 1 if a row failed."""
    parser = argparse.ArgumentParser(description="What needs a GPU.")
    parser.add_argument("--save", type=Path, default=Path("gpu.md"), help="the page to write")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all of it")
    parser.add_argument("--workers", default="4", help="tests that run at a time")
    parser.add_argument("--rehearse", action="store_true", help="run with gloo, without a GPU")
    parser.add_argument("--tests-into", type=Path, help="internal")
    options = parser.parse_args()
    if options.tests_into:
        return run_tests(Page(options.tests_into, options.save), options.workers)
    ends_s = time.monotonic() + options.limit
    import torch

    if options.rehearse:
        os.environ[REHEARSES] = "1"
    elif not torch.cuda.is_available():
        print("torch sees no GPU, so nothing was run; --rehearse needs none", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        rows.write_text(facts(rehearses=options.rehearse) + "\n", encoding="utf-8")
        page = Page(rows, options.save.absolute())
        command = [sys.executable, __file__, "--tests-into", str(rows), "--save", str(page.save)]
        command += ["--workers", options.workers]
        code, _ = run_within(command, ends_s - FOR_BENCHMARKS_S - time.monotonic())
        outcomes = page.outcomes()
        # 1 is also the exit code of a Python that could not even import pytest.
        is_told = code in (0, TOO_LONG) or (code == 1 and "failed" in outcomes)
        if not is_told or not outcomes - {"not reached"}:
            said = f"pytest ended with {code} and no such result; what it printed is above"
            first = next(iter(SECTIONS))
            page.add([Row(part=first, name="all tests", outcome="failed", said=said)])
        if torch.cuda.device_count() < 2:
            os.environ[SHARING] = "1"  # the tests set it where they need it
        for number, part in enumerate(BENCHMARKS):
            measure(part, page, (ends_s - time.monotonic()) / (len(BENCHMARKS) - number))
        print(page.text())
        return int("failed" in page.outcomes())


if __name__ == "__main__":
    raise SystemExit(main())
