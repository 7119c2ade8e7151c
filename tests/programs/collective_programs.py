"""Ranks that get out of step: not all of them make the same collectives."""

from __future__ import annotations

import _thread
import asyncio
import importlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import scripts
import torch
import torch.distributed as dist
from torch import nn
from training_programs import FAULT_STEP, STEPS, Fault, average_gradients, cleanup, mark, setup

from ddpsafe import LaunchTimeoutError, RankContext
from ddpsafe._worker.torch_hooks import read_recorders
from ddpsafe.checkpoint import Checkpointer
from ddpsafe.checkpoint.errors import SaveTimeoutError


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


def return_early(
    ctx: RankContext, folder: Path, wait: Callable[[], object] = average_gradients
) -> str:
    """Return through a condition that is true only on this rank."""
    average_gradients()
    if ctx.rank == 1:
        mark(folder)
        return "early stopping"
    wait()
    return "trained"


def wait_for_irecv() -> None:
    """Wait for what rank 1 should send, in a wait that shows no peer."""
    work = dist.irecv(torch.empty(1), 1)
    assert work is not None
    work.wait()


def wait_in_monitored_barrier() -> None:
    """Wait in a barrier that torch makes of sends and receives."""
    dist.monitored_barrier()


def skip_the_monitored_barrier_of_a_group(ctx: RankContext, folder: Path) -> None:
    """Leave out, on rank 2, the barrier of its group with rank 0, in which it has the number 1."""
    group = dist.new_group([0, 2])
    mark(folder)
    if ctx.rank == 0:
        dist.monitored_barrier(group, timedelta(seconds=2))
    dist.all_reduce(torch.ones(1))


def come_apart_in_the_second_group(
    rank: int, world_size: int, folder: Path, fault: Fault, calls: int, timeout_s: float = 60
) -> None:
    """Make a second group, shorter than the first, in which rank 1 meets the fault and the others wait."""
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


# Some ranks are in a wait of ddpsafe's own, such as a barrier or a save, and others elsewhere.


