"""One call makes a rank's loader: ``ctx.loader``, for training and for evaluation."""

from __future__ import annotations

from typing import Any

import pytest
from data_programs import (
    Noisy,
    Numbers,
    Records,
    Renamed,
    differing_samplers,
    loader_of_another_dataset,
    loaders_of_context,
    run_ranks,
    states_compared,
    write_records,
)

from ddpsafe.data import DataLoader, ShardedIterable
from ddpsafe.data._loader.build import build_loader
from ddpsafe.data.errors import StateMismatchError


@pytest.mark.full(but=["30"])
@pytest.mark.parametrize("n", [30, 31])
def test_context_makes_loaders_for_training_and_evaluation(n: int) -> None:
    """Training covers the dataset in each epoch; evaluation gives the result of one process."""
    values = run_ranks(loaders_of_context, n, ranks=2)
    for epoch in (0, 1):
        parts = [values[rank][0][epoch] for rank in (0, 1)]
        assert len(parts[0]) == len(parts[1])
        assert set(parts[0]) | set(parts[1]) == set(range(n))
    assert values[0][0][0] != values[0][0][1]
    for rank in (0, 1):
        assert values[rank][1] == [3 * i for i in range(n)]
        assert values[rank][2] == values[0][2]


def test_context_refuses_ranks_with_different_data() -> None:
    """Every rank raises before the first batch."""
    values = run_ranks(loader_of_another_dataset)
    assert "has other data than the rest" in values[0]
    assert values[0] == values[1]


@pytest.mark.full(but=["algorithm"])
@pytest.mark.parametrize("name", ["algorithm", "weights", "drop_last"])
def test_context_refuses_ranks_whose_samplers_differ(name: str) -> None:
    """Equal data in another order or with other weights is not the same data."""
    values = run_ranks(differing_samplers, name)
    assert f"rank 1 of 2 has another {name}: " in values[0]
    assert values[0] == values[1]


@pytest.mark.full
@pytest.mark.parametrize(("extra", "ranks"), [(0, None), (2, (1,))])
def test_states_can_be_compared_across_ranks(extra: int, ranks: Any) -> None:
    """With compare=True, a rank at another position is named, and every rank raises."""
    values = run_ranks(states_compared, extra, ranks=3)
    for rank in range(3):
        if ranks is None:
            assert values[rank] == 24
        else:
            assert values[rank][1] == ranks
            assert "rank 1: epoch 0, consumed 48, finished False" in values[rank][0]


def test_state_of_another_dataset_of_equal_length_is_refused() -> None:
    """This holds in a world of one too: the fingerprint is in the state."""
    state = build_loader(Renamed(40, "train"), batch_size=4).state_dict()
    build_loader(Renamed(40, "train"), batch_size=4).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="fingerprint") as caught:
        build_loader(Renamed(40, "val"), batch_size=4).load_state_dict(state)
    assert set(caught.value.differences) == {"fingerprint"}


@pytest.mark.parametrize("changes", [{"n": 41}, {"consumed": 41}])
def test_refused_state_changes_nothing(changes: dict[str, int]) -> None:
    """Not the seed that it would have brought, nor the epoch."""
    saved = build_loader(range(40), batch_size=4, seed=7).sampler
    saved.set_epoch(3)
    state = saved.state_dict()
    for values in (state, state["identity"]):
        values.update({key: changes[key] for key in changes.keys() & values.keys()})
    sampler = build_loader(range(40), batch_size=4).sampler
    before = sampler.state_dict()
    with pytest.raises(StateMismatchError):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == before


def test_dataset_with_random_items_is_compared_by_its_length() -> None:
    """Reading an item twice gives two values, so items do not identify the dataset."""
    state = build_loader(Noisy(40, 0), batch_size=4).state_dict()
    build_loader(Noisy(40, 1), batch_size=4).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="n: saved 40, now 41"):
        build_loader(Noisy(41, 1), batch_size=4).load_state_dict(state)


def test_consistency_check_leaves_nothing_open(tmp_path: Any) -> None:
    """Files that the check opened are closed before workers are forked, so none inherits them."""
    write_records(tmp_path / "records", 40)
    dataset = Records(str(tmp_path / "records"), 40)
    loader = build_loader(dataset, batch_size=4, num_workers=1)
    assert not dataset.file.is_open()
    assert sorted(int(v) for _, values, _ in loader for v in values) == list(range(40))


class Bug(Numbers):
    """A dataset of which no sample can be read."""

    def __getitem__(self, index: int) -> int:
        raise KeyError(index)


def test_error_of_the_dataset_is_raised_unchanged() -> None:
    """It keeps its type and traceback, and gains a note with the index, as all ranks fail alike."""
    with pytest.raises(KeyError) as caught:
        build_loader(Bug(40), batch_size=4)
    assert caught.traceback[-1].name == "__getitem__"
    notes = getattr(caught.value, "__notes__", None)  # notes exist since Python 3.11
    assert notes is None or "While reading index 0 to compare the dataset" in str(notes)


def test_incomplete_batches_of_a_stream_can_be_dropped() -> None:
    """drop_last=True is usual for training."""
    for make in (DataLoader, build_loader):
        loader = make(ShardedIterable(range(10)), batch_size=4, drop_last=True)
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
