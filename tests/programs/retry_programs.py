"""Ranks that fail in one attempt, and what they do in the next."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import scripts
from crash_programs import die_by_kill
from hang_programs import FOREVER_S
from training_programs import average_gradients, mark

from ddpsafe import RankContext
from ddpsafe.checkpoint import Checkpointer


def fail_on_attempts(ctx: RankContext, folder: Path, attempts: int, error: str) -> int:
    """Fail on rank 1 in the first attempts, then work."""
    with (folder / f"ran-{ctx.rank}").open("a") as file:
        file.write(f"{ctx.attempt}\n")
    average_gradients()
    if ctx.rank == 1 and ctx.attempt <= attempts:
        mark(folder)
        if error == "killed":
            die_by_kill(folder)
        raise {"network": ConnectionError, "value": ValueError}[error](f"failure {ctx.attempt}")
    average_gradients()
    return ctx.attempt


def fail_first_and_return_arguments(ctx: RankContext, folder: Path, *arguments: Any) -> list[Any]:
    """Be killed on rank 1 in the first attempt, then return the arguments."""
    average_gradients()
    if ctx.rank == 1 and ctx.attempt == 1:
        mark(folder)
        die_by_kill(folder)
    average_gradients()
    return [*arguments]


def take_the_data_and_die(folder: Path) -> None:
    """Die together with the data of the next attempt, as when a storage system fails."""
    (folder / "data").rmdir()
    die_by_kill(folder)


def die_first_and_then_wait(ctx: RankContext, folder: Path) -> None:
    """Fail in the first attempt, and hang in the second one."""
    average_gradients()
    if ctx.attempt == 1 and ctx.rank == 1:
        die_by_kill(folder)
    average_gradients()
    (folder / f"ready-{ctx.rank}").touch()
    scripts.wait_until((folder / "never").exists, within_s=FOREVER_S)


def needs_less(_ctx: RankContext, folder: Path, batch_size: int) -> int:
    """Run out of memory above a batch size of 8."""
    average_gradients()
    if batch_size > 8:
        mark(folder)
        msg = f"batch size {batch_size}"
        raise MemoryError(msg)
    average_gradients()
    return batch_size


def step_and_die(ctx: RankContext, folder: Path, optimizer: Any) -> None:
    """Make three optimizer steps and be killed, in every attempt."""
    with (folder / f"ran-{ctx.rank}").open("a") as file:
        file.write(f"{ctx.attempt}\n")
    for _ in range(3):
        optimizer.step()
    average_gradients()
    if ctx.rank == 1:
        mark(folder)
        die_by_kill(folder)
    average_gradients()


def resume_and_die(ctx: RankContext, folder: Path, optimizer: Any) -> None:
    """Save each step, and be killed in the seventh."""
    with (folder / f"ran-{ctx.rank}").open("a") as file:
        file.write(f"{ctx.attempt}\n")
    state: dict[str, Any] = {"epoch": 0}
    with Checkpointer(folder / "checkpoints") as checkpointer:
        done = checkpointer.restore(state) or 0
        for step in range(done + 1, 20):
            optimizer.step()
            average_gradients()
            if step == 7 and ctx.rank == 1:
                mark(folder)
                die_by_kill(folder)
            checkpointer.save(state, step)


def describe_meeting(ctx: RankContext, folder: Path) -> dict[str, list[str]]:
    """Record the store, port and logs of this attempt, fail in the first one; return what is left of that."""
    from ddpsafe._worker.rank import this_rank

    spec = this_rank.spec
    assert spec is not None
    assert spec.logs is not None
    facts = [str(os.getpid()), spec.store_dir, str(spec.attempt), spec.logs.stderr]
    (folder / f"attempt-{ctx.attempt}-rank-{ctx.rank}").write_text("\n".join(facts))
    average_gradients()
    if ctx.attempt == 1 and ctx.rank == 1:
        mark(folder)
        die_by_kill(folder)
    average_gradients()
    paths = [folder / f"attempt-1-rank-{rank}" for rank in range(ctx.world_size)]
    first = [path.read_text().splitlines()[:2] for path in paths]
    return {
        "alive": [pid for pid, _ in first if Path(f"/proc/{pid}").exists()],
        "stores": [folder for _, folder in first if Path(folder).exists()],
    }
