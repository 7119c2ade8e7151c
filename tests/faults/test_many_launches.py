"""Many launches in a row, successful and failed ones, leak nothing."""

from __future__ import annotations

import atexit
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import leftovers
import psutil
import pytest
from exception_programs import vanish_badly
from fault_kit import World, require_nothing_left
from training_programs import return_rank, train

import ddpsafe

MAX_GROWTH_BYTES = 20 << 20
"""Growth of the launcher's memory: 100 kB for each of 200 launches would be a leak."""


def launch_successfully(world: World) -> None:
    """Launch a program that succeeds."""
    assert len(world.launch(return_rank).values) == world.ranks


def launch_and_fail(world: World) -> None:
    """Launch a program that fails, and drop the error."""
    with pytest.raises(ddpsafe.RankExitedError):
        world.launch(train, vanish_badly)


@pytest.mark.full(but=["6"])
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launches", [6, 20, pytest.param(200, marks=pytest.mark.soak)])
def test_descriptors_threads_memory_and_files_do_not_grow(tmp_path: Path, launches: int) -> None:
    """Every third fails, every third has one rank; Python's own helpers start with the first ones."""
    before = leftovers.Snapshot.take()
    uncounted = min(10, launches // 2)
    _repeat(tmp_path, uncounted)
    first = _resources()
    _repeat(tmp_path, launches - uncounted)
    last = _resources()
    require_nothing_left(before)
    grown = last.pop("memory") - first.pop("memory")
    assert last == first
    assert grown < MAX_GROWTH_BYTES, f"{grown / (1 << 20):.1f} MB"


def _repeat(folder: Path, times: int) -> None:
    for number in range(1, times + 1):
        launch: Callable[[World], None] = (
            launch_and_fail if number % 3 == 0 else launch_successfully
        )
        launch(World(folder=folder, ranks=1 if number % 3 == 1 else 2))


def _resources() -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "native threads": process.num_threads(),
        "children": len(process.children()),
        "maps": len({region.path for region in process.memory_maps()}),
        "exit functions": atexit._ncallbacks(),  # type: ignore[attr-defined]  # no public name
        "directory": len(os.environ),
        "memory": process.memory_info().rss,
    }
