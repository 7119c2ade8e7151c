"""One training, written by hand, for ddpsafe, and for frameworks; run by test_equality.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ddpsafe
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


# One training step with Accelerate and with Lightning Fabric.


LEARNING_RATE = 0.1


def model_and_optimizer() -> tuple[nn.Linear, torch.optim.Optimizer]:
    """Make the same model on every rank."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def data() -> torch.Tensor:
    """Make four samples, two for each of two ranks."""
    return torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [1.0, 3.0]])


def train_with_accelerate(ctx: RankContext) -> dict[str, Any]:
    """Prepare model, optimizer and loader, and take one step."""
    from accelerate import Accelerator

    group = dist.group.WORLD
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        *model_and_optimizer(), DataLoader(data(), batch_size=2)
    )
    batch = next(iter(loader))
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    return {
        "place": (accelerator.process_index, accelerator.num_processes),
        "ours": (ctx.rank, ctx.world_size),
        "same_group": dist.group.WORLD is group,
        "gathered": sorted(accelerator.gather(batch).tolist()),
        "weight": accelerator.unwrap_model(model).weight.detach().tolist(),
    }


def train_with_fabric(ctx: RankContext) -> dict[str, Any]:
    """Set up model, optimizer and loader, and take one step."""
    from lightning_fabric import Fabric

    group = dist.group.WORLD
    fabric = Fabric(accelerator="cpu", devices=ctx.local_world_size, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(*model_and_optimizer())
    loader = fabric.setup_dataloaders(DataLoader(data(), batch_size=2))
    batch = next(iter(loader))
    fabric.backward(model(batch).square().mean())
    optimizer.step()
    return {
        "place": (fabric.global_rank, fabric.world_size),
        "ours": (ctx.rank, ctx.world_size),
        "same_group": dist.group.WORLD is group,
        "gathered": sorted(sample for batch in ctx.all_gather(batch.tolist()) for sample in batch),
        "weight": model.module.weight.detach().tolist(),
    }


def in_a_spawned_rank(
    rank: int, train: Callable[[RankContext], dict[str, Any]], folder: Path
) -> None:
    """Train in a rank that calls no setup: the framework itself makes the group."""
    found = train(ddpsafe.current())
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
