"""What a loader was given: checked, and completed where the caller left it out."""

from __future__ import annotations

from typing import get_args

import torch
from torch.utils.data import IterableDataset

from ddpsafe._errors import Explanation
from ddpsafe.data._loader.worker_safety import WorkerSafety
from ddpsafe.data._replica import chosen_seed, current_replica
from ddpsafe.data._samplers.base import require_int
from ddpsafe.data._samplers.ordered import LocalSampler
from ddpsafe.data.errors import DataConfigError


def check_arguments(sampler: object, batch_sampler: object, worker_safety: str) -> None:
    """Refuse what contradicts itself.

    Raises:
        DataConfigError: A sampler and a batch_sampler, or an unknown choice.
    """
    if sampler is not None and batch_sampler is not None:
        raise DataConfigError(
            Explanation(
                "A sampler and a batch_sampler were given together.",
                cause="a batch_sampler already decides which samples are read.",
                fix="give one of them.",
            )
        )
    if worker_safety not in get_args(WorkerSafety):
        raise DataConfigError(
            Explanation(
                f"worker_safety cannot be {worker_safety!r}.",
                cause="the name is misspelled.",
                fix=f"choose one of {', '.join(get_args(WorkerSafety))}.",
            )
        )


def local_sampler(
    dataset: object, *, shuffle: bool | None, seed: int | None
) -> tuple[LocalSampler | None, bool | None]:
    """Make the resumable sampler of a world of one; in larger worlds the caller must give one."""
    sized = hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)
    if not sized or current_replica().num_replicas > 1:
        return None, shuffle
    chosen = (chosen_seed() or 0) if seed is None else seed
    sampler = LocalSampler(dataset, shuffle=bool(shuffle), seed=chosen)  # type: ignore[arg-type]  # sized
    sampler.takes_seed_of_state = seed is None
    return sampler, None


def worker_seed(seed: int | None, holder: object) -> int:
    """Return the seed of the workers: the loader's, the one chosen for the run, the sampler's."""
    if seed is not None:
        return require_int(seed, "seed")
    chosen = chosen_seed()
    if chosen is not None:
        return chosen
    inherited = getattr(holder, "seed", 0)
    return inherited if isinstance(inherited, int) else 0


def pins_memory(pin_memory: bool | None) -> bool:  # noqa: FBT001 - torch's argument
    """Return whether batches are pinned: as the caller says, else where CUDA is in use."""
    if pin_memory is not None:
        return pin_memory
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch has no types here
