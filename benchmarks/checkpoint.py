"""Save and restore of a state against plain torch.save and torch.load, and what a save blocks.

Every measurement is taken several times, the contestants in turns, and the best counts: what else
the machine does only adds time. "durable" is torch.save followed by fsync of the file: a save of
ours always brings everything to the disk, torch.save alone leaves it in memory.

Run: python benchmarks/checkpoint.py [--bytes 1073741824] [--folder DIR] [--save FILE]
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
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


def measure(size_bytes: int, folder: Path, rounds: int) -> dict[str, float]:
    """Return the best time of each contestant, in seconds."""
    state = make_state(size_bytes)
    target = {name: torch.empty_like(value) for name, value in state.items()}
    plain = folder / "plain.pt"
    best: dict[str, float] = {}

    def take(name: str, call: Callable[[], object]) -> None:
        best[name] = min(best.get(name, float("inf")), seconds(call))

    with Checkpointer(folder / "ours", keep=1, rng=False) as ours:
        settled: Any = state
        for number in range(rounds):
            plain.unlink(missing_ok=True)
            take("torch.save", lambda: torch_save(state, plain, durable=False))
            plain.unlink()
            os.sync()
            take("torch.save, durable", lambda: torch_save(state, plain, durable=True))
            take("save", lambda step=2 * number: ours.save(settled, step))
            take("torch.load", lambda: torch_load(target, plain))
            take("restore", lambda: ours.restore(target))
            take("copy to host", lambda: copy_to_host(state))
            take(
                "asynchronous save",
                lambda step=2 * number + 1: ours.save(settled, step, asynchronous=True),
            )
            ours.wait()
    return best


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
`restore` checks every byte against its checksum on the way; `torch.load` checks none.
The ratio is the other's time by ours: above 1, ours is faster.
`python benchmarks/checkpoint.py` repeats it.
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=2**30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary one by default")
    parser.add_argument("--save", type=Path, help="write the table to this page, too")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=arguments.folder))
    load = os.getloadavg()[0]
    try:
        best = measure(arguments.bytes, folder, arguments.rounds)
    finally:
        shutil.rmtree(folder)
    table = describe(best, arguments.bytes)
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    facts = (
        f"{arguments.bytes / 1e9:.2f} GB in {2 * TENSORS} tensors, best of {arguments.rounds}, "
        f"{when}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores, load average {load:.1f} at the start."
    )
    print(table, facts, sep="\n\n")
    if arguments.save:
        arguments.save.write_text(PAGE.format(table=table, facts=facts), encoding="utf-8")


if __name__ == "__main__":
    main()
