"""Many launches in a row, good ones and bad ones: nothing adds up."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import leftovers
import psutil
import pytest
from crash_programs import vanish_badly
from fault_kit import World, require_nothing_left
from training_programs import return_rank, train

import ddpsafe

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_GROWTH_BYTES = 20 << 20
"""Of the launcher's memory: 100 kB for each launch would be a leak."""


def launch_well(world: World) -> None:
    """Launch what ends well."""
    assert len(world.launch(return_rank).values) == world.ranks


def launch_badly(world: World) -> None:
    """Launch what fails, and hold the error no longer than its reader would."""
    with pytest.raises(ddpsafe.RankExitedError):
        world.launch(train, vanish_badly)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launches", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_descriptors_threads_memory_shared_memory_and_files_stay_as_they_are(
    tmp_path: Path, launches: int
) -> None:
    """Every tenth launch fails, every fifth has two ranks.

    The first ones start Python's own helpers, and are not counted.
    """
    before = leftovers.Snapshot.take()
    _repeat(tmp_path, 10)
    first = _take_stock()
    _repeat(tmp_path, launches - 10)
    last = _take_stock()
    require_nothing_left(before)
    grown = last.pop("memory") - first.pop("memory")
    assert last == first
    assert grown < MOST_GROWTH_BYTES, f"{grown / (1 << 20):.1f} MB"


def _repeat(folder: Path, times: int) -> None:
    for number in range(1, times + 1):
        launch: Callable[[World], None] = launch_badly if number % 10 == 0 else launch_well
        launch(World(folder=folder, ranks=2 if number % 5 == 0 else 1))


def _take_stock() -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "native threads": process.num_threads(),
        "children": len(process.children()),
        "maps": len({region.path for region in process.memory_maps()}),
        "shared memory": len({*leftovers.shared_memory()} - leftovers.files_held_by_strangers()),
        "exit functions": _count_exit_functions(),
        "directory": len(os.environ),
        "memory": process.memory_info().rss,
    }


def _count_exit_functions() -> int:
    import atexit

    return atexit._ncallbacks()  # type: ignore[attr-defined]  # no public name
