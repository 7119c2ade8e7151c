"""What ddpsafe costs a healthy step, and what its launcher costs a healthy job.

**Switched.** Within one launch, blocks of steps alternate: with everything that ddpsafe adds to a step,
and without it. Neighbouring blocks have the same machine, and drifts of its speed cancel, so this sees a
hundredth of a step.

**Pairs.** What cannot be switched off (the processes, their sessions, threads and variables) is compared
in fresh processes that take turns: `launch` and `spawn` with ``mp.spawn``, ``ddpsafe run`` and ranks that
join by themselves with torchrun. Comparing a form with itself gives the noise.

**Wake-ups.** How often each thread of a rank wakes up, and how much of a core the launcher uses, with
2, 8 and 64 ranks that make ten steps a second.

Intervals are those in which the median lies with 95 % confidence, by resampling the measured ratios.
Run ``python benchmarks/step.py``, with ``--save FILE`` for a page.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import runpy
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from _machine import BACKEND, backend, measured_on, take_device
from _ratios import Ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RANKS: Final = 2
WARM_UP: Final = 200
STEPS: Final = 1_000
BLOCK: Final = 20
BLOCKS: Final = 200
LIMIT_S: Final = 900
FOLDER: Final = "STEP_FOLDER"
QUIET_S: Final = 20.0
PAUSE_S: Final = 0.1
SIZES: Final = (2, 8, 64)
MEMORY_S: Final = 60.0
MEMORY_MB: Final = (0, 10, 100)


class Step(NamedTuple):
    """What a step took, and the CPU time that rank 0 used for it, in seconds."""

    time_s: float
    cpu_s: float


def training(rank: int, checkpointer: Any = None) -> Callable[[int], Step]:
    """Return a function that makes so many steps, and returns what one took and what CPU time it used.

    Six linear layers of 64 under DDP, SGD, one thread: a step of about two milliseconds.

    Args:
        rank: Of this process.
        checkpointer: Saves whenever it is due.
    """
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = take_device(rank)
    layers = [torch.nn.Linear(64, 64) for _ in range(6)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(32, 64, device=device)
    state = {"model": model, "optimizer": optimizer}
    numbers = itertools.count(1)

    def train(steps: int) -> Step:
        started_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if checkpointer is not None and checkpointer.is_due(number := next(numbers)):
                checkpointer.save(state, number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return Step(
            (time.perf_counter() - started_s) / steps, (time.process_time() - cpu_s) / steps
        )

    train(WARM_UP)
    return train


def note(rank: int, result: object) -> None:
    """Write what rank 0 has measured to the job's folder."""
    if rank == 0:
        (Path(os.environ[FOLDER]) / "result").write_text(json.dumps(result))


def switched(ctx: Any) -> None:
    """Alternate between steps with and without what ddpsafe adds, in random order within each pair."""
    from torch.optim import optimizer as optimizers

    train = training(ctx.rank)
    hooks = optimizers._global_optimizer_post_hooks  # noqa: SLF001 - what ddpsafe has registered
    registered = dict(hooks)
    order = random.Random(0)  # noqa: S311 - the same on all ranks

    def switch(*, on: bool) -> None:
        hooks.clear()
        if on:
            hooks.update(registered)
            gc.freeze()
        else:
            gc.unfreeze()

    pairs = []
    for _ in range(BLOCKS):
        pair: dict[bool, Step] = {}
        for is_on in order.sample([True, False], 2):
            switch(on=is_on)
            ctx.barrier()
            train(2)  # what a switch disturbs
            pair[is_on] = train(BLOCK)
        pairs.append((pair[True], pair[False]))
    switch(on=True)
    note(ctx.rank, pairs)


def measure_steps(ctx: Any) -> None:
    """Train under ddpsafe."""
    note(ctx.rank, training(ctx.rank)(STEPS))


