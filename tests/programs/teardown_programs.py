"""Scripts that end the way the official tutorial ends; run by test_teardown.py."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import threading
from typing import Any, Final

import forked_ranks
import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpsafe
from ddpsafe import RankContext
from ddpsafe._launcher.processes.rank_process import RankProcess

HEAVY: Final = (
    "PIL.Image",
    "matplotlib.pyplot",
    "scipy.stats",
    "sklearn.datasets",
    "sklearn.linear_model",
    "torch._dynamo",
)
"""Imports of vision scripts, with which the plain teardown hangs much more often."""

HANG_S: Final = 90
"""A hang of the plain teardown never ends; a slow exit on a busy machine took 20 s and more."""


def import_heavy_modules() -> None:
    """Import those that are installed."""
    for name in HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def keep_numpy_busy() -> None:
    """Start a thread that takes and releases the GIL for as long as the process lives."""
    threading.Thread(target=_multiply_for_ever, daemon=True).start()


def _multiply_for_ever() -> None:
    matrix = np.ones((64, 64))
    while True:
        matrix = matrix @ matrix / 64


def train_as_the_tutorial(rank: int, world_size: int) -> None:
    """Set up, train and clean up by hand; the DDP object is alive when the group is destroyed."""
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    import_heavy_modules()
    keep_numpy_busy()
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = take_two_steps()
    dist.destroy_process_group()
    del model


def train_and_call_nothing(ctx: RankContext) -> int:
    """Train, and leave the teardown to `launch`; the DDP object lives until the function returns."""
    import_heavy_modules()
    keep_numpy_busy()
    take_two_steps()
    return ctx.rank


def take_two_steps() -> object:
    """Train a small DDP model as the tutorial does; return it, alive."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
        optimizer.step()
    return model


def end_again_and_again(rounds: int) -> None:
    """Launch both scripts with two ranks many times in this process; print the exit codes.

    In every twentieth round the ranks are spawned, in the others forked.
    """
    _start_forkserver()
    exit_codes = _note_exit_codes()
    for number in range(1, rounds + 1):
        fields: dict[str, Any] = {
            "start_method": "forkserver" if number % 20 else "spawn",
            "timeouts": {"grace": 2},
            "console": "all",
        }
        ddpsafe.spawn(train_as_the_tutorial, args=(2,), nprocs=2, **fields)
        ddpsafe.launch(train_and_call_nothing, nproc_per_node=2, backend="gloo", **fields)
    print(json.dumps(exit_codes))


def _start_forkserver() -> None:
    """Let the fork server of this process import the heavy modules once, for all ranks."""
    modules = ["torch", "ddpsafe._worker.preload", *HEAVY]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    multiprocessing.forkserver.ensure_running()


def _note_exit_codes() -> dict[str, int]:
    """Count the ranks' exit codes, which a launch does not show once a rank has reported."""
    counts: dict[str, int] = {}
    close = RankProcess.close

    def noting_close(process: RankProcess) -> None:
        code = str(process.exitcode)
        counts[code] = counts.get(code, 0) + 1
        close(process)

    RankProcess.close = noting_close  # type: ignore[method-assign]
    return counts


def train_attached() -> None:
    """Train in a rank that another launcher started; the DDP object outlives the group."""
    keep_numpy_busy()
    with ddpsafe.process_group():
        model = take_two_steps()
    del model


def exit_again_and_again(rounds: int) -> None:
    """Fork two ranks many times, which exit as an interpreter does; print the exit codes.

    A rank that multiprocessing starts leaves through `os._exit`; these run into the destructors of
    Python's and of C++ globals, where plain torch aborts now and then.
    """
    import_heavy_modules()
    counts: dict[str, int] = {}
    for _ in range(rounds):
        port = forked_ranks.free_port()
        pids = [_fork_rank(forked_ranks.by_hand(rank, 2, port)) for rank in range(2)]
        for pid in pids:
            code = str(_exit_code(pid))
            counts[code] = counts.get(code, 0) + 1
    print(json.dumps(counts))


def _fork_rank(env: dict[str, str]) -> int:
    pid = os.fork()
    if pid == 0:
        os.environ.update(env)
        train_attached()
        sys.exit()
    return pid


def _exit_code(pid: int) -> int | None:
    """Wait for a child; -9 means that it hung."""
    process = psutil.Process(pid)
    try:
        return process.wait(timeout=HANG_S)
    except psutil.TimeoutExpired:
        process.kill()
        return process.wait()
