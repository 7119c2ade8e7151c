"""A rank stays in its own code, asleep, busy, or in a read, while the others wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hang_programs as programs
import pytest
from fault_kit import BY_TIMEOUT, COLLECTIVE_S, HANG_S, SIZES, World, require_hang, require_places
from training_programs import train, train_by_hand

import ddpsafe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.recorder
@pytest.mark.parametrize("fault", [programs.sleep, programs.be_busy, programs.read_from_nobody])
@pytest.mark.parametrize("ranks", SIZES)
def test_the_rank_and_its_line_are_named(
    tmp_path: Path, ranks: int, fault: Callable[..., Any]
) -> None:
    """It is behind in the sequence of collectives, and every rank's line is shown."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(
        ddpsafe.CollectiveTimeoutError,
        train,
        fault,
        **BY_TIMEOUT,
    )
    require_hang(error, 1)
    assert f"rank 1 (world_size {ranks}) is behind at {programs.__file__}:" in str(error)
    assert "in all_reduce number 3 " in str(error)
    names = require_places(error, range(ranks))
    assert names.pop(1) == fault.__name__
    assert set(names.values()) == {"average_gradients"}


def test_in_an_unported_script_that_names_no_timeout(tmp_path: Path) -> None:
    """Its group gets the launch's, where torch would wait for half an hour."""
    world = World(folder=tmp_path)
    error = world.spawn_fails(
        ddpsafe.CollectiveTimeoutError,
        train_by_hand,
        programs.sleep,
        1,
        None,
        **BY_TIMEOUT,
    )
    require_hang(error, 1)


def test_rank_zero_is_blamed_when_it_is_rank_zero(tmp_path: Path) -> None:
    """Its number has no part in it."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.CollectiveTimeoutError,
        train,
        programs.sleep,
        0,
        **BY_TIMEOUT,
    )
    require_hang(error, 0)


def test_at_a_barrier_of_ours(tmp_path: Path) -> None:
    """The ranks that wait name the one that did not come, and so does the launcher."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.BarrierTimeoutError,
        programs.sleep_before_a_barrier,
        within_s=COLLECTIVE_S + HANG_S,
        timeouts={"barrier": COLLECTIVE_S},
    )
    require_hang(error, 1)
    assert require_places(error, [1]) == {1: "sleep"}
