"""The end of a script: always clean, again and again, in the shapes in which plain torch hangs.

The teardown of the official tutorial, a DDP object alive while the group is destroyed, hung for
good in 14 of 30 runs of plain torch 2.13 with heavy imports, and aborted in 8 of 40 without them.
``nox -s soak`` runs the loops for longer.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import pytest
import scripts

if TYPE_CHECKING:
    from pathlib import Path

FEW: Final = 1
RUNS: Final = pytest.mark.parametrize("runs", [FEW, pytest.param(60, marks=pytest.mark.soak)])
"""Rounds; a broken teardown shows itself in two of five launches."""

RUN_S: Final = 20
"""What one round may take on a busy machine, on average; a hang takes longer by itself."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), RUNS]


def ends_of(call: str, *, runs: int, folder: Path) -> dict[str, int]:
    """Run a loop of `teardown_programs` in a process of its own, which must not complain.

    Returns:
        How many ranks ended with which exit code.
    """
    source = f"""
        import teardown_programs
        if __name__ == "__main__":
            teardown_programs.{call}
        """
    script = scripts.write(folder, "train.py", source)
    # The heavy imports alone take a minute on a busy machine.
    run = scripts.Script([str(script)], folder=folder, fresh=runs > FEW).end(240 + RUN_S * runs)
    assert (run.code, run.err) == (0, "")
    ends: dict[str, int] = json.loads(run.out)
    return ends


def test_launches_end_cleanly_every_time(tmp_path: Path, runs: int) -> None:
    """The tutorial with its own setup and cleanup, and a script that calls nothing at its end.

    With DDP alive at destroy, heavy imports and a thread that wants the GIL, all in one process:
    every rank exits by itself with 0, in silence.
    """
    found = ends_of(f"end_again_and_again({runs})", runs=runs, folder=tmp_path)
    assert found == {"0": 4 * runs}


def test_attached_interpreter_ends_cleanly_every_time(tmp_path: Path, runs: int) -> None:
    """A rank of another launcher goes through the whole end of an interpreter, DDP object and all."""
    runs = max(1, runs // 5)  # each takes two interpreters
    assert ends_of(f"exit_again_and_again({runs})", runs=runs, folder=tmp_path) == {"0": 2 * runs}
