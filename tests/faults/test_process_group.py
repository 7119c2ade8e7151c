"""Another launcher started the ranks: one fails, and the others notice as far as they can."""

from __future__ import annotations

from pathlib import Path

import attached_programs as programs
import forked_ranks
import pytest
from exception_programs import LostSampleError
from fault_kit import CRASH_S, HANG_S, WORLD_SIZES
from machine import require_in_time

import ddpsafe

BARRIER_S = 1.5


def run(ranks: int, program: object, folder: Path, *args: object) -> list[forked_ranks.Ended]:
    """Run ``program(folder, *args)`` in ranks whose variables are set by hand."""
    port = forked_ranks.free_port()
    envs = [forked_ranks.by_hand(rank, ranks, port) for rank in range(ranks)]
    return forked_ranks.run(program, envs, folder, *args, folder=folder)  # type: ignore[arg-type]  # a program


@pytest.mark.full(but=["3-with"])
@pytest.mark.parametrize("style", ["with", "finally"])
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_a_rank_that_raises_does_not_wait_for_the_others(
    tmp_path: Path, ranks: int, style: str
) -> None:
    """Neither ``with process_group():`` nor ``finally: cleanup()`` holds back its error."""
    ended = run(ranks, programs.fail_attached, tmp_path, style)
    assert isinstance(ended[1].error, LostSampleError)
    for rank in ended:
        require_in_time(float((tmp_path / f"over-{ended.index(rank)}").read_text()), CRASH_S)
    others = [rank.error for rank in ended if rank is not ended[1]]
    assert all(isinstance(error, RuntimeError) for error in others), others


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_a_rank_that_misses_a_barrier_is_named_on_every_other_rank(
    tmp_path: Path, ranks: int
) -> None:
    """Without that, a rank would only report a closed connection."""
    ended = run(ranks, programs.miss_a_barrier_attached, tmp_path, BARRIER_S)
    for number, rank in enumerate(ended):
        if number == 1:
            # It completed its own work, but the job has failed.
            assert isinstance(rank.error, ddpsafe.RankRaisedError), rank
            continue
        assert rank.error.setting == "barrier", rank.error
        assert rank.error.missing_ranks == (1,)
        assert "rank 1 did not reach it" in str(rank.error)
        took_s = float((tmp_path / f"over-{number}").read_text())
        require_in_time(took_s, BARRIER_S + HANG_S)


@pytest.mark.full(but=["1"])
@pytest.mark.recorder
@pytest.mark.parametrize("failing", [1, 0])
def test_a_rank_that_fails_because_of_a_peer_names_the_peer(tmp_path: Path, failing: int) -> None:
    """Beside torch's text; of rank 0 only the number is known, as it serves the store."""
    ended = run(2, programs.fail_beside_others, tmp_path, failing, "train")
    assert isinstance(ended[failing].error, ValueError)
    other = ended[1 - failing].error
    assert isinstance(other, RuntimeError), other
    told = "\n".join(getattr(other, "__notes__", [])) + ended[1 - failing].stderr
    reason = "ValueError: bad batch" if failing else "its process ended"
    assert f"rank {failing} failed first: {reason}" in told


@pytest.mark.full(but=["1"])
@pytest.mark.parametrize("failing", [1, 0])
def test_a_rank_that_returned_fails_when_another_rank_has_failed(
    tmp_path: Path, failing: int
) -> None:
    """The job has failed, so the last rank raises, too, and names the failed one."""
    ended = run(2, programs.fail_beside_others, tmp_path, failing, "return")
    assert isinstance(ended[failing].error, ValueError)
    other = ended[1 - failing].error
    assert isinstance(other, ddpsafe.RankRaisedError), ended
    assert (other.rank, other.origin) == (failing, "peer-lost")
    assert f"rank {failing} failed first: " in str(other)


def test_ranks_agree_on_the_attempt(tmp_path: Path) -> None:
    """A host that joins after a restart counts fewer (pytorch #108158); the highest count wins."""
    ended = run(3, programs.say_the_attempt, tmp_path, ["0", "2", "1"])
    assert [rank.value for rank in ended] == [[3] * 5] * 3
