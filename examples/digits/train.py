"""Train a small CNN on handwritten digits, with one rank for each GPU or core.

Start it with ``python examples/digits/train.py``,
or with ``torchrun --standalone --nproc-per-node 2 examples/digits/train.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ddpsafe
import torch
from digits_data import Digits, prepare
from model import DigitNet, find_misread, train_epoch
from options import parse_options
from pictures import Epoch, draw_curves, draw_misread
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

if TYPE_CHECKING:
    from argparse import Namespace


def train(ctx: ddpsafe.RankContext, options: Namespace) -> None:
    """Train and evaluate together; rank 0 shows the progress and draws the pictures."""
    with ctx.rank_zero_first():
        prepare(options.data)
    train_set, test_set = Digits(options.data / "train"), Digits(options.data / "test")
    sampler = DistributedSampler(train_set, ctx.world_size, ctx.rank)
    batches = DataLoader(train_set, max(1, 64 // ctx.world_size), sampler=sampler)
    # Every test image on exactly one rank: a DistributedSampler would repeat some of them.
    my_share = range(ctx.rank, len(test_set), ctx.world_size)

    model = ctx.wrap(DigitNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    history, misread = [], {}
    progress = tqdm(range(options.epochs), "epochs", disable=not ctx.is_main)
    for epoch in progress:
        sampler.set_epoch(epoch)
        loss = ctx.reduce_mean(train_epoch(model, batches, optimizer, ctx.device))
        shares = ctx.gather(find_misread(ctx.unwrap(model), test_set, my_share, ctx.device))
        misread = {index: reading for share in shares for index, reading in share.items()}
        schedule.step()
        history.append(Epoch(loss, accuracy=1 - len(misread) / len(test_set)))
        progress.set_postfix(history[-1]._asdict())

    if ctx.is_main:
        options.out.mkdir(parents=True, exist_ok=True)
        draw_curves(history, options.out / "curves.png")
        draw_misread(test_set, misread, options.out / "misread.png")
        print(f"test accuracy {history[-1].accuracy:.4f} (world_size {ctx.world_size})")
        print(f"pictures: {options.out}/curves.png, {options.out}/misread.png")


if __name__ == "__main__":
    options = parse_options()
    ddpsafe.launch(train, args=(options,), nproc_per_node=options.nproc_per_node, seed=0)