def part_ways(ctx: RankContext, folder: Path, how: str) -> None:
    """Train for some steps, then let one rank make another call than the others."""
    model = ctx.wrap(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    for _ in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
    is_odd = ctx.rank == ("return" in how or how in ("skipped save", "two barriers"))
    if is_odd:
        mark(folder)
    if how == "evaluation":
        if is_odd:
            model.eval()
            with torch.no_grad():
                model(torch.randn(8, 4))  # stuck here
        ctx.barrier("evaluated")  # stuck here
    elif how == "reduction":
        if is_odd:
            ctx.reduce_mean(1.0)  # stuck here
        ctx.barrier()  # stuck here
    elif how == "download":
        with ctx.rank_zero_first():  # stuck here
            if is_odd:
                dist.barrier()  # stuck here
    elif how == "two barriers":
        if is_odd:
            ctx.barrier("one")  # stuck here
        ctx.barrier("all")  # stuck here
    elif how == "return":
        if not is_odd:
            ctx.barrier("end")
    elif how == "new group":
        if is_odd:
            dist.all_reduce(torch.ones(1))  # stuck here
        dist.new_group([0, 1, 2])  # stuck here
    elif how == "return before new group":
        if not is_odd:
            dist.new_group([0, 1, 2])
    else:
        with Checkpointer(folder / "checkpoints") as checkpointer:
            if is_odd == (how == "save"):
                checkpointer.save({"model": model}, step=1)  # stuck here
            # The buffers come from rank 0.
            model(torch.randn(8, 4))  # stuck here


def save_elsewhere(ctx: RankContext, folder: Path) -> None:
    """Save into another directory on each rank, with Checkpointers that both of them have made."""
    with Checkpointer(folder / "first") as first, Checkpointer(folder / "second") as second:
        average_gradients()
        mark(folder)
        (second if ctx.rank else first).save({"step": torch.tensor(1)}, step=1)


def make_two_groups_at_once(ctx: RankContext, folder: Path, slow_s: float) -> str:
    """Make a group of ranks 2 and 3, and one of 0 and 1, while rank 1 is busy and rank 3 waits for rank 0."""
    mark(folder)
    outer = dist.new_group([0, 3])
    if ctx.rank == 1:
        time.sleep(slow_s)
    if ctx.rank == 3:
        dist.all_reduce(torch.ones(1), group=outer)
    dist.new_group([2, 3])
    dist.new_group([0, 1])
    if ctx.rank == 0:
        dist.all_reduce(torch.ones(1), group=outer)
    return "done"


def wait_for_a_slow_rank(ctx: RankContext, folder: Path, slow_s: float) -> str:
    """Wait in every way for a rank that is slow, each time another one; all of it is healthy."""
    with Checkpointer(folder / "checkpoints") as checkpointer:
        for step in range(1, 4):
            if ctx.rank == step % ctx.world_size:
                time.sleep(slow_s)
            ctx.barrier(f"step {step}")
            with ctx.rank_zero_first():
                if ctx.is_main:
                    time.sleep(slow_s)
            if ctx.rank == (step + 1) % ctx.world_size:
                time.sleep(slow_s)
            checkpointer.save({"step": torch.tensor(step)}, step=step)
            average_gradients()
        if not ctx.is_main:
            time.sleep(slow_s)
        checkpointer.save({"step": torch.tensor(9)}, step=9, asynchronous=True)
        average_gradients()
        ctx.barrier("before the end")
    return "done"


def give_up_waiting(ctx: RankContext, folder: Path, slow_s: float) -> str:
    """Wait at a barrier with a limit on rank 0, which gives up for all, while the last rank is elsewhere."""
    del folder
    average_gradients()
    try:
        if ctx.is_main:
            ctx.barrier("volunteers", timeout=slow_s)
        elif ctx.rank < ctx.world_size - 1:
            ctx.barrier("volunteers")
    except LaunchTimeoutError as error:
        average_gradients()
        return f"alone without {error.missing_ranks}"
    average_gradients()
    return "done"


def save_alone_with_a_limit(ctx: RankContext, folder: Path, slow_s: float) -> str:
    """Save on rank 0 alone, where a save may fail, or may take so long: the training continues."""
    for options in ({"on_failure": "raise"}, {"on_failure": "warn"}):
        limit = timedelta(seconds=slow_s)
        path = folder / str(options["on_failure"])
        with Checkpointer(path, timeout=limit, **options) as checkpointer:  # type: ignore[arg-type]
            if ctx.is_main:
                try:
                    checkpointer.save({"step": torch.tensor(1)}, step=1)
                except SaveTimeoutError:
                    assert options["on_failure"] == "raise"
            average_gradients()
    return "done"


def call_from_a_loop(ctx: RankContext, folder: Path, slow_s: float) -> str:
    """Make a call in a loop of asyncio, in a callback of an executor, and in a thread that `threading` does not know."""
    del folder
    group = dist.new_group()

    def call(_: object = None) -> None:
        dist.all_reduce(torch.ones(2), group=group)

    async def call_later() -> None:
        await asyncio.sleep(slow_s)
        call()

    def sleep_and_call() -> None:
        time.sleep(slow_s)
        call()

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    starts: tuple[Callable[[], object], ...] = (
        lambda: asyncio.run_coroutine_threadsafe(call_later(), loop),
        lambda: loop.call_soon_threadsafe(loop.call_later, slow_s, call),
        lambda: executor.submit(time.sleep, slow_s).add_done_callback(call),
        lambda: pool.apply_async(time.sleep, (slow_s,), callback=call),
        lambda: _thread.start_new_thread(sleep_and_call, ()),
    )
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor,
        ThreadPool(1) as pool,
    ):
        for start in starts:
            if ctx.is_main:
                start()
            else:
                call()
            average_gradients()
    return "done"


