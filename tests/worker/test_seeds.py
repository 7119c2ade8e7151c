"""`launch(seed=…)`: equal models on all ranks, then other random numbers on each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import context_programs as programs
import pytest
from fault_kit import World


def draw(folder: Path, how: str, *, seed: int | None = 3, ranks: int = 2) -> list[dict[str, Any]]:
    """Return what each rank drew."""
    folder.mkdir()
    result = World(folder=folder, ranks=ranks).launch(programs.draw_after_wrap, how, seed=seed)
    return [result.values[rank] for rank in range(ranks)]


@pytest.mark.parametrize("how", ["wrap", "by hand"])
def test_dropout_differs_between_ranks_once_the_model_is_wrapped(tmp_path: Path, how: str) -> None:
    """The models were equal before DDP copied any; the same launch again draws the same."""
    zero, one = draw(tmp_path / "first", how)
    assert zero["weights"] == one["weights"]
    assert zero["mask"] != one["mask"]
    assert not zero["second wrap"]
    assert not one["second wrap"]
    assert draw(tmp_path / "again", how) == [zero, one]
    (alone,) = draw(tmp_path / "alone", "wrap", ranks=1)
    assert alone["mask"] == zero["mask"]


@pytest.mark.parametrize(
    ("how", "seed"),
    [("restored", 3), ("own seed", 3), pytest.param("wrap", None, marks=pytest.mark.full)],
)
def test_a_generator_that_was_set_stays(tmp_path: Path, how: str, seed: int | None) -> None:
    """A restored checkpoint and the script's own seed win, and nothing is seeded without a seed."""
    for rank in draw(tmp_path / "run", how, seed=seed):
        assert rank["unchanged"]
        assert not rank["second wrap"]
