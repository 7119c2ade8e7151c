"""The loader counts epochs, takes torch's arguments, and refuses silent mistakes; ``ctx.loader`` makes it."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import resource_sharer
from typing import Any, Final

import numpy as np
import pytest
import torch
from data_programs import (
    Augmented,
    Noisy,
    Numbers,
    Records,
    Renamed,
    Stream,
    WithEpoch,
    differing_samplers,
    loader_of_another_dataset,
    loaders_of_context,
    run_ranks,
    states_compared,
    write_records,
)
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    get_worker_info,
)
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from ddpsafe._errors import ConfigError
from ddpsafe.data import DataLoader, DistributedSampler, ShardedIterable
from ddpsafe.data._loader.loader import build_loader
from ddpsafe.data._loader.reading import FollowedDataset, NamingDataset, SharedProgress
from ddpsafe.data.errors import DataWarning, StateMismatchError

N = 40


def read(loader: Any) -> list[list[int]]:
    """Return the batches of one pass."""
    return [[int(x) for x in batch] for batch in loader]


def epoch_order(epoch: int) -> list[list[int]]:
    """Return the batches of rank 1 of 2 for an epoch, in torch's order."""
    sampler = TorchDistributedSampler(range(N), 2, 1)
    sampler.set_epoch(epoch)
    own = list(sampler)
    return [own[i : i + 8] for i in range(0, len(own), 8)]


def make(sampler: Any = None, **options: Any) -> DataLoader[int]:
    """Make the loader of rank 1 of 2."""
    return DataLoader(Numbers(N), 8, sampler=sampler or DistributedSampler(N, 2, 1), **options)


def test_peek_at_a_batch_changes_no_draw_of_the_set_epoch() -> None:
    """Augmentations, those in workers included, equal those of a run without the peek."""
    looked, plain = (
        DataLoader(Augmented(N), 8, sampler=DistributedSampler(N, 2, 1), num_workers=2, seed=3)
        for _ in range(2)
    )
    for loader in (looked, plain):
        loader.set_epoch(2)
    next(iter(looked))
    assert [str(batch) for batch in looked] == [str(batch) for batch in plain]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_sampler_without_a_length_is_read_as_torch_reads_it(num_workers: int) -> None:
    """PyTorch needs no length from an iterator of indices."""
    loader: DataLoader[Any] = DataLoader(
        Numbers(9), 2, sampler=iter([3, 1, 2]), num_workers=num_workers
    )
    assert read(loader) == [[3, 1], [2]]


class SeedOfWorker(Numbers):
    """A dataset that checks torch's promise about seeds."""

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        return int(info is not None and info.seed == torch.initial_seed())


def test_worker_info_has_the_seed_of_the_worker() -> None:
    """get_worker_info().seed equals torch.initial_seed(), even in later epochs of persistent workers."""
    loader: DataLoader[Any] = DataLoader(SeedOfWorker(4), 2, num_workers=1, persistent_workers=True)
    assert [read(loader) for _ in range(2)] == [[[1, 1]] * 2] * 2


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_dataset_receives_the_epoch_wherever_it_is(*, workers: int, persistent: bool) -> None:
    """It may be in the main process, in fresh or persistent workers, or inside a Subset."""
    dataset = Subset(Augmented(N), range(16))
    loader = DataLoader(dataset, 4, num_workers=workers, persistent_workers=persistent)
    told = [{int(e) for _, epochs, _ in loader for e in epochs} for _ in range(3)]
    assert told == [{0}, {1}, {2}]


class PlainSampler(Sampler[int]):
    """A sampler without epochs."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        return iter([3, 1, 2, 0])


class Doubling(WithEpoch):
    """A collate function that needs the epoch."""

    def __call__(self, items: list[int]) -> list[int]:
        """Prepend the epoch."""
        return [self.epoch, *items]


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, True)])
def test_collate_function_receives_the_epoch(*, workers: int, persistent: bool) -> None:
    """This works in persistent workers too."""
    loader = DataLoader(
        Numbers(8), 4, collate_fn=Doubling(), num_workers=workers, persistent_workers=persistent
    )
    assert [batch[0] for _ in range(3) for batch in loader] == [0, 0, 1, 1, 2, 2]


def seen_dataset(worker_id: int) -> None:
    """Configure the dataset as torch's documentation does."""
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Numbers)
    info.dataset.n = 1000 + worker_id


