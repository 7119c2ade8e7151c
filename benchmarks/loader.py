"""Overhead per batch of ddpsafe.data.DataLoader over torch's, with the same sampler order in both.

Passes of the two alternate, so that a machine that slows down slows both, and the best pass of each
counts, because other load only adds time. Without workers, the CPU time of the process counts; with
workers, the wall time. Run: python benchmarks/loader.py [--workers 0 2].
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler as TorchDistributedSampler
from torch.utils.data import TensorDataset

from ddpsafe.data import DataLoader, DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BATCH: Final = 64
LIMIT: Final = 0.02


def pass_us(loader: Iterable[Any], clock: Callable[[], float]) -> float:
    """Return the time of one pass, in microseconds per batch."""
    started = clock()
    batches = sum(1 for _ in loader)
    return (clock() - started) / batches * 1e6


def compare(workers: int, batches: int, rounds: int) -> tuple[float, float]:
    """Return torch's best time per batch and our overhead, in microseconds."""
    clock = time.perf_counter if workers else time.process_time
    n = batches * BATCH
    dataset = TensorDataset(torch.randn(n, 64), torch.arange(n))
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    torch_sampler = TorchDistributedSampler(dataset, 1, 0)
    theirs = TorchDataLoader(dataset, BATCH, sampler=torch_sampler, **options)
    ours = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, 1, 0), **options)
    times: dict[int, list[float]] = {id(theirs): [], id(ours): []}
    for number in range(rounds):
        for loader in (theirs, ours) if number % 2 else (ours, theirs):
            times[id(loader)].append(pass_us(loader, clock))
    base = min(times[id(theirs)])
    return base, min(times[id(ours)]) - base


def main() -> None:
    """Print the table, and whether the overhead exceeds the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--batches", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=13)
    arguments = parser.parse_args()
    print("| workers | torch | overhead | share |")
    print("|---|---|---|---|")
    for workers in arguments.workers:
        base, extra = compare(workers, arguments.batches, arguments.rounds)
        note = "" if extra / base < LIMIT else f" (over {LIMIT:.0%})"
        print(
            f"| {workers} | {base:.1f} us | {extra:+.2f} us | {extra / base:+.2%}{note} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
