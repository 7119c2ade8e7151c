"""Values that are easily forgotten: mutable ones, sparse ones, and those that nobody could load."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ddpsafe.checkpoint import Checkpointer, errors
from ddpsafe.checkpoint._trees import HostCopies

if TYPE_CHECKING:
    from pathlib import Path


def holding_itself() -> list[Any]:
    """Make a list that is its own item."""
    items: list[Any] = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.max(torch.ones(2, 2), 0), "torch.return_types.max"),
        (time.gmtime(0), "time.struct_time"),
        (sys.version_info, "sys.version_info"),
        (holding_itself(), "holds itself"),
        (torch.empty(3, device="meta"), "meta device"),
    ],
    ids=["return type", "struct_time", "version", "recursive", "meta"],
)
def test_value_that_could_not_be_loaded_is_refused_by_name(
    tmp_path: Path, value: object, says: str
) -> None:
    """The error is ours, with the path of the value as it is, colons included."""
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(errors.UnsafeStateError) as caught:
        checkpointer.save({"a: b": value}, 1)
    assert caught.value.paths == ("state['a: b']",)
    assert says in str(caught.value)
    assert "holds a value that" in str(caught.value)


def test_copy_for_the_background_shares_nothing_that_can_change() -> None:
    """A set or a bytearray is copied too, not only tensors."""
    state: dict[str, Any] = {"seen": {1}, "bytes": bytearray(b"old"), "x": torch.zeros(1)}
    copied = HostCopies().copy(state)
    state["seen"].add(2)
    state["bytes"][:] = b"new"
    state["x"] += 1
    assert copied == {"seen": {1}, "bytes": bytearray(b"old"), "x": torch.zeros(1)}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sparse_tensor_comes_back(tmp_path: Path, asynchronous: bool) -> None:  # noqa: FBT001
    """It has no memory of one piece to copy into, or to measure."""
    state: dict[str, Any] = {"x": torch.eye(3).to_sparse()}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, 1, asynchronous=asynchronous)
        checkpointer.wait()
        state["x"] = torch.zeros(3, 3).to_sparse()
        assert checkpointer.restore(state) == 1
    assert torch.equal(state["x"].to_dense(), torch.eye(3))
