"""Ranks that another launcher has started: one breaks, and the others notice as far as they can."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attached_fault_programs as programs
import forked_ranks
import pytest
from exception_programs import LostSampleError
from fault_kit import CRASH_S, HANG_S, SIZES, require_in_time

import ddpsafe

if TYPE_CHECKING:
    from pathlib import Path

BARRIER_S = 1.5


def run(ranks: int, program: object, folder: Path, *args: object) -> list[forked_ranks.Ended]:
    """Run ``program(folder, *args)`` in ranks whose variables are set by hand."""
    port = forked_ranks.free_port()
    envs = [forked_ranks.by_hand(rank, ranks, port) for rank in range(ranks)]
    return forked_ranks.run(program, envs, folder, *args, folder=folder)  # type: ignore[arg-type]  # a program


@pytest.mark.parametrize("style", ["with", "finally"])
@pytest.mark.parametrize("ranks", SIZES)
def test_a_rank_that_raises_waits_for_nobody(tmp_path: Path, ranks: int, style: str) -> None:
    """Neither ``with process_group():`` nor ``finally: cleanup()`` keeps an error from getting out."""
    ended = run(ranks, programs.fail_attached, tmp_path, style)
    assert isinstance(ended[1].error, LostSampleError)
    for rank in ended:
        require_in_time(float((tmp_path / f"over-{ended.index(rank)}").read_text()), CRASH_S)
    others = [rank.error for rank in ended if rank is not ended[1]]
    assert all(isinstance(error, RuntimeError) for error in others), others


@pytest.mark.parametrize("ranks", SIZES)
def test_a_rank_that_does_not_come_to_a_barrier_is_named_on_every_other_rank(
    tmp_path: Path, ranks: int
) -> None:
    """Nobody is told only that a connection was closed."""
    ended = run(ranks, programs.miss_a_barrier_attached, tmp_path, BARRIER_S)
    for number, rank in enumerate(ended):
        if number == 1:
            assert rank.value == "left alone"
            continue
        assert isinstance(rank.error, ddpsafe.BarrierTimeoutError), rank.error
        assert rank.error.missing_ranks == (1,)
        assert "rank 1 did not come" in str(rank.error)
        took_s = float((tmp_path / f"over-{number}").read_text())
        require_in_time(took_s, BARRIER_S + HANG_S)
