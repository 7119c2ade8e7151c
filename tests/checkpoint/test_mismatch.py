"""A checkpoint of other objects is refused by name, before any object changes; errors travel between ranks."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import checkpoint_programs as programs
import pytest
import torch

from ddpsafe._errors import Explanation
from ddpsafe._worker.join.joining import describe
from ddpsafe._world import World
from ddpsafe.checkpoint import Checkpointer, errors
from ddpsafe.checkpoint._ranks import Ranks


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


META: Final = ("values", "on the meta device, which has none")
SHAPES: Final = ("2 of shapes (2, 2), (2,)", "2 of shapes (3, 3), (3,)")
REFUSED: Final[dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, tuple[str, str]]]]] = {
    # torch would load the first two: it fails in the next step, or continues with the other's hyperparameters
    "an optimizer of other parameters": (
        lambda: {"optimizer": make(2)["optimizer"]}, lambda: {"optimizer": make(3)["optimizer"]},
        {"optimizer['param_groups'][0]['params']": SHAPES}),
    "an optimizer of another class": (make, lambda: make(optimizer=torch.optim.SGD), {"optimizer": ("Adam", "SGD")}),
    # torch would only warn, and leave it without values
    "a model on the meta device": (lambda: {"model": torch.nn.Linear(2, 2), "x": torch.ones(1)},
        lambda: {"model": torch.nn.Linear(2, 2, device="meta"), "x": torch.ones(1, device="meta")},
        {"model['weight']": META, "model['bias']": META, "x": META}),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_torch_would_load_is_refused(tmp_path: Path, what: str) -> None:
    """The error has the differences by their place."""
    saved, now, differences = REFUSED[what]
    assert refused(tmp_path, saved(), now()) == differences


def test_optimizer_with_other_groups_leaves_the_model_unchanged(tmp_path: Path) -> None:
    """The model comes first in the state, yet nothing is restored in part."""
    model = torch.nn.Linear(2, 2)
    before = model.weight.clone()
    groups = [{"params": [each]} for each in model.parameters()]
    now = {"model": model, "optimizer": torch.optim.Adam(groups)}
    assert refused(tmp_path, make(), now) == {"optimizer['param_groups']": ("1 group", "2 groups")}
    assert torch.equal(model.weight, before)


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


FACTS: Final[dict[str, Any]] = {
    "differences": {"weight": ((2, 3), (3, 2))},
    "found": 2,
    "free_bytes": 5,
    "hosts": ("gpu-07",),
    "known": 1,
    "missing_ranks": (1, 3),
    "needed_bytes": 7,
    "newest": 20,
    "owner": {"pid": 4711},
    "paths": ("state['x']",),
    "problems": ("first", "second"),
    "rank": 3,
    "step": 10,
    "steps": {"gpu-07": (1, 2)},
    "waited_s": 20.5,
}

CLASSES: Final = [
    cls
    for cls in vars(errors).values()
    if inspect.isclass(cls) and issubclass(cls, errors.CheckpointError)
]


def build(cls: type[errors.CheckpointError]) -> errors.CheckpointError:
    """Make an error with every fact that its class takes."""
    names = inspect.getfullargspec(cls.__init__).kwonlyargs
    return cls(
        Explanation("what happened", "why", "do this"), **{name: FACTS[name] for name in names}
    )


def ranks_of(rank: int) -> Ranks:
    """Return a rank of four."""
    world = World(
        rank=rank,
        world_size=4,
        local_rank=rank,
        local_world_size=4,
        node_rank=0,
        nnodes=1,
        started_by="alone",
    )
    return Ranks(
        describe(world, torch.device("cpu"), "gloo", None),
        Path("/checkpoints"),
        timedelta(seconds=1),
    )


def sent(error: BaseException, *, by: int, to: int) -> errors.CheckpointError:
    """Return an error of one rank as another one raises it."""
    failure = json.loads(json.dumps(ranks_of(by).failure_of(error)))
    seen = ranks_of(to).peer_error(failure)
    assert isinstance(seen, errors.CheckpointError)
    return seen


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_error_is_the_same_on_every_rank(cls: type[errors.CheckpointError]) -> None:
    """It travels as JSON; the text names the rank that raised it and the ranks that received it."""
    error = build(cls)
    seen = sent(error, by=0, to=1)
    assert type(seen) is cls
    assert vars(seen).keys() == vars(error).keys() | {"origin"}
    assert seen.origin == "peer-lost"
    assert seen.rank == 3
    what = f"what happened (raised on rank 3, seen by {ranks_of(1)})"
    assert seen.explanation == Explanation(what, "why", "do this")


def test_error_of_a_foreign_class_is_reported_with_its_class() -> None:
    """It may be anything that a user's object raises in state_dict()."""
    seen = sent(ZeroDivisionError("by zero"), by=2, to=0)
    assert type(seen) is errors.CheckpointError
    assert str(seen).startswith("ZeroDivisionError: by zero (raised on rank 2, seen by rank 0")
