"""What goes wrong in ranks that another launcher has started; run by test_process_group.py."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

import scripts
from exception_programs import raise_own_error
from training_programs import average_gradients, mark, since

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ddpsafe import RankContext


def fail_attached(folder: Path, style: str) -> None:
    """Fail on rank 1, inside the context manager or between `setup` and `cleanup`."""
    import ddpsafe

    def work(ctx: RankContext) -> None:
        average_gradients()
        if ctx.rank == 1:
            mark(folder)
            raise_own_error(folder)
        average_gradients()

    with _timed(folder):
        if style == "with":
            with ddpsafe.process_group("gloo") as ctx:
                work(ctx)
        else:
            ctx = ddpsafe.setup(backend="gloo")
            try:
                work(ctx)
            finally:
                ddpsafe.cleanup()


def miss_a_barrier_attached(folder: Path, timeout_s: float) -> str:
    """Let rank 1 go elsewhere while the others wait at a barrier."""
    import ddpsafe

    with _timed(folder), ddpsafe.process_group("gloo", timeouts={"barrier": timeout_s}) as ctx:
        average_gradients()
        if ctx.rank != 1:
            ctx.barrier("evaluated")
        mark(folder)
        scripts.wait_until(lambda: len(list(folder.glob("over-*"))) == ctx.world_size - 1)
        return "left alone"


@contextlib.contextmanager
def _timed(folder: Path) -> Iterator[None]:
    """Write down how long after the fault the block was left."""
    entered = time.monotonic()
    try:
        yield
    finally:
        fault = folder / "fault"
        struck = float(fault.read_text()) if fault.exists() else entered
        (folder / f"over-{os.environ['RANK']}").write_text(repr(since(struck)))
