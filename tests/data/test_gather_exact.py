"""Evaluation over ranks gives the result of one process, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from data_programs import exact_gather, faulty_gather, run_ranks
from hypothesis import given
from hypothesis import strategies as st

from ddpsafe.data import EvalSampler, gather_exact
from ddpsafe.data._evaluation import _check_cover
from ddpsafe.data.errors import IncompleteGatherError


@pytest.mark.full(but=["2"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_results_are_returned_in_dataset_order(ranks: int) -> None:
    """Includes several tensor types, texts, sizes below the world size, and ranks without samples."""
    sizes = [1, 2, 3, 7, 12, 50]
    result = run_ranks(exact_gather, sizes, ranks=ranks)
    assert all(all(result[rank]) for rank in range(ranks))


@pytest.mark.full(but=["missing-IncompleteGatherError-missing: [7]"])
@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("duplicate", "IncompleteGatherError", "repeated: [0]"),
        ("missing", "IncompleteGatherError", "missing: [7]"),
        ("length", "ConfigError", "rank 1: values has 3 entries for 4 indices"),
        ("dtype", "ConfigError", "rank 1"),
        ("single number", "ConfigError", "rank 1: values is a single number"),
        ("indices", "ConfigError", "rank 1: an index must be a whole number"),
        ("object", "ConfigError", "rank 1: builtins.object is not a tensor"),
        ("names", "ConfigError", "rank 1: the values are {'\"a\"': 'tensor int64 []'}"),
    ],
)
def test_fault_on_one_rank_is_raised_on_every_rank(fault: str, kind: str, text: str) -> None:
    """No rank waits for one that raised; the message has the fault and the rank."""
    result = run_ranks(faulty_gather, fault)
    for rank in (0, 1):
        assert result[rank][0] == kind
        assert text in result[rank][1]


@given(n=st.integers(1, 60), replicas=st.integers(1, 8), data=st.data())
def test_indices_must_form_a_permutation(n: int, replicas: int, data: st.DataObject) -> None:
    """Any division is accepted; any single duplicate, missing or foreign index is detected."""
    index = np.concatenate(
        [np.asarray(list(EvalSampler(n, replicas, r)), dtype=np.int64) for r in range(replicas)]
    )
    assert index[_check_cover(index, n, "error")].tolist() == list(range(n))
    place = data.draw(st.integers(0, n - 1))
    for broken in (np.delete(index, place), np.append(index, index[place]), np.append(index, n)):
        with pytest.raises(IncompleteGatherError):
            _check_cover(broken, n, "error")
    padded = np.append(index, index[place])
    assert padded[_check_cover(padded, n, "drop")].tolist() == list(range(n))


def test_world_of_one_needs_no_group() -> None:
    """The same code evaluates in a single process."""
    values = torch.tensor([5.0, 3.0, 4.0])
    assert gather_exact(values, [2, 0, 1]).tolist() == [3.0, 4.0, 5.0]  # type: ignore[union-attr]
    got: Any = gather_exact({"a": values, "b": ["x", "y", "z"]}, [2, 0, 1])
    assert got["b"] == ["y", "z", "x"]
    assert gather_exact(torch.empty(0, 3), [], n=0).shape == (0, 3)  # type: ignore[union-attr]


def test_missing_tail_is_detected_only_with_n() -> None:
    """Without the size of the dataset, more indices cannot be expected."""
    assert gather_exact([1, 2], [0, 1]) == [1, 2]
    with pytest.raises(IncompleteGatherError, match="1 are") as caught:
        gather_exact([1, 2], [0, 1], n=3)
    assert caught.value.missing == (2,)


ENTRIES: list[Any] = [
    {1: 0.5, (2, "x"): [None, True]},
    (1, (2.5, [3])),
    b"\x00\xff",
    complex(1, -0.0),
    torch.tensor(7, dtype=torch.int16),
    torch.zeros(2, 0),
    torch.randn(3, 2).to(torch.bfloat16).t(),
    {"boxes": torch.rand(2, 4), "labels": torch.tensor([1, 2])},
    np.float32(0.1),
    np.arange(6, dtype="<u2").reshape(2, 3),
    np.datetime64("2026-01-01"),
    2**70,
    "ü\ud800",
]


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal and of the same types, recursively."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("place", range(len(ENTRIES)))
def test_list_entries_keep_their_values_and_types(place: int) -> None:
    """Keys stay numbers, tuples stay tuples, and one list may have tensors of unequal shapes."""
    entry = ENTRIES[place]
    got = gather_exact([entry, 0], [1, 0])
    assert same(got, [0, entry])


@pytest.mark.parametrize("dtype", ["f4", "i8", "?", "c16", "datetime64[s]", "U3"])
def test_arrays_are_returned_as_arrays(dtype: str) -> None:
    """They are in dataset order, even if their rows have no elements."""
    values = np.arange(6).astype(dtype).reshape(3, 2)
    assert same(gather_exact(values, [2, 0, 1]), values[[1, 2, 0]])
    assert same(gather_exact(values[:, :0], [2, 0, 1]), values[:, :0])
    assert same(gather_exact({1: values}, [0, 1, 2]), {1: values})
