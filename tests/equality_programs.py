"""One training run in two forms: as people write it by hand, and as `launch` runs it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    import ddpsafe

SEED = 7
STEPS_TO_ACCUMULATE = 3


def make_data() -> torch.utils.data.TensorDataset:
    """Return 50 samples: a number that no tested world size divides."""
    import torch

    random = torch.Generator().manual_seed(SEED)
    x = torch.randn(50, 6, generator=random)
    return torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True).tanh())


def make_model() -> nn.Module:
    """Return a network with enough parameters for several layers of gradients."""
    from torch import nn

    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))


def fit(model: nn.Module, rank: int, world_size: int, *, accumulate: bool) -> None:
    """Train a wrapped model for two epochs."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    data = make_data()
    sampler = DistributedSampler(data, world_size, rank)
    batches = DataLoader(data, batch_size=4, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(batches, start=1):
            due = not accumulate or number % STEPS_TO_ACCUMULATE == 0
            with nullcontext() if due else model.no_sync():
                torch.nn.functional.mse_loss(model(x), y).backward()
            if due:
                optimizer.step()
                optimizer.zero_grad()


def train_by_hand(
    rank: int,
    world_size: int,
    port: int,
    folder: Path,
    accumulate: bool,  # noqa: FBT001 - mp.spawn
) -> None:
    """Set up, train, save and clean up, with nothing of ddpsafe."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    model = DistributedDataParallel(make_model())
    fit(model, rank, world_size, accumulate=accumulate)
    torch.save(model.module.state_dict(), folder / f"by-hand-{rank}.pt")
    del model
    dist.barrier()
    dist.destroy_process_group()


def train_launched(ctx: ddpsafe.RankContext, accumulate: bool) -> dict[str, torch.Tensor]:  # noqa: FBT001 - an argument of launch
    """Train, with the group, the seed and the threads of the launch."""
    model = ctx.wrap(make_model())
    fit(model, ctx.rank, ctx.world_size, accumulate=accumulate)
    return ctx.unwrap(model).state_dict()
