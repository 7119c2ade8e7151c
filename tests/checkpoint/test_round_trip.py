"""A restore returns what was saved: every kind of object, and the random numbers that follow."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scripts
import torch

import ddpsafe
from ddpsafe import checkpoint, data
from ddpsafe.checkpoint import Checkpointer, PerRank, errors


class Counter:
    """A user's own object with a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        """Return the count."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the count."""
        self.count = state["count"]


def make_training() -> dict[str, Any]:
    """Make one object of each kind."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    dataset = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4))
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
        "scaler": torch.amp.GradScaler("cpu"),
        "loader": data.DataLoader(dataset, 2, sampler=data.DistributedSampler(dataset, 1, 0)),
        "counter": PerRank(Counter()),
        "tensor": torch.zeros(3),
        "history": [],
    }


def train(training: dict[str, Any]) -> Iterator[Any]:
    """Train for one epoch; yield the data, the results and the random draws after each batch."""
    for (points,) in training["loader"]:
        loss = training["model"](points).square().mean()
        training["optimizer"].zero_grad()
        training["scaler"].scale(loss).backward()
        training["scaler"].step(training["optimizer"])
        training["scaler"].update()
        training["scheduler"].step()
        training["counter"].stateful.count += 1
        training["tensor"] += 1
        training["history"] = [*training["history"], loss.item()]
        draws = (random.random(), np.random.random(), torch.rand(()).item())  # noqa: NPY002
        yield points.tolist(), loss.item(), draws, training["scheduler"].get_last_lr()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_continues_as_if_it_had_not_stopped(tmp_path: Path, asynchronous: bool) -> None:  # noqa: FBT001
    """Parameters, optimizer, schedule, scaler, data position and random draws are equal."""
    training = make_training()
    running = train(training)
    next(running), next(running)
    with Checkpointer(tmp_path / "c") as checkpointer:
        assert checkpointer.restore(make_training()) is None
        checkpointer.save(training, 2, asynchronous=asynchronous)
        expected = list(running)  # changes what an asynchronous save is still writing
    fresh = make_training()
    with Checkpointer(tmp_path / "c") as checkpointer:
        assert checkpointer.restore(fresh) == 2
    assert fresh["counter"].stateful.count == 2
    assert len(fresh["history"]) == 2
    assert list(train(fresh)) == expected
    assert len(expected) == 2
    assert torch.equal(fresh["tensor"], training["tensor"])


def test_only_the_newest_are_kept_and_latest_points_to_the_last_one(tmp_path: Path) -> None:
    """``keep`` limits the disk space; the link is for people."""
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (1, 2, 10):
            checkpointer.save({"step": step}, step)
        assert checkpointer.latest() == 10
        assert checkpointer.path(10) == (tmp_path / "latest").resolve()
        assert not checkpointer.path(1).exists()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".lock", "latest", "step-000000000002", "step-000000000010"]


def test_checkpoint_is_a_plain_torch_file(tmp_path: Path) -> None:
    """It can be read without ddpsafe, and its manifest is JSON."""
    model = torch.nn.Linear(2, 2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"model": model}, 1)
        folder = checkpointer.path(1)
    loaded = torch.load(folder / "state.pt", weights_only=True)
    assert torch.equal(loaded["model"]["weight"], model.weight)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["content"]["step"] == 1


def test_object_that_would_execute_code_is_refused_with_its_path(tmp_path: Path) -> None:
    """Every saved checkpoint can be loaded under weights_only."""
    bad = {"config": {"loss": [torch.nn.functional.mse_loss], "size": np.float64(1)}}
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(errors.UnsafeStateError) as caught:
        checkpointer.save(bad, 1)
    assert caught.value.paths == ("state['config']['loss'][0]", "state['config']['size']")
    assert "add_safe_globals" in str(caught.value)


def test_another_model_is_named_tensor_by_tensor(tmp_path: Path) -> None:
    """Names and shapes that differ are listed, and nothing changes."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"model": torch.nn.Linear(2, 3), "epoch": 4}, 1)
        other = torch.nn.Sequential(torch.nn.Linear(2, 3))
        before = other[0].weight.clone()
        state = {"model": other, "epoch": 0, "extra": 1}
        with pytest.raises(errors.CheckpointMismatchError) as caught:
            checkpointer.restore(state)
    assert torch.equal(other[0].weight, before)
    assert state["epoch"] == 0
    assert caught.value.differences == {
        "model['weight']": ((3, 2), "nothing"),
        "model['bias']": ((3,), "nothing"),
        "model['0.weight']": ("nothing", (3, 2)),
        "model['0.bias']": ("nothing", (3,)),
        "extra": ("nothing", "shared"),
    }
    assert "model['weight']: saved shape (3, 2), now nothing" in str(caught.value)


