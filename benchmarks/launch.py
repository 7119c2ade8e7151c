"""How long it takes to start ranks that do nothing, until they have ended.

Every measurement is a fresh Python process that launches once (twice for "second launch"), so
nothing is warm that would be cold in a script. Two times are measured, in the same way for all:

- the call: from calling the launcher to its return, with torch imported before, as in a script
  that trains;
- the process: from starting Python to its end, which is how long someone waits at a prompt.

Every rank imports torch, so that a launcher that does not import it in its ranks has no advantage.
This file imports torch and ddpsafe late, so that no rank pays for another contestant's library.
The contestants take turns within each round, so a busy machine slows all of them.

Run ``python benchmarks/launch.py``, with ``--json`` for numbers or ``--save FILE`` for a page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES: Final = (2, 4, 8)
PROCESS_LIMIT_S: Final = 120
PATIENCE: Final = 5


def no_op(rank: int) -> None:  # noqa: ARG001 - the signature that mp.spawn calls
    """Run as a rank without work."""
    import torch.distributed  # noqa: F401 - a rank that could train has torch


def no_op_with_group(rank: int, world_size: int, port: int) -> None:
    """Join the process group, wait for the others, and leave, by hand."""
    import torch.distributed as dist

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    dist.barrier()
    dist.destroy_process_group()


def no_op_with_context(ctx: object) -> None:  # noqa: ARG001 - the signature that launch calls
    """Wait for the others; ddpsafe joins and leaves the process group."""
    import torch.distributed as dist

    dist.barrier()


def mp_spawn(nprocs: int) -> None:
    """Start ranks without a process group."""
    import torch.multiprocessing as mp

    mp.spawn(no_op, nprocs=nprocs)


def mp_spawn_with_group(nprocs: int) -> None:
    """Start ranks that make their process group by hand, at a port chosen here."""
    import torch.multiprocessing as mp

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.spawn(no_op_with_group, args=(nprocs, port), nprocs=nprocs)


def torchrun(nprocs: int) -> None:
    """Start ranks as ``torchrun --standalone`` does."""
    from torch.distributed.run import main

    main(["--standalone", f"--nproc-per-node={nprocs}", __file__, "--be-a-rank"])


def ddpsafe_spawn(nprocs: int) -> None:
    """Start ranks without a process group."""
    import ddpsafe

    ddpsafe.spawn(no_op, nprocs=nprocs)


def ddpsafe_forkserver(nprocs: int) -> None:
    """Start ranks from a server that has torch loaded; the first launch starts the server."""
    import ddpsafe

    ddpsafe.spawn(no_op, nprocs=nprocs, start_method="forkserver")


def ddpsafe_launch(nprocs: int) -> None:
    """Start ranks with a process group."""
    import ddpsafe

    ddpsafe.launch(no_op_with_context, nproc_per_node=nprocs, backend="gloo")


def ddpsafe_launch_forkserver(nprocs: int) -> None:
    """Start ranks with a process group from a server that has torch loaded."""
    import ddpsafe

    ddpsafe.launch(
        no_op_with_context, nproc_per_node=nprocs, backend="gloo", start_method="forkserver"
    )


def ddpsafe_run(nprocs: int) -> None:
    """Start ranks as ``ddpsafe run`` does."""
    from ddpsafe.cli import main

    if code := main(["run", f"--nproc-per-node={nprocs}", __file__, "--be-a-rank"]):
        raise SystemExit(code)


class Contestant(NamedTuple):
    """One way to start ranks.

    Attributes:
        title: Its name in the table.
        launch: Starts the given number of ranks and returns when they have ended.
        against: The contestant that it is compared with.
        launches: Number of launches in one process; the last one is timed.
        imports_torch: Whether a launching process has imported torch, as a script that trains.
    """

    title: str
    launch: Callable[[int], None]
    against: str = "mp.spawn"
    launches: int = 1
    imports_torch: bool = True


BY_HAND: Final = "mp.spawn, process group by hand"
CONTESTANTS: Final = (
    Contestant("mp.spawn", mp_spawn),
    Contestant("torchrun", torchrun),
    Contestant("ddpsafe.spawn", ddpsafe_spawn),
    Contestant("ddpsafe.spawn, forkserver", ddpsafe_forkserver),
    Contestant("ddpsafe.spawn, forkserver, second launch", ddpsafe_forkserver, launches=2),
    Contestant(BY_HAND, mp_spawn_with_group, against=BY_HAND),
    Contestant("ddpsafe.launch", ddpsafe_launch, against=BY_HAND),
    Contestant("ddpsafe.launch, forkserver", ddpsafe_launch_forkserver, against=BY_HAND),
    Contestant("ddpsafe run", ddpsafe_run, against="torchrun", imports_torch=False),
)


def measure(title: str, nprocs: int) -> None:
    """Launch in this process and print the time of the last call, in seconds."""
    contestant = next(known for known in CONTESTANTS if known.title == title)
    if contestant.imports_torch:
        import torch.distributed.run
        import torch.multiprocessing  # noqa: F401 - imported before the clock starts
    for _ in range(contestant.launches):
        started_s = time.perf_counter()
        contestant.launch(nprocs)
        call_s = time.perf_counter() - started_s
    print(json.dumps(call_s))


class Run(NamedTuple):
    """One measurement: both times in seconds, and how many processes failed before it."""

    call_s: float
    process_s: float
    failures: int


class Result(NamedTuple):
    """The runs of one contestant with one number of ranks."""

    nprocs: int
    title: str
    runs: list[Run]


def race(rounds: int) -> list[Result]:
    """Let the contestants take turns, `rounds` times for each number of ranks."""
    results = []
    for nprocs in SIZES:
        turns = [Result(nprocs, known.title, runs=[]) for known in CONTESTANTS]
        for number in range(1, rounds + 1):
            for result in turns:
                result.runs.append(run_fresh(result.title, nprocs))
            print(f"{nprocs} ranks, round {number} of {rounds}", file=sys.stderr)
        results += turns
    return results


def run_fresh(title: str, nprocs: int) -> Run:
    """Measure once in a new process, and again if it fails: some ranks do abort at their end."""
    command = [sys.executable, __file__, "--measure", title, str(nprocs)]
    for failures in range(PATIENCE):
        started_s = time.perf_counter()
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=PROCESS_LIMIT_S, check=False
        )
        process_s = time.perf_counter() - started_s
        if run.returncode == 0:
            call_s = json.loads(run.stdout.splitlines()[-1])
            return Run(call_s, process_s, failures)
        print(f"{title}, {nprocs} ranks, failed: {run.stderr[-300:]}", file=sys.stderr)
    raise SystemExit(f"{title} failed {PATIENCE} times in a row")


def measure_import(times: int = 15) -> list[float]:
    """Time ``import ddpsafe`` in fresh interpreters; it must not load torch in any of them."""
    program = (
        "import sys, time; started_s = time.perf_counter(); import ddpsafe; "
        "print(time.perf_counter() - started_s); assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", program]
    return [float(subprocess.check_output(command)) for _ in range(times)]


def spread(times_s: list[float]) -> str:
    """Format median, minimum and maximum."""
    return f"{statistics.median(times_s):.2f} s ({min(times_s):.2f} to {max(times_s):.2f})"


def table_of(results: list[Result]) -> str:
    """Return the results as a markdown table."""
    head = "| ranks | launcher | call | ratio | process | ratio | failed |"
    lines = [head, "|--:|---|---|--:|---|--:|--:|"]
    known = {contestant.title: contestant for contestant in CONTESTANTS}
    base = {(result.nprocs, result.title): result for result in results}
    for result in results:
        contestant = known[result.title]
        against = base[result.nprocs, contestant.against]
        cells = [str(result.nprocs), result.title, *compare(result, against, "call_s")]
        # A process that launched twice has no time to compare.
        once = contestant.launches == 1
        cells += compare(result, against, "process_s") if once else ("", "")
        cells.append(str(sum(run.failures for run in result.runs)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def compare(result: Result, against: Result, what: str) -> tuple[str, str]:
    """Format the times of one contestant, and the ratio of its median to another's."""
    times_s, others_s = ([getattr(run, what) for run in each.runs] for each in (result, against))
    ratio = statistics.median(times_s) / statistics.median(others_s)
    return spread(times_s), f"{ratio:.2f}"


