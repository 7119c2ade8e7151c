"""Scripts always exit cleanly, even in the situations in which plain torch hangs.

The teardown of the official tutorial, a DDP object alive while the group is destroyed, hung
forever in 14 of 30 runs of plain torch 2.13 with heavy imports, and aborted in 8 of 40 without them.
``nox -s soak`` runs the loops for longer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest
import scripts

FEW: Final = 1
RUNS: Final = pytest.mark.parametrize("runs", [FEW, pytest.param(60, marks=pytest.mark.soak)])
"""Number of rounds; a broken teardown shows in two of five launches."""

FONTS: Final = "Matplotlib is building the font cache; this may take a moment.\n"
"""Matplotlib writes it where the user has never used it, if that takes five seconds."""

RUN_S: Final = 20
"""Average time of one round on a busy machine; a single hang takes longer."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), RUNS]


def count_exit_codes(call: str, *, runs: int, folder: Path) -> dict[str, int]:
    """Run a loop of `teardown_programs` in a new process, which prints no error; count the ranks' exit codes."""
    source = f"""
        import teardown_programs
        if __name__ == "__main__":
            teardown_programs.{call}
        """
    script = scripts.write(folder, "train.py", source)
    # The heavy imports alone take a minute on a busy machine.
    run = scripts.Script([str(script)], folder=folder, fresh=runs > FEW).end(240 + RUN_S * runs)
    assert (run.code, run.err.replace(FONTS, "")) == (0, "")
    ends: dict[str, int] = json.loads(run.out)
    return ends


@pytest.mark.full
def test_ranks_of_a_launch_exit_cleanly_every_time(tmp_path: Path, runs: int) -> None:
    """The tutorial with its own setup and cleanup, and a script that calls nothing at its end.

    DDP is alive at destroy, imports are heavy, and a thread wants the GIL, all in one process. Every
    rank still exits by itself with 0 and prints nothing.
    """
    found = count_exit_codes(f"end_again_and_again({runs})", runs=runs, folder=tmp_path)
    assert found == {"0": 4 * runs}


@pytest.mark.full
def test_attached_ranks_exit_cleanly_every_time(tmp_path: Path, runs: int) -> None:
    """A rank of another launcher shuts down its whole interpreter, with the DDP object alive."""
    runs = max(1, runs // 5)  # each takes two interpreters
    assert count_exit_codes(f"exit_again_and_again({runs})", runs=runs, folder=tmp_path) == {
        "0": 2 * runs
    }
