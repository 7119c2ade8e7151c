"""torch's default group leaves ranks out, numbers them in another order, or is made again."""

from __future__ import annotations

from pathlib import Path

import group_programs as programs
import pytest
from exception_programs import LostSampleError
from fault_kit import World, require_rank

import ddpsafe

SHAPES = sorted(programs.GROUPS)


def ranks_of(shape: str) -> int:
    """Return how many ranks the launch has, one that is in no group included."""
    return max(3, 1 + max(rank for members in programs.GROUPS[shape] for rank in members))


@pytest.mark.full(but=["the last rank is left out-3.0", "two pairs-3.0"])
@pytest.mark.parametrize("slow_s", [0.5, 3.0, pytest.param(12.0, marks=pytest.mark.soak)])
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_outside_of_a_default_group_are_not_awaited(
    tmp_path: Path, shape: str, slow_s: float
) -> None:
    """However long a step of the others takes, the launch succeeds."""
    World(folder=tmp_path, ranks=ranks_of(shape)).spawn(programs.train_in_groups, shape, slow_s)


@pytest.mark.full(but=["another order"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_rank_that_raises_is_named_by_its_rank_in_the_launch(
    tmp_path: Path, shape: str
) -> None:
    """Neither its number in the group nor a rank that is in no group."""
    fails = programs.GROUPS[shape][-1][-1]
    error = World(folder=tmp_path, ranks=ranks_of(shape)).spawn_fails(
        ddpsafe.RankRaisedError, programs.train_in_groups, shape, 0.0, fails
    )
    require_rank(error, fails)
    assert LostSampleError.__name__ in str(error)


@pytest.mark.parametrize("how", ["own", pytest.param("order", marks=pytest.mark.full)])
def test_groups_that_ranks_make_differently_are_refused(tmp_path: Path, how: str) -> None:
    """At the call, with both lists and lines; torch gave a wrong sum, or waited for its timeout."""
    error = World(folder=tmp_path, ranks=4).launch_fails(
        ddpsafe.RankRaisedError, programs.make_groups, how
    )
    text = str(error)
    assert "ranks [0, 1]" in text
    assert "ranks [2, 3]" in text
    assert "in the call of new_group in which rank" in text
    assert isinstance(error.__cause__, ddpsafe.ConfigError)
    assert sum("group_programs.py" in line for line in error.__cause__.explanation.details) == 2


@pytest.mark.parametrize(
    "how",
    [
        "all",
        "alone",
        pytest.param("local", marks=pytest.mark.full),
        pytest.param("subgroups", marks=pytest.mark.full),
        pytest.param("mesh", marks=pytest.mark.full),
    ],
)
def test_groups_that_all_ranks_make_work(tmp_path: Path, how: str) -> None:
    """So do groups that only their members make."""
    result = World(folder=tmp_path, ranks=4).launch(programs.make_groups, how)
    assert set(result.values.values()) == {1.0 if how == "alone" else 2.0}