def page_of(results: list[Result], import_times_s: list[float], rounds: int) -> str:
    """Return the page: the results, and the machine and versions."""
    import ddpsafe

    today = datetime.now(tz=timezone.utc).date().isoformat()
    return f"""\
---
orphan: true
---

# Time to launch

The time from the start of the launcher to the end of the last rank, for ranks that only import torch.
`call` is the time from calling the launcher to its return, in a process that has torch imported;
`process` is the time from starting Python to its end.
Both are the median of {rounds} rounds, then the minimum and the maximum.
The launchers take turns, each time in a fresh process.
`ratio` compares with `mp.spawn`; `ddpsafe.launch`, which makes the process group, is compared with
`mp.spawn` of a function that makes and destroys it; both pass one barrier.
`failed` counts runs that ended with an error, and were repeated.

Measured on {today}: {os.cpu_count()} cores, {platform.system()} {platform.machine()},
Python {platform.python_version()}, torch {version("torch")}, ddpsafe {ddpsafe.__version__};
load average at the end {os.getloadavg()[0]:.0f}: on a busy machine, compare the ratios.

{table_of(results)}

`import ddpsafe` takes {1000 * statistics.median(import_times_s):.0f} ms, the median of
{len(import_times_s)} fresh interpreters, and does not import torch.
"""


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Time to launch ranks that do nothing.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print numbers instead of the page")
    parser.add_argument("--save", type=Path, help="write the page to this file")
    parser.add_argument("--measure", nargs=2, metavar=("LAUNCHER", "RANKS"), help="internal")
    parser.add_argument("--be-a-rank", action="store_true", help="internal")
    options = parser.parse_args()
    if options.be_a_rank:
        no_op(int(os.environ["RANK"]))
    elif options.measure:
        measure(options.measure[0], int(options.measure[1]))
    else:
        report(options)


def report(options: argparse.Namespace) -> None:
    """Measure everything, and print the page or the numbers."""
    results, import_times_s = race(options.rounds), measure_import()
    page = page_of(results, import_times_s, options.rounds)
    if options.save is not None:
        options.save.write_text(page, encoding="utf-8")
    if options.json:
        launches = [
            {"ranks": nprocs, "launcher": title, "runs": [run._asdict() for run in runs]}
            for nprocs, title, runs in results
        ]
        print(json.dumps({"launches": launches, "import_s": import_times_s}))
    else:
        print(page)


if __name__ == "__main__":
    main()
