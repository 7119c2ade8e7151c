"""Train a small CNN on handwritten digits, with one rank for each GPU or core.

Start it with ``python examples/digits/train.py``,
or with ``torchrun --standalone --nproc-per-node 2 examples/digits/train.py``.
Kill a rank, and it continues after the last finished epoch; kill the whole job, and it loses at most four.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import ddpsafe
import torch
from ddpsafe.checkpoint import Checkpointer
from ddpsafe.data import gather_exact
from digits_data import Digits, prepare
from model import DigitNet, find_misread, read_digits, train_epoch
from options import parse_options
from pictures import Epoch, draw_curves, draw_misread
from tqdm import tqdm

if TYPE_CHECKING:
    from argparse import Namespace

    from ddpsafe.data import DataLoader
    from torch import nn


def train(ctx: ddpsafe.RankContext, options: Namespace) -> None:
    """Train and evaluate on all ranks; rank 0 shows the progress and draws the pictures."""
    with ctx.rank_zero_first():
        prepare(options.data)
    train_set, test_set = Digits(options.data / "train"), Digits(options.data / "test")
    train_batches = ctx.loader(train_set, batch_size=max(1, 64 // ctx.world_size))
    test_batches = ctx.loader(test_set, batch_size=256, train=False)

    model = ctx.wrap(DigitNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    state |= {"data": train_batches, "history": [], "resumed": []}
    with Checkpointer(options.out / "checkpoints", every=5, memory_every=1) as checkpointer:
        if checkpointer.restore(state) is not None:
            state["resumed"] = [*state["resumed"], len(state["history"])]
        ctx.print(f"ranks {ctx.all_gather(os.getpid())}, {len(state['history'])} epochs done")
        progress = tqdm(train_batches.epochs(options.epochs), "epochs", disable=not ctx.is_main)
        for epoch in progress:
            loss = ctx.reduce_mean(train_epoch(model, train_batches, optimizer, ctx.device))
            misread = misread_digits(ctx, model, test_batches, test_set)
            schedule.step()
            state["history"] = [*state["history"], [loss, 1 - len(misread) / len(test_set)]]
            progress.set_postfix(Epoch(*state["history"][-1])._asdict())
            if checkpointer.is_due(epoch + 1):
                checkpointer.save(state, epoch + 1)

    misread = misread_digits(ctx, model, test_batches, test_set)
    if ctx.is_main:
        history = [Epoch(*epoch) for epoch in state["history"]]
        draw_curves(history, options.out / "curves.png", resumed=state["resumed"])
        draw_misread(test_set, misread, options.out / "misread.png")
        shutil.rmtree(checkpointer.directory)  # so that the next run starts a new training
        print(f"test accuracy {history[-1].accuracy:.4f} (world_size {ctx.world_size})")
        print(f"pictures: {options.out}/curves.png, {options.out}/misread.png")


def misread_digits(
    ctx: ddpsafe.RankContext, model: nn.Module, test_batches: DataLoader, test_set: Digits
) -> dict[int, int]:
    """Read every test image, each on one rank; return the wrong readings by image index."""
    readings = read_digits(ctx.unwrap(model), test_batches, ctx.device)
    # Now every rank has all readings, in the order of test_set.
    readings = gather_exact(readings, test_batches.sampler, n=len(test_set))
    return find_misread(readings, test_set.labels)


if __name__ == "__main__":
    options = parse_options()
    ddpsafe.launch(
        train,
        args=(options,),
        nproc_per_node=options.nproc_per_node,
        seed=0,
        retry=ddpsafe.RetryPolicy(on={"killed"}, attempts=10),
    )
