"""Evaluation in equal steps, for models whose forward communicates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from ddpsafe._errors import Explanation
from ddpsafe.data._position_sampler import PositionSampler
from ddpsafe.data._sampler_search import batch_geometry, find_epoch_holder
from ddpsafe.data.errors import DataConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import DataLoader

T_co = TypeVar("T_co", covariant=True)


def masked_batches(loader: DataLoader[T_co]) -> Iterator[tuple[Any, int]]:
    """Read a padded loader in equally many steps on every rank, telling repeats apart.

    For models that communicate in their forward (FSDP, SyncBatchNorm), where a rank without a
    batch would leave the others waiting. Keep ``outputs[:n_valid]``, and collect them with
    ``gather_exact(torch.cat(kept), sampler.indices(), n=len(dataset))``.

    Args:
        loader: With ``sampler=EvalSampler(dataset, pad=True)``.

    Yields:
        The batch, and how many of its first samples count; 0 if all of them are repeats.

    Raises:
        DataConfigError: The loader's sampler does not pad, so ranks may take unequal steps.
    """
    batches = iter(loader)
    sampler, batch_size = _padded(loader)
    valid = sampler.valid_samples()
    for batch in batches:
        counted = min(batch_size, valid)
        valid -= counted
        yield batch, counted


def _padded(loader: DataLoader[Any]) -> tuple[PositionSampler, int]:
    sampler = find_epoch_holder(loader)
    geometry = batch_geometry(loader, sampler) if isinstance(sampler, PositionSampler) else None
    if geometry is None or not sampler.pad or sampler.drop_last:
        raise DataConfigError(
            Explanation(
                f"masked_batches: {type(loader.sampler).__name__} does not pad with repeats.",
                cause="ranks may then take different numbers of steps.",
                fix="make the loader with sampler=EvalSampler(dataset, pad=True).",
            )
        )
    return sampler, geometry[0]
