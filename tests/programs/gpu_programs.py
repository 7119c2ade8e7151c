"""Rank functions of gpu/test_gpu.py.

If a test needs two ranks and the machine has one GPU, both share it. NCCL allows that only between
different hosts, so each rank gets its own NCCL_HOSTID before the group is made. That is for tests
only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING, Any

import ddpsafe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch
    from torch import nn

    from ddpsafe import RankContext

    Program = Callable[[RankContext], dict[str, Any]]

STEPS = 4
BATCH = 8


def look_around(ctx: RankContext) -> dict[str, Any]:
    """Return the rank's device, and the one that torch uses by default."""
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD
    total = torch.ones(1, device="cuda") * (ctx.rank + 1)
    dist.all_reduce(total)
    return {
        "device": str(ctx.device),
        "current": torch.cuda.current_device(),
        "made_on": str(torch.empty(1, device="cuda").device),
        "backend": (ctx.backend, dist.get_backend()),
        "bound": str(getattr(group, "bound_device_id", None)),
        "total": total.item(),
    }


def return_a_device_tensor(ctx: RankContext) -> dict[str, torch.Tensor]:
    """Return a tensor on the GPU."""
    import torch

    return {"tensor": torch.full((3,), float(ctx.rank), device=ctx.device)}


def reduce_on_device(ctx: RankContext) -> dict[str, Any]:
    """Use every collective of the context with tensors on the device and on the CPU."""
    import torch

    loss = torch.tensor(float(ctx.rank), device=ctx.device)
    mean = ctx.reduce_mean(loss)
    on_cpu = ctx.reduce_mean(torch.tensor(float(ctx.rank)))
    return {
        "mean": (mean.item(), str(mean.device)),
        "mean_of_cpu": (on_cpu.item(), str(on_cpu.device)),
        "dict": ctx.reduce_mean({"loss": float(ctx.rank)}),
        "gathered": ctx.all_gather(ctx.rank),
        "broadcast": ctx.broadcast(f"from {ctx.rank}"),
        "stop": ctx.stop_requested(),
    }


def be_one_of_two(rank: int, program: Program, folder: Path) -> None:
    """Make the group as a script does, run the program in it, and write its result to a file."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % max(1, gpus))
    if gpus < 2:
        os.environ["NCCL_HOSTID"] = f"ddpsafe-test-{rank}"
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    # Each rank uses its local rank's GPU, unless the script sets another: both may use the first.
    ctx = dataclasses.replace(ddpsafe.current(), device=device, backend="nccl")
    found = program(ctx)
    dist.destroy_process_group()
    torch.save(found, folder / f"rank-{rank}.pt")


def network() -> nn.Module:
    """Make the same network in every process, on the CPU."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make the same batches in every process, on the CPU."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 2, generator=generator))
        for _ in range(STEPS)
    ]


def share_of(tensor: torch.Tensor, ctx: RankContext) -> torch.Tensor:
    """Return this rank's part of a batch, on its device."""
    return tensor.chunk(ctx.world_size)[ctx.rank].to(ctx.device)


def train_in_parallel(ctx: RankContext) -> dict[str, Any]:
    """Train with synchronised BatchNorm: together, the ranks do the work of one process."""
    model = ctx.wrap(network(), sync_batchnorm=True)
    train(model, [(share_of(x, ctx), share_of(y, ctx)) for x, y in batches()])
    inner = ctx.unwrap(model)
    return {"norm": type(inner[1]).__name__, "state": on_cpu(inner)}


def train_alone(device: torch.device) -> dict[str, torch.Tensor]:
    """Train on whole batches in this process."""
    model = network().to(device)
    train(model, [(x.to(device), y.to(device)) for x, y in batches()])
    return on_cpu(model)


def train(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Run one step for each batch."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in data:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def on_cpu(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers, copied to the CPU."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def train_with_amp(ctx: RankContext) -> dict[str, Any]:
    """Train in half precision with a gradient scaler, for ten epochs."""
    import torch

    model = ctx.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cuda")
    losses, dtype = [], None
    for _ in range(10):
        for inputs, targets in batches():
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                outputs = model(share_of(inputs, ctx))
                dtype = str(outputs.dtype)
                loss = torch.nn.functional.mse_loss(outputs.float(), share_of(targets, ctx))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(ctx.reduce_mean(loss).item())
    parameters = {name: value.detach().cpu() for name, value in model.named_parameters()}
    return {
        "dtype": dtype,
        "losses": losses,
        "scale": scaler.get_scale(),
        "parameters": parameters,
    }


def accumulate(ctx: RankContext) -> dict[str, Any]:
    """Accumulate the gradients of two batches, of which only the second synchronises."""
    import torch

    model = ctx.wrap(torch.nn.Linear(4, 1, bias=False))
    ones = torch.ones(2, 4, device=ctx.device)
    with model.no_sync():
        model(ones * (ctx.rank + 1)).mean().backward()
    before = ctx.unwrap(model).weight.grad.tolist()
    model(ones).mean().backward()
    return {"before": before, "after": ctx.unwrap(model).weight.grad.tolist()}


@contextlib.contextmanager
def initialised_cuda() -> Iterator[torch.Tensor]:
    """Keep a tensor on the GPU, which initialises CUDA in this process."""
    import torch

    yield torch.ones(1, device="cuda")
    torch.cuda.empty_cache()
