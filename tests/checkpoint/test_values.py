"""Values that are easily missed: mutable ones, sparse ones, and those that could not be loaded."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddpsafe.checkpoint import Checkpointer, errors
from ddpsafe.checkpoint._trees import HostCopies

# Quantized dtypes cannot be made from raw bits.
DTYPES = {
    each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype) and not str(each).startswith("torch.q")
}


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_tensor_of_every_dtype_is_restored_or_refused(
    tmp_path: Path, dtype: torch.dtype, *, asynchronous: bool
) -> None:
    """Values are equal bit by bit, also complex and 8-bit floats; torch itself cannot save some dtypes."""
    is_saved = dtype.itemsize > 0 and str(dtype).removeprefix("torch.").strip("u") not in {
        f"int{bits}" for bits in range(1, 8)
    }
    tensor = torch.randint(0, 2, (3, 4 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    with Checkpointer(tmp_path, rng=False) as checkpointer:
        if not is_saved:
            with pytest.raises(errors.UnsafeStateError, match=r"state\['x'\]"):
                checkpointer.save({"x": tensor}, 1, asynchronous=asynchronous)
            return
        checkpointer.save({"x": tensor}, 1, asynchronous=asynchronous)
        again = torch.zeros_like(tensor.view(torch.uint8)).view(dtype)
        checkpointer.restore({"x": again})
    assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))


def nested(depth: int) -> Any:
    """Make a list nested to that depth."""
    tree: Any = 1
    for _ in range(depth):
        tree = [tree]
    return tree


def holding_itself() -> list[Any]:
    """Make a list that contains itself."""
    items: list[Any] = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.max(torch.ones(2, 2), 0), "torch.return_types.max"),
        (time.gmtime(0), "time.struct_time"),
        (sys.version_info, "sys.version_info"),
        (holding_itself(), "contains itself"),
        (torch.empty(3, device="meta"), "meta device"),
        (np.float64(0.5), "write value.item()"),
        (np.zeros(2), "write torch.from_numpy(value)"),
        (nested(100), "nested deeper than 100"),
        ("\0shard x", "begins with"),
        (torch.empty(2, dtype=torch.uint4), "uint4"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_value_that_could_not_be_loaded_is_refused_by_name(
    tmp_path: Path, value: object, message: str, *, asynchronous: bool
) -> None:
    """The error is ddpsafe's, with the exact path of the value, colons included."""
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(errors.UnsafeStateError) as caught:
        checkpointer.save({"a: b": value}, 1, asynchronous=asynchronous)
    assert caught.value.paths == ("state['a: b']",)
    assert message in str(caught.value)
    assert "holds a value that" in str(caught.value)


def test_copy_for_an_asynchronous_save_shares_nothing_mutable() -> None:
    """Sets and bytearrays are copied too, not only tensors."""
    state: dict[str, Any] = {"seen": {1}, "bytes": bytearray(b"old"), "x": torch.zeros(1)}
    copied = HostCopies().copy(state)
    state["seen"].add(2)
    state["bytes"][:] = b"new"
    state["x"] += 1
    assert copied == {"seen": {1}, "bytes": bytearray(b"old"), "x": torch.zeros(1)}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sparse_tensor_is_restored(tmp_path: Path, asynchronous: bool) -> None:  # noqa: FBT001
    """It has no single block of memory to copy or to measure."""
    state: dict[str, Any] = {"x": torch.eye(3).to_sparse()}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, 1, asynchronous=asynchronous)
        checkpointer.wait()
        state["x"] = torch.zeros(3, 3).to_sparse()
        assert checkpointer.restore(state) == 1
    assert torch.equal(state["x"].to_dense(), torch.eye(3))


@pytest.mark.parametrize("container", [list, tuple, lambda models: dict(enumerate(models))])
def test_model_inside_a_container_is_refused_with_advice(tmp_path: Path, container: Any) -> None:
    """The message names it, and says to give it its own name at the top level."""
    models = container([torch.nn.Linear(1, 1)])
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(errors.UnsafeStateError) as caught:
        checkpointer.save({"models": models}, 1)
    assert caught.value.paths == ("state['models'][0]",)
    assert "give it its own name in the state" in str(caught.value)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensor_is_restored(
    tmp_path: Path,
    layout: torch.layout,
    asynchronous: bool,  # noqa: FBT001 - a parameter of a test
) -> None:
    """Alone or inside a plain value; a tensor with other lengths is a mismatch.

    torch 2.15 and later do not load them, so there they are refused before anything is saved.
    """

    def nested(*lengths: int) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.rand(n) for n in lengths], layout=layout)

    state: dict[str, Any] = {"x": nested(2, 3), "list": [nested(4, 1)]}
    whole = [each.clone() for value in (state["x"], *state["list"]) for each in value.unbind()]
    with Checkpointer(tmp_path) as checkpointer:
        if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
            with pytest.raises(errors.UnsafeStateError, match=r"state\['x'\]"):
                checkpointer.save(state, 1, asynchronous=asynchronous)
            return
        checkpointer.save(state, 1, asynchronous=asynchronous)
        checkpointer.wait()
        state = {"x": nested(2, 3), "list": None}
        assert checkpointer.restore(state) == 1
        with pytest.raises(errors.CheckpointMismatchError):
            checkpointer.restore({"x": nested(3, 2)})
    found = [each for value in (state["x"], *state["list"]) for each in value.unbind()]
    for ours, theirs in zip(found, whole, strict=True):
        assert torch.equal(ours, theirs)


def anonymous_bytes() -> int:
    """Return how much memory this process has that is not a mapped file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


class Probe:
    """A state of 64 MB that records the memory of the process when it is restored."""

    def __init__(self) -> None:
        self.value = torch.ones(16 * 2**20)
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"note": 1}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        """Record the memory."""
        self.seen = anonymous_bytes()


def is_mapped() -> bool:
    """Return whether this process has a checkpoint file mapped."""
    return "state.pt" in Path("/proc/self/maps").read_text()


def test_refused_restore_keeps_no_file_mapped(tmp_path: Path) -> None:
    """The file is unmapped once the error is handled, without waiting for the garbage collector."""
    gc.collect()  # failures of earlier tests
    gc.disable()
    try:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save({"x": torch.ones(1000)}, 1)
            with contextlib.suppress(errors.CheckpointMismatchError):
                checkpointer.restore({"x": torch.ones(3)})
            assert not is_mapped()
    finally:
        gc.enable()


@pytest.mark.full
def test_restore_holds_the_state_once(tmp_path: Path) -> None:
    """The file is mapped, so the ranks of a node share it; afterwards it is unmapped."""
    gc.collect()  # errors of earlier tests, with the objects in their frames
    model = torch.nn.Linear(4096, 4096)  # 64 MB
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(4096)).sum().backward()
    optimizer.step()
    probe = Probe()
    state: dict[str, Any] = {"model": model, "plain": [torch.ones(3)], "probe": probe}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({**state, "optimizer": optimizer}, 1)
        before = anonymous_bytes()
        checkpointer.restore(state)
        assert probe.seen - before < 32 * 2**20
        checkpointer.restore({"optimizer": optimizer})
        (checkpointer.path(1) / "state.pt").unlink()
    assert not is_mapped()
    assert torch.equal(state["plain"][0], torch.ones(3))
    optimizer.step()
