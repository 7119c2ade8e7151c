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
    """No rank learns only that a connection was closed."""
    ended = run(ranks, programs.miss_a_barrier_attached, tmp_path, BARRIER_S)
    for number, rank in enumerate(ended):
        if number == 1:
            # It did its part, but the job has failed.
            assert isinstance(rank.error, ddpsafe.RankRaisedError), rank
            continue
        assert isinstance(rank.error, ddpsafe.BarrierTimeoutError), rank.error
        assert rank.error.missing_ranks == (1,)
        assert "rank 1 did not reach it" in str(rank.error)
        took_s = float((tmp_path / f"over-{number}").read_text())
        require_in_time(took_s, BARRIER_S + HANG_S)


@pytest.mark.recorder
@pytest.mark.parametrize("failing", [1, 0])
def test_a_rank_that_fails_with_a_peer_says_which_one_failed_first(
    tmp_path: Path, failing: int
) -> None:
    """Torch says "Connection closed by peer"; beside it stands who failed, and how, where known.

    Rank 0 serves the store and takes its reason with it; that it was rank 0 is still said.
    """
    ended = run(2, programs.fail_beside_others, tmp_path, failing, "train")
    assert isinstance(ended[failing].error, ValueError)
    other = ended[1 - failing].error
    assert isinstance(other, RuntimeError), other
    told = "\n".join(getattr(other, "__notes__", [])) + ended[1 - failing].stderr
    reason = "ValueError: bad batch" if failing else "its process ended"
    assert f"rank {failing} failed first: {reason}" in told


@pytest.mark.parametrize("failing", [1, 0])
def test_a_rank_that_has_returned_does_not_succeed_beside_one_that_failed(
    tmp_path: Path, failing: int
) -> None:
    """The job has failed, and its last rank knows: it raises, and names the rank."""
    ended = run(2, programs.fail_beside_others, tmp_path, failing, "return")
    assert isinstance(ended[failing].error, ValueError)
    other = ended[1 - failing].error
    assert isinstance(other, ddpsafe.RankRaisedError), ended
    assert (other.rank, other.origin) == (failing, "peer-lost")
    assert f"rank {failing} failed first: " in str(other)


def test_ranks_agree_on_the_attempt(tmp_path: Path) -> None:
    """A host that joined after a restart counts fewer (pytorch #108158): the highest count holds."""
    ended = run(3, programs.say_the_attempt, tmp_path, ["0", "2", "1"])
    assert [rank.value for rank in ended] == [[3] * 5] * 3
