"""Time and memory of DistributedSampler against torch's, each case in a fresh process.

Prints the time to the first index, the time of the whole epoch of rank 0 of 8, and the peak memory
beyond that of a process that has only imported torch. Run: python benchmarks/sampler.py
[--sizes 1000000 10000000 100000000] [--repeat 1].
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

REPLICAS: Final = 8
CASES: Final = ("torch", "ddpsafe", "feistel-v1")
HUGE: Final = 1_000_000_000


def peak_mib() -> float:
    """Return the peak resident memory of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return float("nan")


def make(case: str, n: int) -> Iterable[int]:
    """Make the sampler of a case."""
    from torch.utils.data import DistributedSampler as TorchDistributedSampler

    from ddpsafe.data import DistributedSampler

    if case == "torch":
        return TorchDistributedSampler(range(n), REPLICAS, 0)
    algorithm = "torch" if case == "ddpsafe" else "feistel-v1"
    return DistributedSampler(n, REPLICAS, 0, algorithm=algorithm)  # type: ignore[arg-type]


def measure(case: str, n: int, *, whole: bool) -> dict[str, float]:
    """Measure one case; runs in its own process."""
    sampler = make(case, n)
    before = peak_mib()
    started = time.perf_counter()
    iterator = iter(sampler)
    next(iterator)
    first_s = time.perf_counter() - started
    if whole:
        collections.deque(iterator, maxlen=0)
    total_s = time.perf_counter() - started
    return {"first_s": first_s, "total_s": total_s, "extra_mib": peak_mib() - before}


def measure_apart(case: str, n: int, *, whole: bool) -> dict[str, float]:
    """Measure one case in a fresh process, because peak memory never falls."""
    command = [sys.executable, __file__, "--case", case, "--sizes", str(n)]
    command += [] if whole else ["--first-only"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(run.stdout)
    return result


def best(case: str, n: int, repeat: int, *, whole: bool = True) -> dict[str, float]:
    """Return the best of several runs, key by key."""
    runs = [measure_apart(case, n, whole=whole) for _ in range(repeat)]
    return {key: min(run[key] for run in runs) for key in runs[0]}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**6, 10**7, 10**8])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--first-only", action="store_true")
    arguments = parser.parse_args()
    if arguments.case:
        found = measure(arguments.case, arguments.sizes[0], whole=not arguments.first_only)
        print(json.dumps(found))
        return
    print("| n | sampler | first index | whole epoch | extra memory | time | memory |")
    print("|---|---|---|---|---|---|---|")
    for n in arguments.sizes:
        reference = best("torch", n, arguments.repeat)
        for case in CASES:
            row(
                n,
                case,
                reference if case == "torch" else best(case, n, arguments.repeat),
                reference,
            )
    row(HUGE, "feistel-v1", best("feistel-v1", HUGE, arguments.repeat, whole=False), None)


def row(n: int, case: str, found: dict[str, float], reference: dict[str, float] | None) -> None:
    """Print one line of the table."""
    ratios = "- | -"
    if reference is not None:
        time_ratio = found["total_s"] / reference["total_s"]
        memory_ratio = found["extra_mib"] / reference["extra_mib"]
        ratios = f"{time_ratio:.2f} x | {memory_ratio:.3f} x"
    total = f"{found['total_s']:.2f} s" if reference is not None else "-"
    print(
        f"| {n:.0e} | {case} | {found['first_s'] * 1e3:.2f} ms | {total} | "
        f"{found['extra_mib']:.1f} MiB | {ratios} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
