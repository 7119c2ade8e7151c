"""Save and restore of a state against plain torch.save and torch.load, and what a save blocks.

Every measurement is taken several times, the contestants in turns, and the best counts: what else
the machine does only adds time. "durable" is torch.save followed by fsync of the file: a save of
ours always brings everything to the disk, torch.save alone leaves it in memory. What is loaded is
loaded in a new process, as after a failure, from files that the kernel still has in memory.

Run: python benchmarks/checkpoint.py [--bytes 1073741824] [--folder DIR] [--save FILE]
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from ddpsafe.checkpoint import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Callable

    State = dict[str, torch.Tensor]

TENSORS: Final = 64
PLAIN: Final = "plain.pt"
OURS: Final = "ours"
RATIO: Final = 0.9
BLOCKING: Final = 1.2


def make_state(size_bytes: int) -> State:
    """Make tensors of random numbers: large ones, and as many small ones, as a network has."""
    large = size_bytes // 4 // TENSORS
    state = {f"weight-{number}": torch.randn(large) for number in range(TENSORS)}
    state |= {f"bias-{number}": torch.randn(256) for number in range(TENSORS)}
    return state


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def torch_save(state: State, path: Path, *, durable: bool) -> None:
    """Save as scripts do."""
    torch.save(state, path)
    if durable:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def torch_load(target: State, path: Path) -> None:
    """Load as scripts do, into tensors that exist."""
    loaded = torch.load(path, weights_only=True)
    for name, value in target.items():
        value.copy_(loaded[name])


def copy_to_host(state: State) -> State:
    """Copy a state as scripts do that save in the background."""
    return {name: value.to("cpu", copy=True) for name, value in state.items()}


def measure_saves(state: State, folder: Path, rounds: int) -> Seconds:
    """Return what each contestant needs to save; each takes the place of the one before."""
    taken = Seconds()
    plain = folder / PLAIN
    with Checkpointer(folder / OURS, keep=1, rng=False) as ours:
        for number in range(rounds):
            taken.of("torch.save", lambda: torch_save(state, plain, durable=False))
            os.sync()
            taken.of("torch.save, durable", lambda: torch_save(state, plain, durable=True))
            taken.of("save", lambda step=2 * number: ours.save(state, step))
            taken.of("copy to host", lambda: copy_to_host(state))
            taken.of(
                "asynchronous save",
                lambda step=2 * number + 1: ours.save(state, step, asynchronous=True),
            )
            ours.wait()
    return taken


def measure_loads(size_bytes: int, folder: Path, rounds: int) -> Seconds:
    """Return what each contestant needs to load, in a new process as after a failure."""
    taken = Seconds()
    for _ in range(rounds):
        for name in ("torch.load", "restore"):
            command = [sys.executable, __file__, "--load", name, "--folder", str(folder)]
            done = subprocess.run(
                [*command, "--bytes", str(size_bytes)], capture_output=True, text=True, check=True
            )
            taken.add(name, float(done.stdout))
    return taken


def load(name: str, size_bytes: int, folder: Path) -> None:
    """Load once, into tensors that are there already, and print the seconds."""
    target: dict[str, Any] = {**make_state(size_bytes)}
    if name == "torch.load":
        print(seconds(lambda: torch_load(target, folder / PLAIN)))
        return
    with Checkpointer(folder / OURS, keep=1, rng=False) as ours:
        print(seconds(lambda: ours.restore(target)))


class Seconds(dict[str, list[float]]):
    """What was measured, by contestant."""

    def of(self, name: str, call: Callable[[], object]) -> None:
        """Measure a call."""
        self.add(name, seconds(call))

    def add(self, name: str, value_s: float) -> None:
        """Keep a measurement."""
        self.setdefault(name, []).append(value_s)

    def best(self) -> dict[str, float]:
        """Return the best of each."""
        return {name: min(values) for name, values in self.items()}


def describe(best: dict[str, float], size_bytes: int) -> str:
    """Return the table."""

    def line(name: str, other: str, target: str) -> str:
        ratio = best[other] / best[name]
        speed = size_bytes / best[name] / 1e9
        return (
            f"| {name} | {best[name]:.2f} s | {speed:.2f} GB/s | {other} {best[other]:.2f} s "
            f"| {ratio:.2f} | {target} |"
        )

    blocked = best["asynchronous save"] / best["copy to host"]
    lines = [
        "| ours | time | bandwidth | compared with | ratio | target |",
        "|---|---|---|---|---|---|",
        line("save", "torch.save, durable", f"≥ {RATIO}"),
        line("save", "torch.save", "none: it leaves the file in memory"),
        line("restore", "torch.load", f"≥ {RATIO}"),
        (
            f"| asynchronous save, until it returns | {best['asynchronous save']:.2f} s | "
            f"{size_bytes / best['asynchronous save'] / 1e9:.2f} GB/s | copy to host "
            f"{best['copy to host']:.2f} s | {blocked:.2f} of the copy's time | ≤ {BLOCKING} |"
        ),
    ]
    return "\n".join(lines)


PAGE: Final = """# Checkpoints against torch.save

{table}

{facts}
Each save takes the place of the one before; each load is the first of a new process.
`restore` checks every byte against its checksum on the way; `torch.load` checks none.
The ratio is the other's time by ours: above 1, ours is faster.
`python benchmarks/checkpoint.py` repeats it.
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=2**30)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary one by default")
    parser.add_argument("--load", choices=["torch.load", "restore"], help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path, help="write the table to this page, too")
    arguments = parser.parse_args()
    if arguments.load:
        load(arguments.load, arguments.bytes, arguments.folder)
        return
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=arguments.folder))
    busy = os.getloadavg()[0]
    try:
        saves = measure_saves(make_state(arguments.bytes), folder, arguments.rounds)
        loads = measure_loads(arguments.bytes, folder, arguments.rounds)
    finally:
        shutil.rmtree(folder)
    table = describe(saves.best() | loads.best(), arguments.bytes)
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    facts = (
        f"{arguments.bytes / 1e9:.2f} GB in {2 * TENSORS} tensors, best of {arguments.rounds}, "
        f"{when}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores, load average {busy:.1f} at the start."
    )
    print(table, facts, sep="\n\n")
    if arguments.save:
        arguments.save.write_text(PAGE.format(table=table, facts=facts), encoding="utf-8")


if __name__ == "__main__":
    main()
