"""Save and restore of a state beside torch.save, torch.distributed.checkpoint and safetensors.

Each round runs the contestants in another order, after a sync, so that none always comes first after
the others have filled the disk's queue. Two contestants are compared round by round, and the median of
these ratios counts, so that other load in some rounds changes little. All of them flush the file to
disk (fsync), except for "torch.save", which leaves it in memory. Each load runs in a new process, as
after a failure, from files that the kernel still has in memory. safetensors is included if it is
installed.

Run: python benchmarks/checkpoint.py [--bytes 1073741824] [--tensors 128] [--folder DIR] [--save FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from ddpsafe.checkpoint import Checkpointer
from ddpsafe.checkpoint._replicas import digests_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    State = dict[str, torch.Tensor]

PLAIN: Final = "plain.pt"
SAFE: Final = "plain.safetensors"
DCP: Final = "dcp"
OURS: Final = "ours"
RATIO: Final = 0.9
BLOCKING: Final = 1.2


def make_state(size_bytes: int, tensors: int) -> State:
    """Make tensors of random numbers: half of them large, half small, as a network has."""
    large = size_bytes // 4 // (tensors // 2)
    state = {f"weight-{number}": torch.randn(large) for number in range(tensors // 2)}
    state |= {f"bias-{number}": torch.randn(256) for number in range(tensors // 2)}
    return state


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def sync(path: Path) -> None:
    """Flush a file to disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def torch_save(state: State, path: Path, *, durable: bool) -> None:
    """Save as scripts do."""
    torch.save(state, path)
    if durable:
        sync(path)


def dcp_save(state: State, folder: Path) -> None:
    """Save with torch.distributed.checkpoint, which syncs its files by itself."""
    import torch.distributed.checkpoint as dcp

    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def safe_save(state: State, path: Path) -> None:
    """Save with safetensors."""
    from safetensors.torch import save_file

    save_file(state, path)
    sync(path)


def copy_into(target: State, loaded: Mapping[str, torch.Tensor]) -> None:
    """Copy into existing tensors, as load_state_dict does."""
    for name, value in target.items():
        value.copy_(loaded[name])