class Configured(Numbers):
    """Returns the value that worker_init_fn has set."""

    def __getitem__(self, index: int) -> int:
        return self.n


def test_worker_init_function_sees_the_users_dataset() -> None:
    """get_worker_info().dataset is the user's dataset, and changes to it take effect."""
    loader = DataLoader(Configured(8), 4, num_workers=2, worker_init_fn=seen_dataset)
    assert read(loader) == [[1000] * 4, [1001] * 4]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 5},
        {"batch_size": 5, "drop_last": True},
        {"batch_size": None},
        {"sampler": PlainSampler()},
        {"sampler": [4, 2]},
        {"batch_sampler": BatchSampler(PlainSampler(), 3, drop_last=False)},
        {"batch_sampler": [[1, 2], [3]]},
        {"batch_size": 4, "num_workers": 2, "prefetch_factor": 1},
        {"batch_size": 4, "num_workers": 1, "in_order": False},
        {"batch_size": 4, "collate_fn": list},
    ],
)
def test_torch_arguments_work_unchanged(options: dict[str, Any]) -> None:
    """Batches and their order are those of torch."""
    dataset = TensorDataset(torch.arange(12))
    ours, theirs = (
        [
            torch.as_tensor(b[0]).tolist()
            if not isinstance(b, list) or len(b) == 1
            else [int(x[0]) for x in b]
            for b in kind(dataset, **options)
        ]
        for kind in (DataLoader, TorchDataLoader)
    )
    assert ours == theirs
    assert len(DataLoader(dataset, **options)) == len(TorchDataLoader(dataset, **options))


def test_generator_of_the_user_is_used() -> None:
    """A loader with generator= shuffles as torch's does."""
    ours, theirs = (
        read(kind(Numbers(N), 8, shuffle=True, generator=torch.Generator().manual_seed(3)))
        for kind in (DataLoader, TorchDataLoader)
    )
    assert ours == theirs


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


@pytest.mark.full(but=["False-map"])
@pytest.mark.parametrize(
    "dataset", [TensorDataset(torch.arange(100)), _Stream()], ids=["map", "stream"]
)
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_with_the_last_reference_to_their_loader(
    dataset: Any, *, persistent: bool
) -> None:
    """So do torch's; this includes interrupted passes, and loaders that have loaded a state."""
    gc.collect()
    gc.disable()
    try:
        before = set(multiprocessing.active_children())
        state: dict[str, Any] = {}
        for _ in range(2):
            loader = DataLoader(dataset, 2, num_workers=1, persistent_workers=persistent)
            if state:
                loader.load_state_dict(state)
            next(iter(loader))
            state = loader.state_dict()
            del loader
        assert set(multiprocessing.active_children()) == before
    finally:
        gc.enable()


def test_iterator_outlives_other_references_to_its_loader() -> None:
    """As with torch's loader: ``it = iter(DataLoader(...))``."""
    batches = iter(DataLoader(TensorDataset(torch.arange(10)), 2, shuffle=True, num_workers=1))
    assert sorted(int(x) for (batch,) in batches for x in batch) == list(range(10))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_copied_loader_reads_all_samples(copied: Callable[[Any], Any]) -> None:
    """The original loader need not exist any longer."""
    loader = DataLoader(TensorDataset(torch.arange(10)), 2, shuffle=True)
    next(iter(loader))
    loader = copied(loader)
    assert sorted(int(x) for (batch,) in loader for x in batch) == list(range(10))


def test_pickled_loader_can_be_iterated() -> None:
    """PyTorch's can, so scripts may pass one to another process."""
    loader = make()
    read(loader)
    assert read(pickle.loads(pickle.dumps(loader))) == epoch_order(1)


def test_drop_last_that_drops_everything_gives_a_warning() -> None:
    """An epoch without batches trains nothing."""
    with pytest.warns(DataWarning, match="leaves no batch of 64"):
        DataLoader(Numbers(40), 64, drop_last=True)


def test_loader_that_cannot_resume_refuses_to_give_a_state() -> None:
    """Such a state would lose or repeat samples."""
    with pytest.raises(ConfigError, match="has no state"):
        make(in_order=False).state_dict()


