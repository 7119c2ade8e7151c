"""A rank closes all descriptors, including the pipes to its launcher."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import odd_end_programs as programs
import pytest
from fault_kit import World, require_rank

import ddpsafe


@pytest.mark.full(but=["fail_without_descriptors"])
@pytest.mark.parametrize(
    "fault", [programs.fail_without_descriptors, programs.fail_with_files_for_pipes]
)
def test_its_exception_is_in_its_log_and_in_the_message(
    tmp_path: Path, fault: Callable[..., Any]
) -> None:
    """A report that cannot go through the pipe is written to the log, and shown from there."""
    world = World(folder=tmp_path)
    error = world.spawn_fails(ddpsafe.RankRaisedError, programs.fail_before_the_group, fault)
    require_rank(error, 1)
    assert "raised exception_programs.LostSampleError" in str(error)
    assert " in raise_own_error" in str(error)
    assert "read from its log: the script had closed the pipe" in str(error)
    assert error.log_path is not None
    assert "in raise_own_error" in error.log_path.read_text()


def test_ddpsafe_writes_nothing_to_the_scripts_files(tmp_path: Path) -> None:
    """The descriptor numbers of the pipes may meanwhile belong to files of the script."""
    world = World(folder=tmp_path)
    world.spawn_fails(
        ddpsafe.RankRaisedError, programs.fail_before_the_group, programs.fail_with_files_for_pipes
    )
    own = list(tmp_path.glob("own-*"))
    assert len(own) >= 2  # one to the launcher and one from it
    assert b"".join(path.read_bytes() for path in own) == b""
