"""The rank and the world size that samplers divide the data by, and the seed of the run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from ddpsafe._errors import ConfigError, Explanation

_MIN_RANDOM_SEED: Final = 2**48


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One of `num_replicas` readers of the same data, counted from 0."""

    num_replicas: int
    rank: int


def has_group() -> bool:
    """Return whether this process has a process group."""
    return dist.is_available() and dist.is_initialized()


def current_replica() -> Replica:
    """Return rank and size of the process group; without one, rank 0 of 1."""
    if has_group():
        return Replica(num_replicas=dist.get_world_size(), rank=dist.get_rank())
    return Replica(num_replicas=1, rank=0)


def resolve_replica(num_replicas: int | None, rank: int | None) -> Replica:
    """Fill in what the caller left out from the process group, and check it.

    Raises:
        ConfigError: The rank is outside of the world, or a launcher announced more ranks
            (``WORLD_SIZE``) but there is no process group yet to tell which one this is.
    """
    if num_replicas is None or rank is None:
        # Without this check every rank would silently read the same data. YAML and $(cat file)
        # leave a newline behind the number.
        announced = os.environ.get("WORLD_SIZE", "1").strip()
        if not has_group() and announced.isdecimal() and int(announced) > 1:
            raise ConfigError(
                Explanation(
                    f"WORLD_SIZE is {announced}, but this process has no process group yet.",
                    cause="the sampler or loader is made before setup(), or in a helper process "
                    "that inherited a rank's environment.",
                    fix="make it after ddpsafe.setup() / init_process_group(), or pass "
                    "num_replicas and rank.",
                )
            )
    current = current_replica()
    replica = Replica(
        num_replicas=current.num_replicas if num_replicas is None else num_replicas,
        rank=current.rank if rank is None else rank,
    )
    if replica.num_replicas < 1 or not 0 <= replica.rank < replica.num_replicas:
        raise ConfigError(
            Explanation(
                f"rank {replica.rank} is outside of the world: num_replicas is "
                f"{replica.num_replicas}, so ranks go from 0 to {replica.num_replicas - 1}.",
                cause="rank and num_replicas come from two places, or were swapped.",
                fix="leave both out: they are read from the process group.",
            )
        )
    return replica


def run_seed() -> int | None:
    """Return the seed that ``launch(seed=)`` gave to all ranks, if any."""
    seed_text = os.environ.get("_DDPSAFE_SEED", "")
    return int(seed_text) if seed_text.isdigit() else None


def chosen_seed() -> int | None:
    """Return the seed of ``torch.manual_seed``, else the run's; ``None`` if none was chosen."""
    initial = torch.initial_seed()  # launch(seed=) sets it, too
    # torch starts each process with a seed of 64 random bits: one below 2**48 was chosen.
    return initial if initial < _MIN_RANDOM_SEED else run_seed()


def local_world_size() -> int:
    """Return how many ranks run on this machine (``LOCAL_WORLD_SIZE``); 1 without a launcher."""
    announced = os.environ.get("LOCAL_WORLD_SIZE", "1").strip()
    return int(announced) if announced.isdecimal() else 1