def test_build_loader_covers_training_and_evaluation() -> None:
    """A single function makes both, and evaluation is in order."""
    train = build_loader(Numbers(N), batch_size=8, seed=3)
    assert sorted(x for batch in read(train) for x in batch) == list(range(N))
    assert read(build_loader(Numbers(10), batch_size=4, train=False)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    batches = build_loader(Numbers(10), batch_sampler=[[1, 2]])
    assert read(batches) == [[1, 2]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read(build_loader(Stream(), batch_size=5))) == 2


def test_epoch_set_on_the_dataset_before_the_first_pass_counts() -> None:
    """Before, the loader overwrote it."""
    data = Augmented(N)
    loader = DataLoader(data, 8, sampler=DistributedSampler(N, 2, 1))
    data.set_epoch(5)
    assert loader.state_dict()["epoch"] == 5
    assert [batch[0].tolist() for batch in loader] == epoch_order(5)


class Broken(Numbers):
    """A dataset with a bug in one sample, which it finds under another number, as a shuffled view does."""

    def __getitem__(self, index: int) -> int:
        index = (index + 1) % self.n
        return undefined_name if index == 14 else index  # type: ignore[name-defined] # noqa: F821


class BrokenFiles(Broken):
    """The same, with a list of files."""

    paths: Final = [f"/data/{i}.png" for i in range(N)]


class BrokenBatches(Broken):
    """The same, reading a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class Lookup:
    """A tokenizer's result, which is read by name."""

    def __getitem__(self, name: str) -> int:
        return {"ids": 1}[name]


class Tokenized(Numbers):
    """A dataset whose samples are read by name."""

    def __getitem__(self, index: int) -> Any:
        return Lookup()


def labels_of(samples: list[Lookup]) -> list[int]:
    """Collate a field that the samples lack."""
    return [each["labels"] for each in samples]


@pytest.mark.full(but=["alone-0", "alone-1", "a long batch-0"])
@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "batch_size", "named"),
    [
        (Broken(N), 8, "While reading index 13 in"),
        (Broken(N), None, "While reading index 13 in"),
        (BrokenFiles(N), 8, "While reading index 13 (paths[13] is /data/13.png) in"),
        (BrokenBatches(N), 8, "While reading a batch of indices [8, 9, 10, …] in"),
        (BrokenBatches(N), 3, "While reading a batch of indices [12, 13, 14] in"),
        (Subset(BrokenFiles(N), range(6, N)), 8, "While reading index 7 of a Subset, which is index 13 (paths[13] is /data/13.png) in"),
        (Subset(Subset(Broken(N), range(6, N)), [7]), 1, "While reading index 0 of a Subset, which is index 7 of a Subset, which is index 13 in"),
        (Subset(BrokenBatches(N), range(12, N)), 3, "While reading a batch of indices [0, 1, 2] in"),
        (Tokenized(N), 8, None),  # raised in collation, after all samples were read
    ],
    ids=["alone", "without batches", "with paths", "a long batch", "a short batch", "a part", "of a part", "a part in batches", "collating"],
)  # fmt: skip
def test_error_of_a_sample_names_its_index(
    dataset: Numbers, batch_size: int | None, named: str | None, num_workers: int
) -> None:
    """With and without workers it is the sampler's index, and there is none if no sample was being read."""
    collate = labels_of if isinstance(dataset, Tokenized) else None
    options = {"num_workers": num_workers, "seed": 0, "shuffle": False, "collate_fn": collate}
    with pytest.raises((NameError, KeyError)) as caught:
        list(DataLoader(dataset, batch_size, **options))
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert ("While reading" in told) is (named is not None)
    assert named is None or named in told


@pytest.mark.parametrize(
    ("batch", "error", "note"),
    [
        (slice(13, 14), NameError, "While reading a batch in rank 0."),
        (iter([12, 13, 15]), NameError, "While reading a batch in rank 0."),
        (13, TypeError, ""),
    ],
    ids=["a slice", "an iterator", "an index"],
)
def test_a_batch_without_known_indices_keeps_its_error(
    batch: Any, error: type[Exception], note: str
) -> None:
    """A slice has no indices, an iterator has none left, and a single index is not a batch."""

    class Sliced(Broken):
        """Reads a batch at once, and accepts slices, as a file does."""

        def __getitems__(self, indices: Any) -> list[int]:
            return [self[i] for i in (range(N)[indices] if isinstance(indices, slice) else indices)]

    with pytest.raises(error) as caught:
        NamingDataset(Broken(N) if batch == 13 else Sliced(N)).__getitems__(batch)
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert told.endswith(note)
    assert ("While reading" in told) is bool(note)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "batch", [np.array([3, 5]), torch.tensor([3, 5]), (3, 5), range(3, 6, 2)], ids=type
)
def test_a_batch_sampler_may_yield_any_type_that_torch_takes(batch: Any, num_workers: int) -> None:
    """Arrays and tensors have no truth value."""
    loader = DataLoader(Numbers(N), batch_sampler=[batch], num_workers=num_workers)
    assert [each.tolist() for each in loader] == [[3, 5]]
    resource_sharer.stop()  # the thread that sent the tensor to the worker


