"""Ranks that may be asked to stop, or whose launcher is suspended."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

import psutil
import scripts
import torch
import torch.distributed as dist
from orphan_programs import wait_for
from training_programs import average_gradients

import ddpsafe
from ddpsafe import RankContext

HELPERS: Final = ("loader of torch", "loader", "pool", "executor", "manager")
"""The kinds of processes that a rank starts through `multiprocessing`, see `work_of`."""

STEP_S: Final = 0.05
"""How long a step takes; without a pause, ranks that wait for a request would use all cores."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Signals to a launcher, and with `also_all` to every process below it, before it and after it."""

    program: Callable[..., object]
    signals: list[signal.Signals]
    ranks: int = 2
    also_all: bool = False

    def send(self, folder: Path) -> None:
        """Wait for the ranks, and send the signals to this process."""
        ready = [folder / f"ready-{rank}" for rank in range(self.ranks)]
        scripts.wait_until(lambda: all(path.exists() for path in ready))
        processes = psutil.Process().children(recursive=True) if self.also_all else []
        pids = [process.pid for process in processes]
        (folder / "sent").write_text(str(time.monotonic()))
        # Those to this process follow each other at once: after a second, another one means impatience.
        _send(pids, self.signals)
        for signum in self.signals:
            os.kill(os.getpid(), signum)
            time.sleep(0.05)
        _send(pids, self.signals)


def _send(pids: list[int], signals: list[signal.Signals]) -> None:
    for pid, signum in itertools.product(pids, signals):
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            os.kill(pid, signum)


def train_until_asked(ctx: RankContext, folder: Path, *, pace_s: float = 0.005) -> int:
    """Train until asked to stop, each rank at its own speed, and save; return the steps made."""
    step = 0
    while not ctx.stop_requested():
        step += 1
        if step == 3:
            (folder / f"ready-{ctx.rank}").touch()
        time.sleep(pace_s * (1 + ctx.rank))
    (folder / f"saved-{ctx.rank}").write_text(str(step))
    return step


def ask_late(ctx: RankContext, folder: Path) -> int:
    """Load for some time before the first step and the first call of `stop_requested()`."""
    (folder / f"ready-{ctx.rank}").touch()
    scripts.wait_until((folder / "go").exists)
    return train_until_asked(ctx, folder)


def train_in_step(ctx: RankContext, folder: Path) -> int:
    """Do the same with a collective in every step, as DistributedDataParallel does."""
    step = 0
    while not ctx.stop_requested():
        time.sleep(STEP_S)
        step = round(ctx.reduce_mean(float(step + 1)))
        if step == 3:
            (folder / f"ready-{ctx.rank}").touch()
    (folder / f"saved-{ctx.rank}").write_text(str(step))
    return step


def finish_early(ctx: RankContext, folder: Path) -> int:
    """Make 40 steps at very different speeds; the request arrives when rank 0 has made them all."""
    for step in range(40):
        if ctx.stop_requested():
            return step
        if ctx.rank == 1 and step == 20:
            scripts.wait_until((folder / "ready-0").exists)
            (folder / "ready-1").touch()
            scripts.wait_until((folder / "sent").exists)
            time.sleep(0.5)
    if ctx.is_main:
        (folder / "ready-0").touch()
    return 40


def never_ask(ctx: RankContext, folder: Path) -> None:
    """Train without ever calling `stop_requested()`."""
    (folder / f"ready-{ctx.rank}").touch()
    time.sleep(600)


def ask_and_go_on(ctx: RankContext, folder: Path) -> None:
    """Call `stop_requested()`, and ignore the answer."""
    ctx.stop_requested()
    (folder / f"ready-{ctx.rank}").touch()
    while True:
        ctx.stop_requested()
        time.sleep(0.01)


def fail_to_save(ctx: RankContext, folder: Path) -> None:
    """Stop when asked, but let rank 1 find the disk full."""
    train_in_step(ctx, folder)
    if ctx.rank == 1:
        raise OSError(28, "No space left on device")
    ctx.barrier("saved")


def wait_in_gloo(ctx: RankContext, folder: Path) -> None:
    """Ask once; then rank 1 dies while rank 0 is in C++, in a collective, and rank 2 in Python."""
    ctx.stop_requested()
    (folder / f"ready-{ctx.rank}").touch()
    if ctx.rank == 1:
        time.sleep(0.5)
        (folder / "fault").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600) if ctx.rank == 2 else ctx.reduce_mean(1.0)


