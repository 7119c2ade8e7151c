"""Sampler, seeds, workers and the check of the data in one call: what ``ctx.loader`` is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import IterableDataset

from ddpsafe.data._consistency import check_dataset_consistency, loader_facts
from ddpsafe.data._loader import DataLoader
from ddpsafe.data._samplers import DistributedSampler, EvalSampler

if TYPE_CHECKING:
    from torch.utils.data import Dataset

T_co = TypeVar("T_co", covariant=True)


def build_loader(
    dataset: Dataset[T_co],
    *,
    batch_size: int | None = 1,
    train: bool = True,
    shuffle: bool | None = None,
    seed: int = 0,
    check: bool = True,
    **options: Any,
) -> DataLoader[T_co]:
    """Make the loader of this rank; every rank calls it.

    Args:
        dataset: The dataset, the same on every rank.
        batch_size: Samples per batch of one rank.
        train: ``True`` shuffles and gives ranks equally many samples; ``False`` reads each
            sample exactly once, in order, for evaluation (collect with `gather_exact`).
        shuffle: Whether to shuffle for training; yes by default.
        seed: Of the order and of the workers.
        check: Whether to compare the dataset over the ranks, and to keep its fingerprint in the
            state. Where neither paths nor a fingerprint identify it, 64 of its items are read.
        options: As of `DataLoader`: ``num_workers``, ``collate_fn``, ``batch_sampler``, ...

    Returns:
        The loader; loop ``for epoch in loader.epochs(n)``.

    Raises:
        DatasetInconsistencyError: On every rank, if the ranks' datasets or arguments differ.
    """
    given = options.get("sampler") is not None or options.get("batch_sampler") is not None
    if options.get("batch_sampler") is not None:
        batch_size = 1
    if not given and not isinstance(dataset, IterableDataset):
        options["sampler"] = _sampler(dataset, train=train, shuffle=shuffle, seed=seed)
    loader = DataLoader(dataset, batch_size, seed=seed, **options)
    if check:
        fingerprint = check_dataset_consistency(dataset, facts=loader_facts(loader))
        loader.remember_fingerprint(fingerprint)
    return loader


def _sampler(dataset: Any, *, train: bool, shuffle: bool | None, seed: int) -> DistributedSampler:
    if not train:
        return EvalSampler(dataset)
    return DistributedSampler(dataset, shuffle=shuffle is not False, seed=seed)
