"""Ranks that get out of step: not all of them make the same collectives."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import scripts
import torch
import torch.distributed as dist
from torch import nn
from training_programs import FAULT_STEP, STEPS, Fault, average_gradients, cleanup, mark, setup

from ddpsafe import RankContext


def skip_one(ctx: RankContext, folder: Path, culprit: int) -> None:
    """Skip one all-reduce, as a ``continue`` on a bad batch does, and then save."""
    for step in range(STEPS):
        if step == FAULT_STEP and ctx.rank == culprit:
            mark(folder)
            continue
        average_gradients()
    dist.all_gather_object([None] * ctx.world_size, ctx.rank)


def swallow_an_error(ctx: RankContext, folder: Path, when: str) -> None:
    """Handle an error on rank 1 by skipping the batch, as scripts do that run out of memory."""

    class Fails(torch.autograd.Function):
        """Fails in the backward pass."""

        @staticmethod
        def forward(_: object, value: Any) -> Any:
            """Return a copy."""
            return value.clone()

        @staticmethod
        def backward(_: object, *__: object) -> Any:
            """Fail."""
            raise MemoryError

    class Model(torch.nn.Module):
        """Two layers, with a failure between them."""

        fails = ""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

        def forward(self, batch: Any) -> Any:
            """Return the output."""
            if self.fails == "forward":
                raise MemoryError
            hidden = self.first(batch)
            return self.last(Fails.apply(hidden) if self.fails else hidden)  # type: ignore[no-untyped-call]  # torch

    model = Model()
    wrapped = ctx.wrap(model)
    for step in range(STEPS):
        is_bad = ctx.rank == 1 and step == FAULT_STEP
        try:
            model.fails = when if is_bad else ""
            wrapped(torch.ones(2, 4)).sum().backward()
        except MemoryError as error:
            mark(folder)
            print(f"step {step}: {type(error).__name__}, skipping this batch", flush=True)
        model.fails = ""


def run_out_of_batches(ctx: RankContext, folder: Path, batches: list[int]) -> int:
    """Train on as many batches as this rank has."""
    for _ in range(batches[ctx.rank]):
        average_gradients()
    if batches[ctx.rank] == min(batches):
        mark(folder)
    return ctx.rank


def return_early(ctx: RankContext, folder: Path) -> str:
    """Return through a condition that is true only on this rank."""
    average_gradients()
    if ctx.rank == 1:
        mark(folder)
        return "early stopping"
    average_gradients()
    return "trained"


def come_apart_in_the_second_group(
    rank: int, world_size: int, folder: Path, fault: Fault, calls: int, timeout_s: float = 60
) -> None:
    """Make a second group, in which rank 1 meets the fault after some calls and the others wait.

    The first group has made more calls at its end than the second one will.
    """
    setup(rank, world_size)
    for _ in range(2 * calls + STEPS):
        average_gradients()
    cleanup()
    setup(rank, world_size, timeout_s=timeout_s)
    for _ in range(calls):
        average_gradients()
    if rank == 1:
        mark(folder)
        fault(folder)
    else:
        average_gradients()


def pass_other_shapes(
    ctx: RankContext, folder: Path, culprit: int, its_size: int, others_size: int
) -> None:
    """Reduce a last batch of a different size than the others'."""
    average_gradients()
    mark(folder)
    dist.all_reduce(torch.ones(its_size if ctx.rank == culprit else others_size))  # stuck here
    dist.all_reduce(torch.ones(4))


def call_another_collective(ctx: RankContext, folder: Path, culprit: int) -> None:
    """Broadcast where the others reduce."""
    average_gradients()
    if ctx.rank == culprit:
        mark(folder)
        dist.all_gather([torch.ones(8)] * ctx.world_size, torch.ones(8))  # stuck here
    else:
        average_gradients()


def differ_under_detail(ctx: RankContext, folder: Path, how: str) -> None:
    """Let rank 1 differ in its second call, while torch compares the calls of the ranks."""
    average_gradients()
    if ctx.rank != 1:
        average_gradients()
        return
    mark(folder)
    if how == "another call":
        dist.barrier()  # stuck here
    else:
        dist.all_reduce(torch.ones(9))  # stuck here


# Rank 0 works alone.


def work_alone_at_the_end(ctx: RankContext, _folder: Path, takes_s: float) -> str:
    """Let rank 0 save and evaluate after the others have returned."""
    average_gradients()
    if not ctx.is_main:
        return "done"
    time.sleep(takes_s)
    return "saved"


def evaluate_on_rank_zero(ctx: RankContext, folder: Path) -> None:
    """Evaluate on rank 0 alone through the wrapper: BatchNorm's buffers are then broadcast."""
    model = _train_with_buffers(ctx)
    if ctx.is_main:
        mark(folder)
        model(_batch())
    for _ in range(STEPS):
        model(_batch()).sum().backward()


def evaluate_unwrapped_on_rank_zero(ctx: RankContext, _folder: Path) -> str:
    """Evaluate on rank 0 alone, through the bare model."""
    model = _train_with_buffers(ctx)
    if ctx.is_main:
        ctx.unwrap(model)(_batch())
    for _ in range(STEPS):
        model(_batch()).sum().backward()
    return "evaluated" if ctx.is_main else "trained"


def _train_with_buffers(ctx: RankContext) -> Any:
    """Make one step of a wrapped model that has buffers."""
    # The first DDP object imports 800 modules before its first collective. On a busy machine the ranks
    # would be further apart than the timeout of these tests.
    importlib.import_module("torch._dynamo")
    ctx.barrier()
    model = ctx.wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model(_batch()).sum().backward()
    return model


def _batch() -> Any:
    return torch.ones(8, 4)


def come_after_the_timeout(ctx: RankContext, folder: Path) -> None:
    """Enter an all-reduce on rank 1 after the others have stopped waiting for it."""
    average_gradients()
    if ctx.rank == 1:
        mark(folder)
        scripts.wait_until((folder / "given-up").exists)
        (folder / "comes").touch()
        average_gradients()
    try:
        average_gradients()
    except RuntimeError:
        (folder / "given-up").touch()
        # On a busy core it may not be awake for a second.
        scripts.wait_until((folder / "comes").exists)
        raise


def send_nothing(ctx: RankContext, folder: Path) -> None:
    """Work on rank 1 while rank 0 waits to receive from it, and rank 2 waits for both."""
    average_gradients()
    if ctx.rank == 0:
        dist.recv(torch.ones(8), 1)
    if ctx.rank == 1:
        pending = dist.all_reduce(torch.ones(8), async_op=True)
        mark(folder)
        time.sleep(60)  # stuck here
        pending.wait()
    average_gradients()


def receive_from_each_other(ctx: RankContext, folder: Path) -> None:
    """Wait on both ranks for the other one to send."""
    average_gradients()
    if ctx.rank == 1:
        mark(folder)
    dist.recv(torch.ones(8), 1 - ctx.rank)