def try_again(ctx: RankContext, folder: Path) -> str:
    """Be asked to stop in the first attempt only, rank 1 alone; the launcher is not asked."""
    for step in range(200):
        if ctx.stop_requested():
            return f"stopped at {step}"
        if ctx.attempt == 1 and ctx.rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.005 if ctx.attempt == 1 else 0)
    (folder / f"finished-{ctx.rank}").touch()
    return f"finished attempt {ctx.attempt}"


def run_scenarios(folder: Path) -> None:
    """Launch one scenario after the other, with one fork server, and record the result of each."""
    policy = ddpsafe.RetryPolicy(on={"preempted", OSError})
    for name, scenario in SCENARIOS.items():
        place = folder / name
        place.mkdir()
        sender = threading.Thread(target=scenario.send, args=[place])
        sender.start()
        found: dict[str, object] = {}
        try:
            found["values"] = ddpsafe.launch(
                scenario.program,
                (place,),
                nproc_per_node=scenario.ranks,
                backend="gloo",
                start_method="forkserver",
                timeouts={"stop": 1 if name == "overdue" else 60},
                retry=policy,
            ).values
        except (ddpsafe.LaunchError, KeyboardInterrupt) as error:
            found |= {"error": type(error).__name__, "text": str(error)}
            found |= {"kind": getattr(error, "kind", ""), "attempt": getattr(error, "attempt", 0)}
        sender.join()
        sent = float((place / "sent").read_text())
        found["took_s"] = time.monotonic() - sent
        (place / "found.json").write_text(json.dumps(found))


def train_and_resume(ctx: RankContext, folder: Path, steps: int) -> None:
    """Train until asked to stop; when started again, resume and make `steps` more steps.

    The parameter is a running sum that depends on the order of all steps since the very first.
    """
    path = folder / "checkpoint.pt"
    state = {"step": 0, "parameter": torch.zeros((), dtype=torch.float64)}
    if path.exists():
        state = torch.load(path, weights_only=True)
    first = int(state["step"])
    for step in itertools.count(first):
        if step == 3:
            (folder / f"ready-{ctx.rank}").touch()
        if ctx.stop_requested():
            break
        if first > 0 and step >= first + steps:
            break
        time.sleep(STEP_S)
        state["parameter"] = ctx.reduce_mean(state["parameter"] * 0.75 + step + ctx.rank)
        state["step"] = step + 1
    if ctx.is_main:
        torch.save(state, folder / "checkpoint.new")
        (folder / "checkpoint.new").replace(path)
    ctx.barrier("saved")
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    found = {"first": first, "last": int(state["step"]), "parameter": state["parameter"].item()}
    (folder / f"run-{restarts}-{ctx.rank}.json").write_text(json.dumps(found))


def lose_a_rank(ctx: RankContext, folder: Path) -> None:
    """Lose rank 2 of three while rank 1 waits for it at a barrier, rank 0 in a collective."""
    ctx.reduce_mean(1.0)
    (folder / f"ready-{ctx.rank}").touch()
    if ctx.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if ctx.rank == 1:
        ctx.barrier("all have evaluated")
    ctx.reduce_mean(1.0)


def add_slowly(number: int) -> int:
    """Work in a process of a pool."""
    time.sleep(0.01)
    return number + 1


