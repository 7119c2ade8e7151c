"""Memory runs out in Python, in torch, or on the whole machine."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import exception_programs as programs
import pytest
from fault_kit import (
    CRASH_S,
    WORLD_SIZES,
    World,
    memory_group,
    require_rank,
    start_script,
    write_script,
)
from machine import require_in_time
from training_programs import train

import ddpsafe


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """Make a control group that is limited to 1 GB."""
    with memory_group() as group:
        if group is None:
            pytest.skip(f"needs a writable memory control group (uid {os.geteuid()})")
        yield group


@pytest.mark.root
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_the_kernels_out_of_memory_killer_is_named(
    tmp_path: Path, small_memory: Path, ranks: int
) -> None:
    """A rank that the kernel killed is distinguished from one that a user killed."""
    statements = f"""
        from exception_programs import outgrow_the_machine
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


@pytest.mark.full(but=["3-outgrow_torch"])
@pytest.mark.parametrize("fault", [programs.outgrow_the_process, programs.outgrow_torch])
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_a_failed_allocation_reports_the_peak_and_what_to_lower(
    tmp_path: Path, ranks: int, fault: Callable[..., Any]
) -> None:
    """Python's MemoryError and the RuntimeError of torch's allocator are one kind of failure."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(ddpsafe.RankRaisedError, train, fault)
    require_rank(error, 1)
    assert error.kind == "out-of-memory"
    assert "lower the batch size" in str(error)
    assert "GiB of host memory at its peak" in str(error)
