"""The launcher of one of two nodes on this host: ``python node_effect_programs.py CASE FOLDER PORT NODE``.

Prints one JSON object with what the case's launch has shown. The launchers share the folder, and
each makes its own run directory in it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import scripts

import ddpsafe

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpsafe import RankContext

FOREVER_S = 600


def started_by_server() -> bool:
    """Return whether the fork server has started this process."""
    parent = psutil.Process().parent()
    return parent is not None and any("forkserver" in word for word in parent.cmdline())


def describe_rank(ctx: RankContext, changed: str, *, named: str) -> dict[str, Any]:
    """Fail in the first attempt; then return what the rank has got of the call and the config."""
    import torch

    print(f"printed by rank {ctx.rank}")
    if ctx.attempt == 1:
        raise ConnectionError
    return {
        "args": changed,
        "kwargs": named,
        "attempt": ctx.attempt,
        "world_size": ctx.world_size,
        "local_world_size": ctx.local_world_size,
        "nnodes": ctx.nnodes,
        "backend": ctx.backend,
        "by_server": started_by_server(),
        "run_dir": str(ctx.run_dir),
        "env": os.environ.get("OF_THIS_TEST"),
        "seed": torch.initial_seed(),
    }


def launch_all(folder: Path, meeting: dict[str, Any], node: int) -> dict[str, Any]:
    """Call `launch` with every keyword, and with fields beside a config."""
    config = ddpsafe.LaunchConfig(
        **meeting,
        nproc_per_node=4,  # overridden below
        backend="cpu:gloo",
        start_method="forkserver",
        retry={"attempts": 2, "on": [ConnectionError], "backoff_initial": 0, "jitter": 0},
        run_dir=folder / f"run-{node}",
        env={"OF_THIS_TEST": "set"},
        seed=7,
        console="tagged",
    )
    result = ddpsafe.launch(
        describe_rank,
        ("at first",),
        {"named": "by name"},
        config=config,
        on_retry=lambda _: ("changed",),
        nproc_per_node=node + 1,
    )
    return {"attempts": result.attempts, "run_dir": str(result.run_dir), "values": result.values}


def describe_process(index: int, folder: Path, word: str) -> None:
    """Fail in the first attempt; then write what the rank has got of the call, and wait."""
    if word == "at first":
        raise ConnectionError
    seen = {
        "index": index,
        "args": word,
        "daemon": multiprocessing.current_process().daemon,
        "by_server": started_by_server(),
    }
    (folder / f"rank-{os.environ['RANK']}").write_text(json.dumps(seen))
    scripts.wait_until((folder / "end").exists)


def spawn_all(folder: Path, meeting: dict[str, Any], node: int) -> dict[str, Any]:
    """Call `spawn` with every keyword, and look at its handle while the ranks run."""
    config = ddpsafe.LaunchConfig(
        **meeting,
        retry={"attempts": 2, "on": [ConnectionError], "backoff_initial": 0, "jitter": 0},
        run_dir=folder / f"run-{node}",
    )
    handle = ddpsafe.spawn(
        describe_process,
        (folder, "at first"),
        nprocs=node + 1,
        join=False,
        daemon=True,
        start_method="forkserver",
        config=config,
        on_retry=lambda _: (folder, "changed"),
        console="none",
    )
    assert handle is not None
    scripts.wait_until(lambda: len(list(folder.glob("rank-*"))) == 3)
    has_ended = handle.join(timeout=0)
    (folder / f"seen-{node}").touch()
    scripts.wait_until(lambda: len(list(folder.glob("seen-*"))) == 2)
    (folder / "end").touch()
    ranks = [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(3)]
    return {"pids": len(handle.pids()), "joined": [has_ended, handle.join()], "ranks": ranks}


def fail_or_finish(index: int, folder: Path) -> None:
    """Fail on rank 0; on the others, finish a while after that."""
    del index
    (folder / f"started-{os.environ['RANK']}").touch()
    scripts.wait_until((folder / "gate").exists)
    if os.environ["RANK"] == "0":
        msg = "the first"
        raise ValueError(msg)
    with contextlib.suppress(AssertionError):
        scripts.wait_until(lambda: False, within_s=3)
    (folder / f"finished-{os.environ['RANK']}").touch()


def join_with_grace(
    folder: Path, meeting: dict[str, Any], node: int, asking: str
) -> dict[str, Any]:
    """Join ranks of which one fails, with a grace period on some of the nodes."""
    handle = ddpsafe.spawn(
        fail_or_finish,
        (folder,),
        2,
        join=False,
        start_method="forkserver",
        run_dir=folder / f"run-{node}",
        **meeting,
    )
    assert handle is not None
    grace_s = 60.0 if str(node) in asking else None
    handle.join(0, grace_period=grace_s)
    scripts.wait_until(lambda: len(list(folder.glob("started-*"))) == 4)
    (folder / f"joining-{node}").touch()
    scripts.wait_until(lambda: len(list(folder.glob("joining-*"))) == 2)
    (folder / "gate").touch()
    try:
        handle.join(grace_period=grace_s)
    except ddpsafe.RankFailedError as error:
        statuses = {rank: each.status for rank, each in error.outcomes.items()}
        return {"rank": error.rank, "statuses": statuses}
    return {}


def learn(folder: Path, meeting: dict[str, Any], node: int) -> dict[str, Any]:
    """Run a first attempt with steps, and a second one that hangs before its first step."""
    import hang_programs

    from ddpsafe._launcher.watch.hang_detection import LearnedGaps

    for name, value in {"LEAST_S": 1.0, "LEAST_SLOW_S": 1.0, "FACTOR": 2.0}.items():
        setattr(LearnedGaps, name, value)
    (folder / "fails").touch()
    return of_failure(
        hang_programs.step_then_stay,
        (folder, Optimizer()),
        timeouts={"progress": "auto", "attempt": 60},
        retry={"attempts": 2, "on": [ConnectionError], "backoff_initial": 0},
        run_dir=folder / f"run-{node}",
        **meeting,
    )


class Optimizer:
    """An optimizer of torch that is made in the rank."""

    def step(self) -> None:
        """Make one step."""
        import torch

        torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1).step()


def of_failure(
    fn: Callable[..., object], args: tuple[object, ...], **fields: Any
) -> dict[str, Any]:
    """Launch; return the error's facts."""
    try:
        ddpsafe.launch(fn, args, start_method="forkserver", **fields)
    except ddpsafe.DDPSafeError as error:
        return {
            "error": type(error).__name__,
            "attempt": getattr(error, "attempt", 0),
            "setting": getattr(error, "setting", ""),
            "unfinished": getattr(error, "unfinished_ranks", ()),
        }
    return {}


