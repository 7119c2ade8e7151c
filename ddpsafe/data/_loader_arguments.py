"""What a loader was given: checked, and completed where the caller left it out."""

from __future__ import annotations

from typing import get_args

from torch.utils.data import IterableDataset

from ddpsafe._errors import Explanation
from ddpsafe.data._position_sampler import require_int
from ddpsafe.data._replica import current_replica
from ddpsafe.data._samplers import LocalSampler
from ddpsafe.data._worker_safety import WorkerSafety
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
    dataset: object, *, shuffle: bool | None, seed: int
) -> tuple[LocalSampler | None, bool | None]:
    """Make the resumable sampler of a world of one; in larger worlds the caller must give one."""
    sized = hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)
    if not sized or current_replica().num_replicas > 1:
        return None, shuffle
    return LocalSampler(dataset, shuffle=bool(shuffle), seed=seed), None  # type: ignore[arg-type]  # sized


def worker_seed(seed: int | None, holder: object) -> int:
    """Return the seed of the workers: the loader's, else the sampler's."""
    if seed is not None:
        return require_int(seed, "seed")
    inherited = getattr(holder, "seed", 0)
    return inherited if isinstance(inherited, int) else 0
