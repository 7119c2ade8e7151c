"""Samples per second of ddpsafe.data.DataLoader beside torch's, with the same sampler order in both.

The two take turns, every 50 batches or, with workers, every pass, so that a machine that slows down slows
both. A second loader of torch's takes turns, too: its ratio to the first one shows the noise. Samples of
64 bytes show what a loader does for each, samples of 600 kB what it does with their data. Without workers,
the CPU time of the process counts; with workers, the wall time. The first batch, with the start of the
workers, and the peak memory of the process are those of processes of their own.

Run: python benchmarks/loader.py [--workers 0 2].
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from _ratios import Ratio
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from ddpsafe.data import DataLoader, DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Kind(NamedTuple):
    """Samples of one size: float32 numbers in each, samples in a batch, batches in a pass."""

    numbers: int
    batch: int
    batches: int


TURN: Final = 50
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


def times_s(
    loaders: list[Iterable[Any]], clock: Callable[[], float], turn: int | None
) -> list[float]:
    """Return the time of one pass over each; they take turns of so many batches, or of all."""
    used_s = [0.0] * len(loaders)
    iterators: dict[int, Iterator[Any]] = {}
    batches = turn or 1
    while batches:
        for number, loader in enumerate(loaders):
            started_s = clock()
            if number not in iterators:
                iterators[number] = iter(loader)
            batches = sum(1 for _ in itertools.islice(iterators[number], turn))
            used_s[number] += clock() - started_s
    return used_s


def loader_of(which: str, dataset: Samples, kind: Kind, workers: int) -> Iterable[Any]:
    """Make torch's loader, or ours, with the same order."""
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    if which == "torch":
        sampler = TorchDistributedSampler(dataset, 1, 0)
        return TorchDataLoader(dataset, kind.batch, sampler=sampler, **options)
    return DataLoader(dataset, kind.batch, sampler=DistributedSampler(dataset, 1, 0), **options)


def compare(kind: Kind, workers: int, rounds: int) -> tuple[float, Ratio, Ratio]:
    """Return torch's samples per second, and the time for one: ours against torch's, torch's against itself."""
    clock = time.perf_counter if workers else time.process_time
    # Workers read ahead while others have their turn.
    turn = None if workers else TURN
    dataset = Samples(kind)
    loaders = [loader_of(which, dataset, kind, workers) for which in ("torch", "torch", "ours")]
    times_s(loaders, clock, turn)  # starts the workers
    ours, again, theirs = [], [], []
    for number in range(rounds):
        # Each is first in a third of the rounds, and follows each other one as often.
        order = list(itertools.permutations(range(3)))[number % 6]
        by_place = times_s([loaders[which] for which in order], clock, turn)
        used_s = [by_place[order.index(which)] for which in range(3)]
        theirs.append(used_s[0])
        again.append(used_s[1] / used_s[0])
        ours.append(used_s[2] / used_s[0])
    return len(dataset) / statistics.median(theirs), Ratio.of(ours), Ratio.of(again)


def begin(which: str, name: str, workers: int) -> None:
    """Print how long the first batch takes, and the peak memory after a pass; in a process of its own."""
    kind = KINDS[name]
    dataset = Samples(kind)
    started_s = time.perf_counter()
    iterator = iter(loader_of(which, dataset, kind, workers))
    next(iterator)
    first_s = time.perf_counter() - started_s
    for _ in iterator:
        pass
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([1000 * first_s, peak_kib / 1024]))


def compare_beginnings(name: str, workers: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median time of the first batch in ms, and the median peak memory in MiB, of both."""
    found: dict[str, list[list[float]]] = {"torch": [], "ours": []}
    for _ in range(rounds):
        for which, measured in found.items():
            command = [sys.executable, __file__, "--begin", which, name, str(workers)]
            run = subprocess.run(command, check=True, capture_output=True, text=True)
            measured.append(json.loads(run.stdout))
    return {
        which: (statistics.median(a for a, _ in all_of), statistics.median(b for _, b in all_of))
        for which, all_of in found.items()
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--begin", nargs=3, metavar=("WHICH", "KIND", "WORKERS"))
    arguments = parser.parse_args()
    if arguments.begin:
        which, name, workers = arguments.begin
        begin(which, name, int(workers))
        return
    print(
        "| sample | workers | torch, samples per second | time for one, ours against torch's | 95 % "
        "| torch's against itself | 95 % |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, kind in KINDS.items():
        for workers in arguments.workers:
            per_s, ours, again = compare(kind, workers, arguments.rounds)
            print(f"| {name} | {workers} | {per_s:,.0f} | {ours} | {again} |", flush=True)
    print("\n| sample | workers | first batch, torch | ours | peak memory, torch | ours |")
    print("|---|--:|--:|--:|--:|--:|")
    for name in KINDS:
        for workers in arguments.workers:
            both = compare_beginnings(name, workers, max(1, arguments.rounds // 2))
            (first, peak), (our_first, our_peak) = both["torch"], both["ours"]
            times, memory = (
                f"{first:.1f} ms | {our_first:.1f} ms",
                f"{peak:.0f} MiB | {our_peak:.0f} MiB",
            )
            print(f"| {name} | {workers} | {times} | {memory} |", flush=True)


if __name__ == "__main__":
    main()
