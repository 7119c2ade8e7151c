"""Finds in a loader the sampler that divides the data, and the one that tracks the position."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import (
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe.data._replica import resolve_replica
from ddpsafe.data._samplers.base import Resumable
from ddpsafe.data._samplers.ordered import LocalSampler
from ddpsafe.data.errors import DatasetChangedError, DataWarning, MissingDistributedSamplerError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# Accelerate nests its own batch samplers three deep.
_MAX_NESTING: Final = 4
_UNDIVIDED: Final = (
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    SubsetRandomSampler,
    LocalSampler,
)

_DIVIDED: Final[dict[type, str]] = {
    WeightedRandomSampler: "DataLoader(dataset, sampler=WeightedSampler(weights, num_samples=…))",
    SubsetRandomSampler: "part = Subset(dataset, indices); "
    "DataLoader(part, sampler=DistributedSampler(part))",
}


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Return what produces the loader's indices, the outermost first."""
    if isinstance(loader.dataset, IterableDataset):
        return [loader.dataset]
    samplers: list[Any] = []
    item: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while item is not None and len(samplers) < _MAX_NESTING:
        samplers.append(item)
        inner = getattr(item, "batch_sampler", None)
        item = getattr(item, "sampler", None) if inner is None else inner
    return samplers


def find_epoch_holder(loader: DataLoader[Any]) -> Any:
    """Return the sampler or stream whose ``epoch`` decides the order; ``None`` if there is none."""
    chain = samplers_of(loader)
    # If its epoch cannot be read, a value that the user set would be overwritten unseen.
    others = [
        item
        for item in chain
        if callable(getattr(item, "set_epoch", None))
        and isinstance(getattr(item, "epoch", None), int)
    ]
    return next((item for item in chain if isinstance(item, Resumable)), next(iter(others), None))


def check_population(loader: DataLoader[Any], cursor: object) -> None:
    """Raise if the sampler was made for a dataset of another length; warn if it leaves no batch."""
    if loader.drop_last and hasattr(cursor, "population") and len(loader) == 0:
        warnings.warn(
            f"drop_last=True leaves no batch of {loader.batch_size} for this rank: nothing is read.",
            DataWarning,
            stacklevel=4,
        )
    population = getattr(cursor, "population", None)
    if population is None or not hasattr(loader.dataset, "__len__"):
        return
    expected, actual = population(), len(loader.dataset)
    if expected != actual:
        raise DatasetChangedError(
            Explanation(
                f"{type(cursor).__name__} was made for {expected} samples, "
                f"but the dataset has {actual}.",
                cause="the sampler, its weights or its lengths belong to another dataset.",
                fix="make the sampler from the dataset that the loader reads.",
            )
        )


def refuse_undivided(loader: DataLoader[Any]) -> None:
    """Raise if every rank would read the same samples, or some samples would never be read.

    Raises:
        MissingDistributedSamplerError: The sampler does not divide the data.
        ConfigError: It divides the data by a number that does not divide the world size.
    """
    world = resolve_replica(None, None)
    if world.num_replicas == 1:
        return
    chain = samplers_of(loader)
    divided = [item for item in chain if isinstance(getattr(item, "num_replicas", None), int)]
    if divided:
        sampler = divided[0]
        replicas = sampler.num_replicas
        # Fewer replicas than ranks are right if ranks share a model (tensor parallelism).
        if world.num_replicas % replicas == 0:
            return
        raise ConfigError(
            Explanation(
                f"{type(sampler).__name__} divides the data by {replicas}, but the world has "
                f"{world.num_replicas} ranks.",
                cause="num_replicas was passed explicitly, or the sampler was made before the "
                "process group: samples would be lost or read twice.",
                fix="leave num_replicas and rank out, and make the sampler after the process group.",
            )
        )
    if isinstance(chain[-1], _UNDIVIDED):
        sampler = chain[-1]
        shuffle = not isinstance(sampler, SequentialSampler) and getattr(sampler, "shuffle", True)
        default = f"DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle={shuffle}))"
        raise MissingDistributedSamplerError(
            Explanation(
                f"Rank {world.rank} (world_size {world.num_replicas}) would read the whole dataset, "
                f"as would every other rank: {type(sampler).__name__} does not divide it.",
                cause="the loader has no distributed sampler.",
                fix=f"{_DIVIDED.get(type(sampler), default)}; for evaluation sampler=EvalSampler(dataset). "
                "If this rank is meant to read everything: DistributedSampler(dataset, num_replicas=1, rank=0).",
            )
        )
