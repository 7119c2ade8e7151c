"""Rank functions for ranks that another launcher has started; run by tests/worker and test_process_group.py."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import psutil
import scripts
import torch
import torch.distributed as dist
from exception_programs import raise_own_error
from torch.distributed import TCPStore
from training_programs import average_gradients, mark, since

import ddpsafe
from ddpsafe import RankContext

PATIENT: Final = {"start": 30, "collective": 30, "barrier": 30}
"""Timeouts of ranks that find each other, on a busy machine too."""


def join(timeouts: Mapping[str, float] = PATIENT) -> dict[str, Any]:
    """Join as a rank, sum over the ranks, and leave."""
    with ddpsafe.process_group(timeouts=dict(timeouts)) as ctx:
        total = torch.tensor([float(ctx.rank + 1)])
        dist.all_reduce(total)
        found = {
            "place": place(ctx),
            "started_by": ctx.world.started_by,
            "attempt": ctx.attempt,
            "total": total.item(),
            "is_current": ddpsafe.current() is ctx,
        }
    return found | {"group_is_gone": not dist.is_initialized()}


def run_elastically(function: Callable[[], object], *, max_restarts: int = 0) -> None:
    """Run torchrun's agent for two ranks, forked from a server, which run a function."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # as with --standalone
        run_id=str(os.getpid()),
        max_restarts=max_restarts,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    elastic_launch(config, function)()


def join_until_another_is_refused(folder: Path) -> int:
    """Join as a rank, and stay until a process that claims the same rank has been refused."""
    refused = folder / "refused"
    try:
        with ddpsafe.process_group(timeouts=PATIENT) as ctx:
            scripts.wait_until(refused.exists)
            return ctx.rank
    except ddpsafe.DDPSafeError:
        refused.touch()
        raise


def place(ctx: ddpsafe.RankContext) -> tuple[int, ...]:
    """Return rank, world size, local rank, local world size, node rank and number of nodes."""
    return (
        ctx.rank, ctx.world_size, ctx.local_rank, ctx.local_world_size, ctx.node_rank, ctx.nnodes,
    )  # fmt: skip


def follow_on_each_node() -> tuple[int, ...]:
    """Wait for the node's leader, which never arrives; return the missing ranks."""
    with ddpsafe.process_group(timeouts=PATIENT | {"barrier": 1}) as ctx:
        missing: tuple[int, ...] = ()
        if ctx.local_rank != 0:
            try:
                ctx.rank_zero_first(str, local=True)
            except ddpsafe.LaunchTimeoutError as error:
                missing = error.missing_ranks
        ctx.barrier(timeout=timedelta(seconds=30))
    return missing


def fail_to_join() -> dict[str, str]:
    """Wait alone at the rendezvous; return the variables that have changed."""
    before = dict(os.environ)
    try:
        ddpsafe.setup(
            env={"OMP_DYNAMIC": "true"}, timeouts={"start": 1, "collective": 1, "barrier": 1}
        )
    except ddpsafe.RendezvousTimeoutError:
        return {
            name: os.environ[name] for name in os.environ if os.environ[name] != before.get(name)
        }
    raise AssertionError


def fail_to_reach_itself(host: str) -> dict[str, Any]:
    """Serve the store at another host's address; return the error, and whether the port is free."""
    os.environ["MASTER_ADDR"] = host
    told: dict[str, Any] = {}
    try:
        ddpsafe.setup(timeouts={"start": 2})
    except ddpsafe.PreflightError as error:
        told["error"] = str(error)
    with contextlib.suppress(OSError), socket.create_server(("", int(os.environ["MASTER_PORT"]))):
        told["port is free"] = True
    return told


def close_a_group_that_does_not_end() -> str:
    """Leave a group that torch does not close, as NCCL does with a collective still enqueued."""
    dist.destroy_process_group = lambda _group=None: threading.Event().wait()
    try:
        with ddpsafe.process_group(timeouts=PATIENT | {"barrier": 2}):
            pass
    except ddpsafe.LaunchTimeoutError as error:
        return str(error)
    return ""


def join_again_and_again(cycles: int) -> list[float]:
    """Set up and clean up in a loop, as in k-fold validation; return each group's sum."""
    totals = []
    for cycle in range(cycles):
        ctx = ddpsafe.setup(timeouts=PATIENT)
        total = torch.tensor([float(ctx.rank + cycle)])
        dist.all_reduce(total)
        totals.append(total.item())
        ddpsafe.cleanup()
        assert not dist.is_initialized()
    return totals


