"""What a test of two ranks costs: with ddpsafe's plugin, and written by hand with mp.spawn.

Usage: python benchmarks/plugin.py [--tests 20]. The time of a test is pytest's own, with fixtures;
CPU time is that of pytest and of all its ranks, with the first test.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

PLUGIN: Final = """
import pytest


@pytest.mark.ddp(nproc=2)
@pytest.mark.parametrize("i", range(TESTS))
def test_sum(ddp_context, i):
    assert ddp_context.all_reduce(ddp_context.rank + 1) == 3
"""

BY_HAND: Final = """
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def body(rank, port):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    assert total == 3
    dist.destroy_process_group()


@pytest.mark.parametrize("i", range(TESTS))
def test_sum(i):
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(body, (port,), nprocs=2)
"""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", type=int, default=20, help="in addition to the first one")
    options = parser.parse_args()
    print("| | first test | each of the others, median (least to most) | all others | CPU time |")
    print("|---|--:|--:|--:|--:|")
    for name, program, tests in (
        ("`@pytest.mark.ddp(nproc=2)`", PLUGIN, options.tests),
        ("`mp.spawn` by hand", BY_HAND, max(3, options.tests // 5)),
    ):
        print(measure(name, program, tests), flush=True)
    print(f"\n{os.cpu_count()} cores, load average at the end {os.getloadavg()[0]:.0f}")


def measure(name: str, program: str, tests: int) -> str:
    """Run a file of tests; return the row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "test_it.py")
        path.write_text(program.replace("TESTS", str(tests + 1)), encoding="utf-8")
        Path(folder, "pytest.ini").touch()
        options = ["-p", "ddpsafe.testing", "-p", "no:cacheprovider", "--durations=0", "-vv"]
        before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, str(path)],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        took_s = time.monotonic() - began_s
    if done.returncode:
        sys.exit(done.stdout)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    parts = re.findall(r"^([\d.]+)s \w+ +\S+\[(\d+)\]$", done.stdout, re.MULTILINE)
    times_s = [0.0] * (tests + 1)
    for seconds, number in parts:
        times_s[int(number)] += float(seconds)
    first_s, *others_s = times_s
    spread = f"{min(others_s):.2f} to {max(others_s):.2f}"
    return (
        f"| {name} | {first_s:.1f} s | {statistics.median(others_s):.2f} s ({spread}) "
        f"| {sum(others_s):.1f} s for {tests} | {cpu_s:.1f} s, in {took_s:.0f} s |"
    )


if __name__ == "__main__":
    main()
