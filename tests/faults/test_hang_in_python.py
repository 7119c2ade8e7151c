"""A rank sleeps, computes or reads in its own code while the others wait for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hang_programs as programs
import pytest
from fault_kit import (
    BY_TIMEOUT,
    COLLECTIVE_S,
    HANG_S,
    WORLD_SIZES,
    World,
    require_hang,
    require_places,
)
from training_programs import train, train_by_hand


@pytest.mark.full(but=["3-sleep"])
@pytest.mark.recorder
@pytest.mark.parametrize("fault", [programs.sleep, programs.be_busy, programs.read_from_nobody])
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_the_rank_that_the_others_wait_for_is_named_with_its_line(
    tmp_path: Path, ranks: int, fault: Callable[..., Any]
) -> None:
    """It is behind in the sequence of collectives; the message shows every rank's line."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails("collective", train, fault, **BY_TIMEOUT)
    require_hang(error, 1)
    assert f"rank 1 (world_size {ranks}) is behind at {programs.__file__}:" in str(error)
    assert "in all_reduce number 3 " in str(error)
    names = require_places(error, range(ranks))
    assert names.pop(1) == fault.__name__
    assert set(names.values()) == {"average_gradients"}


def test_a_hang_in_an_unported_script_ends_at_the_launchs_timeout(tmp_path: Path) -> None:
    """A script that names no timeout gets the launch's, where torch would wait for half an hour."""
    world = World(folder=tmp_path)
    error = world.spawn_fails("collective", train_by_hand, programs.sleep, 1, None, **BY_TIMEOUT)
    require_hang(error, 1)


def test_rank_zero_is_blamed_when_it_hangs(tmp_path: Path) -> None:
    """The rank's number plays no part in the diagnosis."""
    world = World(folder=tmp_path)
    error = world.launch_fails("collective", train, programs.sleep, 0, **BY_TIMEOUT)
    require_hang(error, 0)


def test_a_rank_that_misses_ddpsafes_barrier_is_named(tmp_path: Path) -> None:
    """Both the waiting ranks and the launcher name the missing one."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        "barrier",
        programs.sleep_before_a_barrier,
        within_s=COLLECTIVE_S + HANG_S,
        timeouts={"barrier": COLLECTIVE_S},
    )
    require_hang(error, 1)
    assert require_places(error, [1]) == {1: "sleep"}
