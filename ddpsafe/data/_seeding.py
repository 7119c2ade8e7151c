"""Random numbers per sample, independent of ranks and workers, or per rank and worker."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ddpsafe.data._arguments import require_choice
from ddpsafe.data._loader.reading import FollowedDataset
from ddpsafe.data._replica import current_replica, has_group
from ddpsafe.data._samplers.permutation import MASK64, derive_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpsafe.data._loader.reading import SharedProgress

RngKind = Literal["torch", "numpy", "random"]


def seed_worker(seed: int, epoch: int, rank: int, worker_id: int) -> None:
    """Seed `random`, numpy's global generator and torch's, differently for each worker.

    torch's worker seeds do not depend on the rank (torch/utils/data/_utils/worker.py), so ranks
    with equal seeds draw equal augmentations.

    Args:
        seed: The run's seed.
        epoch: From 0.
        rank: From 0.
        worker_id: From 0 within the rank.
    """
    _seed_everything([seed, epoch, rank, worker_id])


def _seed_everything(words: list[int]) -> None:
    sequence = np.random.SeedSequence([word & MASK64 for word in words])
    first, second, *rest = (int(word) for word in sequence.generate_state(6, np.uint32))
    random.seed(first << 32 | second)
    np.random.seed(rest)  # noqa: NPY002 - augmentations use the global generator
    # torch.manual_seed takes 154 us, nearly all of it for devices that a worker must not touch.
    torch.default_generator.manual_seed(random.getrandbits(63))
    random.seed(second << 32 | first)
    info = get_worker_info()
    if info is not None:  # torch documents that it equals torch.initial_seed()
        object.__setattr__(info, "seed", torch.initial_seed())


@overload
def sample_rng(
    seed: int, epoch: int, index: int, kind: Literal["torch"] = "torch"
) -> torch.Generator: ...
@overload
def sample_rng(
    seed: int, epoch: int, index: int, kind: Literal["numpy"]
) -> np.random.Generator: ...
@overload
def sample_rng(seed: int, epoch: int, index: int, kind: Literal["random"]) -> random.Random: ...
def sample_rng(
    seed: int, epoch: int, index: int, kind: RngKind = "torch"
) -> torch.Generator | np.random.Generator | random.Random:
    """Make the generator of one sample: the same for any ranks, workers, batch size and resume.

    Args:
        seed: The run's seed.
        epoch: From 0; the loader passes it to the dataset's ``set_epoch()``.
        index: The sample's index in the dataset.
        kind: The library of the generator.

    Returns:
        A new generator for this sample.
    """
    if kind == "torch":
        return derive_generator(seed, epoch, index)
    key = derive_keys(seed, epoch, index, count=1)[0]
    if kind == "numpy":
        return np.random.Generator(np.random.Philox(key=key))
    require_choice(kind, "kind", get_args(RngKind))
    return random.Random(key)  # noqa: S311 - augmentation, not secrets


def derive_generator(*words: int) -> torch.Generator:
    """Make torch's generator for these words; another one for any other words."""
    return torch.Generator().manual_seed(derive_keys(*words, count=1)[0] >> 1)


class WorkerInit:
    """Seeds a DataLoader worker by (seed, epoch, rank, worker), then runs the user's function.

    With `progress`, workers follow the epoch of the main process. A class rather than a closure, because spawned
    workers receive it pickled.
    """

    def __init__(
        self,
        seed: int,
        user_fn: Callable[[int], object] | None,
        progress: SharedProgress | None = None,
    ) -> None:
        self.seed = seed
        self.user_fn = user_fn
        self._progress = progress
        self._rank = current_replica().rank

    def __call__(self, worker_id: int) -> None:
        """Run in the worker, before it reads anything."""
        # The name that ps, top and the launcher's report of a hang show; Linux keeps 15 bytes.
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(f"data_worker_{worker_id}", encoding="ascii")
        rank, info = self.rank(), get_worker_info()
        epoch = None if self._progress is None else self._progress.epoch()
        if epoch is not None:
            seed_worker(self.seed, epoch, rank, worker_id)
        else:
            # Another loader (Accelerate, Lightning) was rebuilt from this one and starts the
            # workers. Only torch's own seed then changes from epoch to epoch.
            _seed_everything([self.seed, info.seed if info else 0, rank, worker_id])
        if info is not None and isinstance(info.dataset, FollowedDataset):
            follower = info.dataset
            follower.enter_worker(
                worker_id, lambda epoch: seed_worker(self.seed, epoch, rank, worker_id), rank
            )
            # Worker init functions configure get_worker_info().dataset: it must be the user's.
            object.__setattr__(info, "dataset", follower.dataset)
        if self.user_fn is not None:
            self.user_fn(worker_id)

    def rank(self) -> int:
        """Return the rank that owns the worker; a forked worker still has the process group."""
        return current_replica().rank if has_group() else self._rank

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the rank: a spawned worker has no process group to read it from."""
        return {**self.__dict__, "_rank": self.rank()}
