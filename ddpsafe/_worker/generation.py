"""Which generation of ranks this is, where a store outlives the ranks that meet there.

torchrun's agent keeps one store for all restarts, and its keys survive them. Its restart counter
does not tell generations apart: it differs between hosts when one of them joined later
(pytorch #108158). So rank 0 names the generation, and tells each rank in answer to a greeting that
only a living rank can have written.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from ddpsafe._worker.control import Control

if TYPE_CHECKING:
    from torch.distributed import Store

    from ddpsafe._clock import Deadline
    from ddpsafe._world import World


def agree_on_generation(store: Store, world: World, *, deadline: Deadline) -> tuple[str, list[int]]:
    """Learn the name of this generation of ranks.

    Args:
        store: A store whose keys may be those of earlier generations.
        world: This rank's place.
        deadline: When to give up.

    Returns:
        The name, new in this store, and the ranks that have not come: all that rank 0 misses, or
        rank 0 itself.
    """
    if world.rank == 0:
        name = uuid.uuid4().hex
        return name, _welcome(store, world, name, deadline)
    greeting = uuid.uuid4().hex
    store.set(f"hello/{world.rank}", greeting)
    control = Control(store, rank=world.rank, world_size=world.world_size)
    if not control.wait_for(f"welcome/{greeting}", deadline=deadline):
        return "", [0]
    name = store.get(f"welcome/{greeting}").decode()
    store.set(f"seen/{greeting}", name)
    return name, []


def _welcome(store: Store, world: World, name: str, deadline: Deadline) -> list[int]:
    """Answer greetings until every rank has seen this generation's name.

    A greeting may be that of a dead rank, which has seen the name of its own generation only.
    """
    outside = set(range(1, world.world_size))
    answered: set[str] = set()
    for pause_s in deadline.pauses_s():
        for rank in sorted(outside):
            greeting = _read(store, f"hello/{rank}")
            if greeting is None:
                continue
            if greeting not in answered:
                answered.add(greeting)
                store.set(f"welcome/{greeting}", name)
            elif _read(store, f"seen/{greeting}") == name:
                outside.remove(rank)
        if not outside:
            break
        time.sleep(pause_s)
    return sorted(outside)


def _read(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
