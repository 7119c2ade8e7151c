"""How soon the first step comes after a crash.

Rank 1 of 2 kills itself at its fifth step, on the first attempt only. Measured is the
time from then until both ranks have made the first step of the next attempt. torchrun runs with
``--max-restarts=1`` and ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``, without which its restart finds
the keys of the previous attempt and mostly fails. ddpsafe runs with
``RetryPolicy(attempts=2, on={"killed"})``, once as it is and once without the pause between
attempts, because torchrun has none.

Run ``python benchmarks/restart.py``, with ``--save FILE`` for a page.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from _machine import BACKEND, backend, measured_on, take_device

RANKS: Final = 2
CRASHES_AT_STEP: Final = 5
LIMIT_S: Final = 180
FOLDER: Final = "RESTART_FOLDER"
NO_PAUSE: Final = {"backoff_initial": 0, "jitter": 0}


def crash_and_train(rank: int, attempt: int) -> None:
    """Make a few steps; rank 1 dies in the first attempt, and the second records its first step."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    folder = Path(os.environ[FOLDER])
    device = take_device(rank)
    model = DistributedDataParallel(torch.nn.Linear(8, 8).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, 2 * CRASHES_AT_STEP):
        if rank == 1 and attempt == 1 and step == CRASHES_AT_STEP:
            (folder / "crash").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(4, 8, device=device)).sum().backward()
        optimizer.step()
        if attempt > 1 and step == 1:
            dist.barrier()
            (folder / f"again-{rank}").write_text(str(time.monotonic()))


def crash_with_context(ctx: Any) -> None:
    """Crash and train under ddpsafe."""
    crash_and_train(ctx.rank, ctx.attempt)


def crash_under_torchrun() -> None:
    """Run as a rank of torchrun that crashes and trains."""
    import torch.distributed as dist

    take_device(int(os.environ["RANK"]))
    dist.init_process_group(backend())
    crash_and_train(dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1)
    dist.destroy_process_group()


def restart_torchrun() -> None:
    """Crash under torchrun, with one restart."""
    from torch.distributed.run import main

    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    main(["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=1", __file__, "--be-a-rank"])


def restart_ddpsafe(start_method: str, pause: dict[str, int]) -> None:
    """Crash under ddpsafe, with one retry."""
    import ddpsafe

    retry = {"attempts": 2, "on": {"killed"}, **pause}
    options = {"nproc_per_node": RANKS, "backend": backend(), "start_method": start_method}
    ddpsafe.launch(crash_with_context, retry=retry, **options)


JOBS: Final = {
    "torchrun": restart_torchrun,
    "ddpsafe, spawn": lambda: restart_ddpsafe("spawn", {}),
    "ddpsafe, spawn, no pause": lambda: restart_ddpsafe("spawn", NO_PAUSE),
    "ddpsafe, forkserver": lambda: restart_ddpsafe("forkserver", {}),
    "ddpsafe, forkserver, no pause": lambda: restart_ddpsafe("forkserver", NO_PAUSE),
}


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


def restart_s(job: str) -> float:
    """Return the seconds from the crash until both ranks have made a step again."""
    noted = run(job)
    again_s = max(float(noted[f"again-{rank}"]) for rank in range(RANKS))
    return again_s - float(noted["crash"])


def measure_restarts(jobs: list[str], rounds: int) -> dict[str, list[float]]:
    """Measure the restarts of these launchers, in turns."""
    results: dict[str, list[float]] = {job: [] for job in jobs}
    for number in range(1, rounds + 1):
        for job in jobs:
            results[job].append(restart_s(job))
            print(
                f"restart, round {number} of {rounds}: {job}: {results[job][-1]}", file=sys.stderr
            )
    return results


def page_of(restarts: dict[str, list[float]], rounds: int) -> str:
    """Return the page: the results, and the machine and versions."""
    base = next(iter(restarts))
    base_s = statistics.median(restarts[base])
    rows = [
        f"| {job} | {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}) "
        f"| {statistics.median(times) / base_s:.2f} |"
        for job, times in restarts.items()
    ]
    return f"""\
---
orphan: true
---

# How soon a crashed job steps again

Rank 1 of {RANKS} is killed at its fifth step; the time ends when both ranks have made a step again. Each cell has the median of {rounds}, the minimum and the maximum; the ratio compares the median with that of {base}.

| launcher | crash to step | ratio |
|---|--:|--:|
{chr(10).join(rows)}

{measured_on()}
To repeat: `python benchmarks/restart.py`.
"""


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Time of a restart.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=JOBS, action="append", help="one launcher, or several")
    parser.add_argument("--save", type=Path, help="write the page to this file")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default=backend())
    parser.add_argument("--job", choices=JOBS, help="internal")
    parser.add_argument("--be-a-rank", action="store_true", help="internal")
    options = parser.parse_args()
    os.environ[BACKEND] = options.backend
    if options.be_a_rank:
        crash_under_torchrun()
    elif options.job:
        JOBS[options.job]()
    else:
        page = page_of(measure_restarts(options.only or [*JOBS], options.rounds), options.rounds)
        if options.save is not None:
            options.save.write_text(page, encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main()
