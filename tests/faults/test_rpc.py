"""Ranks call each other by torch's RPC, and a caller is not blamed for the rank that it called."""

from __future__ import annotations

from pathlib import Path

import hang_programs as programs
import pytest
from fault_kit import HANG_S, World, require_hang, require_rank

import ddpsafe

RPC_S = 2.0
"""Timeout of the calls."""


@pytest.mark.full(but=["1"])
@pytest.mark.parametrize("attempt", range(4))
def test_a_rank_that_is_killed_in_a_call_is_blamed(tmp_path: Path, attempt: int) -> None:
    """The caller's error often arrives before the kill, but the kill is the root cause."""
    del attempt
    error = World(folder=tmp_path).spawn_fails(
        ddpsafe.RankKilledError, programs.call_the_other_rank, programs.be_killed, 60.0
    )
    require_rank(error, 1)


@pytest.mark.full
def test_a_rank_that_hangs_in_a_call_is_named(tmp_path: Path) -> None:
    """The message shows the line of the call; the main thread only waits for calls to end."""
    error = World(folder=tmp_path).spawn_fails(
        "collective", *(programs.call_the_other_rank, programs.hang, RPC_S), within_s=RPC_S + HANG_S
    )
    require_hang(error, 1)
    assert "was executing an RPC call from another rank at " in str(error)
    assert " in hang, " in str(error)
