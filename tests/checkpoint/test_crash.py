"""The documented crash test, with fewer kills."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import scripts

SCRIPT: Final = Path(__file__).parents[2] / "benchmarks" / "crash_checkpoint.py"


@pytest.mark.full
@pytest.mark.parametrize("kills", [8, pytest.param(40, marks=pytest.mark.soak)])
def test_no_kill_loses_a_checkpoint_or_changes_the_result(kills: int, tmp_path: Path) -> None:
    """Savers and ranks die at random moments; the final parameters equal those of an undisturbed run.

    The full test, with 300 kills that include launchers, is ``benchmarks/crash_checkpoint.py``.
    """
    options = ["--kills", str(kills), "--seed", "1", "--victims", "saver", "rank"]
    run = scripts.Script([str(SCRIPT), *options], folder=tmp_path).end()
    assert run.code == 0, run.out + run.err
    total = next(line for line in run.out.splitlines() if line.startswith("| all |"))
    _, _, killed, _, trainings, faults, _ = (cell.strip() for cell in total.split("|"))
    assert int(killed) == kills
    assert int(trainings) >= 2
    assert int(faults) == 0
