"""Train a small CNN on handwritten digits, with one rank for each GPU or core.

Start it with ``python examples/digits/train.py``,
or with ``torchrun --standalone --nproc-per-node 2 examples/digits/train.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ddpsafe
import torch
from ddpsafe.data import gather_exact
from digits_data import Digits, prepare
from model import DigitNet, find_misread, read_digits, train_epoch
from options import parse_options
from pictures import Epoch, draw_curves, draw_misread
from tqdm import tqdm

if TYPE_CHECKING:
    from argparse import Namespace


def train(ctx: ddpsafe.RankContext, options: Namespace) -> None:
    """Train and evaluate together; rank 0 shows the progress and draws the pictures."""
    with ctx.rank_zero_first():
        prepare(options.data)
    train_set, test_set = Digits(options.data / "train"), Digits(options.data / "test")
    train_batches = ctx.loader(train_set, batch_size=max(1, 64 // ctx.world_size))
    test_batches = ctx.loader(test_set, batch_size=256, train=False)

    model = ctx.wrap(DigitNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    history, misread = [], {}
    progress = tqdm(range(options.epochs), "epochs", disable=not ctx.is_main)
    for _ in progress:
        loss = ctx.reduce_mean(train_epoch(model, train_batches, optimizer, ctx.device))
        readings = read_digits(ctx.unwrap(model), test_batches, ctx.device)
        # Every test image was read by one rank, once: here they are in the order of test_set.
        readings = gather_exact(readings, test_batches.sampler, n=len(test_set))
        misread = find_misread(readings, test_set.labels)
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
