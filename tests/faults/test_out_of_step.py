"""Ranks come apart: one makes fewer collectives than the others, or leaves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import collective_programs as programs
import pytest
from fault_kit import BY_TIMEOUT, COLLECTIVE_S, HANG_S, WORLDS, World, require_hang, require_rank
from hang_programs import sleep
from training_programs import do_nothing_about_it

import ddpsafe

if TYPE_CHECKING:
    from pathlib import Path

KEPT = 16
"""So many collectives of each group are kept as evidence."""

LEFT_S = 3.0
"""A rank that left is told by two looks, half a second apart, without any timeout."""


@pytest.mark.recorder
@pytest.mark.parametrize(("ranks", "culprit"), [(2, 1), (4, 2)])
def test_a_rank_that_skips_an_all_reduce_meets_the_others_in_the_wrong_place(
    tmp_path: Path, ranks: int, culprit: int
) -> None:
    """Its next collective is another one; who is alone with it is named, and so are both calls."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(
        ddpsafe.CollectiveTimeoutError,
        programs.skip_one,
        culprit,
        **BY_TIMEOUT,
    )
    require_hang(error, culprit)
    assert "all_gather number 5 " in str(error)
    assert "all_reduce number 5 " in str(error)
    assert "in skip_one, " in str(error)


@pytest.mark.recorder
@pytest.mark.parametrize(
    ("batches", "culprit"), [([5, 3], 1), ([3, 5], 0), ([5, 5, 3, 4], 2)], ids=str
)
def test_uneven_numbers_of_batches(tmp_path: Path, batches: list[int], culprit: int) -> None:
    """The rank that ran out of batches first is named, long before any timeout."""
    world = World(folder=tmp_path, ranks=len(batches))
    error = world.launch_fails(
        ddpsafe.RankLeftEarlyError, programs.run_out_of_batches, batches, within_s=LEFT_S
    )
    require_rank(error, culprit)
    assert error.exit_code == 1
    assert "returned early" in str(error)
    assert "Join" in str(error)


@pytest.mark.recorder
@pytest.mark.parametrize(("ranks", "start_method"), WORLDS)
def test_a_rank_that_returns_early(tmp_path: Path, ranks: int, start_method: str) -> None:
    """`mp.spawn` and torchrun blame a rank that still worked."""
    world = World(folder=tmp_path, ranks=ranks, start_method=start_method)
    error = world.launch_fails(ddpsafe.RankLeftEarlyError, programs.return_early, within_s=LEFT_S)
    require_rank(error, 1)


@pytest.mark.recorder
@pytest.mark.parametrize("calls", [0, 2])
def test_a_rank_that_returns_early_from_a_second_group(tmp_path: Path, calls: int) -> None:
    """A new group counts from 1: what the rank did in the first one does not put it ahead."""
    world = World(folder=tmp_path)
    error = world.spawn_fails(
        ddpsafe.RankLeftEarlyError,
        programs.come_apart_in_the_second_group,
        do_nothing_about_it,
        calls,
        within_s=LEFT_S,
    )
    require_rank(error, 1)


def test_a_rank_that_hangs_in_a_second_group(tmp_path: Path) -> None:
    """It is named, not the one that waits for it, whose calls in the first group are long past."""
    world = World(folder=tmp_path)
    error = world.spawn_fails(
        ddpsafe.CollectiveTimeoutError,
        programs.come_apart_in_the_second_group,
        sleep,
        KEPT - 1,
        COLLECTIVE_S,
        within_s=COLLECTIVE_S + HANG_S,
    )
    require_hang(error, 1)


@pytest.mark.recorder
def test_a_rank_that_comes_after_the_timeout(tmp_path: Path) -> None:
    """All ranks are in the same collective by then; it is named, and by how much it was late."""
    world = World(folder=tmp_path, ranks=3)
    error = world.launch_fails(
        ddpsafe.CollectiveTimeoutError, programs.come_after_the_timeout, **BY_TIMEOUT
    )
    require_hang(error, 1)
    assert re.search(
        r"entered all_reduce number 2 of shape \[\d+\] \d\.\d s after the others at ", str(error)
    ), error


@pytest.mark.recorder
def test_ranks_that_receive_from_each_other(tmp_path: Path) -> None:
    """They are in no collective: the last one ended well, and is not said to have timed out."""
    error = World(folder=tmp_path).launch_fails(
        ddpsafe.CollectiveTimeoutError, programs.receive_from_each_other, **BY_TIMEOUT
    )
    assert error.missing_ranks == ()
    for rank in range(2):
        line = rf"rank {rank}, .* in recv from rank {1 - rank}, after all_reduce number 1 "
        assert re.search(line, str(error)), error
    assert " in all_reduce" not in str(error)


@pytest.mark.recorder
def test_a_rank_that_does_not_send(tmp_path: Path) -> None:
    """Who waits to receive is behind the others only because of it, and it is said from whom."""
    error = World(folder=tmp_path, ranks=3).launch_fails(
        ddpsafe.CollectiveTimeoutError, programs.send_nothing, **BY_TIMEOUT
    )
    require_hang(error, 1)
    line = r"rank 0, .* in recv from rank 1, after all_reduce number 1 "
    assert re.search(line, str(error)), error


def test_a_rank_that_works_alone_after_the_others_have_returned_is_no_failure(
    tmp_path: Path,
) -> None:
    """Rank 0 saves and evaluates by itself at the end: no rank waits for another."""
    world = World(folder=tmp_path)
    assert world.launch(programs.work_alone_at_the_end, 2.0).values == {0: "saved", 1: "done"}
