"""Memory runs out: in Python, in torch, or on the whole machine."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import crash_programs as programs
import pytest
import scripts
from fault_kit import (
    CRASH_S,
    SIZES,
    World,
    require_in_time,
    require_rank,
    start_script,
    write_script,
)
from training_programs import train

import ddpsafe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_BYTES = 1 << 30


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """Make a control group of the kernel's that gets 1 GB."""
    group = _make_group()
    if group is None:
        pytest.skip(f"needs a writable memory control group (uid {os.geteuid()})")
    yield group
    scripts.wait_until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def _make_group() -> Path | None:
    """Try version 1 of control groups, then version 2."""
    for root, limit, swap in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max", "memory.swap.max"),
    ):
        group = Path(root) / f"ddpsafe-test-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if _limit(group, limit, swap):
                return group
            group.rmdir()
    return None


def _limit(group: Path, limit: str, swap: str) -> bool:
    try:
        (group / limit).write_text(str(LIMIT_BYTES))
        if (group / swap).exists():
            (group / swap).write_text("0" if swap == "memory.swap.max" else str(LIMIT_BYTES))
    except OSError:
        return False
    return True


@pytest.mark.root
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_the_kernels_killer_is_named(tmp_path: Path, small_memory: Path, ranks: int) -> None:
    """A rank that the kernel has killed is told from one that a person has."""
    statements = f"""
        from crash_programs import outgrow_the_machine
        from training_programs import since, train
        try:
            ddpsafe.launch(
                train, (folder, outgrow_the_machine), **{{**options, "nproc_per_node": {ranks}}}
            )
        except ddpsafe.RankKilledError as error:
            print(since(float((folder / "fault").read_text())))
            print(error.rank, error.signal, error.exit_code, error.kind)
            print(error)
    """
    script = shlex.join([sys.executable, *write_script(tmp_path, statements)])
    command = ["sh", "-c", f"echo $$ > {small_memory}/cgroup.procs && exec {script}"]
    with start_script(tmp_path, command=command) as job:
        took_s, facts, *message = job.end().lines()
    require_in_time(float(took_s), FILLING_S + CRASH_S)
    assert facts == "1 9 137 out-of-memory"
    assert message[0].startswith(f"rank 1 (world_size {ranks}) was killed by SIGKILL")
    assert "out-of-memory killer" in message[1]
    assert "raise the limit" in message[2]


FILLING_S = 4.0
"""The rank first fills a gigabyte."""


@pytest.mark.parametrize("fault", [programs.outgrow_the_process, programs.outgrow_torch])
@pytest.mark.parametrize("ranks", SIZES)
def test_an_allocation_that_fails_says_what_was_held_and_what_to_lower(
    tmp_path: Path, ranks: int, fault: Callable[..., Any]
) -> None:
    """Python's MemoryError and the RuntimeError of torch's allocator are one kind of failure."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(ddpsafe.RankRaisedError, train, fault)
    require_rank(error, 1)
    assert error.kind == "out-of-memory"
    assert "lower the batch size" in str(error)
    assert "GiB of host memory at its peak" in str(error)
