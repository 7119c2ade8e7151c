"""What ddpsafe costs a healthy step, and how soon the first step comes after a crash.

**Step.** The same DDP loop, started by ``mp.spawn`` with a process group by hand and by
`ddpsafe.launch`, in fresh processes that take turns: by hand, ddpsafe, by hand again. The second
run by hand compared with the first is the noise.
Both the time of a step and the CPU time that rank 0 spends in it are measured: other programs on the
machine lengthen the first, and hardly affect the second.

**Restart.** Rank 1 of 2 kills itself at its fifth step, on the first attempt only. Measured is the
time from then until both ranks have made the first step of the next attempt. torchrun runs with
``--max-restarts=1`` and ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``, without which its restart finds
the keys of the previous attempt and mostly fails. ddpsafe runs with
``RetryPolicy(attempts=2, on={"killed"})``, once as it is and once without the pause between
attempts, because torchrun has none.

Run ``python benchmarks/overhead.py``, with ``--save FILE`` for a page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

RANKS: Final = 2
WARM_UP: Final = 50
STEPS: Final = 400
CRASHES_AT_STEP: Final = 5
LIMIT_S: Final = 180
FOLDER: Final = "OVERHEAD_FOLDER"
NO_PAUSE: Final = {"backoff_initial": 0, "jitter": 0}


def train_steps(rank: int) -> None:
    """Train a small network with DDP; rank 0 records the time and the CPU time of each step, in seconds."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(256, 256)
    times_s = []
    for _ in range(WARM_UP + STEPS):
        started_s, cpu_s = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        times_s.append((time.perf_counter() - started_s, time.process_time() - cpu_s))
    if rank == 0:
        folder = Path(os.environ[FOLDER])
        (folder / "steps").write_text(json.dumps(times_s[WARM_UP:]))


def crash_and_train(rank: int, attempt: int) -> None:
    """Make a few steps; rank 1 dies in the first attempt, and the second records its first step."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    folder = Path(os.environ[FOLDER])
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, 2 * CRASHES_AT_STEP):
        if rank == 1 and attempt == 1 and step == CRASHES_AT_STEP:
            (folder / "crash").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        if attempt > 1 and step == 1:
            dist.barrier()
            (folder / f"again-{rank}").write_text(str(time.monotonic()))


def steps_by_hand(rank: int, port: int) -> None:
    """Join by hand, train, and leave."""
    import torch.distributed as dist

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    train_steps(rank)
    dist.barrier()
    dist.destroy_process_group()


def steps_with_context(ctx: Any) -> None:
    """Train under ddpsafe."""
    train_steps(ctx.rank)


def crash_with_context(ctx: Any) -> None:
    """Crash and train under ddpsafe."""
    crash_and_train(ctx.rank, ctx.attempt)


def crash_under_torchrun() -> None:
    """Run as a rank of torchrun that crashes and trains."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    crash_and_train(int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1)
    dist.destroy_process_group()


def launch_by_hand() -> None:
    """Start the loop as scripts do."""
    import torch.multiprocessing as mp

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.spawn(steps_by_hand, args=(port,), nprocs=RANKS)


def launch_ddpsafe() -> None:
    """Start the loop with ddpsafe."""
    import ddpsafe

    ddpsafe.launch(steps_with_context, nproc_per_node=RANKS, backend="gloo")


def restart_torchrun() -> None:
    """Crash under torchrun, with one restart."""
    from torch.distributed.run import main

    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    main(["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=1", __file__, "--be-a-rank"])


def restart_ddpsafe(start_method: str, pause: dict[str, int]) -> None:
    """Crash under ddpsafe, with one retry."""
    import ddpsafe

    retry = {"attempts": 2, "on": {"killed"}, **pause}
    options = {"nproc_per_node": RANKS, "backend": "gloo", "start_method": start_method}
    ddpsafe.launch(crash_with_context, retry=retry, **options)


Round = tuple[tuple[float, float], tuple[float, float], tuple[float, float]]
"""Time and CPU time of a step: by hand, ddpsafe, and by hand again."""

JOBS: Final = {
    "by hand": launch_by_hand,
    "ddpsafe": launch_ddpsafe,
    "torchrun": restart_torchrun,
    "ddpsafe, spawn": lambda: restart_ddpsafe("spawn", {}),
    "ddpsafe, spawn, no pause": lambda: restart_ddpsafe("spawn", NO_PAUSE),
    "ddpsafe, forkserver": lambda: restart_ddpsafe("forkserver", {}),
    "ddpsafe, forkserver, no pause": lambda: restart_ddpsafe("forkserver", NO_PAUSE),
}
RESTARTS: Final = tuple(JOBS)[2:]