def clean_up_too_often() -> list[bool]:
    """Call cleanup before setup and three times after it; return whether a group exists after each."""
    ddpsafe.cleanup()
    ddpsafe.setup(timeouts=PATIENT)
    left = []
    for _ in range(3):
        ddpsafe.cleanup()
        left.append(dist.is_initialized())
    return left


def set_up_twice() -> list[bool]:
    """Call setup inside setup, as nested helpers do; one cleanup ends the group."""
    first = ddpsafe.setup(timeouts=PATIENT)
    second = ddpsafe.setup(timeouts=PATIENT)
    ddpsafe.cleanup()
    return [second is first, dist.is_initialized()]


def fail_first() -> None:
    """Let rank 0 fail in rank_zero_first; its process, which serves the store, exits at once."""
    with ddpsafe.process_group(timeouts=PATIENT) as ctx, ctx.rank_zero_first():
        if ctx.is_main:
            msg = "the mirror is gone"
            raise ConnectionRefusedError(msg)


def lead_until_killed(folder: str) -> None:
    """Let the first rank of the second node be killed while it leads; the others outlive it."""
    told = Path(folder, "told")
    with ddpsafe.process_group(timeouts=PATIENT) as ctx:
        try:
            with ctx.rank_zero_first(local=True):
                if ctx.rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
        finally:
            if ctx.rank == 3:
                told.touch()
        scripts.wait_until(told.exists)
        sys.exit(0)


def miss_a_barrier(limit_s: float) -> None:
    """Let rank 0 return while the others wait at a barrier."""
    with ddpsafe.process_group(timeouts={**PATIENT, "barrier": 2 * limit_s}) as ctx:
        if not ctx.is_main:
            ctx.barrier("save the model", timeout=timedelta(seconds=limit_s))


def listen_alone() -> dict[str, Any]:
    """Join a world of one; return the addresses on which this process listens."""
    with ddpsafe.process_group(timeouts=PATIENT) as ctx:
        total = torch.ones(2)
        dist.all_reduce(total)
        return {"place": place(ctx), "total": total.tolist(), "listening": listening()}


def listen_together() -> list[str]:
    """Join as one of several ranks on this host; return the addresses on which this process listens."""
    with ddpsafe.process_group(timeouts=PATIENT) as ctx:
        found = listening()
        ctx.barrier("all have looked")
        return found


def listening() -> list[str]:
    """Return the addresses on which this process listens."""
    process: Any = psutil.Process()
    find = process.net_connections if psutil.version_info >= (6,) else process.connections
    connections = find("inet")
    return [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN]


def adopt_own_group() -> dict[str, Any]:
    """Make the group by hand, use ddpsafe in it in both forms, and return what remains."""
    dist.init_process_group("gloo")
    found = _use_adopted_group()
    dist.destroy_process_group()
    return found


def adopt_group_of_accelerate() -> dict[str, Any]:
    """Let Accelerate make the group."""
    from accelerate import PartialState

    state = PartialState(cpu=True)
    found = _use_adopted_group()
    state.destroy_process_group()
    return found


def adopt_group_of_fabric() -> dict[str, Any]:
    """Let Lightning Fabric make the group."""
    from lightning_fabric import Fabric

    # With LOCAL_RANK, Fabric knows that it is a rank and starts no processes.
    os.environ.update(LOCAL_RANK=os.environ["RANK"], NODE_RANK="0")
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    found = _use_adopted_group()
    dist.destroy_process_group()
    return found


def _use_adopted_group() -> dict[str, Any]:
    with ddpsafe.process_group() as ctx:
        ctx.barrier("adopted")
        found: dict[str, Any] = {"place": place(ctx)[:2], "gathered": ctx.all_gather(ctx.rank)}
    found["left_by_process_group"] = dist.is_initialized()
    ddpsafe.setup()
    ddpsafe.cleanup()
    found["left_by_cleanup"] = dist.is_initialized()
    found["still_works"] = ddpsafe.current().all_gather(dist.get_rank())
    return found


