"""Kills a training again and again, at random moments, and checks that its checkpoints survive.

Five kinds of victim, each at a random moment, most of them inside ``save``:

- a single process that saves (most kills, because it restarts in a tenth of a second);
- a random rank of a launch that retries by itself;
- the launcher of a launch, whose ranks die with it;
- the same, with a random number of ranks in every new launch;
- one or both ranks of a launch that keeps each state in memory, and only each seventh in the directory.

After each kill, the newest checkpoint must load completely, and must not be older than the last one
that ``save`` has acknowledged. At the end of each training, its parameters must equal those of an
undisturbed one: bit for bit if the number of ranks stays the same, within `TOLERANCE` otherwise,
because gradients are then summed in another order. Every sample must have been read once per epoch.

Run: python benchmarks/crash_checkpoint.py [--kills 300] [--seed 0] [--save FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import Dataset

import ddpsafe
from ddpsafe import data
from ddpsafe.checkpoint import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Sequence

SAMPLES: Final = 96
BATCH: Final = 12
EPOCHS: Final = 5
TOLERANCE: Final = 1e-5
SHARES: Final = {
    "saver": 0.66,
    "rank": 0.12,
    "launcher": 0.05,
    "ranks changed": 0.05,
    "memory": 0.12,
}
LIMIT_S: Final = 120
WRITE_S: Final = 2.0
"""How long to wait for a write to begin; there may be none, if the training is ending."""


class Points(Dataset[tuple[torch.Tensor, int]]):
    """Sample i is (a random point that is always the same, i)."""

    def __init__(self) -> None:
        self.points = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.points[index], index


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training.

    Attributes:
        folder: Where checkpoints, acknowledgements and process ids go.
        asynchronous: Save in the background.
        dropout: Makes the result depend on the state of the random number generators too.
        in_memory: Keep each state in memory.
    """

    folder: Path
    asynchronous: bool = False
    dropout: float = 0.5
    in_memory: bool = False

    @property
    def directory(self) -> Path:
        """The checkpoints."""
        return self.folder / "checkpoints"

    @property
    def acknowledged(self) -> Path:
        """The file with the steps for which `save` has returned, each appended in one write."""
        return self.folder / "acknowledged"

    @property
    def lost(self) -> Path:
        """The file with what a restart did not find in memory."""
        return self.folder / "lost"

    @property
    def result(self) -> Path:
        """The file with the final parameters."""
        return self.folder / "result.pt"

    def last_acknowledged(self) -> int:
        """Return the last step that must not be lost."""
        if not self.acknowledged.exists():
            return -1
        return int(self.acknowledged.read_text().split()[-1])


def train(ctx: ddpsafe.RankContext, job: Job) -> None:
    """Train from the last checkpoint to the end; rank 0 saves the result."""
    pid_file = job.folder / f"rank-{ctx.rank}"
    if not job.in_memory:
        pid_file.write_text(str(os.getpid()))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 64), torch.nn.Dropout(job.dropout), torch.nn.Linear(64, 1)
    )
    torch.manual_seed(100 + ctx.rank)
    model = ctx.wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    sampler = data.DistributedSampler(Points(), pad=False)
    loader = data.DataLoader(Points(), BATCH // ctx.world_size, sampler=sampler)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "seen": [],
        "ballast": torch.zeros(2**18),  # a megabyte: a save takes long enough to be hit
    }
    asynchronous = not job.in_memory and (job.asynchronous or ctx.attempt % 2 == 0)
    memory: dict[str, Any] = {"every": 7, "memory_every": 1} if job.in_memory else {}
    with Checkpointer(job.directory, **memory) as checkpointer:
        if (
            job.in_memory
        ):  # only now: to a busy machine, what is before takes longer than the killer waits
            pid_file.write_text(str(os.getpid()))
        step = checkpointer.restore(state) or 0
        if job.in_memory and ctx.is_main and step < job.last_acknowledged():
            with job.lost.open("a") as file:
                file.write(f"{job.last_acknowledged()} was in memory, but {step} was restored\n")
        for epoch in loader.epochs(EPOCHS):
            for points, indices in loader:
                optimizer.zero_grad()
                model(points).square().mean().backward()
                optimizer.step()
                scheduler.step()
                step += 1
                state["seen"] = [*state["seen"], [epoch, ctx.all_gather(indices.tolist())]]
                if not memory or checkpointer.is_due(step):
                    checkpointer.save(state, step, asynchronous=asynchronous)
                # Once a background save has been started, only the previous one has been acknowledged.
                acknowledge(ctx, job, step - asynchronous)
    acknowledge(ctx, job, step)
    if ctx.is_main:
        torch.save({"model": ctx.unwrap(model).state_dict(), "seen": state["seen"]}, job.result)


