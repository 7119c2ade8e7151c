"""Scripts whose default group is not that of all ranks; run by tests/faults/test_default_groups.py."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from exception_programs import raise_own_error
from training_programs import mark

from ddpsafe import RankContext

STEPS: Final = 20
SLOW_STEP: Final = 5

GROUPS: Final[dict[str, list[list[int]]]] = {
    "the last rank is left out": [[0, 1]],
    "the first rank is left out": [[1, 2]],
    "two pairs": [[0, 1], [2, 3]],
    "another order": [[2, 0, 1]],
    "smaller after all": [[0, 1, 2], [0, 1]],
    "other pairs after pairs": [[0, 1], [2, 3], [0, 2], [1, 3]],
}
"""Members of the default groups, in the order of their ranks in the group; one after the other."""


def train_in_groups(
    rank: int, world_size: int, folder: Path, shape: str, slow_s: float, fails: int = -1
) -> None:
    """Train in each group that has this rank, with one slow step; one rank may raise in it."""
    del world_size
    for number, members in enumerate(GROUPS[shape]):
        if rank not in members:
            continue
        store = dist.FileStore(str(folder / f"store-{number}"), len(members))
        place = members.index(rank)
        dist.init_process_group("gloo", store=store, rank=place, world_size=len(members))
        for step in range(STEPS):
            if step == SLOW_STEP and place == 0:
                time.sleep(slow_s)
            if step == SLOW_STEP + 1 and rank == fails:
                mark(folder)
                raise_own_error(folder)
            dist.all_reduce(torch.ones(4))
        dist.barrier()
        dist.destroy_process_group()


def make_groups(ctx: RankContext, folder: Path, how: str) -> float:
    """Make smaller groups, rightly or not (only one's own, in another order on each rank), and add up in them."""
    mark(folder)
    pairs = [[0, 1], [2, 3]]
    own = pairs[ctx.rank // 2]
    if how == "own":
        group = dist.new_group(own)
    elif how == "order":
        made = [dist.new_group(pair) for pair in (pairs if ctx.rank < 2 else pairs[::-1])]
        group = made[0]
    elif how == "all":
        group = [dist.new_group(pair) for pair in pairs][ctx.rank // 2]
    elif how == "alone":
        group = dist.new_group([ctx.rank])
    elif how == "local":
        group = dist.new_group(own, use_local_synchronization=True)
    elif how == "subgroups":
        group, _ = dist.new_subgroups(2)
    else:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "place"))
        group = mesh.get_group("place")
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return total.item()


def make_a_group_by_other_numbers(rank: int, world_size: int, folder: Path, slow_s: float) -> None:
    """Make a group of the first two numbers, one of which a slow rank has that has another one in the launch."""
    number = [0, 2, 1, 3][rank]
    where = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=where, rank=number, world_size=world_size)
    if number == 1:
        time.sleep(slow_s)
    dist.new_group([0, 1])
    dist.barrier()
    dist.destroy_process_group()
