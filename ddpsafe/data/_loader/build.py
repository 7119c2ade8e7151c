"""Sampler, seeds, workers and the check of the data in one call: `ctx.loader`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import IterableDataset

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe.data._consistency import check_dataset_of
from ddpsafe.data._gathering import gather_json
from ddpsafe.data._loader.loader import DataLoader
from ddpsafe.data._replica import chosen_seed, run_seed
from ddpsafe.data._samplers.ordered import DistributedSampler, EvalSampler

if TYPE_CHECKING:
    from torch.utils.data import Dataset

T_co = TypeVar("T_co", covariant=True)


def build_loader(
    dataset: Dataset[T_co],
    *,
    batch_size: int | None = 1,
    train: bool = True,
    shuffle: bool | None = None,
    seed: int | None = None,
    check: bool = True,
    **options: Any,
) -> DataLoader[T_co]:
    """Make the loader of this rank; every rank calls it.

    Args:
        dataset: The dataset, the same on every rank.
        batch_size: Samples per batch of one rank.
        train: ``True`` shuffles and gives all ranks the same number of samples; ``False`` reads
            each sample exactly once, in order, for evaluation (collect with `gather_exact`).
        shuffle: Whether to shuffle for training; true by default.
        seed: Seed of the order and of the workers; by default that of ``launch(seed=)``, else
            that of ``torch.manual_seed`` on rank 0 if every rank called it, else 0.
        check: Whether to compare the dataset across ranks, and to keep its fingerprint in the
            state. If neither paths nor a fingerprint identify it, 64 of its items are read.
        options: Further arguments of `DataLoader`: ``num_workers``, ``collate_fn``, ...

    Returns:
        The loader; loop ``for epoch in loader.epochs(n)``.

    Raises:
        DatasetInconsistencyError: On every rank, if the ranks' datasets or arguments differ.
        ConfigError: An argument would have no effect, given another one.
    """
    sampler = options.get("sampler")
    batch_sampler = options.get("batch_sampler")
    user_sampler = batch_sampler if sampler is None else sampler
    if user_sampler is not None and shuffle is not None:
        raise _no_effect(f"shuffle={shuffle}", "the sampler that was given decides the order")
    if user_sampler is not None and not train and not isinstance(user_sampler, EvalSampler):
        raise _no_effect("train=False", "it makes an EvalSampler, but a sampler was given")
    if shuffle and not train:
        raise _no_effect("shuffle=True", "train=False reads in the order of the dataset")
    if shuffle and isinstance(dataset, IterableDataset):
        raise _no_effect("shuffle=True", "a stream has its own order")
    if not train and getattr(dataset, "even", None) is not None:
        raise _no_effect("train=False", "ShardedIterable(even=...) drops or repeats samples")
    if batch_sampler is not None and batch_size != 1:
        raise _no_effect(f"batch_size={batch_size}", "a batch_sampler makes its own batches")
    if sampler is None and batch_sampler is None and not isinstance(dataset, IterableDataset):
        sized: Any = dataset  # torch's Dataset declares no length
        if not train:
            options["sampler"] = EvalSampler(sized)
        else:
            order_seed = run_seed() or 0 if seed is None else seed
            if seed is None and check:
                # The seeds of ``torch.manual_seed`` may differ between ranks; rank 0's counts.
                seeds = gather_json(chosen_seed())
                order_seed = 0 if None in seeds else int(seeds[0])
            options["sampler"] = DistributedSampler(
                sized, shuffle=shuffle is not False, seed=order_seed
            )
            options["sampler"].takes_seed_of_state = seed is None
    loader = DataLoader(dataset, batch_size, seed=seed, **options)
    if check:
        loader.remember_fingerprint(check_dataset_of(loader))
    return loader


def _no_effect(what: str, why: str) -> ConfigError:
    return ConfigError(
        Explanation(f"{what} would have no effect.", cause=f"{why}.", fix="leave one of them out.")
    )
