"""A checkpoint that another user may have written never executes code, hangs, or crashes a restore."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

PROGRAM: Final = Path(__file__).parents[1] / "kits" / "checkpoint_forger.py"
COUNT: Final = 250


def test_no_forgery_executes_hangs_or_raises_an_error_of_another_kind() -> None:
    """Manifests, pickles with dotted names, pipes, links, and trees that no Checkpointer saves.

    5,000 of them: ``python tests/kits/checkpoint_forger.py --count 5000 --seed 1000``.
    """
    command = [sys.executable, str(PROGRAM), "--count", str(COUNT), "--seed", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode in (0, 1), run.stderr
    found = json.loads(run.stdout)
    assert found["faults"] == {}
    assert sum(found["outcomes"].values()) == COUNT
    assert found["outcomes"]["step 1"] > COUNT // 4  # most of it is damage: the step before is used
