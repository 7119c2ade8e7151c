"""Two threads of a rank wait for each other's locks."""

from __future__ import annotations

from pathlib import Path

import hang_programs as programs
import pytest
from fault_kit import BY_TIMEOUT, WORLD_SIZES, World, require_hang, require_places
from training_programs import train


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_message_shows_the_main_thread_and_the_stacks_show_the_other(
    tmp_path: Path, ranks: int
) -> None:
    """The message shows the line where the rank waits; the run directory has all its threads."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails("collective", train, programs.wait_for_each_other, **BY_TIMEOUT)
    require_hang(error, 1)
    assert require_places(error, [1]) == {1: "wait_for_each_other"}
    stacks = (tmp_path / "run" / "attempt-1" / "rank-1.stacks").read_text()
    assert f'File "{programs.__file__}", line' in stacks
    assert "in other" in stacks