def acknowledge(ctx: ddpsafe.RankContext, job: Job, step: int) -> None:
    """Record, on rank 0, that a step is saved."""
    if ctx.is_main and step > 0:
        fd = os.open(job.acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(fd, f"{step}\n".encode())
        os.close(fd)


def preloaded() -> Any:
    """Return the fork server, which has imported what is slow: a victim lives for half a second."""
    context = multiprocessing.get_context("forkserver")
    # The first optimizer of a process imports torch._dynamo, which takes two seconds.
    late = ["torch._dynamo", "ddpsafe.data", "ddpsafe.checkpoint", "ddpsafe._worker.join.attached"]
    context.set_forkserver_preload(["torch", "ddpsafe._worker.preload", *late])
    return context


def train_alone(job: Job) -> None:
    """Train in this process, without a process group."""
    train(ddpsafe.current(), job)


def launch(job: Job, ranks: int, *, attempts: int = 1) -> None:
    """Train in ranks."""
    logging.getLogger("ddpsafe").setLevel(logging.ERROR)  # retries are expected here
    retry = ddpsafe.RetryPolicy(
        on={"killed"}, attempts=attempts, backoff_initial=0, jitter=0, no_progress=None
    )
    ddpsafe.launch(
        train,
        args=(job,),
        nproc_per_node=ranks,
        backend="gloo",
        start_method="forkserver",
        retry=retry,
    )


@dataclass(kw_only=True)
class Tally:
    """What happened to one kind of victim."""

    kills: int = 0
    inside_save: int = 0
    trainings: int = 0
    faults: list[str] = field(default_factory=list)


def check_survivors(job: Job, tally: Tally) -> None:
    """Load the newest checkpoint as a reader would, and compare it with what was acknowledged."""
    if job.in_memory:  # the ranks compare it themselves: the memory is the launcher's
        tally.kills += 1
        return
    last = job.last_acknowledged()
    saving = list(job.directory.glob(".saving-*"))
    tally.kills += 1
    tally.inside_save += bool(saving)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            found = Checkpointer(job.directory, access="read", rng=False).restore({"seen": []})
        except Exception as exc:  # noqa: BLE001 - any error is a fault
            tally.faults.append(f"after kill {tally.kills}: {exc!r}")
            return
    if (found or 0) < last:
        tally.faults.append(f"step {last} was acknowledged, but the newest is {found}")


def check_result(job: Job, expected: dict[str, Any], tally: Tally, *, exact: bool) -> None:
    """Compare a finished training with an undisturbed one."""
    tally.trainings += 1
    if job.lost.exists():
        tally.faults += job.lost.read_text().splitlines()
    result = torch.load(job.result, weights_only=True)
    for name, value in expected["model"].items():
        found = result["model"][name]
        same = torch.equal(found, value) if exact else torch.allclose(found, value, atol=TOLERANCE)
        if not same:
            off = (found - value).abs().max().item()
            tally.faults.append(f"{name} differs by up to {off:g} from the undisturbed training")
    if exact and result["seen"] != expected["seen"]:
        tally.faults.append("other samples were read than in the undisturbed training")
    for epoch in range(EPOCHS):
        read = [i for e, ranks in result["seen"] if e == epoch for rank in ranks for i in rank]
        if Counter(read) != Counter(range(SAMPLES)):
            tally.faults.append(f"epoch {epoch}: not every sample was read exactly once")


def pid_of(job: Job, rank: int) -> int | None:
    """Return the pid of a rank, if it has started to train."""
    with contextlib.suppress(OSError, ValueError):
        return int((job.folder / f"rank-{rank}").read_text())
    return None


def kill(pid: int) -> bool:
    """Send SIGKILL; return whether the process existed."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


class Arena:
    """Runs trainings and kills them.

    Args:
        folder: Where everything is written.
        seed: Seed of the random moments.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._random = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self._number = 0
        self._context = preloaded()

    def new_job(self, **options: Any) -> Job:
        """Make a job with its own folder."""
        self._number += 1
        folder = self._folder / f"job-{self._number}"
        folder.mkdir()
        return Job(folder=folder, **options)

    def undisturbed(self, ranks: int, **options: Any) -> dict[str, Any]:
        """Train without kills and return the result."""
        job = self.new_job(**options)
        if ranks:
            launch(job, ranks)
        else:
            self._run_alone(job).join(LIMIT_S)
        found: dict[str, Any] = torch.load(job.result, weights_only=True)
        return found

    def _run_alone(self, job: Job) -> Any:
        process = self._context.Process(target=train_alone, args=(job,))
        process.start()
        return process

    def kill_all(self, victim: str, kills: int, tally: Tally) -> None:
        """Kill `kills` victims of one kind."""
        match victim:
            case "saver":
                self.kill_savers(kills, tally)
            case "rank" | "memory":
                self.kill_ranks(kills, tally, in_memory=victim == "memory")
            case _:
                sizes = (2,) if victim == "launcher" else (1, 2, 3, 4)
                self.kill_launchers(kills, tally, sizes=sizes)

    def kill_savers(self, kills: int, tally: Tally) -> None:
        """Kill single processes that train."""
        expected = self.undisturbed(0)
        while tally.kills < kills:
            job = self.new_job(asynchronous=tally.trainings % 2 == 1)
            while not job.result.exists():
                process = self._run_alone(job)
                if tally.kills < kills:
                    self._kill_saver(job, process, tally)
                process.join(LIMIT_S)
            check_result(job, expected, tally, exact=True)

    def _kill_saver(self, job: Job, process: Any, tally: Tally) -> None:
        (job.folder / "rank-0").unlink(missing_ok=True)
        wait_until(lambda: pid_of(job, 0) is not None or not process.is_alive())
        process.join(self._random.uniform(0, 0.4))
        if process.is_alive():
            process.kill()
            process.join(LIMIT_S)
            check_survivors(job, tally)

    def kill_ranks(self, kills: int, tally: Tally, *, in_memory: bool) -> None:
        """Kill random ranks of launches that retry."""
        expected = self.undisturbed(2)
        while tally.kills < kills:
            job = self.new_job(in_memory=in_memory)
            open_before = open_files()
            done = threading.Event()
            killer = threading.Thread(target=self._kill_ranks, args=(job, kills, tally, done))
            killer.start()
            try:
                launch(job, 2, attempts=1000)
            finally:
                done.set()
                killer.join()
            check_result(job, expected, tally, exact=True)
            if in_memory and open_files() != open_before and tally.trainings > 1:
                tally.faults.append(f"descriptors: {open_before} before, {open_files()} after")

    def _kill_ranks(self, job: Job, kills: int, tally: Tally, done: threading.Event) -> None:
        """Kill one rank of each attempt once all have begun; check the files before the next attempt."""
        dead: set[int | None] = {None}
        while tally.kills < kills and not done.wait(0.01):
            pids = [pid_of(job, rank) for rank in range(2)]
            if dead & set(pids):
                continue
            done.wait(self._random.uniform(0, 0.8))
            if not job.in_memory:
                self._perhaps_await_write(job)
            victims = self._random.sample(pids, self._random.choice((1, 1 + job.in_memory)))
            killed = [victim is not None and kill(victim) for victim in victims]
            if any(killed):
                check_survivors(job, tally)
            dead |= set(pids)

    def _perhaps_await_write(self, job: Job) -> None:
        """Half of the time, wait until files are being written: a random moment rarely hits that."""
        if self._random.random() < 0.5:
            ends_s = time.monotonic() + WRITE_S
            while not any(job.directory.glob(".saving-*")) and time.monotonic() < ends_s:
                time.sleep(0.0005)

    def kill_launchers(self, kills: int, tally: Tally, *, sizes: tuple[int, ...]) -> None:
        """Kill launchers, whose ranks die with them; each launch has one of `sizes` as world size."""
        exact = len(sizes) == 1
        dropout = 0.5 if exact else 0.0  # each rank draws its own numbers
        expected = self.undisturbed(2, dropout=dropout)
        while tally.kills < kills:
            job = self.new_job(dropout=dropout)
            while not job.result.exists():
                self._one_launcher(job, kills, tally, self._random.choice(sizes))
            check_result(job, expected, tally, exact=exact)

    def _one_launcher(self, job: Job, kills: int, tally: Tally, ranks: int) -> None:
        for file in job.folder.glob("rank-*"):
            file.unlink()
        # Each launcher has its own interpreter: the cleanup after a launcher's death also ends
        # that launcher's fork server.
        asynchronous = self._random.random() < 0.5
        facts = json.dumps([str(job.folder), asynchronous, job.dropout, ranks])
        process = subprocess.Popen([sys.executable, __file__, "--be-launcher", facts])
        if tally.kills < kills:
            wait_until(lambda: pid_of(job, ranks - 1) is not None or process.poll() is not None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._random.uniform(0, 0.8))
            self._perhaps_await_write(job)
            if process.poll() is None:
                pids = [pid_of(job, rank) for rank in range(ranks)]
                process.kill()
                process.wait(LIMIT_S)
                wait_until(lambda: not any(pid and is_alive(pid) for pid in pids))
                check_survivors(job, tally)
        process.wait(LIMIT_S)


def open_files() -> Counter[str]:
    """Return what this process, which is the launcher, has open, but for what has a number in its name."""
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[re.sub(r"\d+", "", str(link.readlink()))] += 1
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition: Any) -> None:
    """Poll until a condition holds, for at most two minutes."""
    ends_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > ends_s:
            message = "it did not happen"
            raise TimeoutError(message)
        time.sleep(0.002)


