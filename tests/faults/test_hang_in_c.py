"""A rank computes in C with the GIL held: no Python thread of it can say anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hang_programs as programs
import pytest
from fault_kit import BY_TIMEOUT, WORLDS, World, require_hang, require_places
from training_programs import train

import ddpsafe

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("ranks", "start_method"), WORLDS)
def test_the_rank_and_its_line_are_named(tmp_path: Path, ranks: int, start_method: str) -> None:
    """The stack comes from a signal handler in C, which needs no GIL."""
    world = World(folder=tmp_path, ranks=ranks, start_method=start_method)
    error = world.launch_fails(
        ddpsafe.CollectiveTimeoutError,
        train,
        programs.hold_the_gil,
        **BY_TIMEOUT,
    )
    require_hang(error, 1)
    names = require_places(error, range(ranks))
    assert names.pop(1) == "hold_the_gil"
    assert set(names.values()) == {"average_gradients"}
