"""Real ranks: uneven loops end together, and data that every rank would read is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from data_programs import (
    accelerated,
    exact_gather,
    fabricated,
    faulty_gather,
    run_ranks,
    save_and_stop,
    undivided,
    uneven,
    uneven_states,
)
from hypothesis import given
from hypothesis import strategies as st

from ddpsafe.data import EvalSampler, even_steps, gather_exact
from ddpsafe.data._evaluation import _check_cover
from ddpsafe.data.errors import IncompleteGatherError


@pytest.mark.full(but=["min-counts0-steps0", "error-counts4-steps4"])
@pytest.mark.parametrize(
    ("policy", "counts", "steps"),
    [
        ("min", [3, 5], [3, 3]),
        ("dummy", [3, 5], [5, 5]),
        ("join", [3, 5], [3, 5]),
        ("min", [0, 2], [0, 0]),
        ("error", [4, 4], [4, 4]),
    ],
)
def test_uneven_loops_end_with_equal_parameters(
    policy: str, counts: list[int], steps: list[int]
) -> None:
    """Ranks do not hang, take the promised steps, and have equal parameters to the bit."""
    values = run_ranks(uneven, policy, counts)
    assert [values[rank][0] for rank in range(2)] == steps
    assert values[0][1] == values[1][1]


def test_dummy_steps_weight_samples_as_one_process_would() -> None:
    """With the weight, the gradient is the mean over all samples of all ranks in that step."""
    values = run_ranks(uneven, "dummy", [2, 4])
    torch.manual_seed(0)
    weight = torch.nn.Linear(2, 1, bias=False).double().weight.detach().requires_grad_()
    for step in range(4):
        parts = [values[r][2][step] for r in range(2) if step < len(values[r][2])]
        loss = ((torch.cat(parts) @ weight.T) ** 2).mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = (weight - 0.05 * gradient).detach().requires_grad_()
    assert values[0][1] == pytest.approx(weight.flatten().tolist(), abs=1e-12)


@pytest.mark.full(but=["error-counts0"])
@pytest.mark.parametrize(("policy", "counts"), [("error", [2, 4]), ("dummy", [0, 2])])
def test_uneven_loops_that_cannot_continue_name_the_rank(policy: str, counts: list[int]) -> None:
    """Every rank raises an error with the rank that ran out."""
    values = run_ranks(uneven, policy, counts)
    text = "ran out of batches after 2 steps" if policy == "error" else "has no batch at all"
    for rank in (0, 1):
        assert values[rank][2] == (0,)
        assert f"rank 0 (world_size 2) {text}" in values[rank][1]


@pytest.mark.full(but=["min-3"])
@pytest.mark.parametrize(("policy", "steps"), [("min", 3), ("dummy", 4)])
def test_positions_agree_in_every_step_and_at_the_end(policy: str, steps: int) -> None:
    """This holds even if rank 0 has one batch more, so either rank's state may be saved."""
    values = run_ranks(uneven_states, policy)
    for states, _dropped, _rank in values.values():
        assert [state["consumed"] for state in states[:steps]] == [4, 8, 12, 16][:steps]
        assert [state["finished"] for state in states] == [*[False] * steps, True]
    assert values[0][1] == (policy == "min")


def test_loader_without_distributed_sampler_is_refused_in_a_world_of_two() -> None:
    """The message has the line to write; intended exceptions are possible."""
    values = run_ranks(undivided)
    for rank in (0, 1):
        shuffled, ordered, misfit, allowed = values[rank]
        assert shuffled.startswith("MissingDistributedSamplerError")
        assert "DistributedSampler(dataset, shuffle=True)" in shuffled
        assert "DistributedSampler(dataset, shuffle=False)" in ordered
        assert "divides the data by 3, but the world has 2 ranks" in misfit
        assert allowed == str(list(range(10)))


def test_training_stopped_on_two_ranks_continues_on_three() -> None:
    """Rank 0 of 2 saves, 3 load with other batch sizes and workers, and every sample is read once."""
    first = run_ranks(save_and_stop, 4, None, {"batch_size": 7})
    assert first[0][1] == first[1][1]
    options = {"batch_size": 5, "num_workers": 2, "persistent_workers": True}
    second = run_ranks(save_and_stop, 99, first[0][1], options, ranks=3)
    seen = Counter(
        x for part in (first, second) for rank in part for batch in part[rank][0] for x in batch
    )
    assert set(seen) == set(range(101))
    assert seen.total() - 101 < 3
    assert second[0][1]["finished"]


def test_even_steps_returns_the_loader_in_a_world_of_one() -> None:
    """One rank has nothing to agree on."""
    assert list(even_steps([1, 2, 3], policy="dummy")) == [1, 2, 3]


# Results of all ranks, in the order of the dataset.


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
        ("object", "ConfigError", "rank 1: builtins.object is not a dense tensor"),
        ("names", "ConfigError", 'rank 1: the values are "a" tensor int64 []'),
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


# Frameworks.


@pytest.mark.full
@pytest.mark.parametrize(
    ("package", "program"), [("accelerate", accelerated), ("lightning_fabric", fabricated)]
)
def test_a_framework_divides_the_data(package: str, program: Any) -> None:
    """Two ranks read every sample in each epoch, with different augmentations; with Fabric exactly once."""
    pytest.importorskip(package)
    values: Any = run_ranks(program)
    for own_sampler in (0, 1):
        parts = [values[rank][own_sampler] for rank in (0, 1)]
        for epoch in range(2):
            seen = Counter(x for part in parts for x, _ in part[epoch])
            assert set(seen) == set(range(48)), (own_sampler, epoch)
            assert program is accelerated or seen.total() == 48, (own_sampler, epoch)
        draws = [d for part in parts for epoch in (0, 1) for _, d in part[epoch]]
        assert len(set(draws)) == len(draws)
        assert parts[0][0] != parts[1][0]
