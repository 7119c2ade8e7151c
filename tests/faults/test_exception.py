"""A rank raises."""

from __future__ import annotations

from pathlib import Path

import exception_programs as programs
import pytest
from fault_kit import WORLD_SIZES, WORLDS, World, require_rank
from join_programs import FailsToLoad
from training_programs import return_rank, train, train_by_hand

import ddpsafe


@pytest.mark.parametrize(("ranks", "start_method"), WORLDS)
def test_a_rank_that_raises_in_training_is_blamed(
    tmp_path: Path, ranks: int, start_method: str
) -> None:
    """Its exception is the error's cause, and the other ranks are shown as failed because of it."""
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


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "start_method"), WORLDS)
def test_a_rank_that_raises_in_an_unported_script_is_blamed(
    tmp_path: Path, ranks: int, start_method: str
) -> None:
    """`spawn` promises the same to a script that makes its own process group."""
    world = World(folder=tmp_path, ranks=ranks, start_method=start_method)
    error = world.spawn_fails(ddpsafe.RankRaisedError, train_by_hand, programs.raise_own_error)
    require_rank(error, 1)
    assert isinstance(error.__cause__, programs.LostSampleError)


@pytest.mark.full
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_a_rank_that_raises_before_init_process_group_is_blamed(tmp_path: Path, ranks: int) -> None:
    """The others stop waiting in `init_process_group`, and the message shows where they were."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.spawn_fails(ddpsafe.RankRaisedError, programs.raise_before_the_group)
    require_rank(error, 1)
    assert "was stopped by the launcher at " in str(error)


def test_a_rank_that_cannot_unpickle_its_argument_is_blamed(tmp_path: Path) -> None:
    """The message names the phase: the function has not run yet."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankRaisedError, return_rank, FailsToLoad(tmp_path))
    require_rank(error, 1)
    assert "while loading what it is to run" in str(error)
    assert isinstance(error.__cause__, programs.LostSampleError)


@pytest.mark.full
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_a_rank_that_raises_in_finally_is_blamed(tmp_path: Path, ranks: int) -> None:
    """An error of the cleanup code counts like any other."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.raise_in_finally)
    require_rank(error, 1)


@pytest.mark.full
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_rank_zero_is_blamed_when_it_raises_while_saving(tmp_path: Path, ranks: int) -> None:
    """The ranks at the barrier failed because of rank 0."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.raise_while_saving)
    require_rank(error, 0)
    assert "in raise_while_saving" in str(error)
    assert "missing" in str(error.__cause__)


@pytest.mark.full
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_the_first_rank_is_blamed_when_all_raise(tmp_path: Path, ranks: int) -> None:
    """The others failed by themselves, and the message says so."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.raise_on_all)
    require_rank(error, 1)
    assert "failed because of" not in str(error)
    assert "rank 0 also failed: " in str(error)


@pytest.mark.full
def test_a_rank_that_raises_in_ddp_training_is_blamed(tmp_path: Path) -> None:
    """DistributedDataParallel, an optimizer and a saved step make no difference."""
    world = World(folder=tmp_path)
    error = world.launch_fails(ddpsafe.RankRaisedError, programs.train_a_model, 1)
    require_rank(error, 1)
    assert isinstance(error.__cause__, programs.LostSampleError)