def handle_a_signal_in_a_barrier(ctx: RankContext, folder: Path, slow_s: float) -> str:
    """Let a handler meet the other rank while the main thread waits at a barrier, as some save on a signal."""

    def on_alarm(*_: object) -> None:
        (folder / "handling").touch()
        time.sleep(slow_s)
        average_gradients()

    if ctx.rank == 1:
        signal.signal(signal.SIGALRM, on_alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    else:
        while not (folder / "handling").exists():
            time.sleep(0.01)
        average_gradients()
    ctx.barrier("end")
    return "done"


def call_in_threads(ctx: RankContext, folder: Path, how: str) -> None:
    """Make calls that meet other ranks in a second thread, in a way that never ends."""
    average_gradients()
    mark(folder)
    if how == "order":  # one group for both threads: the order of their calls differs between ranks
        thread = threading.Thread(target=lambda: dist.broadcast(torch.ones(2), 0), name="weights")
        if ctx.rank == 1:
            thread.start()
            wait_until_called("broadcast", (2,))
        else:
            threading.Thread(target=start_after_reduce, args=(thread,), daemon=True).start()
        dist.all_reduce(torch.ones(3))  # stuck here
    elif how == "evaluation":
        model = ctx.wrap(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
        if ctx.is_main:
            thread = threading.Thread(target=evaluate, args=(model,), name="evaluation")
            thread.start()
            thread.join()  # stuck here
        ctx.barrier("epoch")  # stuck here
    else:
        if ctx.is_main:
            thread = threading.Thread(target=ctx.barrier, args=("uploaded",), name="upload")
            thread.start()
            thread.join()  # stuck here
        dist.all_reduce(torch.ones(3))  # stuck here


def evaluate(model: torch.nn.Module) -> None:
    """Run a model in eval() mode."""
    model.eval()
    with torch.no_grad():
        model(torch.randn(8, 4))


def wait_until_called(name: str, shape: tuple[int, ...]) -> None:
    """Wait until this rank has called a collective of that name with a tensor of that shape."""
    while not any(
        (call.name, call.sizes) == (f"gloo:{name}", f"[{list(shape)}]")
        for call in read_recorders(asks_events=False)[0]
    ):
        time.sleep(0.01)


def start_after_reduce(thread: threading.Thread) -> None:
    """Start a thread once the main thread is in its call."""
    wait_until_called("all_reduce", (3,))
    thread.start()


def work_in_threads(ctx: RankContext, folder: Path, slow_s: float) -> str:
    """Meet the other ranks in two threads, each with a group and a barrier of its own, while one rank is slow."""
    group = dist.new_group()

    def background() -> None:
        for step in range(6):
            if ctx.rank == (step + 1) % ctx.world_size:
                time.sleep(slow_s)
            ctx.barrier(f"background {step % 2}")
            dist.all_reduce(torch.ones(4), group=group)

    thread = threading.Thread(target=background, name="background")
    thread.start()
    with Checkpointer(folder / "checkpoints") as checkpointer:
        for step in range(1, 7):
            if ctx.rank == step % ctx.world_size:
                time.sleep(slow_s)
            average_gradients()
            ctx.barrier("step")
            if step % 3 == 0:
                checkpointer.save({"step": torch.tensor(step)}, step=step, asynchronous=True)
    thread.join()
    return "done"


def leave_a_thread_behind(ctx: RankContext, folder: Path, slow_s: float) -> str:
    """Return while a thread still meets the other ranks: that is healthy, however long it takes."""
    del folder

    def background() -> None:
        for step in range(4):
            if ctx.rank == 1:
                time.sleep(slow_s)
            dist.all_reduce(torch.ones(4))
            ctx.barrier(f"background {step}")

    thread = threading.Thread(target=background, name="background")
    thread.start()
    if ctx.rank != 1:
        thread.join()
    else:
        wait_until_called("all_reduce", (4,))
    return "done"