class Numbers:
    """A dataset whose items take some time, as decoding does."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> float:
        time.sleep(0.002)
        return float(index)


def work_of(kind: str, method: str, ctx: RankContext) -> Iterator[object]:
    """Yield for ever what helpers of this kind, started by this method, have made."""
    context = multiprocessing.get_context(method)
    if kind == "loader of torch":
        from torch.utils.data import DataLoader

        yield from DataLoader(
            Numbers(),  # type: ignore[arg-type]  # it need not subclass Dataset
            batch_size=4,
            num_workers=2,
            persistent_workers=True,
            multiprocessing_context=context,
        )
    elif kind == "loader":
        yield from ctx.loader(
            Numbers(), batch_size=4, num_workers=2, multiprocessing_context=context
        )
    elif kind == "pool":
        with context.Pool(2) as pool:
            yield from pool.imap(add_slowly, itertools.count())
    elif kind == "executor":
        with ProcessPoolExecutor(2, mp_context=context) as executor:
            while True:
                yield executor.submit(add_slowly, 1).result()
    else:
        assert kind == "manager"
        with context.Manager() as manager:
            shared = manager.dict()
            for number in itertools.count():
                shared[number] = number
                time.sleep(0.01)
                yield shared[number]


def train_with_helpers(
    ctx: RankContext, folder: Path, kinds: tuple[str, ...] = HELPERS, method: str = "fork"
) -> int:
    """Train with what helper processes make until asked to stop, take a second to save, and go on with them."""
    works = [work_of(kind, method, ctx) for kind in kinds]
    step = 0
    while not ctx.stop_requested():
        for work in works:
            next(work)
        step = round(ctx.reduce_mean(float(step + 1)))
        if step == 3:
            (folder / f"ready-{ctx.rank}").touch()
    (folder / f"saving-{ctx.rank}").touch()
    time.sleep(1)
    for work in works:
        next(work)
    (folder / f"saved-{ctx.rank}").write_text(str(step))
    ctx.barrier("saved")
    for work in works:
        work.close()  # type: ignore[attr-defined]  # a generator: leaves its `with`
    return step


def train_with_a_program(ctx: RankContext, folder: Path) -> None:
    """Train with what a program writes, which dies of the signal, as any program does."""
    source = "import time\nwhile True: print(1, flush=True); time.sleep(0.01)"
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        for step in itertools.count():
            if not program.stdout.readline():
                raise subprocess.CalledProcessError(program.wait(), program.args)
            if ctx.stop_requested() and step > 1_000_000:
                return
            if step == 3:
                (folder / f"ready-{ctx.rank}").touch()


SCENARIOS: Final[dict[str, Scenario]] = {
    "order and echo": Scenario(train_until_asked, [signal.SIGTERM, signal.SIGTERM], ranks=4),
    "warning and order": Scenario(train_until_asked, [signal.SIGUSR1, signal.SIGTERM], ranks=4),
    "warning": Scenario(train_until_asked, [signal.SIGUSR1], ranks=4),
    "all processes": Scenario(train_in_step, [signal.SIGTERM], also_all=True),
    "all processes warned": Scenario(train_in_step, [signal.SIGUSR1], also_all=True),
    "all processes and helpers": Scenario(train_with_helpers, [signal.SIGTERM] * 2, also_all=True),
    "a program died": Scenario(train_with_a_program, [signal.SIGTERM], also_all=True),
    "overdue": Scenario(ask_and_go_on, [signal.SIGTERM]),
    "full disk": Scenario(fail_to_save, [signal.SIGTERM]),
    "too late": Scenario(finish_early, [signal.SIGUSR1]),
    "impatience": Scenario(ask_and_go_on, [signal.SIGTERM, signal.SIGINT]),
}
"""Signals that the launcher receives while ranks train. None of them ends its process."""


# Ranks whose launcher is suspended.


class Loading:
    """An argument that loads until the test makes a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, Path]) -> None:
        """Wait for the test's file."""
        self.__dict__.update(state)
        (self.folder / f"ready-{os.getpid()}").touch()
        wait_for(self.folder / "go")

    def __call__(self) -> None:
        """Do nothing more."""


class StopBetweenStarts:
    """Stands for stdout in the launcher, which flushes it before it starts each rank."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._has_stopped = False

    def flush(self) -> None:
        """Suspend this process after it has started one rank, before the next one."""
        self._stream.flush()
        if len(multiprocessing.active_children()) == 1 and not self._has_stopped:
            self._has_stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class Talking:
    """Make collectives, but no optimizer step, until the test makes a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> None:
        """Let the ranks agree on the end, so that none is left in a collective."""
        has_ended = torch.zeros(1)
        while not has_ended:
            time.sleep(STEP_S)
            average_gradients()
            (self.folder / f"ready-{os.getpid()}").touch()
            has_ended += (self.folder / "go").exists()
            dist.all_reduce(has_ended)


class Leaving:
    """Return at once, with a thread that runs until the test makes a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> None:
        """Start the thread, which reports that the main one has returned."""
        threading.Thread(target=self._last).start()

    def _last(self) -> None:
        (self.folder / f"ready-{os.getpid()}").touch()
        wait_for(self.folder / "go")


CALLS: Final[dict[str, Callable[[Path], Callable[[], None]]]] = {
    "start": Loading,
    "progress": Talking,
    "finish": Leaving,
}


def run(_ctx: RankContext, call: Callable[[], None]) -> str:
    """Call the argument."""
    call()
    return "went"


def save_slowly(ctx: RankContext, folder: Path) -> None:
    """Stop when asked to, and save until the test makes a file."""
    while not ctx.stop_requested():
        time.sleep(STEP_S)
        (folder / f"ready-{ctx.rank}").touch()
    wait_for(folder / "go")
