"""Real ranks: uneven loops end together, and data that every rank would read is refused."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from data_programs import run_ranks, save_and_stop, undivided, uneven, uneven_states

from ddpsafe.data import even_steps


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