def run_jobs(name: str, other: str, rounds: int, port: int) -> None:
    """Launch one of two jobs that start at the same moment, repeatedly; each rank writes down its job's sum."""
    import multiprocessing

    import torch.multiprocessing as mp

    preload = ["torch", "attached_programs", "ddpsafe._launch", "ddpsafe._worker.preload"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    for number in range(rounds):
        Path(f"ready-{name}-{number}").touch()
        scripts.wait_until(Path(f"ready-{other}-{number}").exists)
        args = (2, float(name), port, f"{name}-{number}")
        mp.start_processes(be_job, args=args, nprocs=2, start_method="forkserver")


def be_job(rank: int, world_size: int, value: float, port: int, name: str) -> None:
    """Run a rank of a script with a hard-coded port."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    result: object
    try:
        ddpsafe.setup(rank, world_size, timeouts=PATIENT)
        total = torch.tensor([value])
        dist.all_reduce(total)
        result = total.item()
        ddpsafe.cleanup()
    except ddpsafe.DDPSafeError as error:
        result = [type(error).__name__, str(error)]
    Path(f"rank-{name}-{rank}.json").write_text(json.dumps(result))


# Ranks that are asked to stop.


def train_until_asked(ctx: ddpsafe.RankContext, signalled: int, signum: signal.Signals) -> int:
    """Poll at this rank's own pace until a stop is requested; one rank is signalled; return the call."""
    for call in itertools.count(1):
        if ctx.stop_requested():
            return call
        if call == 10 and ctx.rank == signalled:
            os.kill(os.getpid(), signum)
        time.sleep(0.002 * (1 + ctx.rank))
    raise AssertionError


def be_asked(signalled: int, signum: signal.Signals) -> dict[str, Any]:
    """Receive a stop request in one group, and train_until_asked in the next one without it."""
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    with ddpsafe.process_group(timeouts=PATIENT) as ctx:
        call = train_until_asked(ctx, signalled, signum)
    after = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    with ddpsafe.process_group(timeouts=PATIENT) as ctx:
        again = [ctx.stop_requested() for _ in range(3)]
    return {"call": call, "restored": before == after, "again": again}


def be_asked_with_a_handler() -> dict[str, Any]:
    """Handle one signal and ignore the other before ddpsafe is used."""
    seen: list[int] = []

    def handle(signum: int, _frame: object) -> None:
        seen.append(signum)

    signal.signal(signal.SIGUSR1, handle)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with ddpsafe.process_group(timeouts=PATIENT) as ctx:
        answers = [ctx.stop_requested()]
        os.kill(os.getpid(), signal.SIGTERM)
        answers.append(ctx.stop_requested())
        os.kill(os.getpid(), signal.SIGUSR1)
        answers.append(ctx.stop_requested())
    kept = [signal.getsignal(signal.SIGUSR1) is handle]
    kept.append(signal.getsignal(signal.SIGTERM) == signal.SIG_IGN)
    return {"answers": answers, "seen": seen, "kept": kept}


def go_on_without_one(ways: Mapping[int, str]) -> list[int]:
    """Let ranks leave early or fail before another one is asked to stop; return the last step, and who failed."""
    steps = 0
    try:
        with ddpsafe.process_group(timeouts=PATIENT) as ctx:
            ctx.barrier("all are here")
            way = ways.get(ctx.rank)
            ctx.stop_requested()
            if way == "fails":
                msg = "bad batch"
                raise ValueError(msg)
            if way != "returns":
                time.sleep(0.5)
                steps = train_until_asked(ctx, 0, signal.SIGTERM)
    except ddpsafe.RankRaisedError as error:
        return [steps, error.rank]
    return [steps]


def fail_before_a_barrier() -> None:
    """Let rank 1 fail while the others wait for it at a barrier with a long timeout."""
    with ddpsafe.process_group(timeouts=PATIENT) as ctx:
        ctx.barrier("all are here")
        if ctx.rank == 1:
            msg = "bad batch"
            raise ValueError(msg)
        ctx.barrier("all have evaluated")


def forget_srun() -> list[str]:
    """Make a group in the shell of a job; return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ddpsafe.process_group(timeouts=PATIENT) as ctx:
            assert ctx.world_size == 1
    return [str(each.message) for each in caught]


def look_at_the_environment() -> list[bool]:
    """Return whether a group's variables are set inside it, and unset after it."""
    names = ("NCCL_DEBUG", "GLOO_SOCKET_IFNAME")
    before = dict(os.environ)
    with ddpsafe.process_group(timeouts=PATIENT, env={"NCCL_DEBUG": "WARN"}):
        inside = all(name in os.environ for name in names)
    return [inside, dict(os.environ) == before]


# Ranks that fail.


def fail_attached(folder: Path, style: str) -> None:
    """Fail on rank 1, inside the context manager or between `setup` and `cleanup`."""

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
    """Return on rank 1 while the others wait at a barrier."""
    with _timed(folder), ddpsafe.process_group("gloo", timeouts={"barrier": timeout_s}) as ctx:
        average_gradients()
        if ctx.rank != 1:
            ctx.barrier("evaluated")
        mark(folder)
        scripts.wait_until(lambda: len(list(folder.glob("over-*"))) == ctx.world_size - 1)
        return "left alone"


def fail_beside_others(folder: Path, failing: int, others: str) -> str:
    """Fail on one rank, while the others train with it or have returned already."""

    def work(ctx: RankContext) -> str:
        average_gradients()
        if ctx.rank == failing:
            scripts.wait_until(lambda: others == "train" or len(list(folder.glob("done-*"))) > 0)
            msg = "bad batch"
            raise ValueError(msg)
        if others == "train":
            average_gradients()
        (folder / f"done-{ctx.rank}").touch()
        return "done"

    return str(ddpsafe.launch(work, backend="gloo", timeouts={"barrier": 20}).values)


def say_the_attempt(_folder: Path, counts: list[str]) -> list[int]:
    """Join with the restart count of this rank's host; return the attempt of each rank."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = counts[int(os.environ["RANK"])]
    with ddpsafe.process_group("gloo") as ctx:
        return [ctx.attempt, ddpsafe.current().attempt, *ctx.all_gather(ctx.attempt)]


@contextlib.contextmanager
def _timed(folder: Path) -> Iterator[None]:
    """Record how long after the fault the block was left."""
    entered = time.monotonic()
    try:
        yield
    finally:
        fault = folder / "fault"
        struck = float(fault.read_text()) if fault.exists() else entered
        (folder / f"over-{os.environ['RANK']}").write_text(repr(since(struck)))


# Ranks whose store another user can reach.


SOON: Final = {"start": 4, "collective": 30, "barrier": 30}

STEPS: Final = 8
STEP_S: Final = 0.1


def train_beside_a_stranger(folder: str) -> dict[str, Any]:
    """Wait for the other user's messages, train for some steps, and return the result."""
    told: dict[str, Any] = {"stopped": False, "error": ""}
    try:
        with ddpsafe.process_group(timeouts=PATIENT) as ctx:
            ctx.stop_requested()
            Path(folder, f"joined-{ctx.rank}").touch()
            scripts.wait_until(Path(folder, "forged").exists)
            for _ in range(STEPS):
                time.sleep(STEP_S)  # the store is read twice a second
                told["stopped"] |= ctx.stop_requested()
            ctx.barrier("trained")
            told["sum"] = ctx.all_reduce(ctx.rank)
    except ddpsafe.DDPSafeError as error:
        told["error"] = f"{type(error).__name__}: {error}"
    return told


def join_soon() -> str:
    """Join; return the error."""
    try:
        with ddpsafe.process_group(timeouts=SOON):
            return ""
    except ddpsafe.DDPSafeError as error:
        return f"{type(error).__name__}: {error}"


def join_twice_and_start_a_program() -> list[object]:
    """Join two groups in turn; return their sums, and the secrets that a program inherits."""
    found: list[object] = []
    for _ in range(2):
        with ddpsafe.process_group(timeouts=PATIENT) as ctx:
            found.append(ctx.all_reduce(ctx.rank))
    show = "import os, json; print(json.dumps([os.environ.get('DDPSAFE_JOB_SECRET')]))"
    found += json.loads(subprocess.check_output([sys.executable, "-S", "-c", show], text=True))
    return found


def forge(port: int, world_size: int) -> list[str]:
    """Connect as another user, and write under every key that ranks act on."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    keys = list(_keys_to_forge(store, world_size))
    for key, value in keys:
        store.set(key, value)
    return [key for key, _ in keys]


def _keys_to_forge(store: TCPStore, world_size: int) -> Iterator[tuple[str, str]]:
    known: list[str] = store.list_keys()
    groups = {key.partition("/job")[0] for key in known if key.endswith("/job")}
    for group in groups:
        yield f"{group}/control/control/departed", json.dumps([0, "own", "it was rank 0", True])
        yield f"{group}/control/barrier/trained/0/missing", "[1]"
        for rank in range(world_size):
            yield f"{group}/stop/promise/{rank}", "2"
        yield f"{group}/stop/agreed", "2"
        yield f"{group}/stop/asked", "SIGTERM"