def test_the_sample_a_worker_reads_is_recorded() -> None:
    """The worker may die much later, while it collates or waits, and it may read a batch at once."""
    progress, said = SharedProgress(1), []

    class Told(Numbers):
        """Records what is known of its worker, as the error would show it if the worker died."""

        def __getitem__(self, index: Any) -> Any:
            said.append((progress.has_begun(0), progress.reading(0), progress.describe(0, self)))
            return index

    class ToldInBatches(Told):
        """The same, reading a batch at once."""

        def __getitems__(self, indices: list[Any]) -> list[Any]:
            return [self[index] for index in indices]

    for dataset, indices in (
        (Told(N), [4, np.int64(5), torch.tensor(6), "key", -1]),
        (ToldInBatches(N), [7, 8]),
        (ToldInBatches(N), ["key"]),
    ):
        progress.announce(0, 0)
        assert not progress.has_begun(0)
        followed = FollowedDataset(dataset, None, progress)
        followed.enter_worker(0, lambda _: None, 0)
        followed.__getitems__(indices)
        assert (progress.has_begun(0), progress.reading(0), progress.describe(0, dataset)) == (
            True,
            None,
            "",
        )
    assert said == [
        (True, 4, "index 4"),
        (True, 5, "index 5"),
        (True, 6, "index 6"),
        *[(True, None, "")] * 2,
        *[(True, None, "the batch that begins with index 7")] * 2,
        (True, None, ""),
    ]


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_a_single_rank_follows_a_dataset_that_grows_and_shrinks(workers: int) -> None:
    """Its length, and the next pass, are those of torch's loader, as a replay buffer needs it."""
    dataset = list(range(4))
    loaders = [
        kind(dataset, batch_size=2, shuffle=shuffle, num_workers=workers)
        for kind in (DataLoader, TorchDataLoader)
        for shuffle in (False, True)
    ]
    for n in (4, 7, 5, 1, 12):
        dataset[:] = range(n)
        for loader in loaders:
            assert len(loader) == -(-n // 2)
            assert sorted(int(x) for batch in loader for x in batch) == list(range(n))


def test_a_pass_under_way_keeps_its_order_while_the_dataset_grows() -> None:
    """The position that is saved in it is continued only over a dataset of the same length."""
    dataset = list(range(6))
    loader = DataLoader(dataset, batch_size=2, shuffle=True, seed=3)
    iterator = iter(loader)
    first = next(iterator)
    state = loader.state_dict()
    dataset.append(6)
    assert len(loader) == 4
    rest = [int(x) for batch in iterator for x in batch]
    assert sorted([*map(int, first), *rest]) == list(range(6))
    again = DataLoader(dataset, batch_size=2, shuffle=True, seed=3)
    with pytest.raises(StateMismatchError, match="n"):
        again.load_state_dict(state)
    again = DataLoader(dataset[:6], batch_size=2, shuffle=True, seed=3)
    again.load_state_dict(state)
    assert [int(x) for batch in again for x in batch] == rest


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 7, 64, 300, 1500])
def test_batches_are_those_of_torchs_loader(size: int, *, drop_last: bool) -> None:
    """They are cut out of the sampler's chunks of 256, 512 … indices; its state counts them as drawn."""
    sampler = DistributedSampler(2999, 2, 1)
    loader = DataLoader(Numbers(2999), size, sampler=sampler, drop_last=drop_last)
    torchs = TorchDataLoader(
        Numbers(2999), size, sampler=TorchDistributedSampler(range(2999), 2, 1), drop_last=drop_last
    )
    drawn = 0
    for batch, expected in zip(loader, torchs, strict=True):
        assert batch.tolist() == expected.tolist()
        drawn += len(batch)
        assert sampler.state_dict()["consumed"] == min(2999, 2 * drawn)


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
