"""Checkpoint errors cross process boundaries intact, and travel between ranks as plain values."""

from __future__ import annotations

import inspect
import json
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from ddpsafe._errors import Explanation
from ddpsafe._worker.join.joining import describe
from ddpsafe._world import World
from ddpsafe.checkpoint import errors
from ddpsafe.checkpoint._ranks import Ranks

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
