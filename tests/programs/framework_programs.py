"""One training step with Accelerate and with Lightning Fabric; run by test_frameworks.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import ddpsafe
from ddpsafe import RankContext

if TYPE_CHECKING:
    from torch import nn


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
