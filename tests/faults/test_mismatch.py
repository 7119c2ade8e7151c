"""Ranks call collectives that do not belong together."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import collective_programs as programs
import pytest
from fault_kit import BY_TIMEOUT, World, require_hang, require_places, require_rank

import ddpsafe

if TYPE_CHECKING:
    from pathlib import Path

ONE_OF: list[tuple[int, int]] = [(2, 1), (4, 2)]
"""World size and culprit."""


@pytest.mark.recorder
@pytest.mark.parametrize(("ranks", "culprit"), ONE_OF)
def test_another_collective(tmp_path: Path, ranks: int, culprit: int) -> None:
    """The rank that is alone with its call is named, and what each rank called."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(
        ddpsafe.CollectiveTimeoutError,
        programs.call_another_collective,
        culprit,
        **BY_TIMEOUT,
    )
    require_hang(error, culprit)
    assert "entered a different collective than the others" in str(error)
    assert "all_gather number 2 " in str(error)
    assert "all_reduce number 2 " in str(error)
    names = require_places(error, range(ranks))
    assert names.pop(culprit) == "call_another_collective"
    assert set(names.values()) == {"average_gradients"}


@pytest.mark.parametrize(("ranks", "culprit"), ONE_OF)
def test_a_shorter_tensor(tmp_path: Path, ranks: int, culprit: int) -> None:
    """Gloo aborts the process that is sent more than it expects, here the one that is wrong.

    The message says that shapes are the likely reason, and the line.
    """
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(
        ddpsafe.RankKilledError, programs.pass_other_shapes, culprit, 1000, 2000
    )
    require_rank(error, culprit)
    assert error.signal == signal.SIGABRT
    assert "compare the shapes" in str(error)
    assert "in pass_other_shapes" in str(error)


@pytest.mark.parametrize(("ranks", "culprit"), ONE_OF)
def test_a_longer_tensor(tmp_path: Path, ranks: int, culprit: int) -> None:
    """Gloo then aborts a rank that did nothing wrong, so the message has to say more than that."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(
        ddpsafe.RankKilledError, programs.pass_other_shapes, culprit, 2000, 1000
    )
    assert error.signal == signal.SIGABRT
    assert "compare the shapes" in str(error)
