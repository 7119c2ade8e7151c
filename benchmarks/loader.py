"""Samples per second of ddpsafe.data.DataLoader beside torch's, with the same sampler order in both.

Passes of the two alternate, so that a machine that slows down slows both; the ratios of neighbouring
passes count. Samples of 64 bytes show what a loader does for each, samples of 600 kB what it does with
their data. Without workers, the CPU time of the process counts; with workers, the wall time.

Run: python benchmarks/loader.py [--workers 0 2].
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from _ratios import Ratio
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from ddpsafe.data import DataLoader, DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Kind(NamedTuple):
    """Samples of one size: float32 numbers in each, samples in a batch, batches in a pass."""

    numbers: int
    batch: int
    batches: int


KINDS: Final = {"64 B": Kind(16, 64, 1_500), "600 kB": Kind(150_000, 8, 100)}


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Samples of one size, which cost next to nothing to read."""

    def __init__(self, kind: Kind) -> None:
        self._data = torch.randn(kind.numbers)
        self._len = kind.batch * kind.batches

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._len

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return a sample and a label."""
        return self._data, index


def pass_s(loader: Iterable[Any], clock: Callable[[], float]) -> float:
    """Return the time of one pass, in seconds."""
    started_s = clock()
    for _ in loader:
        pass
    return clock() - started_s


def compare(kind: Kind, workers: int, rounds: int) -> tuple[float, Ratio]:
    """Return torch's samples per second, and the ratio of the time that ours takes for one."""
    clock = time.perf_counter if workers else time.process_time
    dataset = Samples(kind)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    theirs = TorchDataLoader(
        dataset, kind.batch, sampler=TorchDistributedSampler(dataset, 1, 0), **options
    )
    ours = DataLoader(dataset, kind.batch, sampler=DistributedSampler(dataset, 1, 0), **options)
    for loader in (theirs, ours):  # starts the workers
        pass_s(loader, clock)
    pairs = []
    for number in range(rounds):
        if number % 2:
            theirs_s, ours_s = pass_s(theirs, clock), pass_s(ours, clock)
        else:
            ours_s, theirs_s = pass_s(ours, clock), pass_s(theirs, clock)
        pairs.append((ours_s, theirs_s))
    per_s = len(dataset) / statistics.median(theirs_s for _, theirs_s in pairs)
    return per_s, Ratio.of([ours_s / theirs_s for ours_s, theirs_s in pairs])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    print(
        "| sample | workers | torch, samples per second | time for one, ours against torch's | 95 % |"
    )
    print("|---|--:|--:|--:|--:|")
    for name, kind in KINDS.items():
        for workers in arguments.workers:
            per_s, ratio = compare(kind, workers, arguments.rounds)
            print(f"| {name} | {workers} | {per_s:,.0f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
