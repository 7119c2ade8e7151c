"""Learn which points lie in a ring, with accumulated gradients and synchronised batch norm.

Start it with ``torchrun --standalone --nproc-per-node 2``.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from ddpsafe import cleanup, current, setup
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATE = 4


def ring(count: int) -> TensorDataset:
    """Sample points, labelled 1 if they are in a ring; the same on every rank."""
    points = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    radius = points.norm(dim=1)
    return TensorDataset(points, ((radius > 0.7) & (radius < 1.6)).long())


def main() -> None:
    """Train, and print the mean of loss and accuracy over all ranks after every epoch."""
    gpu = torch.cuda.is_available()
    device = setup().device
    points = ring(2048)
    sampler = DistributedSampler(points)
    batches = DataLoader(points, batch_size=16, sampler=sampler, pin_memory=gpu)
    net = nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    net = net.to(device)
    model = current().wrap(net, sync_batchnorm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        metrics = torch.zeros(2, device=device)
        for step, (inputs, labels) in enumerate(batches, start=1):
            update = step % ACCUMULATE == 0 or step == len(batches)
            with nullcontext() if update else model.no_sync():
                scores = model(inputs.to(device))
                loss = nn.functional.cross_entropy(scores, labels.to(device))
                (loss / ACCUMULATE).backward()
            hits = scores.argmax(dim=1) == labels.to(device)
            metrics += torch.stack([loss.detach(), hits.float().mean()]) / len(batches)
            if update:
                optimizer.step()
                optimizer.zero_grad()
        metrics = current().reduce_mean(metrics)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {metrics[0]:.3f}, accuracy {metrics[1]:.3f}")
    cleanup()


if __name__ == "__main__":
    main()
