"""A launch computes the same as the hand-written form, and frameworks train in it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import equality_programs as programs
import pytest
import torch
from forked_ranks import free_port

import ddpsafe

State = dict[str, torch.Tensor]


@pytest.mark.full(but=["2-1"])
@pytest.mark.parametrize(
    ("nproc", "accumulate"), [(2, 1), pytest.param(3, 1, marks=pytest.mark.soak), (2, 3)]
)
def test_launch_trains_the_same_weights_as_the_hand_written_form(
    nproc: int, accumulate: int, tmp_path: Path
) -> None:
    """To the last bit: seeds, DistributedSampler, BatchNorm, Dropout and Adam, also with no_sync."""
    expected = train_by_hand(nproc, accumulate, tmp_path)
    values = ddpsafe.launch(
        programs.with_ddpsafe,
        (accumulate,),
        nproc_per_node=nproc,
        backend="gloo",
        start_method="forkserver",
    ).values
    untrained = programs.network().state_dict()
    for rank in range(nproc):
        assert differing(values[rank], expected[rank]) == []
        assert differing(values[rank], untrained) == sorted(untrained)


def train_by_hand(nproc: int, accumulate: int, folder: Path) -> list[State]:
    """Run the hand-written form under plain torch.multiprocessing."""
    args = (nproc, free_port(), accumulate, folder)
    torch.multiprocessing.start_processes(
        programs.by_hand, args=args, nprocs=nproc, start_method="forkserver"
    )
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(nproc)]


def differing(found: State, expected: State) -> list[str]:
    """Return the names of the tensors that are not identical to the last bit."""
    assert found.keys() == expected.keys()
    return sorted(name for name in found if not torch.equal(found[name], expected[name]))


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
@pytest.mark.parametrize("by", ["launch", "spawn"])
@pytest.mark.parametrize(("train", "package"), FRAMEWORKS)
def test_framework_trains_as_one_process_does(
    train: Train, package: str, by: str, tmp_path: Path
) -> None:
    """It uses the group that `launch` has made, and under `spawn` makes one from the environment."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; the extra `test` has it")
    if by == "launch":
        values = ddpsafe.launch(train, nproc_per_node=2, **FAST).values
        assert [values[rank]["same_group"] for rank in range(2)] == [True, True]
    else:
        ddpsafe.spawn(programs.in_a_spawned_rank, args=(train, tmp_path), nprocs=2, **FAST)
        texts = [(tmp_path / f"rank-{rank}.json").read_text() for rank in range(2)]
        values = dict(enumerate(map(json.loads, texts)))
    require_equal_training([values[rank] for rank in range(2)])
