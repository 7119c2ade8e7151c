"""A checkpoint of other objects is refused by name, before any object changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import checkpoint_programs as programs
import pytest
import torch

from ddpsafe.checkpoint import Checkpointer, errors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def make(size: int = 2, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> Any:
    """Make a model and its optimizer, with a state after one step."""
    model = torch.nn.Linear(size, size)
    adam = optimizer(model.parameters())
    model(torch.ones(size)).sum().backward()  # type: ignore[no-untyped-call]  # torch
    adam.step()
    return {"model": model, "optimizer": adam}


def refused(directory: Path, saved: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Save one state, fail to restore it into another, and return the differences."""
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(saved, 1)
        with pytest.raises(errors.CheckpointMismatchError) as caught:
            checkpointer.restore(now)
    return caught.value.differences


def test_optimizer_with_other_groups_leaves_the_model_unchanged(tmp_path: Path) -> None:
    """The model comes first in the state, yet nothing is restored in part."""
    model = torch.nn.Linear(2, 2)
    before = model.weight.clone()
    groups = [{"params": [each]} for each in model.parameters()]
    now = {"model": model, "optimizer": torch.optim.Adam(groups)}
    assert refused(tmp_path, make(), now) == {
        "optimizer['param_groups']": ("1 group", "2 groups"),
    }
    assert torch.equal(model.weight, before)


def test_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    """PyTorch would load it, and fail in the next step."""
    saved, now = ({"optimizer": make(size)["optimizer"]} for size in (2, 3))
    assert refused(tmp_path, saved, now) == {
        "optimizer['param_groups'][0]['params']": (
            "2 of shapes (2, 2), (2,)",
            "2 of shapes (3, 3), (3,)",
        ),
    }


def test_model_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    """PyTorch would only warn, and leave it without values."""
    now = {"model": torch.nn.Linear(2, 2, device="meta"), "x": torch.ones(1, device="meta")}
    saved = {"model": torch.nn.Linear(2, 2), "x": torch.ones(1)}
    where = ("values", "on the meta device, which has none")
    assert refused(tmp_path, saved, now) == {
        "model['weight']": where,
        "model['bias']": where,
        "x": where,
    }


def test_lazy_model_takes_its_shapes_from_the_checkpoint(tmp_path: Path) -> None:
    """As with load_state_dict."""
    model, now = torch.nn.Linear(3, 2), torch.nn.LazyLinear(2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"model": model}, 1)
        checkpointer.restore({"model": now})
    assert torch.equal(now.weight, model.weight)


@pytest.mark.parametrize("wraps_now", [False, True])
def test_wrapper_that_renames_every_parameter_is_named(tmp_path: Path, *, wraps_now: bool) -> None:
    """The wrapper is not DDP, and either side may have it."""
    model = torch.nn.Linear(3, 2)
    wrapper = torch.nn.ModuleDict({"engine": model})
    saved, now = ({"model": each} for each in ((model, wrapper)[:: 1 if wraps_now else -1]))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(saved, 1)
        with pytest.raises(errors.CheckpointMismatchError) as caught:
            checkpointer.restore(now)
    assert "a wrapper puts 'engine.' before" in str(caught.value)


def test_optimizer_of_another_class_is_refused(tmp_path: Path) -> None:
    """PyTorch would load it, and continue with the other optimizer's hyperparameters."""
    now = make(optimizer=torch.optim.SGD)
    assert refused(tmp_path, make(), now) == {"optimizer": ("Adam", "SGD")}


def test_tensors_of_another_dtype_are_refused(tmp_path: Path) -> None:
    """PyTorch would cast them: a float to an integer, a double to a half."""
    saved = {"x": torch.ones(2, dtype=torch.float64), "model": torch.nn.Linear(1, 1).double()}
    now = {"x": torch.zeros(2, dtype=torch.int64), "model": torch.nn.Linear(1, 1).half()}
    assert refused(tmp_path, saved, now) == {
        "x": ("float64", "int64"),
        "model['weight']": ("float64", "float16"),
        "model['bias']": ("float64", "float16"),
    }
    assert now["x"].tolist() == [0, 0]


def test_a_long_list_is_shortened(tmp_path: Path) -> None:
    """The message names the first eight tensors that differ, and how many more there are."""

    def state(size: int) -> dict[str, Any]:
        layers = (torch.nn.Linear(size, size) for _ in range(5))
        return {"model": torch.nn.Sequential(*layers)}

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state(2), 1)
        with pytest.raises(errors.CheckpointMismatchError) as caught:
            checkpointer.restore(state(3))
        details = caught.value.explanation.details
        assert details[0] == "model['0.weight']: saved shape (2, 2), now shape (3, 3)"
        assert details[8:] == ["… and 2 more"]
        with pytest.warns(errors.CheckpointWarning) as warned:
            checkpointer.restore(state(3), strict=False)
    text = str(warned[0].message)
    first = "model['0.weight']: saved shape (2, 2), now shape (3, 3); "
    assert f"left unchanged: {first}" in text
    assert text.endswith("now shape (3,); … and 2 more")


def test_refusal_of_one_rank_is_raised_on_every_rank(tmp_path: Path) -> None:
    """Only the object's own load_state_dict can detect it; no rank continues without it."""
    found = programs.run_ranks(programs.refuse_on_rank_1, tmp_path)
    for rank in range(2):
        assert found[rank]["class"] == "CheckpointMismatchError", found
        assert found[rank]["rank"] in ((None, 1) if rank == 1 else (1,))
        assert "'picky' (Picky) could not load its state" in found[rank]["text"]
