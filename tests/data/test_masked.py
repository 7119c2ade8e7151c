"""Equal steps with the repeats marked, for models that communicate in their forward pass."""

from __future__ import annotations

import pytest
from data_programs import Numbers
from hypothesis import given
from hypothesis import strategies as st

from ddpsafe.data import DataLoader, EvalSampler, masked_batches

pytestmark = pytest.mark.filterwarnings("ignore::ddpsafe.data.errors.DataWarning")


@given(n=st.integers(1, 60), replicas=st.integers(1, 8), batch_size=st.integers(1, 9))
def test_steps_are_equal_and_each_sample_counts_once(
    n: int, replicas: int, batch_size: int
) -> None:
    """Even with fewer samples than ranks, the counted parts are the dataset, in order."""
    steps, kept = set(), {}
    for rank in range(replicas):
        sampler = EvalSampler(n, replicas, rank, pad=True)
        loader = DataLoader(Numbers(n), batch_size, sampler=sampler)
        parts = [(batch.tolist(), counted) for batch, counted in masked_batches(loader)]
        steps.add((len(parts), sum(len(batch) for batch, _ in parts)))
        own = [x for batch, counted in parts for x in batch[:counted]]
        assert own == sampler.indices()
        kept.update(dict.fromkeys(own, rank))
        assert len(own) == len(range(rank, n, replicas))
    assert len(steps) == 1
    assert sorted(kept) == list(range(n))
