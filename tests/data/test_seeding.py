"""Random numbers: distinct across ranks, workers and epochs, or a function of the sample alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from data_programs import Augmented, ByRng, Numbers, augmentation_traces, run_ranks, seeded_traces

import ddpsafe
from ddpsafe.data import DataLoader, DistributedSampler, sample_rng, seed_worker


def test_ranks_with_equal_seeds_draw_different_augmentations() -> None:
    """PyTorch's workers draw the same on every rank; here no draw of any generator occurs twice."""
    values = run_ranks(augmentation_traces)
    for persistent in (0, 1):
        ranks = [values[rank][persistent] for rank in (0, 1)]
        samples = [
            sample for epochs in ranks for epoch in epochs for batch in epoch for sample in batch
        ]
        for column in (2, 3, 4):
            draws = [sample[column] for sample in samples]
            assert len(set(draws)) == len(draws)
        told = [[{s[1] for b in epoch for s in b} for epoch in epochs] for epochs in ranks]
        assert told == [[{0}, {1}]] * 2


def draws_of(loader: DataLoader[int]) -> list[float]:
    """Return the draws of one epoch."""
    return [float(x) for _, _, draws in loader for x in torch.stack(list(draws)).flatten()]


def test_persistent_workers_draw_as_fresh_ones_do() -> None:
    """Draws are a function of (seed, epoch, rank, worker), so restarting workers changes none."""
    traces = [
        [
            draws_of(loader)
            for loader in [
                DataLoader(Augmented(16), 4, num_workers=2, persistent_workers=persistent)
            ]
            for _ in range(3)
        ]
        for persistent in (False, True)
    ]
    assert traces[0] == traces[1]
    assert len({x for epoch in traces[0] for x in epoch}) == 3 * 16 * 3


def test_seed_of_the_loader_changes_the_draws() -> None:
    """Another seed gives other augmentations in the same order."""
    sampler = DistributedSampler(16, 1, 0, shuffle=False)
    first, second = (
        draws_of(DataLoader(Augmented(16), 4, sampler=sampler, num_workers=1, seed=seed))
        for seed in (0, 1)
    )
    assert set(first).isdisjoint(second)


def test_seed_worker_depends_on_each_argument() -> None:
    """No two adjacent (seed, epoch, rank, worker) give the same streams."""
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())  # noqa: NPY002 - augmentations use it
    seen = set()
    words = [(s, e, r, w) for s in range(3) for e in range(3) for r in range(3) for w in range(3)]
    for each in words:
        seed_worker(*each)
        seen |= {random.random(), float(np.random.random()), float(torch.rand(()))}  # noqa: NPY002 - augmentations use it
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002 - augmentations use it
    torch.set_rng_state(states[2])
    assert len(seen) == 3 * len(words)


@pytest.mark.parametrize("workers", [0, 2])
def test_global_generators_are_left_unchanged(workers: int) -> None:
    """A validation pass between two epochs does not affect the training that follows."""
    loader = DataLoader(Numbers(16), 4, num_workers=workers)
    before = (torch.get_rng_state(), random.getstate())
    assert len(list(loader)) == 4
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_sample_rng_does_not_depend_on_ranks_workers_or_resume(workers: int) -> None:
    """A sample's draw is the same in any world, with any worker count, after any resume."""
    expected = {i: float(torch.rand((), generator=sample_rng(7, 0, i))) for i in range(24)}
    for replicas in (1, 3):
        for rank in range(replicas):
            sampler = DistributedSampler(24, replicas, rank)
            loader = DataLoader(ByRng(24), 5, sampler=sampler, num_workers=workers)
            state = loader.state_dict()
            loader.load_state_dict(state)
            for indices, draws in loader:
                for index, draw in zip(indices, draws, strict=True):
                    assert float(draw) == expected[int(index)]


def test_sample_rng_supports_three_libraries() -> None:
    """They share one key; another kind is refused."""
    assert isinstance(sample_rng(0, 0, 0), torch.Generator)
    assert sample_rng(0, 0, 1, "numpy").random() != sample_rng(0, 1, 0, "numpy").random()
    assert sample_rng(0, 0, 1, "random").random() == sample_rng(0, 0, 1, "random").random()
    with pytest.raises(ddpsafe.ConfigError, match="kind cannot be 'jax'"):
        sample_rng(0, 0, 0, "jax")  # type: ignore[call-overload]


def order_of(**options: Any) -> list[int]:
    """Return the order of a loader without a seed."""
    return [int(x) for batch in DataLoader(Numbers(40), 8, shuffle=True, **options) for x in batch]


def test_torchs_manual_seed_determines_order_and_workers() -> None:
    """As with torch's loader, equal seeds give equal orders and draws, and other seeds others."""
    orders, draws = [], []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        orders.append(order_of())
        draws.append(draws_of(DataLoader(Augmented(8), 4, num_workers=1)))
    assert orders[0] == orders[2] != orders[1]
    assert draws[0] == draws[2]
    assert set(draws[0]).isdisjoint(draws[1])


def test_state_includes_a_seed_that_was_not_given() -> None:
    """A run that is resumed under another torch.manual_seed continues in its own order."""
    torch.manual_seed(1)
    loader = DataLoader(Numbers(40), 8, shuffle=True)
    iterator = iter(loader)
    first = [int(x) for x in next(iterator)]
    state = loader.state_dict()
    rest = [int(x) for batch in iterator for x in batch]
    torch.manual_seed(2)
    resumed = DataLoader(Numbers(40), 8, shuffle=True)
    resumed.load_state_dict(state)
    assert [int(x) for batch in resumed for x in batch] == rest
    assert sorted(first + rest) == list(range(40))


@pytest.mark.full
def test_seed_of_the_launch_determines_every_order_and_draw() -> None:
    """It affects samplers, ctx.loader and workers; draws differ between ranks, even without workers."""
    values = [
        ddpsafe.launch(
            seeded_traces, nproc_per_node=2, backend="gloo", start_method="forkserver", seed=seed
        ).values
        for seed in (5, 6)
    ]
    for first, second in zip(values[0][0]["orders"], values[1][0]["orders"], strict=True):
        assert first != second
    draws = [draw for run in values for rank in (0, 1) for draw in run[rank]["draws"]]
    assert len(set(draws)) == len(draws)
    # The training's own draws are unaffected.
    assert all(run[0]["torch"] == run[1]["torch"] for run in values)