def run(kills: int, seed: int, victims: Sequence[str]) -> dict[str, Tally]:
    """Kill `kills` times in total, and return what happened to each kind of victim."""
    total = sum(SHARES[name] for name in victims)
    shares = {name: max(1, round(kills * SHARES[name] / total)) for name in victims}
    shares[victims[0]] += kills - sum(shares.values())
    tallies = {name: Tally() for name in victims}
    with tempfile.TemporaryDirectory(prefix="crash-") as folder:
        arena = Arena(Path(folder), seed)
        for name, tally in tallies.items():
            arena.kill_all(name, shares[name], tally)
    return tallies


def describe(tallies: dict[str, Tally], seed: int, took_s: float) -> str:
    """Return the table."""
    names = {
        "saver": "a process that saves, alone",
        "rank": "a random rank of two, retried by the launch",
        "launcher": "the launcher of two ranks",
        "ranks changed": "the launcher; then 1 to 4 ranks",
        "memory": "one or both of two ranks, with each state in memory",
    }
    lines = [
        "| victim | kills | of them while files were written | trainings finished | faults |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {names[name]} | {t.kills} | {t.inside_save} | {t.trainings} | {len(t.faults)} |"
        for name, t in tallies.items()
    ]
    kills = sum(t.kills for t in tallies.values())
    inside = sum(t.inside_save for t in tallies.values())
    faults = sum(len(t.faults) for t in tallies.values())
    trainings = sum(t.trainings for t in tallies.values())
    lines.append(f"| all | {kills} | {inside} | {trainings} | {faults} |")
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    cores = os.cpu_count()
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {cores} cores"
    lines += ["", f"Seed {seed}, {when}, {took_s:.0f} s, {machine}."]
    return "\n".join(lines)


