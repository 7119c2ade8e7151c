"""Errors that wrap, hide or resemble another rank's failure; run by test_wrapped_error.py."""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from exception_programs import raise_own_error
from hang_programs import count_reads
from training_programs import FAULT_STEP, STEPS, Fault, average_gradients, mark

from ddpsafe import RankContext


def exit_with_one() -> None:
    """Exit as ``except Exception: sys.exit(1)`` does."""
    sys.exit(1)


def let_through() -> None:
    """Raise it again."""
    raise  # noqa: PLE0704 - called in an except block


def train_in_try(
    ctx: RankContext, folder: Path, fault: Fault, handle: Callable[[], object]
) -> None:
    """Train; rank 1 meets the fault, and all ranks handle the resulting error in the same way."""
    try:
        for step in range(STEPS):
            if step == FAULT_STEP and ctx.rank == 1:
                mark(folder)
                fault(folder)
            average_gradients()
    except Exception:  # noqa: BLE001 - as it is often written
        handle()


def train_in_an_except_block(ctx: RankContext, folder: Path, fault: Fault) -> None:
    """Do the same while an expected error is being handled."""
    try:
        import no_such_module_at_all  # noqa: F401 - it is not there
    except ImportError:
        for step in range(STEPS):
            if step == FAULT_STEP and ctx.rank == 1:
                mark(folder)
                fault(folder)
            ctx.all_gather(step) if step > FAULT_STEP else average_gradients()


def be_slow_in_an_except_block(ctx: RankContext, meet: Callable[[RankContext], object]) -> str:
    """Handle an expected error with a collective that some ranks enter late; all succeed."""
    average_gradients()
    if ctx.rank == 2:
        time.sleep(2)
    try:
        import no_such_module_at_all  # noqa: F401 - it is not there
    except ImportError:
        meet(ctx)
    average_gradients()
    return "well"


def scatter(ctx: RankContext) -> None:
    """Scatter parts whose sizes only the source knows."""
    out: list[object] = [None]
    dist.scatter_object_list(out, list(range(ctx.world_size)) if ctx.rank == 0 else None, src=0)


def gather_in_a_subgroup(ctx: RankContext) -> None:
    """Gather among the last two ranks while the first one continues."""
    group = dist.new_group([1, 2])
    if ctx.rank == 2:
        time.sleep(2)
    if ctx.rank > 0:
        dist.all_gather_object([None, None], ctx.rank, group=group)


def count_reads_of_meetings(ctx: RankContext, _folder: Path) -> int:
    """Make collectives while an error is being handled; return how often the rank was asked."""
    try:
        import no_such_module_at_all  # noqa: F401 - it is not there
    except ImportError:
        return count_reads(lambda: [ctx.all_gather(step) for step in range(20)])
    return -1


def average_other_metrics_in_finally(ctx: RankContext, folder: Path) -> None:
    """Fail on rank 1, whose `finally` averages different metrics than the others' step."""
    if ctx.rank != 1:
        ctx.reduce_mean({"loss": 1.0})
        return
    try:
        mark(folder)
        raise_own_error(folder)
    finally:
        ctx.reduce_mean({"final": 1.0})


def be_killed_in_an_except_block(ctx: RankContext, folder: Path) -> None:
    """Kill rank 1 while it waits for the others and handles an expected error."""
    average_gradients()
    if ctx.rank != 1:
        time.sleep(1)
        average_gradients()
    try:
        import no_such_module_at_all  # noqa: F401 - it is not there
    except ImportError:
        threading.Timer(0.3, _kill, args=(folder,)).start()
        ctx.all_gather(ctx.rank)


def _kill(folder: Path) -> None:
    mark(folder)
    os.kill(os.getpid(), 9)


