"""One training, written by hand and written for ddpsafe; run by test_equality.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpsafe import RankContext

EPOCHS = 2
BATCH = 4
SAMPLES = 30
"""Not a multiple of 2 or 3 ranks' batches: the sampler pads, and the last batch is smaller."""


def dataset() -> torch.utils.data.Dataset[Any]:
    """Make the same samples in every process."""
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 8, generator=generator), torch.randn(SAMPLES, 3, generator=generator)
    )


def network() -> nn.Module:
    """Make a small network with buffers and with randomness in its steps."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )


def train(ddp: nn.Module, rank: int, world_size: int, accumulate: int) -> None:
    """Train in place, as every script does; `accumulate` batches make a step."""
    import contextlib

    from torch.utils.data import DataLoader, DistributedSampler

    torch.manual_seed(100 + rank)
    samples = dataset()
    sampler = DistributedSampler(samples, world_size, rank, seed=3)
    loader = DataLoader(samples, BATCH, sampler=sampler)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader, start=1):
            is_step = number % accumulate == 0 or number == len(loader)
            with contextlib.nullcontext() if is_step else ddp.no_sync():
                torch.nn.functional.mse_loss(ddp(inputs), targets).backward()
            if is_step:
                optimizer.step()
                optimizer.zero_grad()


def state(ddp: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers."""
    return {name: value.clone() for name, value in ddp.module.state_dict().items()}


def by_hand(rank: int, world_size: int, port: int, accumulate: int, folder: Path) -> None:
    """Set up, train, clean up: the hand-written form, for torch.multiprocessing."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    ddp = DistributedDataParallel(network())
    train(ddp, rank, world_size, accumulate)
    torch.save(state(ddp), folder / f"rank-{rank}.pt")
    # No teardown: the usual one sometimes hangs, which is not the subject of this test.
    os._exit(0)


def with_ddpsafe(ctx: RankContext, accumulate: int) -> dict[str, torch.Tensor]:
    """Train the same in a launch."""
    torch.set_num_threads(1)
    ddp = ctx.wrap(network())
    train(ddp, ctx.rank, ctx.world_size, accumulate)
    return state(ddp)
