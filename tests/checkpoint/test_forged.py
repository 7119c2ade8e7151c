"""A checkpoint that another user may have written never executes code, hangs, or crashes a restore."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

PROGRAM: Final = Path(__file__).parents[1] / "kits" / "checkpoint_forger.py"


@pytest.mark.parametrize(
    ("count", "seed"), [(80, 0), pytest.param(1000, 1000, marks=pytest.mark.soak)]
)
@pytest.mark.timeout(600)
def test_no_forgery_executes_hangs_or_raises_an_error_of_another_kind(
    count: int, seed: int
) -> None:
    """Manifests, pickles with dotted names, pipes, links, and trees that no Checkpointer saves.

    5,000 of them: ``python tests/kits/checkpoint_forger.py --count 5000 --seed 1000``.
    """
    command = [sys.executable, str(PROGRAM), "--count", str(count), "--seed", str(seed)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode in (0, 1), run.stderr
    found = json.loads(run.stdout)
    assert found["faults"] == {}
    assert sum(found["outcomes"].values()) == count
    assert found["outcomes"]["step 1"] > count // 4  # most of it is damage: the step before is used
