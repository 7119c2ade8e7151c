"""Evaluation over ranks gives what one process would have computed, bit for bit."""

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
from ddpsafe.data.errors import DataConfigError, IncompleteGatherError


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_come_back_in_dataset_order(ranks: int) -> None:
    """Tensors of several types, texts, sizes below the world size, ranks without a sample."""
    sizes = [1, 2, 3, 7, 12, 50]
    result = run_ranks(exact_gather, sizes, ranks=ranks)
    assert all(all(result[rank]) for rank in range(ranks))


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("duplicate", "IncompleteGatherError", "more than once: [0]"),
        ("missing", "IncompleteGatherError", "missing: [7]"),
        ("length", "DataConfigError", "rank 1: values has 3 entries for 4 indices"),
        ("dtype", "DataConfigError", "rank 1"),
    ],
)
def test_fault_on_one_rank_is_raised_on_every_rank(fault: str, kind: str, text: str) -> None:
    """No rank waits for one that raised; the message says what is wrong, and where."""
    result = run_ranks(faulty_gather, fault)
    for rank in (0, 1):
        assert result[rank][0] == kind
        assert text in result[rank][1]


@given(n=st.integers(1, 60), replicas=st.integers(1, 8), data=st.data())
def test_cover_is_exactly_a_permutation(n: int, replicas: int, data: st.DataObject) -> None:
    """Any division is accepted; any single duplicate, loss or stranger is found."""
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
    """The same code evaluates alone."""
    values = torch.tensor([5.0, 3.0, 4.0])
    assert gather_exact(values, [2, 0, 1]).tolist() == [3.0, 4.0, 5.0]  # type: ignore[union-attr]
    got: Any = gather_exact({"a": values, "b": ["x", "y", "z"]}, [2, 0, 1])
    assert got["b"] == ["y", "z", "x"]
    assert gather_exact(torch.empty(0, 3), [], n=0).shape == (0, 3)  # type: ignore[union-attr]


def test_missing_tail_is_seen_only_with_n() -> None:
    """Without the dataset's size nobody knows that more should have come."""
    assert gather_exact([1, 2], [0, 1]) == [1, 2]
    with pytest.raises(IncompleteGatherError, match="1 are") as caught:
        gather_exact([1, 2], [0, 1], n=3)
    assert caught.value.missing == (2,)


def test_what_is_neither_tensor_nor_plain_is_refused() -> None:
    """Nothing is unpickled from another rank, so values must be plain."""
    with pytest.raises(DataConfigError, match="neither tensors nor plain"):
        gather_exact([object()], [0])
