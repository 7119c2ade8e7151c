"""Overhead per batch of ddpsafe.data.DataLoader over torch's, the same sampler order in both.

Passes of the two alternate, so that a machine that slows down slows both; the median of
the differences is taken. Run: python benchmarks/loader.py [--workers 0 2] [--batches 1500].
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler as TorchDistributedSampler
from torch.utils.data import TensorDataset

from ddpsafe.data import DataLoader, DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Iterable

BATCH: Final = 64
LIMIT: Final = 0.02


def pass_us(loader: Iterable[Any]) -> float:
    """Return the time of one pass, in microseconds per batch."""
    started = time.perf_counter()
    batches = sum(1 for _ in loader)
    return (time.perf_counter() - started) / batches * 1e6


def compare(workers: int, batches: int, rounds: int) -> tuple[float, float]:
    """Return torch's median time per batch and our overhead, in microseconds."""
    n = batches * BATCH
    dataset = TensorDataset(torch.randn(n, 64), torch.arange(n))
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    torch_sampler = TorchDistributedSampler(dataset, 1, 0)
    theirs = TorchDataLoader(dataset, BATCH, sampler=torch_sampler, **options)
    ours = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, 1, 0), **options)
    pass_us(theirs), pass_us(ours)
    pairs = []
    for number in range(rounds):
        first, second = (theirs, ours) if number % 2 else (ours, theirs)
        times = {id(first): pass_us(first), id(second): pass_us(second)}
        pairs.append((times[id(theirs)], times[id(ours)]))
    base = statistics.median(t for t, _ in pairs)
    return base, statistics.median(o - t for t, o in pairs)


def main() -> None:
    """Print the table, and whether the overhead is under the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--batches", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    print("| workers | torch | overhead | share |")
    print("|---|---|---|---|")
    for workers in arguments.workers:
        base, extra = compare(workers, arguments.batches, arguments.rounds)
        verdict = "" if extra / base < LIMIT else f" (over {LIMIT:.0%})"
        print(
            f"| {workers} | {base:.1f} us | {extra:+.2f} us | {extra / base:+.2%}{verdict} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
