"""A rank computes in C and holds the GIL, so none of its Python threads can answer."""

from __future__ import annotations

from pathlib import Path

import hang_programs as programs
import pytest
from fault_kit import BY_TIMEOUT, WORLDS, World, require_hang, require_places
from training_programs import train


@pytest.mark.parametrize(("ranks", "start_method"), WORLDS)
def test_a_rank_that_holds_the_gil_is_named_with_its_line(
    tmp_path: Path, ranks: int, start_method: str
) -> None:
    """A signal handler in C, which does not need the GIL, reports the stack."""
    world = World(folder=tmp_path, ranks=ranks, start_method=start_method)
    error = world.launch_fails("collective", train, programs.hold_the_gil, **BY_TIMEOUT)
    require_hang(error, 1)
    names = require_places(error, range(ranks))
    assert names.pop(1) == "hold_the_gil"
    assert set(names.values()) == {"average_gradients"}
