"""What the ranks of tests/gpu run. Every function here is called on machines with GPUs only."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    import ddpsafe

SEED = 11


def make_model() -> nn.Module:
    """Return a small network with a layer that SyncBatchNorm would replace."""
    import torch
    from torch import nn

    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 16 samples, the same in every process."""
    import torch

    random = torch.Generator().manual_seed(SEED)
    x = torch.randn(16, 8, generator=random)
    return x, x.sum(dim=1, keepdim=True)


def describe_device(ctx: ddpsafe.RankContext) -> dict[str, Any]:
    """Say which device this rank works on, and reduce something there."""
    import torch
    import torch.distributed as dist

    value = torch.ones(1, device=ctx.device) * (ctx.rank + 1)
    dist.all_reduce(value)
    return {
        "device": str(ctx.device),
        "current": torch.cuda.current_device(),
        "backend": dist.get_backend(),
        "sum": value.item(),
        "mean": ctx.reduce_mean(float(ctx.rank)),
    }


def step(ctx: ddpsafe.RankContext, options: dict[str, bool]) -> dict[str, torch.Tensor]:
    """Make one step on this rank's share of the batch; return the parameters on the CPU."""
    import torch

    model = ctx.wrap(make_model(), sync_batchnorm=options.get("sync_batchnorm", False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=options.get("amp", False))
    x, y = (part.to(ctx.device).chunk(ctx.world_size)[ctx.rank] for part in make_batch())
    accumulated = model.no_sync() if options.get("no_sync") else nullcontext()
    with accumulated, torch.autocast("cuda", enabled=options.get("amp", False)):
        loss = torch.nn.functional.mse_loss(model(x), y)
        if options.get("no_sync"):
            loss.backward()
    if options.get("no_sync"):
        loss = torch.nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return {name: value.cpu() for name, value in ctx.unwrap(model).state_dict().items()}


def reduce_on_one_gpu(rank: int, world_size: int) -> None:
    """Join by hand, as if each rank were a host of its own: NCCL refuses two ranks on one GPU."""
    import torch
    import torch.distributed as dist

    os.environ["NCCL_HOSTID"] = f"host-{rank}"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    value = torch.ones(1, device="cuda") * (rank + 1)
    dist.all_reduce(value)
    assert value.item() == sum(range(1, world_size + 1))
    dist.destroy_process_group()


def return_device_tensor(ctx: ddpsafe.RankContext) -> torch.Tensor:
    """Return a tensor that lives on the rank's GPU."""
    import torch

    return torch.full((2,), float(ctx.rank), device=ctx.device)
