"""Learn to separate two clouds of points, and resume from the last snapshot after a restart.

Start it with ``torchrun --standalone --nproc-per-node 2`` and ``--snapshot <a file>``.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def two_clouds(count: int) -> TensorDataset:
    """Sample points around (-1, -1), labelled 0, and (1, 1), labelled 1; the same on every rank."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 2
    centres = 2 * labels.float().unsqueeze(1) - 1
    return TensorDataset(centres + 0.7 * torch.randn(count, 2, generator=random), labels)


class Snapshot:
    """A model, its optimizer, and how many epochs they have seen, in one file."""

    def __init__(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.path, self.model, self.optimizer = path, model, optimizer

    def load(self, device: torch.device) -> int:
        """Restore the state, if there is one, and return the next epoch."""
        if not self.path.exists():
            return 0
        state = torch.load(self.path, map_location=device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return state["epochs"]

    def save(self, epochs: int) -> None:
        """Write beside the old file, then replace it: a crash in between loses nothing."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        unfinished = self.path.with_suffix(".unfinished")
        torch.save(state | {"epochs": epochs}, unfinished)
        unfinished.replace(self.path)


def main(options: argparse.Namespace) -> None:
    """Train, starting from the snapshot."""
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    points = two_clouds(1024)
    sampler = DistributedSampler(points)
    batches = DataLoader(points, batch_size=32, sampler=sampler, pin_memory=gpu)
    model = nn.Linear(2, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    snapshot = Snapshot(options.snapshot, model, optimizer)
    first_epoch = snapshot.load(device)
    ddp_model = DistributedDataParallel(model)
    for epoch in range(first_epoch, options.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in batches:
            loss = nn.functional.cross_entropy(ddp_model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            snapshot.save(epoch + 1)
            print(f"epoch {epoch} (started with {first_epoch}): loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--snapshot", type=Path, required=True)
    main(parser.parse_args())