def exceed(ctx: RankContext, limit: str) -> None:
    """Exceed one limit, on the last rank."""
    import torch
    import torch.distributed as dist

    is_last = ctx.rank == ctx.world_size - 1
    if limit == "barrier" and not is_last:
        ctx.barrier()
    elif limit == "collective" and not is_last:
        dist.all_reduce(torch.zeros(1))
    elif limit == "finish":
        import threading

        threading.Thread(target=time.sleep, args=[FOREVER_S if is_last else 0]).start()
        return
    elif limit == "stop":
        ctx.stop_requested()
        if is_last:
            os.kill(os.getpid(), signal.SIGTERM)
            ctx.stop_requested()  # passes the signal on, as a call does that follows it
    while not (limit == "stop" and not is_last and ctx.stop_requested()):
        time.sleep(0.02)


def exceed_limit(folder: Path, meeting: dict[str, Any], node: int, limit: str) -> dict[str, Any]:
    """Launch ranks of which one exceeds a limit."""
    return of_failure(
        exceed,
        (Late() if limit == "start" else limit,),
        timeouts={limit: 3, "grace": 1},
        run_dir=folder / f"run-{node}",
        **meeting,
    )


class Late:
    """An argument with which the last rank never arrives."""

    def __reduce__(self) -> tuple[object, ...]:
        return (stay_away, ())


def stay_away() -> str:
    """Sleep in the last rank."""
    if os.environ.get("RANK") == "1":
        time.sleep(FOREVER_S)
    return "rendezvous"


def refuse(folder: Path, meeting: dict[str, Any], node: int, field: str) -> dict[str, Any]:
    """Launch as a node of another job."""
    secret = folder / f"secret-{node}"
    secret.write_text(f"the secret of node {node}")
    own = {"id": f"job-{node}", "secret_file": secret}[field]
    meeting["rendezvous"] |= {field: own, "join": 4}
    return of_failure(exceed, ("none",), **meeting)


def main() -> None:
    """Run one case as one of the nodes."""
    case, folder, port, node = sys.argv[1:]
    name, _, detail = case.partition(":")
    run = {
        "launch": launch_all,
        "spawn": spawn_all,
        "grace": join_with_grace,
        "learn": learn,
        "limit": exceed_limit,
        "refuse": refuse,
    }[name]
    meeting = {
        "nnodes": 2,
        "node_rank": int(node),
        "preflight": "off",
        "rendezvous": {"endpoint": f"{socket.gethostname()}:{port}"},
    }
    details = (detail,) if detail else ()
    print(json.dumps(run(Path(folder), meeting, int(node), *details)))  # type: ignore[operator]


if __name__ == "__main__":
    main()
