"""Fit a line to noisy points, with one rank for each of up to four cores."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup(rank: int, world_size: int) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup() -> None:
    dist.destroy_process_group()


def noisy_points(count: int) -> TensorDataset:
    """Sample y = 3 x + 2 with noise, the same points on every rank."""
    random = torch.Generator().manual_seed(0)
    x = torch.rand(count, 1, generator=random)
    return TensorDataset(x, 3 * x + 2 + 0.1 * torch.randn(count, 1, generator=random))


def train(rank: int, world_size: int, epochs: int) -> None:
    """Train, and print the line at the end."""
    setup(rank, world_size)
    points = noisy_points(1024)
    sampler = DistributedSampler(points)
    batches = DataLoader(points, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        loss_sum = torch.zeros(1)
        for x, y in batches:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss_sum.item() / len(batches) / world_size:.4f}")
    if rank == 0:
        slope, offset = (parameter.item() for parameter in model.parameters())
        print(f"y = {slope:.2f} x + {offset:.2f}")
    cleanup()


if __name__ == "__main__":
    world_size = min(4, os.cpu_count() or 1)
    mp.spawn(train, args=(world_size, 20), nprocs=world_size)
