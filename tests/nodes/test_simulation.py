"""Jobs of several nodes in virtual time, each from a seed: see `tests/nodes/simulation`.

The launchers there are the real ones; hosts, network, processes and clocks are simulated. A job that fails is shown
with the command that runs it again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import machine
import pytest
import scripts

SIMULATION: Final = Path(__file__).parent / "simulation"


def simulate(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the simulation."""
    command = [sys.executable, str(SIMULATION), *options]
    return subprocess.run(
        command,
        env=scripts.clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=machine.hang_limit(1200),
    )


@pytest.mark.full(but=["0-150", "150-150"])
@pytest.mark.parametrize(
    ("first", "jobs"),
    [(0, 150), (150, 150), *((first, 450) for first in range(300, 3000, 450)), (3_001_264, 1)],
)
def test_jobs_end_as_promised(first: int, jobs: int) -> None:
    """No healthy job ends, the first cause is named, retries succeed, no rank is left, and nothing waits for ever."""
    run = simulate("--first", str(first), "--seeds", str(jobs))
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert f"{jobs} jobs" in run.stdout


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1_000_000, 1_100_000, 2000))
def test_jobs_end_as_promised_in_100_000_seeds(first: int) -> None:
    """The same, for hours."""
    test_jobs_end_as_promised(first, 2000)


def test_a_seed_decides_everything() -> None:
    """So that a job that fails can be looked at."""
    first, again = (simulate("--seed", "10372") for _ in range(2))
    assert first.stdout == again.stdout
    assert "attempt 1 begins with 4 nodes" in first.stdout
