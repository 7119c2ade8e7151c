"""Ranks that join late or not at all, and what they do in another attempt."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import scripts
import torch
import torch.distributed as dist
from exception_programs import die_by_kill, raise_own_error
from hang_programs import FOREVER_S, sleep
from training_programs import Fault, average_gradients, cleanup, mark, setup

from ddpsafe import RankContext
from ddpsafe._clock import Deadline
from ddpsafe.checkpoint import Checkpointer


class FailsToLoad:
    """An argument that rank 1 cannot unpickle: it raises, or is killed."""

    def __init__(self, folder: Path, fault: Fault = raise_own_error) -> None:
        self.folder, self.fault = folder, fault

    def __reduce__(self) -> tuple[object, ...]:
        return (load_badly, (self.folder, self.fault))


def load_badly(folder: Path, fault: Fault) -> str:
    """Unpickle; meet the fault on rank 1."""
    if os.environ.get("RANK") == "1":
        mark(folder)
        fault(folder)
    return "loaded"


class SlowToLoad:
    """An argument that rank 1 unpickles slowly, so that it is stuck before the function runs."""

    def __init__(self, folder: Path, delay_s: float = FOREVER_S) -> None:
        self.folder = folder
        self.delay_s = delay_s

    def __reduce__(self) -> tuple[object, ...]:
        return (load_slowly, (self.folder, self.delay_s))


def load_slowly(folder: Path, delay_s: float) -> str:
    """Unpickle, on rank 1 with a delay, but without one in the caller."""
    if os.environ.get("RANK") == "1":
        mark(folder)
        time.sleep(delay_s)  # stuck here
    return "loaded"


def join_never(rank: int, world_size: int, folder: Path, timeout_s: float = 60) -> None:
    """Hang before `setup`."""
    if rank == 1:
        mark(folder)
        sleep(folder)
    setup(rank, world_size, timeout_s=timeout_s)


def note_limits(rank: int, folder: Path, timeout_s: float | None) -> None:
    """Make a group as scripts do; record its timeout, and how long it would wait for ranks."""
    from ddpsafe._worker import process_group

    waited: list[float] = []
    wait = process_group.wait_for_everyone

    def note(control: Any, world: Any, *, deadline: Deadline) -> None:
        waited.append(round(deadline.remaining_s()))
        wait(control, world, deadline=deadline)

    process_group.wait_for_everyone = note
    named = {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
    dist.init_process_group(
        "gloo", init_method="tcp://localhost:1", rank=rank, world_size=1, **named
    )
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    (folder / "limits").write_text(f"{backend.options._timeout.total_seconds()} {float(waited[0])}")
    dist.destroy_process_group()


def join_late(rank: int, world_size: int, folder: Path, delay_s: float) -> None:
    """Call `setup` after the others have waited for some time."""
    if rank == 1:
        time.sleep(delay_s)
    setup(rank, world_size)
    average_gradients()
    (folder / f"done-{rank}").touch()
    cleanup()


def listen_on(ctx: RankContext, folder: Path, port: int) -> None:
    """Open a hard-coded port on rank 1."""
    average_gradients()
    if ctx.rank == 1:
        mark(folder)
        socket.create_server(("127.0.0.1", port))
    average_gradients()


def count_ranks_by_hand(rank: int, world_size: int, folder: Path) -> None:
    """Add up one for each rank, on a hard-coded port."""
    setup(rank, world_size)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    (folder / f"count-{rank}").write_text(str(ones.item()))
    cleanup()


# Ranks that fail in one attempt, and what they do in the next.


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
