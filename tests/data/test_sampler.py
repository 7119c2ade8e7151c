"""The sampler equals torch's, bit for bit, except where it improves on it."""

from __future__ import annotations

import pickle
import warnings
from collections import Counter

import pytest
from data_programs import Numbers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from ddpsafe._errors import ConfigError
from ddpsafe.data import DistributedSampler, EvalSampler
from ddpsafe.data.errors import DatasetChangedError, DataWarning

pytestmark = pytest.mark.filterwarnings("ignore::ddpsafe.data.errors.DataWarning")

worlds = st.integers(1, 20).flatmap(lambda r: st.tuples(st.just(r), st.integers(0, r - 1)))


@given(
    n=st.integers(1, 300),
    world=worlds,
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 100),
    drop_last=st.booleans(),
)
def test_order_equals_torchs_bit_for_bit(
    *, n: int, world: tuple[int, int], shuffle: bool, seed: int, epoch: int, drop_last: bool
) -> None:
    """Equal arguments give equal indices and lengths, as Python ints, even if n < num_replicas."""
    replicas, rank = world
    drop_last = drop_last and n >= replicas
    theirs = TorchDistributedSampler(range(n), replicas, rank, shuffle, seed, drop_last)
    ours = DistributedSampler(range(n), replicas, rank, shuffle, seed, drop_last)
    theirs.set_epoch(epoch)
    ours.set_epoch(epoch)
    assert list(ours) == list(theirs)
    assert (len(ours), ours.num_samples, ours.total_size) == (
        len(theirs),
        theirs.num_samples,
        theirs.total_size,
    )
    assert all(type(index) is int for index in ours)


@given(
    n=st.integers(1, 300),
    replicas=st.integers(1, 20),
    algorithm=st.sampled_from(["torch", "feistel-v1"]),
    epoch=st.integers(0, 9),
    pad=st.booleans(),
)
def test_ranks_partition_the_dataset(
    *, n: int, replicas: int, algorithm: str, epoch: int, pad: bool
) -> None:
    """Without padding each sample is read once; with it, at most num_replicas - 1 are read twice."""
    shares = []
    for rank in range(replicas):
        sampler = DistributedSampler(n, replicas, rank, pad=pad, algorithm=algorithm)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
    sizes = [len(share) for share in shares]
    counts = Counter(index for share in shares for index in share)
    assert set(counts) == set(range(n))
    if pad:
        assert len(set(sizes)) == 1
        assert n < replicas or counts.total() - n <= replicas - 1
    else:
        assert counts.total() == n
        assert max(sizes) - min(sizes) <= 1


def test_eval_sampler_reads_in_order_and_may_leave_ranks_without_samples() -> None:
    """With three samples on five ranks, no rank reads a repeat and two ranks read nothing."""
    assert [list(EvalSampler(3, 5, rank)) for rank in range(5)] == [[0], [1], [2], [], []]


def test_sampler_is_torchs_subclass_and_pickles_during_iteration() -> None:
    """Frameworks recognise it by isinstance, and it holds no live generator."""
    sampler = DistributedSampler(1000, 2, 1)
    iterator = iter(sampler)
    first = [next(iterator) for _ in range(10)]
    assert isinstance(sampler, TorchDistributedSampler)
    assert list(pickle.loads(pickle.dumps(sampler)))[:10] == first


@pytest.mark.parametrize(
    ("n", "num_replicas", "text"),
    [
        (2, 4, "^2 samples for 4 ranks: ranks 2 to 3 repeat samples of the others"),
        (1, 2, "^1 sample for 2 ranks: rank 1 repeats samples of the others"),
    ],
)
def test_fewer_samples_than_ranks_gives_a_warning(n: int, num_replicas: int, text: str) -> None:
    """PyTorch repeats samples silently; here the ranks that repeat them are named."""
    with pytest.warns(DataWarning, match=text):
        DistributedSampler(n, num_replicas, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EvalSampler(2, 4, 0)


def test_dataset_whose_length_changed_is_refused() -> None:
    """Samples added later would never be read, or an index would be out of range."""
    dataset = Numbers(10)
    sampler = DistributedSampler(dataset, 1, 0)
    dataset.n = 11
    with pytest.raises(DatasetChangedError, match="has 11 samples, but had 10"):
        list(sampler)


@pytest.mark.parametrize("announced", ["4", " 4\n"])
def test_sampler_before_the_process_group_exists_is_refused(
    announced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a launcher, a world of one would be silently wrong at that point."""
    monkeypatch.setenv("WORLD_SIZE", announced)
    with pytest.raises(ConfigError, match="no process group yet"):
        DistributedSampler(10)
    assert len(DistributedSampler(10, 1, 0)) == 10