class TimedCheckpointer:
    """Saves a state of the model and so many bytes beside it, and measures what a training waits for."""

    def __init__(self, checkpointer: Any, more_bytes: int) -> None:
        import torch

        self.began_s = self.due_s = self.save_s = 0.0
        self.saves = 0
        self._checkpointer = checkpointer
        self._more = {"more": torch.zeros(more_bytes // 4)}

    def is_due(self, step: int) -> bool:
        """Ask whether it is time."""
        started_s = time.perf_counter()
        self.began_s = self.began_s or started_s
        due = self._checkpointer.is_due(step)
        self.due_s += time.perf_counter() - started_s
        return bool(due)

    def save(self, state: dict[str, Any], step: int) -> None:
        """Save."""
        started_s = time.perf_counter()
        self._checkpointer.save({**state, **self._more}, step)
        self.saves += 1
        self.save_s += time.perf_counter() - started_s


def measure_with_memory(ctx: Any, more_bytes: int) -> None:
    """Train under ddpsafe, with states in memory; record the time that they take."""
    from ddpsafe.checkpoint import Checkpointer

    folder = Path(os.environ[FOLDER]) / "checkpoints"
    with Checkpointer(folder, every=10**9, memory_every="auto") as checkpointer:
        timed = TimedCheckpointer(checkpointer, more_bytes)
        train = training(ctx.rank, timed)
        steps, lasted_s = WARM_UP, 0.0
        while ctx.all_reduce(lasted_s, op="max") < MEMORY_S:
            train(BLOCK)
            steps += BLOCK
            lasted_s = time.perf_counter() - timed.began_s
        note(ctx.rank, [steps, timed.saves, timed.save_s, timed.due_s, lasted_s])


def steps_of_spawn(rank: int) -> None:
    """Join in a rank of `ddpsafe.spawn`, train, and leave."""
    import torch.distributed as dist

    take_device(rank)
    dist.init_process_group(backend())
    note(rank, training(rank)(STEPS))
    dist.barrier()
    dist.destroy_process_group()


def steps_by_hand(rank: int, port: int) -> None:
    """Join by hand, train, and leave."""
    import torch.distributed as dist

    address = f"tcp://127.0.0.1:{port}"
    take_device(rank)
    dist.init_process_group(backend(), init_method=address, rank=rank, world_size=RANKS)
    note(rank, training(rank)(STEPS))
    dist.barrier()
    dist.destroy_process_group()


def steps_of_script() -> None:
    """Train in a script that a launcher has started."""
    import torch.distributed as dist

    take_device(int(os.environ["RANK"]))
    dist.init_process_group(backend())
    note(dist.get_rank(), training(dist.get_rank())(STEPS))
    dist.barrier()
    dist.destroy_process_group()


def steps_attached() -> None:
    """Train in a script that joins with ddpsafe under another launcher."""
    import ddpsafe

    with ddpsafe.process_group(backend=backend()) as ctx:
        note(ctx.rank, training(ctx.rank)(STEPS))


def launch_by_hand() -> None:
    """Start the loop as scripts do."""
    import torch.multiprocessing as mp

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.spawn(steps_by_hand, args=(port,), nprocs=RANKS)


def launch(fn: Callable[..., None], ranks: int = RANKS, **options: Any) -> None:
    """Start ranks with `ddpsafe.launch`."""
    import ddpsafe

    ddpsafe.launch(fn, nproc_per_node=ranks, backend=backend(), **options)


def spawn() -> None:
    """Start the loop with `ddpsafe.spawn`."""
    import ddpsafe

    ddpsafe.spawn(steps_of_spawn, nprocs=RANKS, backend=backend())


def run_script(module: str, script: str) -> None:
    """Start this file with a launcher of scripts."""
    count = f"--nproc-per-node={RANKS}"
    sys.argv = [module, *(["run"] if module == "ddpsafe" else ["--standalone"]), count]
    sys.argv += [__file__, "--script", script]
    runpy.run_module(module, run_name="__main__")


SCRIPTS: Final = {"plain": steps_of_script, "attached": steps_attached}
JOBS: Final[dict[str, Callable[[], None]]] = {
    "mp.spawn": launch_by_hand,
    "launch": lambda: launch(measure_steps),
    "spawn": spawn,
    "torchrun": lambda: run_script("torch.distributed.run", "plain"),
    "ddpsafe run": lambda: run_script("ddpsafe", "plain"),
    "process_group under torchrun": lambda: run_script("torch.distributed.run", "attached"),
}
COMPARED: Final = (
    ("launch", "mp.spawn"),
    ("spawn", "mp.spawn"),
    ("ddpsafe run", "torchrun"),
    ("process_group under torchrun", "torchrun"),
)


def run(job: str) -> Any:
    """Run a job in a fresh process; return what its rank 0 has measured."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, FOLDER: folder, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--job", job]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if ended.returncode:
            raise SystemExit(f"{job} failed: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
        return json.loads((Path(folder) / "result").read_text())


class Threads(NamedTuple):
    """What the threads of a process have done so far.

    Attributes:
        cpu_s: The CPU time of all of them, in seconds.
        wake_ups: How often each was given a core after it had slept, by thread id.
        names: Their names, by thread id.
    """

    cpu_s: float
    wake_ups: dict[str, int]
    names: dict[str, str]


def threads_of(pid: int) -> Threads:
    """Read the threads of a process from ``/proc``."""
    cpu_ns, wake_ups, names = 0, {}, {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        cpu_ns += int((task / "schedstat").read_text().split()[0])
        lines = (task / "status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        wake_ups[task.name] = int(fields["voluntary_ctxt_switches"])
        names[task.name] = fields["Name"].strip()
    return Threads(cpu_ns / 1e9, wake_ups, names)


def measure_quiet(ctx: Any, launcher_pid: int) -> None:
    """Make ten steps a second; rank 0 records what its own threads and the launcher do meanwhile."""
    import torch

    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def train(limit_s: float) -> float:
        started_s = time.perf_counter()
        while time.perf_counter() - started_s < limit_s:
            parameter.grad = torch.ones(4)
            optimizer.step()
            time.sleep(PAUSE_S)
        return time.perf_counter() - started_s

    ctx.barrier()
    train(QUIET_S / 4)
    before, rank_before = threads_of(launcher_pid), threads_of(os.getpid())
    lasted_s = train(QUIET_S)
    after, rank_after = threads_of(launcher_pid), threads_of(os.getpid())
    ctx.barrier()  # until all have measured, the launcher has all of them to watch
    wake_ups: Counter[str] = Counter()
    for tid, count in rank_after.wake_ups.items():
        name = rank_after.names[tid]
        kind = "main" if int(tid) == os.getpid() else "gloo" if "gloo" in name else "other"
        wake_ups[kind] += count - rank_before.wake_ups.get(tid, 0)
    note(
        ctx.rank,
        {
            "launcher": (after.cpu_s - before.cpu_s) / lasted_s,
            **{kind: count / lasted_s for kind, count in wake_ups.items()},
        },
    )


def quiet_job(ranks: int) -> Callable[[], None]:
    """Return a job of ranks that hardly do anything."""
    return lambda: launch(measure_quiet, ranks, args=(os.getpid(),))


JOBS |= {"switched": lambda: launch(switched)}
JOBS |= {f"quiet {ranks}": quiet_job(ranks) for ranks in SIZES}


def memory_job(megabytes: int) -> Callable[[], None]:
    """Return a job with states in memory."""
    return lambda: launch(measure_with_memory, args=(megabytes * 10**6,))


JOBS |= {f"memory {megabytes}": memory_job(megabytes) for megabytes in MEMORY_MB}


def rows_of_switched() -> Iterator[str]:
    """Measure within one launch; yield the rows of the table."""
    pairs = [(Step(*on), Step(*off)) for on, off in run("switched")]
    off_s = statistics.median(off.time_s for _, off in pairs)
    yield f"A step without ddpsafe took {1000 * off_s:.2f} ms."
    yield ""
    yield "| with ddpsafe, against without | median | 95 % |"
    yield "|---|--:|--:|"
    yield f"| time of a step | {Ratio.of([on.time_s / off.time_s for on, off in pairs])} |"
    yield f"| CPU time of a step | {Ratio.of([on.cpu_s / off.cpu_s for on, off in pairs])} |"


def rows_of_pairs(rounds: int) -> Iterator[str]:
    """Measure in fresh processes; yield the rows of the table."""
    jobs = [*dict.fromkeys(name for pair in COMPARED for name in pair)]
    steps: dict[str, list[Step]] = {job: [] for job in jobs}
    for number in range(1, rounds + 1):
        for job in jobs if number % 2 else jobs[::-1]:
            steps[job].append(Step(*run(job)))
            print(f"round {number} of {rounds}: {job}: {steps[job][-1]}", file=sys.stderr)
    yield "| compared | time of a step | 95 % | CPU time of a step | 95 % |"
    yield "|---|--:|--:|--:|--:|"
    for ours, theirs in COMPARED:
        pairs = list(zip(steps[ours], steps[theirs], strict=True))
        yield f"| {ours} against {theirs} | {cells_of(pairs)} |"
    for job in ("mp.spawn", "launch", "torchrun"):
        pairs = list(zip(steps[job][1:], steps[job], strict=False))
        yield f"| {job} against itself, one round later | {cells_of(pairs)} |"


def cells_of(pairs: list[tuple[Step, Step]]) -> str:
    """Return the cells for the time of a step and its CPU time: the first of each pair against the second."""
    wall = Ratio.of([one.time_s / other.time_s for one, other in pairs])
    cpu = Ratio.of([one.cpu_s / other.cpu_s for one, other in pairs])
    return f"{wall} | {cpu}"


def rows_of_quiet() -> Iterator[str]:
    """Measure wake-ups and the launcher; yield the rows of the table."""
    yield "| ranks | launcher, share of a core | wake-ups of a rank per second: main thread | gloo's | ddpsafe's |"
    yield "|--:|--:|--:|--:|--:|"
    for ranks in SIZES:
        rate = run(f"quiet {ranks}")
        cells = [f"{rate.get(kind, 0):.2f}" for kind in ("main", "gloo", "other")]
        yield f"| {ranks} | {rate['launcher']:.2%} | {' | '.join(cells)} |"


def rows_of_memory() -> Iterator[str]:
    """Measure states in memory; yield the rows of the table."""
    yield "| state | a step | saves | a save | all saves, of the time | a call of `is_due` | all of them |"
    yield "|--:|--:|--:|--:|--:|--:|--:|"
    for megabytes in MEMORY_MB:
        steps, saves, save_s, due_s, lasted_s = run(f"memory {megabytes}")
        yield (
            f"| {megabytes or 0.1:g} MB | {1000 * (lasted_s - save_s - due_s) / steps:.2f} ms "
            f"| {saves} | {1000 * save_s / saves:.1f} ms | {save_s / lasted_s:.2%} "
            f"| {1e6 * due_s / steps:.1f} µs | {due_s / lasted_s:.2%} |"
        )


def page_of(rounds: int) -> str:
    """Measure everything; return the page."""
    switched_rows, memory, pairs, quiet = map(
        "\n".join, (rows_of_switched(), rows_of_memory(), rows_of_pairs(rounds), rows_of_quiet())
    )
    return f"""\
---
orphan: true
---

# What a healthy step costs

A step of six linear layers of 64 under DDP, with SGD: {RANKS} ranks, {backend()}, one thread each.

## Within one launch

{BLOCKS} pairs of blocks of {BLOCK} steps, with everything that ddpsafe adds to a step and without it.
{switched_rows}

## States in memory

Trainings of {MEMORY_S:.0f} s with `memory_every="auto"`: the first saves, which it makes to measure them, are counted.

{memory}

## Whole processes

{STEPS} steps in fresh processes that take turns, {rounds} rounds. A form against itself is the noise.

{pairs}

## While nothing happens

Ranks that make {1 / PAUSE_S:.0f} steps a second, for {QUIET_S:.0f} s.

{quiet}

{measured_on()}
To repeat: `python benchmarks/step.py`.
"""


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="Cost of a step.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", type=Path, help="write the page to this file")
    parser.add_argument(
        "--only", choices=("switched", "memory", "pairs", "quiet"), help="print one table"
    )
    parser.add_argument("--backend", choices=("gloo", "nccl"), default=backend())
    parser.add_argument("--job", choices=JOBS, help="internal")
    parser.add_argument("--script", choices=SCRIPTS, help="internal")
    options = parser.parse_args()
    os.environ[BACKEND] = options.backend
    if options.script:
        SCRIPTS[options.script]()
    elif options.job:
        JOBS[options.job]()
    elif options.only:
        tables = {
            "switched": rows_of_switched,
            "memory": rows_of_memory,
            "pairs": lambda: rows_of_pairs(options.rounds),
            "quiet": rows_of_quiet,
        }
        print(*tables[options.only](), sep="\n")
    else:
        page = page_of(options.rounds)
        if options.save is not None:
            options.save.write_text(page, encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main()