def run(job: str) -> dict[str, str]:
    """Run a job in a fresh process; return what its ranks recorded, by file name."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, FOLDER: folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--job", job]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if ended.returncode:
            raise SystemExit(f"{job} failed: {ended.stderr[-2000:]}")
        return {path.name: path.read_text() for path in Path(folder).iterdir()}


def step_s(job: str) -> tuple[float, float]:
    """Return the medians of the time of a step and of its CPU time on rank 0, in seconds."""
    wall_s, cpu_s = zip(*json.loads(run(job)["steps"]), strict=True)
    return statistics.median(wall_s), statistics.median(cpu_s)


def restart_s(job: str) -> float:
    """Return the seconds from the crash until both ranks have made a step again."""
    noted = run(job)
    again_s = max(float(noted[f"again-{rank}"]) for rank in range(RANKS))
    return again_s - float(noted["crash"])


def measure_steps(rounds: int) -> list[Round]:
    """Take turns: by hand, ddpsafe, by hand again."""
    results = []
    for number in range(1, rounds + 1):
        results.append((step_s("by hand"), step_s("ddpsafe"), step_s("by hand")))
        print(f"steps, round {number} of {rounds}: {results[-1]}", file=sys.stderr)
    return results


def measure_restarts(rounds: int) -> dict[str, list[float]]:
    """Measure the restarts of all launchers, in turns."""
    results: dict[str, list[float]] = {job: [] for job in RESTARTS}
    for number in range(1, rounds + 1):
        for job in RESTARTS:
            results[job].append(restart_s(job))
            print(
                f"restart, round {number} of {rounds}: {job}: {results[job][-1]}", file=sys.stderr
            )
    return results


def percent(ratios: list[float]) -> str:
    """Format the median of ratios with the quartiles, as percent above one."""
    low, middle, high = (100 * (part - 1) for part in statistics.quantiles(ratios, n=4))
    return f"{middle:+.2f} % | {low:+.2f} to {high:+.2f} %"


def page_of(steps: list[Round], restarts: dict[str, list[float]], rounds: int) -> str:
    """Return the page: the results, and the machine and versions."""
    today = datetime.now(tz=timezone.utc).date().isoformat()
    hand_s, hand_cpu_s = (
        statistics.median(first[each] for first, _, _ in steps) for each in (0, 1)
    )
    compared = [
        f"| {name}, {kind} | {percent(ratios)} |"
        for each, kind in enumerate(("time of a step", "CPU time of a step"))
        for name, ratios in (
            (
                "ddpsafe against by hand",
                [m[each] / (0.5 * (a[each] + b[each])) for a, m, b in steps],
            ),
            ("by hand against by hand", [b[each] / a[each] for a, _, b in steps]),
        )
    ]
    base_s = statistics.median(restarts["torchrun"])
    rows = [
        f"| {job} | {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}) "
        f"| {statistics.median(times) / base_s:.2f} |"
        for job, times in restarts.items()
    ]
    return f"""\
---
orphan: true
---

# What a healthy step costs, and how soon a crashed job steps again

## A step

{STEPS} steps of DDP over {RANKS} ranks, gloo, one thread each; {rounds} rounds in fresh processes that take turns.
A step of the hand-written form took {1000 * hand_s:.2f} ms, of which rank 0 used the CPU for {1000 * hand_cpu_s:.2f} ms (medians of medians).
Each ratio is between the medians of neighbouring runs; comparing the hand-written form with itself gives the noise, and these runs cannot show a cost below it.

| compared | median | quartiles |
|---|--:|--:|
{chr(10).join(compared)}

## After a crash

Rank 1 of {RANKS} is killed at its fifth step; the time ends when both ranks have made a step again. Each cell has the median of {rounds}, the minimum and the maximum; the ratio compares the median with torchrun's.

| launcher | crash to step | ratio |
|---|--:|--:|
{chr(10).join(rows)}

Measured on {today}: {os.cpu_count()} cores, {platform.system()} {platform.machine()},
Python {platform.python_version()}, torch {version("torch")}, gloo.
To repeat: `python benchmarks/overhead.py`.
"""


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Cost of a step, and of a restart.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", type=Path, help="write the page to this file")
    parser.add_argument("--job", choices=JOBS, help="internal")
    parser.add_argument("--be-a-rank", action="store_true", help="internal")
    options = parser.parse_args()
    if options.be_a_rank:
        crash_under_torchrun()
    elif options.job:
        JOBS[options.job]()
    else:
        page = page_of(
            measure_steps(options.rounds), measure_restarts(options.rounds), options.rounds
        )
        if options.save is not None:
            options.save.write_text(page, encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main()
