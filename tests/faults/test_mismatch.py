"""Ranks call collectives that do not match."""

from __future__ import annotations

import signal
from pathlib import Path

import collective_programs as programs
import pytest
from fault_kit import BY_TIMEOUT, World, require_hang, require_places, require_rank

import ddpsafe

SIZES_AND_CULPRITS: list[tuple[int, int]] = [(2, 1), (4, 2)]
"""World size and culprit."""


@pytest.mark.full(but=["2-1"])
@pytest.mark.recorder
@pytest.mark.parametrize(("ranks", "culprit"), SIZES_AND_CULPRITS)
def test_a_rank_that_calls_another_collective_is_named(
    tmp_path: Path, ranks: int, culprit: int
) -> None:
    """It is the only one with its call; of two ranks, either may be wrong, and both are named."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(
        "collective", programs.call_another_collective, culprit, **BY_TIMEOUT
    )
    require_hang(error, culprit, or_rank=0 if ranks == 2 else None)
    assert ("entered a different collective than the others" in str(error)) == (ranks > 2)
    assert "all_gather number 2 " in str(error)
    assert "all_reduce number 2 " in str(error)
    names = require_places(error, range(ranks))
    assert names.pop(culprit) == "call_another_collective"
    assert set(names.values()) == {"average_gradients"}


@pytest.mark.full(but=["2-1"])
@pytest.mark.parametrize(("ranks", "culprit"), SIZES_AND_CULPRITS)
def test_a_rank_that_passes_a_shorter_tensor_is_named(
    tmp_path: Path, ranks: int, culprit: int
) -> None:
    """Gloo aborts the process that receives more than it expects, which here is the faulty one.

    The message names the shapes as the likely cause, and the line.
    """
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(
        ddpsafe.RankKilledError, programs.pass_other_shapes, culprit, 1000, 2000
    )
    require_rank(error, culprit)
    assert error.signal == signal.SIGABRT
    assert "compare the shapes" in str(error)
    assert "in pass_other_shapes" in str(error)


@pytest.mark.full(but=["2-1"])
@pytest.mark.parametrize(("ranks", "culprit"), SIZES_AND_CULPRITS)
def test_the_message_suggests_shapes_when_a_rank_passes_a_longer_tensor(
    tmp_path: Path, ranks: int, culprit: int
) -> None:
    """Gloo then aborts a rank that did nothing wrong, so its name alone would mislead."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(
        ddpsafe.RankKilledError, programs.pass_other_shapes, culprit, 2000, 1000
    )
    require_rank(
        error, culprit - 1
    )  # gloo's ring sends to the previous rank, which receives too much
    assert error.signal == signal.SIGABRT
    assert "compare the shapes" in str(error)


@pytest.mark.full(but=["another call"])
@pytest.mark.parametrize(
    ("how", "said", "shown"),
    [
        pytest.param(
            "another call",
            "entered a different collective than the others",
            "| rank 1 is in barrier number 2\n",
            id="another call",
        ),
        pytest.param(
            "another shape",
            "unlike the others, passed shape [9] to all_reduce number 2",
            "| rank 1 is in all_reduce number 2 of shape [9]\n",
            id="another shape",
        ),
    ],
)
def test_a_mismatch_that_torch_finds_is_taken_for_one(
    tmp_path: Path, how: str, said: str, shown: str
) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL torch raises on every rank; the rank that differs is named."""
    # torch reads the variable when it is imported, which a fork server has done before.
    error = World(folder=tmp_path, ranks=3, start_method="spawn").launch_fails(
        "collective", programs.differ_under_detail, how, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    )
    require_hang(error, 1)
    assert said in str(error)
    assert shown in str(error)
    assert "| ranks 0 and 2 are in all_reduce number 2 of shape [8]\n" in str(error)
    assert require_places(error, range(3))[1] == "differ_under_detail"
