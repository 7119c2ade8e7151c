"""A checkpoint that another user may have written never executes code, hangs, or crashes a restore."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest
import scripts

PROGRAM: Final = Path(__file__).parents[1] / "kits" / "checkpoint_forger.py"


@pytest.mark.parametrize(
    ("count", "seed"), [(50, 0), pytest.param(1000, 1000, marks=pytest.mark.soak)]
)
@pytest.mark.timeout(600)
def test_no_forgery_executes_hangs_or_raises_an_error_of_another_kind(
    count: int, seed: int, tmp_path: Path
) -> None:
    """Forgeries are manifests, pickles with dotted names, pipes, links, and unsavable trees.

    To run 5,000: ``python tests/kits/checkpoint_forger.py --count 5000 --seed 1000``.
    """
    command = [str(PROGRAM), "--count", str(count), "--seed", str(seed)]
    run = scripts.Script(command, folder=tmp_path).end(2 * scripts.LIMIT_S)
    assert run.code in (0, 1), run.err
    found = json.loads(run.out)
    assert found["faults"] == {}
    assert sum(found["outcomes"].values()) == count
    assert found["outcomes"]["step 1"] > count // 4  # most forgeries are damage, so step 1 is used