def test_saves_cannot_go_back_to_an_earlier_step(tmp_path: Path) -> None:
    """A forgotten restore() cannot overwrite checkpoints; saving the same step again is allowed."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"x": 1}, 5)
        checkpointer.save({"x": 1}, 5)
        with pytest.raises(errors.StepOrderError) as caught:
            checkpointer.save({"x": 1}, 4)
        assert (caught.value.step, caught.value.newest) == (4, 5)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(errors.StepOrderError, match="restore"):
            checkpointer.save({"x": 1}, 5)
        assert checkpointer.restore({"x": 0}) == 5
        checkpointer.save({"x": 1}, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("runs/1",),
            rf"(?s)it is relative.*What to do: write \"{re.escape(str(Path.cwd()))}/runs/1\"\.$",
        ),
        (("~/runs",), "only shells expand"),
        (("s3://bucket/runs",), "is an address, not a directory"),
        (("/tmp/x", 0), "keep=0"),
        (("/tmp/x", True), "keep=True"),
    ],
)
def test_wrong_arguments_are_explained(arguments: tuple[Any, ...], message: str) -> None:
    """Arguments are checked before anything is written."""
    with pytest.raises(ddpsafe.ConfigError, match=message):
        Checkpointer(*arguments)


def test_a_wrong_choice_is_answered_with_all_of_them(tmp_path: Path) -> None:
    """The text to write has the name of the argument."""
    with pytest.raises(ddpsafe.ConfigError) as caught:
        Checkpointer(tmp_path, access="x")  # type: ignore[arg-type]  # under test
    explanation = caught.value.explanation
    assert explanation.cause == "that is not one of the choices."
    assert explanation.fix == "write access='write' or access='read'."


def test_wrong_calls_are_explained(tmp_path: Path) -> None:
    """Examples are a bad step, a state that is not a mapping, and a timeout that is not a duration."""
    with pytest.raises(ddpsafe.ConfigError, match="timeout=3"):
        Checkpointer(tmp_path, timeout=3)  # type: ignore[arg-type]  # type: ignore[arg-type]  # under test
    checkpointer = Checkpointer(tmp_path, timeout=timedelta(seconds=20))
    with pytest.raises(ddpsafe.ConfigError, match="with block"):
        checkpointer.save({"x": 1}, 1, asynchronous=True)
    for step in (-1, 1.5, True):
        with pytest.raises(ddpsafe.ConfigError, match="a step is an integer"):
            checkpointer.save({"x": 1}, step)  # type: ignore[arg-type]  # type: ignore[arg-type]  # under test
    for state in ([1], {}, {1: 2}, {"\ud800": 1}):
        with pytest.raises(ddpsafe.ConfigError, match="not a mapping of names"):
            checkpointer.save(state, 1)  # type: ignore[arg-type]  # type: ignore[arg-type]  # under test
    with pytest.raises(errors.DirectoryLockedError, match=r"(?s)of this process.*call close\(\)"):
        Checkpointer(tmp_path)
    checkpointer.close()
    with pytest.raises(ddpsafe.ConfigError, match="this one is closed"):
        checkpointer.save({"x": 1}, 1)


def test_step_may_be_a_numpy_integer(tmp_path: Path) -> None:
    """Any integer type counts steps; a float does not."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"x": 1}, np.int64(3))  # type: ignore[arg-type]  # type: ignore[arg-type]  # under test
        assert checkpointer.latest() == 3


def test_generators_are_saved_only_on_request(tmp_path: Path) -> None:
    """``rng=False`` leaves them out, so no later job can restore them."""
    with Checkpointer(tmp_path, rng=False) as checkpointer:
        checkpointer.save({"x": 1}, 1)
    random.seed(7)
    expected = random.random()
    random.seed(7)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore({"x": 0}) == 1
    assert random.random() == expected


def test_reader_needs_no_write_permission(tmp_path: Path) -> None:
    """An evaluation beside the training locks nothing and can save nothing."""
    with Checkpointer(tmp_path) as writer:
        writer.save({"x": 7}, 1)
        reader = Checkpointer(tmp_path, access="read")
        state = {"x": 0}
        assert reader.restore(state) == 1
        assert state == {"x": 7}
        with pytest.raises(ddpsafe.ConfigError, match="access='read'"):
            reader.save(state, 2)


def test_tensors_that_share_memory_are_saved_once(tmp_path: Path) -> None:
    """Tied weights take their space once, also in asynchronous saves."""
    weight = torch.zeros(2**16)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"a": weight, "b": weight}, 1, asynchronous=True)
        checkpointer.wait()
        assert (checkpointer.path(1) / "state.pt").stat().st_size < 1.5 * weight.nbytes


def test_process_that_dies_during_a_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """The partial one is never seen, and the next job deletes it."""
    script = f"""
import os, signal
from ddpsafe.checkpoint import Checkpointer
from ddpsafe.checkpoint import _directory
checkpointer = Checkpointer({str(tmp_path / "c")!r})
checkpointer.save({{"x": 1}}, 1)
_directory.publish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
checkpointer.save({{"x": 2}}, 2)
"""
    run = subprocess.run([sys.executable, "-c", script], check=False, timeout=scripts.LIMIT_S)
    assert run.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "c").glob(".saving-*"))) == 1
    state = {"x": 0}
    with Checkpointer(tmp_path / "c") as checkpointer:
        assert checkpointer.restore(state) == 1
    assert state == {"x": 1}
    assert list((tmp_path / "c").glob(".saving-*")) == []


def test_namespace_is_found_on_the_package() -> None:
    """``ddpsafe.checkpoint`` needs no separate import."""
    assert ddpsafe.checkpoint is checkpoint
    assert checkpoint.__all__ == [
        "CheckpointInfo",
        "Checkpointer",
        "Keep",
        "PerRank",
        "import_file",
    ]
