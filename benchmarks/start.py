"""Where the time of a launch goes, from the start of Python to its end.

A launch of ranks that only note when they run, in fresh processes, beside what importing torch takes on
the same machine: with spawn every rank imports it, with forkserver their server does.

Run ``python benchmarks/start.py``, with ``--save FILE`` for a page.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from _machine import measured_on

RANKS: Final = 4
METHODS: Final = ("spawn", "forkserver")
PHASES: Final = (
    "Python starts, `import ddpsafe` and its launcher",
    "from the call to the first process of a rank: checks, plan, arguments, the fork server's imports",
    "from there to the last process of a rank",
    "from there until the last rank is in the function: imports of a new interpreter, the process group",
    "from the end of the function until the launch returns",
    "until Python has ended",
)


def now_s() -> float:
    """Return the time since boot, which processes share and /proc counts in."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def started_s() -> float:
    """Return when this process started."""
    from ddpsafe._host import read_stat

    return read_stat("self").started / os.sysconf("SC_CLK_TCK")


def note(ctx: Any) -> tuple[float, float]:
    """Return when this rank's process started, and when its function did."""
    del ctx
    return started_s(), now_s()


def launch(method: str) -> None:
    """Launch in this process, and print the times of the phases."""
    import ddpsafe

    start = ddpsafe.launch
    called_s = now_s()
    result = start(note, nproc_per_node=RANKS, start_method=method, backend="gloo")
    returned_s = now_s()
    started, entered = zip(*result.values.values(), strict=True)
    marks = [called_s, min(started), max(started), max(entered), returned_s]
    print(json.dumps([started_s(), *marks]))


def measure(method: str) -> list[float]:
    """Launch in a fresh process; return how long each phase took, in seconds."""
    command = [sys.executable, __file__, "--launch", method]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    ended_s = now_s()
    marks = [*json.loads(ended.stdout.splitlines()[-1]), ended_s]
    return [later - earlier for earlier, later in itertools.pairwise(marks)]


def measure_import() -> float:
    """Return how long a fresh interpreter takes to import torch, in seconds."""
    began_s = now_s()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return now_s() - began_s


def page_of(rounds: int) -> str:
    """Measure in turns; return the page."""
    imports_s: list[float] = []
    found: dict[str, list[list[float]]] = {method: [] for method in METHODS}
    for number in range(rounds):
        imports_s.append(measure_import())
        for method in METHODS:
            found[method].append(measure(method))
            print(f"round {number + 1} of {rounds}: {method}", file=sys.stderr)
    unit_s = statistics.median(imports_s)
    rows = []
    for index, phase in enumerate((*PHASES, "all")):
        cells = []
        for method in METHODS:
            took_s = [sum(each) if phase == "all" else each[index] for each in found[method]]
            median_s = statistics.median(took_s)
            cells.append(f"{median_s:.2f} s, {median_s / unit_s:.2f}")
        rows.append(f"| {phase} | {' | '.join(cells)} |")
    return f"""\
---
orphan: true
---

# Where the time of a launch goes

`ddpsafe.launch` of {RANKS} ranks that do nothing, with gloo, in a script that does not import torch itself.
Each cell: the median of {rounds} runs, and how many times `python -c "import torch"` that is ({unit_s:.2f} s).

| phase | {" | ".join(METHODS)} |
|---|{"---|" * len(METHODS)}
{os.linesep.join(rows)}

{measured_on()}
To repeat: `python benchmarks/start.py`.
"""


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Where the time of a launch goes.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", type=Path, help="write the page to this file")
    parser.add_argument("--launch", choices=METHODS, help="internal")
    options = parser.parse_args()
    if options.launch is not None:
        launch(options.launch)
        return
    page = page_of(options.rounds)
    if options.save is not None:
        options.save.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
