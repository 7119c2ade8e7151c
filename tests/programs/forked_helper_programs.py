"""Rank functions with helpers that `multiprocessing` forks, which inherit the rank's pipes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from crash_programs import vanish_badly
from exception_programs import LostSampleError, raise_own_error
from training_programs import average_gradients

from ddpsafe import RankContext

WORK_S = 2.0
"""How long the rank works while the others wait for it in a collective."""

IMPORT_S = 3.0
"""How long torch may take to create its first optimizer."""


def go_on_without_the_helper(ctx: RankContext, _folder: Path) -> int:
    """Let an optional helper fail in rank 1, which then continues and finishes."""
    if ctx.rank == 1:
        _run_helper(_fail_and_destroy)
        time.sleep(WORK_S)
    average_gradients()
    return ctx.rank


def vanish_after_the_helper(folder: Path) -> None:
    """Exit without a report; the only exception was a helper's."""
    _run_helper(_fail_and_destroy)
    vanish_badly(folder)


def fail_while_the_helper_trains(folder: Path) -> None:
    """Exit without a report while handling an exception, and while a forked helper makes steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # takes a second
    try:
        raise_own_error(folder)
    except LostSampleError:
        dist.destroy_process_group()
    _run_helper(optimizer.step)
    os._exit(7)


def _run_helper(work: Callable[[], object]) -> None:
    helper = multiprocessing.get_context("fork").Process(target=work)
    helper.start()
    helper.join()


def _fail_and_destroy() -> None:
    try:
        Path("/nope/eval.json").read_text(encoding="utf-8")
    except OSError:
        with contextlib.suppress(Exception):  # torch decides whether a fork may destroy it
            dist.destroy_process_group()
        raise
