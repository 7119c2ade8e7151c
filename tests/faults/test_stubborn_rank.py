"""A rank does not exit when it receives SIGTERM, or when its work is done."""

from __future__ import annotations

from pathlib import Path

import leftovers
import orphan_programs as programs
import pytest
from fault_kit import CRASH_S, WORLD_SIZES, World, fault_time_s, require_nothing_left, require_rank
from machine import require_in_time
from odd_end_programs import hang_in_teardown
from training_programs import since

import ddpsafe
from ddpsafe._launcher.watch.supervisor import LEAVE

GRACE_S = 0.5


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(
    tmp_path: Path, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The rank that failed is still blamed, and the log reports the SIGKILL."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(
        ddpsafe.RankRaisedError,
        programs.ignore_terminate,
        within_s=CRASH_S + GRACE_S,
        timeouts={"grace": GRACE_S},
    )
    require_rank(error, 1)
    assert "0.5 s after SIGTERM (timeouts.grace); sending SIGKILL" in caplog.text


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_a_rank_that_returns_but_hangs_in_teardown_is_ended_and_its_value_counts(
    tmp_path: Path, ranks: int
) -> None:
    """The launcher waits for the end of its process group no longer than 30 s."""
    before = leftovers.Snapshot.take()
    world = World(folder=tmp_path, ranks=ranks)
    result = world.launch(hang_in_teardown, timeouts={"grace": GRACE_S})
    took_s = since(fault_time_s(tmp_path))
    assert result.values == {rank: rank for rank in range(ranks)}
    require_in_time(took_s, LEAVE.total_seconds() + GRACE_S + CRASH_S)
    require_nothing_left(before)
