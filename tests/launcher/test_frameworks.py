"""Accelerate and Lightning Fabric work inside `launch` and `spawn`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import equality_programs as programs
import pytest
import torch

import ddpsafe

Train = Callable[[ddpsafe.RankContext], dict[str, Any]]

FAST: Final[dict[str, Any]] = {
    "start_method": "forkserver",
    "backend": "gloo",
    # Without it Accelerate chooses a number of threads and prints it on stderr.
    "env": {"OMP_NUM_THREADS": "1"},
    "console": "none",
}

FRAMEWORKS: Final = [
    pytest.param(programs.train_with_accelerate, "accelerate", id="accelerate"),
    pytest.param(programs.train_with_fabric, "lightning_fabric", id="fabric"),
]


@pytest.fixture(autouse=True)
def _has_framework(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; the extra `test` has it")


def weight_after_one_step() -> list[list[float]]:
    """Take the same step in one process, on all samples."""
    model, optimizer = programs.model_and_optimizer()
    model(programs.data()).square().mean().backward()
    optimizer.step()
    return model.weight.detach().tolist()


def require_equal_training(found: list[dict[str, Any]]) -> None:
    """Fail unless each rank has its place, half the samples, and the weights of a step on all."""
    assert [tuple(each["place"]) for each in found] == [(0, 2), (1, 2)]
    assert [tuple(each["ours"]) for each in found] == [(0, 2), (1, 2)]
    for each in found:
        assert each["gathered"] == sorted(programs.data().tolist())
        torch.testing.assert_close(
            torch.tensor(each["weight"]), torch.tensor(weight_after_one_step())
        )


@pytest.mark.full
@pytest.mark.parametrize(("train", "package"), FRAMEWORKS)
def test_framework_trains_in_the_group_that_launch_made(train: Train, package: str) -> None:
    """The framework uses the existing group, makes no other, and takes a real step."""
    del package
    values = ddpsafe.launch(train, nproc_per_node=2, **FAST).values
    assert [found["same_group"] for found in values.values()] == [True, True]
    require_equal_training([values[rank] for rank in range(2)])


@pytest.mark.full
@pytest.mark.parametrize(("train", "package"), FRAMEWORKS)
def test_framework_makes_its_group_under_spawn(train: Train, package: str, tmp_path: Path) -> None:
    """The framework reads the rank's environment variables and makes the group itself."""
    del package
    ddpsafe.spawn(programs.in_a_spawned_rank, args=(train, tmp_path), nprocs=2, **FAST)
    require_equal_training(
        [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    )
