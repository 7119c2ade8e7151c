"""A rank closes all descriptors, the pipes to its launcher among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import odd_end_programs as programs
import pytest
from fault_kit import World, require_rank

import ddpsafe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize(
    "fault", [programs.fail_without_descriptors, programs.fail_with_files_for_pipes]
)
def test_what_it_raises_is_in_its_log_and_in_the_message(
    tmp_path: Path, fault: Callable[..., Any]
) -> None:
    """What the pipe does not take any more is written down, and shown as its last words."""
    world = World(folder=tmp_path)
    error = world.spawn_fails(ddpsafe.RankExitedError, programs.fail_before_the_group, fault)
    require_rank(error, 1)
    assert "LostSampleError" in str(error)
    assert "the script had closed the pipe on which it is reported" in str(error)
    assert error.log_path is not None
    assert "in raise_own_error" in error.log_path.read_text()


def test_nothing_of_ours_is_in_its_own_files(tmp_path: Path) -> None:
    """The numbers of the pipes may belong to files of the script's by then."""
    world = World(folder=tmp_path)
    world.spawn_fails(
        ddpsafe.RankExitedError, programs.fail_before_the_group, programs.fail_with_files_for_pipes
    )
    own = list(tmp_path.glob("own-*"))
    assert len(own) >= 2  # one to the launcher and one from it
    assert b"".join(path.read_bytes() for path in own) == b""