def dcp_load(target: State, folder: Path) -> None:
    """Load with torch.distributed.checkpoint, in place."""
    import torch.distributed.checkpoint as dcp

    dcp.load(target, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


def safe_load(target: State, path: Path) -> None:
    """Load with safetensors."""
    from safetensors.torch import load_file

    copy_into(target, load_file(path))


def has_safetensors() -> bool:
    """Return whether safetensors is installed."""
    return importlib.util.find_spec("safetensors") is not None


def measure_saves(state: State, folder: Path, rounds: int, order: random.Random) -> Seconds:
    """Return how long each contestant takes to save; each save replaces the previous one."""
    taken = Seconds()
    steps = itertools.count()
    with Checkpointer(folder / OURS, keep=1, rng=False) as ours:

        def save_asynchronously() -> None:
            ours.save(state, next(steps), asynchronous=True)

        # As parameters, since only models are compared; a job of one rank compares nothing.
        model = torch.nn.ParameterDict(state)
        contestants: dict[str, Callable[[], object]] = {
            "torch.save": lambda: torch_save(state, folder / "quick.pt", durable=False),
            "torch.save, durable": lambda: torch_save(state, folder / PLAIN, durable=True),
            "dcp.save": lambda: dcp_save(state, folder / DCP),
            "save": lambda: ours.save(state, next(steps)),
            "copy to host": lambda: {k: v.to("cpu", copy=True) for k, v in state.items()},
            "asynchronous save": save_asynchronously,
            "comparing ranks": lambda: digests_of({"model": model}, lambda model: model),
        }
        if has_safetensors():
            contestants["safetensors"] = lambda: safe_save(state, folder / SAFE)
        for _ in range(rounds):
            for name in order.sample(list(contestants), len(contestants)):
                # dcp adds files to its folder; the others replace theirs.
                shutil.rmtree(folder / DCP, ignore_errors=True)
                os.sync()
                taken.of(name, contestants[name])
                ours.wait()
        dcp_save(state, folder / DCP)
    return taken


def measure_loads(arguments: argparse.Namespace, folder: Path, order: random.Random) -> Seconds:
    """Return how long each contestant takes to load, in a new process as after a failure."""
    taken = Seconds()
    names = ["torch.load", "restore", "dcp.load", *(["safetensors"] if has_safetensors() else [])]
    for _ in range(arguments.rounds):
        for name in order.sample(names, len(names)):
            command = [sys.executable, __file__, "--load", name, "--folder", str(folder)]
            command += ["--bytes", str(arguments.bytes), "--tensors", str(arguments.tensors)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            taken.add(f"{name}, load" if name == "safetensors" else name, float(done.stdout))
    return taken


def load(arguments: argparse.Namespace) -> None:
    """Load once, into existing tensors, and print the seconds."""
    target: dict[str, Any] = {**make_state(arguments.bytes, arguments.tensors)}
    folder: Path = arguments.folder
    ways: dict[str, Callable[[], object]] = {
        "torch.load": lambda: copy_into(target, torch.load(folder / PLAIN, weights_only=True)),
        "dcp.load": lambda: dcp_load(target, folder / DCP),
        "safetensors": lambda: safe_load(target, folder / SAFE),
    }
    if arguments.load in ways:
        import torch.distributed.checkpoint

        print(seconds(ways[arguments.load]))
        return
    with Checkpointer(folder / OURS, keep=1, rng=False) as ours:
        print(seconds(lambda: ours.restore(target)))


class Seconds(dict[str, list[float]]):
    """The measured seconds, by contestant."""

    def of(self, name: str, call: Callable[[], object]) -> None:
        """Measure a call."""
        self.add(name, seconds(call))

    def add(self, name: str, value_s: float) -> None:
        """Store a measurement."""
        self.setdefault(name, []).append(value_s)

    def median(self, name: str) -> float:
        """Return the median time of a contestant."""
        return statistics.median(self[name])

    def ratio(self, name: str, other: str) -> float:
        """Return the other's time divided by this one's: the median over the rounds."""
        pairs = zip(self[other], self[name], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def describe(taken: Seconds, size_bytes: int) -> str:
    """Return the table."""

    def line(name: str, other: str, target: str) -> str:
        ours_s, other_s = taken.median(name), taken.median(other)
        speed = size_bytes / ours_s / 1e9
        return (
            f"| {name} | {ours_s:.2f} s ({min(taken[name]):.2f}) | {speed:.2f} GB/s | {other} "
            f"{other_s:.2f} s ({min(taken[other]):.2f}) | {taken.ratio(name, other):.2f} | {target} |"
        )

    optional = "safetensors" in taken
    lines = [
        "| ours | median (best) | bandwidth | compared with: median (best) | ratio | target |",
        "|---|---|---|---|---|---|",
        line("save", "torch.save, durable", f"≥ {RATIO}"),
        line("save", "torch.save", "none: it leaves the file in memory"),
        line("save", "dcp.save", ""),
        *([line("save", "safetensors", "")] if optional else []),
        line("restore", "torch.load", f"≥ {RATIO}"),
        line("restore", "dcp.load", ""),
        *([line("restore", "safetensors, load", "")] if optional else []),
        line("asynchronous save", "copy to host", f"≥ {1 / BLOCKING:.2f}"),
        line("comparing ranks", "save", "≥ 10"),
    ]
    return "\n".join(lines)


PAGE: Final = """# Checkpoints beside torch.save, torch.distributed.checkpoint and safetensors

{table}

{facts}
Each round runs the contestants in another order, after a sync; each save replaces the previous one, and each load is the first of a new process.
`restore` checks every byte against its checksum; the others check nothing.
The ratio is the median, over the rounds, of the other's time divided by ours: above 1, ours is faster.
For an asynchronous save, the time until the call returns counts.
"Comparing ranks" is the part of a save that each of several ranks needs to find out whether their models are equal; it is not in the rows above.
`python benchmarks/checkpoint.py` repeats it.
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=2**30)
    parser.add_argument("--tensors", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0, help="seed of the order in each round")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary one by default")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path, help="also write the table to this page")
    arguments = parser.parse_args()
    if arguments.load:
        load(arguments)
        return
    order = random.Random(arguments.seed)  # noqa: S311 - repeatable
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=arguments.folder))
    busy = os.getloadavg()[0]
    try:
        state = make_state(arguments.bytes, arguments.tensors)
        saves = measure_saves(state, folder, arguments.rounds, order)
        loads = measure_loads(arguments, folder, order)
    finally:
        shutil.rmtree(folder)
    table = describe(Seconds(saves | loads), arguments.bytes)
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    facts = (
        f"{arguments.bytes / 1e9:.2f} GB in {arguments.tensors} tensors, {arguments.rounds} rounds, "
        f"{when}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores, load average {busy:.1f} at the start and {os.getloadavg()[0]:.1f} at the end."
    )
    print(table, facts, sep="\n\n")
    if arguments.save:
        arguments.save.write_text(PAGE.format(table=table, facts=facts), encoding="utf-8")


if __name__ == "__main__":
    main()
