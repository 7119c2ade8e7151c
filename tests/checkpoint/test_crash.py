"""The crash test of the documentation, with fewer kills."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pytest

SCRIPT: Final = Path(__file__).parents[2] / "benchmarks" / "crash_checkpoint.py"
KILLS: Final = 12


def test_no_kill_loses_a_checkpoint_or_changes_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Savers and ranks die at random moments; the parameters end bit for bit as undisturbed.

    The whole of it, 300 kills with launchers among them, is ``benchmarks/crash_checkpoint.py``.
    """
    monkeypatch.chdir(tmp_path)
    options = ["--kills", str(KILLS), "--seed", "1", "--victims", "saver", "rank"]
    command = [sys.executable, str(SCRIPT), *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    total = next(line for line in run.stdout.splitlines() if line.startswith("| all |"))
    _, _, kills, _, trainings, faults, _ = (cell.strip() for cell in total.split("|"))
    assert int(kills) == KILLS
    assert int(trainings) >= 2
    assert int(faults) == 0
