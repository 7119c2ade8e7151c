"""Train a small CNN on handwritten digits, with one rank for each GPU or core.

Start it with ``python examples/digits/train_by_hand.py``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from digits_data import Digits, prepare
from model import DigitNet, find_misread, read_digits, train_epoch
from options import parse_options
from pictures import Epoch, draw_curves, draw_misread
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

if TYPE_CHECKING:
    from argparse import Namespace


def setup(rank: int, world_size: int) -> torch.device:
    """Join the process group."""
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", rank=rank, world_size=world_size)
        return torch.device("cuda", rank)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return torch.device("cpu")


def cleanup() -> None:
    """Leave the process group."""
    dist.destroy_process_group()


def train(rank: int, world_size: int, options: Namespace) -> None:
    """Train and evaluate on all ranks; rank 0 shows the progress and draws the pictures."""
    device = setup(rank, world_size)
    torch.manual_seed(0)
    if rank == 0:
        prepare(options.data)
    dist.barrier()
    train_set, test_set = Digits(options.data / "train"), Digits(options.data / "test")
    sampler = DistributedSampler(train_set, world_size, rank)
    train_batches = DataLoader(train_set, max(1, 64 // world_size), sampler=sampler)
    # Every test image on exactly one rank: a DistributedSampler would repeat some of them.
    my_share = Subset(test_set, range(rank, len(test_set), world_size))
    test_batches = DataLoader(my_share, batch_size=256)

    model = DistributedDataParallel(DigitNet().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    history, misread = [], {}
    progress = tqdm(range(options.epochs), "epochs", disable=rank != 0)
    for epoch in progress:
        sampler.set_epoch(epoch)
        loss = torch.tensor(train_epoch(model, train_batches, optimizer, device), device=device)
        dist.all_reduce(loss)
        loss = loss.item() / world_size
        shares = [None] * world_size
        dist.all_gather_object(shares, read_digits(model.module, test_batches, device))
        readings = torch.empty_like(test_set.labels)
        for owner, share in enumerate(shares):
            readings[owner::world_size] = share
        misread = find_misread(readings, test_set.labels)
        schedule.step()
        history.append(Epoch(loss, accuracy=1 - len(misread) / len(test_set)))
        progress.set_postfix(history[-1]._asdict())

    if rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        draw_curves(history, options.out / "curves.png")
        draw_misread(test_set, misread, options.out / "misread.png")
        print(f"test accuracy {history[-1].accuracy:.4f} (world_size {world_size})")
        print(f"pictures: {options.out}/curves.png, {options.out}/misread.png")
    cleanup()


if __name__ == "__main__":
    options = parse_options()
    mp.spawn(train, args=(options.nproc_per_node, options), nprocs=options.nproc_per_node)