PAGE: Final = """# Crash test of checkpoints

A training is killed with SIGKILL at random moments and started again, until it finishes.
After each kill, the newest checkpoint has to load completely and must not be older than the last one that `save` acknowledged.
Each finished training has to have read every sample once per epoch, and to have the same parameters as an undisturbed one: bit for bit, with dropout, if the number of ranks stays the same.
If it changes, they may differ by {tolerance:g}, because floating-point sums depend on their order; there is no dropout then, because each rank draws its own random numbers.
Saves run in the background in every second training of the first kind, in every second attempt of the second, and randomly in half of the launchers.

{table}

`python benchmarks/crash_checkpoint.py --kills {kills} --seed {seed}` repeats it.
"""


def main() -> None:
    """Kill, print the table, and fail if a checkpoint was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="also write the table to this page")
    parser.add_argument("--victims", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--be-launcher", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be_launcher:
        folder, asynchronous, dropout, ranks = json.loads(arguments.be_launcher)
        preloaded()
        launch(Job(folder=Path(folder), asynchronous=asynchronous, dropout=dropout), ranks)
        return
    started_s = time.monotonic()
    tallies = run(arguments.kills, arguments.seed, arguments.victims)
    table = describe(tallies, arguments.seed, time.monotonic() - started_s)
    print(table)
    if arguments.save:
        page = PAGE.format(
            table=table, kills=arguments.kills, seed=arguments.seed, tolerance=TOLERANCE
        )
        arguments.save.write_text(page, encoding="utf-8")
    faults = [text for tally in tallies.values() for text in tally.faults]
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