def fail_in_the_handler(_folder: Path) -> None:
    """Handle a timeout of its own, for a key that was never set, and fail in its handler."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        store.wait(["warm"], timedelta(seconds=0.2))
    except dist.DistError:
        _ = {}["label"]


def fail_inside_the_model(ctx: RankContext, folder: Path) -> None:
    """Fail on rank 1 in the forward pass, which DDP calls."""

    def serve(*_: object) -> None:
        if ctx.rank == 1:
            mark(folder)
            message = "feature server [10.0.0.5]:443: Socket Timeout"
            raise RuntimeError(message)

    model = torch.nn.Linear(1, 1)
    model.register_forward_pre_hook(serve)
    ctx.wrap(model)(torch.ones(1)).backward()


def meet_in_finally(ctx: RankContext, folder: Path, meet: Callable[[RankContext], object]) -> None:
    """Make a collective in `finally` on all ranks, even if rank 1 has failed and the others train."""
    try:
        for step in range(STEPS):
            if step == FAULT_STEP and ctx.rank == 1:
                mark(folder)
                raise_own_error(folder)
            average_gradients()
    finally:
        meet(ctx)


def gather(ctx: RankContext) -> None:
    """Gather metrics."""
    ctx.all_gather({"rank": ctx.rank})


def reduce(ctx: RankContext) -> None:
    """Average metrics."""
    ctx.reduce_mean({"loss": 1.0, "accuracy": 0.5})


def broadcast(ctx: RankContext) -> None:
    """Broadcast from rank 0."""
    ctx.broadcast("done")


def monitor(_ctx: RankContext) -> None:
    """Enter gloo's monitored barrier."""
    dist.monitored_barrier()


def gather_tensors(ctx: RankContext) -> None:
    """Gather tensors, which is not watched: the error is found beneath the timeout."""
    dist.all_gather([torch.ones(8)] * ctx.world_size, torch.ones(8))


def lose_a_download(_folder: Path) -> None:
    """Have a server reset the connection, with the text that gloo uses for a lost rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_reset_one, args=(server,)).start()
        port = server.getsockname()[1]
        urllib.request.urlopen(f"https://127.0.0.1:{port}/resnet50.pth", timeout=5)


def _reset_one(server: socket.socket) -> None:
    connection, _ = server.accept()
    connection.recv(10)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def die_beside_a_rank_that_exits(ctx: RankContext, folder: Path) -> None:
    """Kill rank 1; the others catch the resulting error and exit without a report."""
    try:
        average_gradients()
        if ctx.rank == 1:
            mark(folder)
            os.kill(os.getpid(), 9)
        average_gradients()
    except Exception:  # noqa: BLE001 - as it is often written
        os._exit(1)


def hang_in_a_subgroup(ctx: RankContext, folder: Path, fault: Fault) -> None:
    """Train with tensor parallelism of two; rank 1 meets the fault, and rank 0 waits there for it."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine: Any = groups[ctx.rank // 2]
    for step in range(STEPS):
        if step == FAULT_STEP and ctx.rank == 1:
            mark(folder)
            fault(folder)
        dist.all_reduce(torch.ones(2), group=mine)
        average_gradients()


def meet_under_other_names(ctx: RankContext, folder: Path, wait_s: float) -> None:
    """Enter one barrier on rank 1 and a different one on the other ranks."""
    if ctx.rank == 1:
        mark(folder)
    ctx.barrier("evaluated" if ctx.rank == 1 else "trained", timeout=timedelta(seconds=wait_s))


def make_a_group_alone(ctx: RankContext, folder: Path) -> None:
    """Make a group on rank 0 only, although all ranks have to, while the others train."""
    average_gradients()
    if ctx.rank == 0:
        mark(folder)
        dist.new_group([0, 1])
    average_gradients()


def average_other_shapes(ctx: RankContext, folder: Path) -> None:
    """Average a number on rank 0 and two on rank 1."""
    mark(folder)
    ctx.reduce_mean(1.0 if ctx.rank == 0 else torch.tensor([1.0, 2.0]))


def hang_after_a_thread_died(folder: Path) -> None:
    """Wait for a thread that has died."""
    feeder = threading.Thread(target=raise_own_error, args=(folder,))
    feeder.start()
    threading.Event().wait()
