"""Training scripts as users write them for ``spawn``, with their own setup and cleanup."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import scripts
import torch
import torch.distributed as dist

import ddpsafe
from ddpsafe import RankContext


def setup(rank: int, world_size: int, port: int) -> None:
    """Make the group at a hard-coded port, as the tutorial does."""
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup() -> None:
    """Destroy the group, as the tutorial does."""
    dist.destroy_process_group()


def total(rank: int) -> float:
    """Sum the ranks, counted from 1, over the group."""
    number = torch.tensor([rank + 1.0])
    dist.all_reduce(number)
    return number.item()


def note(rank: int, folder: Path, text: object) -> None:
    """Write a line for the test to read."""
    with (folder / f"rank-{rank}").open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def train(rank: int, world_size: int, port: int, folder: Path) -> object:
    """Set up, work, clean up; return an object that cannot be pickled."""
    setup(rank, world_size, port)
    note(rank, folder, total(rank))
    cleanup()
    return threading.Lock()


def train_twice(rank: int, world_size: int, port: int, folder: Path) -> None:
    """Open and close the group twice."""
    for _ in range(2):
        setup(rank, world_size, port)
        note(rank, folder, total(rank))
        cleanup()


def meet_by_url(rank: int, url: str, folder: Path) -> None:
    """Make the group at a URL."""
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
    note(rank, folder, total(rank))
    cleanup()


def meet_by_environment(rank: int, folder: Path) -> None:
    """Make the group without an address or a rank: the environment has both."""
    dist.init_process_group("gloo")
    note(rank, folder, (dist.get_rank(), dist.get_world_size(), total(rank)))
    cleanup()


def be_alone(rank: int, folder: Path) -> None:
    """Make a separate group in every rank, with which the launch does not interfere."""
    url = f"file://{folder / f'store-{rank}'}"
    dist.init_process_group("gloo", init_method=url, rank=0, world_size=1)
    note(rank, folder, total(rank))
    cleanup()


def node_rank_idiom(gpu: int, gpus_per_node: int, folder: Path) -> None:
    """Read RANK as the node's rank and WORLD_SIZE as the number of nodes, as ImageNet does."""
    found = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    rank = int(os.environ["RANK"]) * gpus_per_node + gpu
    world_size = int(os.environ["WORLD_SIZE"]) * gpus_per_node
    dist.init_process_group(
        "gloo", init_method="tcp://127.0.0.1:12355", rank=rank, world_size=world_size
    )
    note(rank, folder, (found, total(rank)))
    cleanup()


def note_environment(rank: int, folder: Path, *names: str) -> None:
    """Record some variables."""
    note(rank, folder, [os.environ.get(name) for name in names])


def note_backends(rank: int, folder: Path) -> None:
    """Note the backend of groups that ask for none, by name and by a config."""
    found = []
    config = ddpsafe.LaunchConfig(backend="gloo")
    for asked in ({}, {"backend": "gloo"}, {"config": config}):
        found.append(ddpsafe.setup(**asked).backend)  # type: ignore[arg-type]  # a row
        ddpsafe.cleanup()
    note(rank, folder, tuple(found))


def wait_for_gate(rank: int, folder: Path) -> None:
    """Run until the test opens the gate."""
    note(rank, folder, os.getpid())
    scripts.wait_until((folder / "gate").exists)


def stop_oneself(ctx: RankContext) -> None:
    """Run until asked to stop, by a signal that this rank sends itself."""
    ctx.stop_requested()  # after its first call a rank does not die of the signal
    os.kill(os.getpid(), signal.SIGTERM)
    scripts.wait_until(ctx.stop_requested)


def wait_and_fail(rank: int, folder: Path) -> None:
    """Fail in rank 1 when the gate opens, while rank 0 continues."""
    wait_for_gate(rank, folder)
    if rank == 1:
        msg = "no such class: 17"
        raise LookupError(msg)
    scripts.wait_until((folder / "never").exists)


def share(
    rank: int, queue: Any, lock: Any, event: Any, counter: Any, weights: torch.Tensor
) -> None:
    """Use everything that only a process being started can inherit."""
    event.wait(30)
    for _ in range(100):
        with lock:
            counter.value += 1
    weights[rank] = rank + 1
    queue.put((rank, "x" * 100_000))  # more than a pipe holds: a thread sends it at the exit


def try_to_have_a_child(rank: int, folder: Path) -> None:
    """Record whether this process is daemonic, and whether it may have a child."""
    process = multiprocessing.get_context("spawn").Process(target=os.getpid)
    try:
        process.start()
        process.join()
        outcome = "had a child"
    except AssertionError as exc:
        outcome = str(exc)
    note(rank, folder, f"{multiprocessing.current_process().daemon}: {outcome}")


def wait_for_ever(rank: int) -> None:
    """Wait until a signal arrives."""
    del rank
    while True:
        signal.pause()


def note_start_method(rank: int, folder: Path) -> None:
    """Record the default start method of this process."""
    note(rank, folder, repr(multiprocessing.get_start_method(allow_none=True)))


def end_in_a_way(rank: int, fault: str) -> None:
    """Meet the fault named for this rank; without one, wait for a moment."""
    for part in fault.split(", "):
        how, _, where = part.split()
        if where in ("all", str(rank)):
            if how == "raise":
                msg = f"from rank {rank}"
                raise ValueError(msg)
            if how == "exit":
                sys.exit(123)
            if how == "abort":
                os.abort()
            return
    with contextlib.suppress(AssertionError):
        scripts.wait_until(lambda: False, within_s=1)


def spawn_and_die(rank: int, folder: Path, start_method: str) -> None:
    """Spawn ranks, and die by a signal once they have started."""
    tempfile.tempdir = str(folder)  # a process killed with its helpers removes nothing
    handle = ddpsafe.spawn(
        note_and_wait, (folder,), 2, join=False, start_method=start_method, run_dir=folder / "inner"
    )
    assert handle is not None
    scripts.wait_until(lambda: len(list(folder.glob("inner-*"))) == 2)
    os.kill(os.getpid(), signal.SIGTERM)
    scripts.wait_until((folder / f"never-{rank}").exists)


def note_and_wait(rank: int, folder: Path) -> None:
    """Record the process id, and wait."""
    (folder / f"inner-{rank}.tmp").write_text(str(os.getpid()))
    (folder / f"inner-{rank}.tmp").rename(folder / f"inner-{rank}")
    wait_for_ever(rank)


def fail_or_finish(rank: int, folder: Path) -> None:
    """Fail on rank 0, and finish on rank 1 a while after that."""
    if rank == 0:
        (folder / "started").touch()
        scripts.wait_until((folder / "gate").exists)
        msg = "the first"
        raise ValueError(msg)
    scripts.wait_until((folder / "gate").exists)
    with contextlib.suppress(AssertionError):
        scripts.wait_until(lambda: False, within_s=3)
    (folder / "finished").touch()


def fail_or_stay(rank: int, folder: Path) -> None:
    """Fail on rank 0, and never end on the others."""
    (folder / f"started-{rank}").touch()
    scripts.wait_until((folder / "gate").exists)
    if rank == 0:
        msg = "the first"
        raise ValueError(msg)
    time.sleep(600)


def write_to_tensors(rank: int, plain: Any, view: Any, model: Any, many: list[Any]) -> None:
    """Write to this rank's place in each tensor."""
    assert len(many) == 300
    plain[rank] = view[rank] = rank + 1
    model.weight.data[rank] = rank + 1
