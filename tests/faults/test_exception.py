"""A rank raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import exception_programs as programs
import pytest
from fault_kit import SIZES, WORLDS, World, require_rank
from join_programs import FailsToLoad
from training_programs import return_rank, train, train_by_hand

import ddpsafe

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("ranks", "start_method"), WORLDS)
def test_in_the_middle_of_training(tmp_path: Path, ranks: int, start_method: str) -> None:
    """The rank is named, its exception comes through itself, the others failed because of it."""
    world = World(folder=tmp_path, ranks=ranks, start_method=start_method)
    error = world.launch_fails(ddpsafe.RankRaisedError, train, programs.raise_own_error)
    require_rank(error, 1)
    assert error.kind == "user-error"
    assert isinstance(error.__cause__, programs.LostSampleError)
    assert error.__cause__.index == 17
    assert f"at {programs.__file__}:" in str(error)
    assert "in raise_own_error" in str(error)
    for rank in set(range(ranks)) - {1}:
        assert f"  rank {rank} failed because of rank 1: " in str(error) or (
            f"  rank {rank} was stopped by the launcher" in str(error)
        )


@pytest.mark.parametrize(("ranks", "start_method"), WORLDS)
def test_in_a_script_with_a_group_of_its_own(tmp_path: Path, ranks: int, start_method: str) -> None:
    """The same for an unported script under `spawn`."""
    world = World(folder=tmp_path, ranks=ranks, start_method=start_method)
    error = world.spawn_fails(ddpsafe.RankRaisedError, train_by_hand, programs.raise_own_error)
    require_rank(error, 1)
    assert isinstance(error.__cause__, programs.LostSampleError)


@pytest.mark.parametrize("ranks", SIZES)
def test_before_the_process_group(tmp_path: Path, ranks: int) -> None:
    """The rank is not waited for in `init_process_group`; where the others were is shown."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.spawn_fails(ddpsafe.RankRaisedError, programs.raise_before_the_group)
    require_rank(error, 1)
    assert "was stopped by the launcher at " in str(error)


def test_while_the_argument_is_loaded(tmp_path: Path) -> None:
    """An argument that cannot be unpickled on one rank fails that rank, before its function."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankRaisedError, return_rank, FailsToLoad(tmp_path))
    require_rank(error, 1)
    assert "while loading the function and its arguments" in str(error)
    assert isinstance(error.__cause__, programs.LostSampleError)


@pytest.mark.parametrize("ranks", SIZES)
def test_in_the_finally_block(tmp_path: Path, ranks: int) -> None:
    """Tidying up may fail too, and is blamed like anything else."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.raise_in_finally)
    require_rank(error, 1)


@pytest.mark.parametrize("ranks", SIZES)
def test_while_rank_zero_saves(tmp_path: Path, ranks: int) -> None:
    """The ranks at the barrier only lost rank 0."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.raise_while_saving)
    require_rank(error, 0)
    assert "in raise_while_saving" in str(error)
    assert "missing" in str(error.__cause__)


@pytest.mark.parametrize("ranks", SIZES)
def test_on_every_rank(tmp_path: Path, ranks: int) -> None:
    """The first is blamed; the others are not said to have failed because of it."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.raise_on_all)
    require_rank(error, 1)
    assert "failed because of" not in str(error)
    assert "rank 0 also failed: " in str(error)


def test_in_ddp_after_a_step(tmp_path: Path) -> None:
    """A model in DistributedDataParallel, an optimizer and a saved step make no difference."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.train_a_model, 1)
    require_rank(error, 1)
    assert isinstance(error.__cause__, programs.LostSampleError)
