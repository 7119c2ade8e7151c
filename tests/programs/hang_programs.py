"""Ranks that hang in different ways or wait for each other, and ranks that are only slow."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil
import torch
import torch.distributed as dist
from scripts import LIMIT_S, wait_until
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from training_programs import average_gradients, mark

from ddpsafe import RankContext

FOREVER_S = 600
"""Longer than any test: a rank that waits this long must be ended."""


def stop(_folder: Path) -> None:
    """Be frozen, as by a debugger or Ctrl-Z."""
    os.kill(os.getpid(), signal.SIGSTOP)  # stuck here


def sleep(_folder: Path) -> None:
    """Sleep in Python."""
    time.sleep(FOREVER_S)  # stuck here


def be_busy(_folder: Path) -> None:
    """Compute in Python forever."""
    ends = time.monotonic() + FOREVER_S
    while time.monotonic() < ends:  # stuck here
        pass  # stuck here


def hold_the_gil(_folder: Path) -> None:
    """Compute in C without ever letting another Python thread run.

    A sleep would not do: the signal that asks for the stacks interrupts it.
    """
    digits = 9**400_000
    pow(digits, digits, 9**400_001 + 2)  # stuck here


def read_from_nobody(folder: Path) -> None:
    """Read from a FIFO that has no writer, as from a mount that hangs."""
    fifo = folder / f"fifo-{os.getpid()}"
    os.mkfifo(fifo)
    fifo.read_bytes()  # stuck here


DISK: Final = "disk"


def write_to_a_frozen_disk(folder: Path) -> None:
    """Write to a frozen disk, which blocks in the kernel until it is thawed, as on a dead server."""
    (folder / DISK / f"file-{os.getpid()}").write_bytes(b"x")  # stuck here


def wait_for_each_other(_folder: Path) -> None:
    """Acquire two locks in opposite orders in two threads."""
    first, second = threading.Lock(), threading.Lock()
    both = threading.Barrier(2)

    def other() -> None:
        with second:
            both.wait()
            first.acquire()

    threading.Thread(target=other, daemon=True).start()
    with first:
        both.wait()
        second.acquire()  # stuck here


def hold_a_lock_in_a_collective(ctx: RankContext, folder: Path, then: str) -> None:
    """Hold a lock on rank 0 while it waits for rank 1, which waits for the lock and continues with it."""
    average_gradients()
    with (folder / "lock").open("w") as file:
        if ctx.rank == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
            ctx.barrier()
            mark(folder)
            average_gradients()
        else:
            ctx.barrier()
            fcntl.flock(file, fcntl.LOCK_EX)  # stuck here
    if ctx.rank == 1 and then == "enters the collective":
        average_gradients()
    elif ctx.rank == 1 and then == "enters another one":
        dist.barrier()


def sleep_before_a_barrier(ctx: RankContext, folder: Path) -> None:
    """Let rank 1 sleep while the others wait for it at a barrier of ddpsafe."""
    if ctx.rank == 1:
        mark(folder)
        sleep(folder)
    ctx.barrier("after the epoch")


def sleep_everywhere(ctx: RankContext, folder: Path) -> None:
    """Let all ranks sleep, so that no collective can time out."""
    average_gradients()
    if ctx.is_main:
        mark(folder)
    sleep(folder)


# Slow ranks.


def step_slowly(
    ctx: RankContext, _folder: Path, how: str, takes_s: float, optimizer: Any = None
) -> str:
    """Make steps of a third of a second for some time."""
    ends = time.monotonic() + takes_s
    while time.monotonic() < ends:
        if how == "optimizer":
            optimizer.step()
        elif how == "collective" and ctx.is_main:
            average_gradients()
        time.sleep(0.3)
    return "done"


def count_reads(doing: Callable[[], object]) -> int:
    """Return how often torch's flight recorder is read during a call, which interrupts training."""
    import torch._C._distributed_c10d as c10d  # there is no public way

    reads = 0
    dump = c10d._dump_fr_trace_json

    def count(*args: Any, **options: Any) -> Any:
        nonlocal reads
        reads += "backend" not in options  # else of another recorder, which is empty
        return dump(*args, **options)

    c10d._dump_fr_trace_json = count
    doing()
    return reads


def count_reads_in_training(ctx: RankContext, folder: Path, takes_s: float, optimizer: Any) -> int:
    """Make steps for some time; return how often the rank was asked for its position."""
    return count_reads(lambda: step_slowly(ctx, folder, "optimizer", takes_s, optimizer))


def step_then_stay(ctx: RankContext, folder: Path, optimizer: Any) -> None:
    """Make steps for some time and then hang; in a second attempt, hang before the first step."""
    until = time.monotonic() + 4
    while ctx.attempt == 1 and time.monotonic() < until:
        optimizer.step()
        time.sleep(0.2)
    if ctx.attempt == 1 and (folder / "fails").exists():
        raise ConnectionError
    mark(folder)
    time.sleep(FOREVER_S)  # stuck here


# Ranks that wait for each other forever or for long, without a short timeout.


BATCH_S = 0.02
"""How long an evaluation waits for its next batch."""

COMPUTES_S = 13.0
"""The ranks are asked after 1.5, 3, 6, 12 and 24 s in a test that warns after 1.5 s."""

MAY_CONTINUE = "may-continue"
"""The file whose existence ends a wait: what waits is found for as long as it takes."""


def cross_two_groups(ctx: RankContext, folder: Path) -> None:
    """Call the collectives of two groups in two orders."""
    groups = [dist.new_group(), dist.new_group()]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    if ctx.is_main:
        groups.reverse()
        mark(folder)
    for group in groups:
        dist.all_reduce(torch.ones(8), group=group)  # stuck here


def reduce_different_sizes(ctx: RankContext, folder: Path) -> None:
    """Pass fewer elements on rank 1, which often returns while rank 0 waits for the others."""
    if ctx.is_main:
        mark(folder)
    dist.all_reduce(torch.ones(4 - ctx.rank))  # rank 0 is stuck here


def leave_the_others(ctx: RankContext, folder: Path, kind: str) -> None:
    """Call a collective that rank 1 can finish and the others cannot, and go on to a barrier."""
    average_gradients()
    if ctx.rank == 1:
        mark(folder)
    count = {"empty": 0, "fewer": 3}.get(kind.partition(" ")[0], 4) if ctx.rank == 1 else 4
    mine = torch.ones(count)
    parts = [torch.ones(count) for _ in range(ctx.world_size)]
    if kind == "empty all_gather":
        dist.all_gather(parts, mine)
    elif kind == "empty asynchronous all_gather":
        work = dist.all_gather(parts, mine, async_op=True)
        assert work is not None
        work.wait()
    elif kind == "empty all_reduce":
        dist.all_reduce(mine)
    elif kind == "fewer in a reduce":
        dist.reduce(mine, 0)
    elif kind == "another root of a broadcast":
        dist.broadcast(mine, 1 if ctx.rank == 1 else 0)
    dist.barrier()


def go_round_in_a_ring(ctx: RankContext, folder: Path) -> None:
    """Wait in a group with the next rank, which waits in a group with the rank after it."""
    size = ctx.world_size
    groups = [dist.new_group([rank, (rank + 1) % size]) for rank in range(size)]
    if ctx.is_main:
        mark(folder)
    dist.all_reduce(torch.ones(8), group=groups[ctx.rank])  # stuck here


def skip_a_collective(ctx: RankContext, folder: Path) -> None:
    """Let rank 1 skip an all-reduce, so that it is in the barrier while the others are not."""
    for _ in range(3):
        average_gradients()
    if ctx.rank == 1:
        mark(folder)
    else:
        average_gradients()
    dist.barrier()  # stuck here
    average_gradients()


def branch_by_rank(ctx: RankContext, folder: Path) -> None:
    """Let rank 0 alone wait at a barrier, while the others train with DDP."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(3):
        if step == 2 and ctx.is_main:
            mark(folder)
            dist.barrier()  # stuck here
        model(torch.ones(2, 4)).sum().backward()  # stuck here


def stop_in_training(ctx: RankContext, folder: Path) -> None:
    """Stop rank 1 between two steps of DDP."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(3):
        if step == 2 and ctx.rank == 1:
            mark(folder)
            os.kill(os.getpid(), signal.SIGSTOP)  # stuck here
        model(torch.ones(2, 4)).sum().backward()  # stuck here


def stop_before(ctx: RankContext, folder: Path, then: str) -> None:
    """Stop rank 1 before a broadcast that is all the other rank waits for, or before its end as soon as it is resumed."""
    average_gradients()
    if ctx.rank == 1:
        mark(folder)
        os.kill(os.getpid(), signal.SIGSTOP)  # stuck here
        if then == "an exit":
            os._exit(3)
        if then == "a crash":
            os.kill(os.getpid(), signal.SIGSEGV)
    if then == "a broadcast":
        dist.broadcast(torch.ones(8), src=1)  # stuck here
    average_gradients()  # stuck here


def leave_a_subgroup_alone(ctx: RankContext, folder: Path) -> None:
    """Return on rank 1 while rank 0 waits for it in a group of the two."""
    pair = dist.new_group([0, 1])
    average_gradients()
    if ctx.is_main:
        mark(folder)
        dist.all_reduce(torch.ones(8), group=pair)  # stuck here


def stop_for_a_moment(ctx: RankContext, folder: Path) -> str:
    """Stop rank 1, and let rank 0 resume it before a proof is possible."""
    pid = ctx.all_gather(os.getpid())[1]
    if ctx.rank == 1:
        mark(folder)
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(1.5)
        os.kill(pid, signal.SIGCONT)
    average_gradients()
    return "done"


def wait_for_test(folder: Path) -> None:
    """Sleep until the test, or another rank, lets this one continue."""
    ends_s = time.monotonic() + LIMIT_S
    while not (folder / MAY_CONTINUE).exists():
        assert time.monotonic() < ends_s, "the test has not found what waits"
        time.sleep(0.1)  # stuck here


def step_and_wait(ctx: RankContext, folder: Path, *, at_barrier: bool = False) -> str:
    """Make five steps of an optimizer and two more; rank 1 waits between them, and the others for it."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(7):
        if step == 5 and ctx.rank == 1:
            wait_for_test(folder)
        if step == 5 and at_barrier:
            ctx.barrier("epoch")
        average_gradients()
        weight.grad = torch.ones(2)
        optimizer.step()
    return "done"


JOINS = "import torch.distributed as dist; dist.init_process_group('gloo')"


def wait_for_a_program_in_its_place(ctx: RankContext, folder: Path) -> str:
    """Let rank 0 wait for a program that joins as rank 0, until the watch has said so."""
    for _ in range(5):  # from then on, the length of a step is known
        ctx.all_reduce(1.0, op="sum")
    if ctx.is_main:
        program = subprocess.Popen([sys.executable, "-c", JOINS])
        while not (folder / MAY_CONTINUE).exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(1)
        program.kill()
    ctx.barrier()
    return "done"


class SlowSample:
    """A dataset of which one sample takes long on rank 1."""

    def __init__(self, slow: int, folder: Path) -> None:
        self.slow, self.folder = slow, folder

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == self.slow:
            wait_for_test(self.folder)
        return index


def step_and_wait_for_a_loader_worker(ctx: RankContext, folder: Path) -> str:
    """Make steps with samples of two workers; rank 1 waits once for one of them, rank 0 for rank 1."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    dataset = SlowSample(9 if ctx.rank == 1 else -1, folder)
    seen = []
    for index in DataLoader(dataset, batch_size=1, num_workers=2):
        seen.append(int(index))
        average_gradients()
        weight.grad = torch.ones(2)
        optimizer.step()
    return "done" if seen == list(range(12)) else f"read {seen}"


def evaluate_on_one_rank(ctx: RankContext, folder: Path, takes_s: float) -> str:
    """Let rank 0 evaluate while the others wait, as between two epochs."""
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.step()
        average_gradients()
    if ctx.is_main:
        mark(folder)
        model.eval()
        ends = time.monotonic() + takes_s
        with torch.no_grad():
            while time.monotonic() < ends:
                time.sleep(BATCH_S)
                model(torch.ones(256, 256))
    average_gradients()
    return "done"


class SlowDisk(io.BytesIO):
    """A file whose first write is slow, but continues: a rank that only sleeps there does nothing."""

    def __init__(self, takes_s: float) -> None:
        super().__init__()
        self.takes_s = takes_s

    def write(self, data: Any) -> int:
        """Write in pieces, with pauses."""
        ends_s, self.takes_s = time.monotonic() + self.takes_s, 0.0
        with tempfile.TemporaryFile(buffering=0) as disk:
            while time.monotonic() < ends_s:
                disk.write(bytes(8_192))
                time.sleep(BATCH_S)
        return super().write(data)


def accumulate_evaluate_and_save(ctx: RankContext, _folder: Path, takes_s: float) -> str:
    """Accumulate gradients under no_sync; rank 0 evaluates and saves at times, the others wait."""
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in range(24):
        is_last = batch % 4 == 3
        with contextlib.nullcontext() if is_last else model.no_sync():
            model(torch.ones(8, 64)).sum().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        if batch % 12 == 11:
            if ctx.is_main:
                model.eval()
                ends = time.monotonic() + takes_s
                with torch.no_grad():
                    while time.monotonic() < ends:
                        time.sleep(BATCH_S)
                        model.module(torch.ones(64, 64))
                model.train()
                torch.save(model.module.state_dict(), SlowDisk(takes_s))
            dist.barrier()
    return "done"


def call_random_collectives(ctx: RankContext, _folder: Path, seed: int, calls: int) -> str:
    """Call collectives over random subgroups in the same order, each rank with its own delays."""
    choose, mine = random.Random(seed), random.Random(f"{seed}/{ctx.rank}")
    all_ranks = range(ctx.world_size)
    members = [
        sorted(choose.sample(all_ranks, choose.randint(2, ctx.world_size))) for _ in range(4)
    ]
    groups = [dist.new_group(each) for each in members]
    for _ in range(calls):
        at, name = choose.randrange(4), choose.choice(["all_reduce", "barrier", "broadcast"])
        is_long = choose.random() < 0.1
        if ctx.rank not in members[at]:
            continue
        time.sleep(mine.choice([0.0, 0.0, 0.01, 1.5 if is_long else 0.05]))
        if name == "all_reduce":
            dist.all_reduce(torch.ones(4), group=groups[at])
        elif name == "barrier":
            dist.barrier(group=groups[at])
        else:
            dist.broadcast(torch.ones(4), src=members[at][0], group=groups[at])
    return "done"


def hold_the_gil_in_training(ctx: RankContext, folder: Path) -> str:
    """Let rank 1 hold the GIL between two steps."""
    for step in range(6):
        if step == 5 and ctx.rank == 1:
            wait_with_the_gil(folder)
        average_gradients()
    return "done"


def ask_for_status(ctx: RankContext, folder: Path, how: str) -> str:
    """Let rank 0 ask for the status of its own launch, while rank 1 cannot answer."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        average_gradients()
        weight.grad = torch.ones(2)
        optimizer.step()
    pids = ctx.all_gather(os.getpid())
    said = ""
    if ctx.is_main:
        wait_until(lambda: is_away(pids[1], folder, how))
        said = call_status(ctx, "--json")
        (folder / MAY_CONTINUE).touch()
        os.kill(pids[1], signal.SIGCONT)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        wait_with_the_gil(folder)
    average_gradients()
    return said


def call_status(ctx: RankContext, *options: str) -> str:
    """Return what ``ddpsafe status --stacks`` prints of the launch that this rank belongs to."""
    command = [sys.executable, "-m", "ddpsafe", "status", str(ctx.run_dir), "--stacks", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


class WaitingSample:
    """A dataset whose sample is read after its stack has been looked at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        (self.folder / "away").touch()
        wait_for_test(self.folder)
        return index


def ask_for_status_of_a_loader(ctx: RankContext, folder: Path) -> str:
    """Let rank 0 ask for stacks while rank 1 waits for a sample of its loader's worker."""
    said = ""
    if ctx.is_main:
        wait_until((folder / "away").exists)
        said = call_status(ctx)
        (folder / MAY_CONTINUE).touch()
    else:
        assert [int(each) for each in DataLoader(WaitingSample(folder), num_workers=1)] == [0]
    average_gradients()
    return said


def wait_with_the_gil(folder: Path) -> None:
    """Wait in C until the test, or another rank, lets this one continue; no other thread runs Python."""
    library = ctypes.PyDLL(None)
    sys.setswitchinterval(600)
    (folder / "away").touch()
    awaited = str(folder / MAY_CONTINUE).encode()
    while library.access(awaited, 0):
        library.usleep(10_000)  # stuck here


def is_away(pid: int, folder: Path, how: str) -> bool:
    """Return whether rank 1 is in a state in which it cannot answer."""
    if how == "stopped":
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return (folder / "away").exists()


def reduce_often(ctx: RankContext, _folder: Path, slow_s: float) -> None:
    """Enter a collective after some work; rank 1 works longer."""
    for _ in range(30):
        time.sleep(0.02 + slow_s * ctx.rank)
        ctx.all_reduce(1.0)


def compute(takes_s: float) -> None:
    """Use the processor."""
    ends_s = time.monotonic() + takes_s
    while time.monotonic() < ends_s:
        pass


def compute_before_the_first_step(ctx: RankContext, _folder: Path, takes_s: float) -> None:
    """Compute on rank 1, as a compilation does, while rank 0 waits for its first gradients."""
    if ctx.rank == 1:
        compute(takes_s)
    average_gradients()


def wait_before_the_first_step(ctx: RankContext, folder: Path, how: str) -> None:
    """Wait for a lock that no process releases before the test lets the rank continue."""
    if how == "after computing":
        compute(COMPUTES_S)
        (folder / f"idle-{ctx.rank}").touch()
    if ctx.rank == 1 or how != "in a collective":
        if how == "lock":
            with (folder / "lock").open("w") as one, (folder / "lock").open("w") as other:
                fcntl.flock(one, fcntl.LOCK_SH)
                signal.signal(
                    signal.SIGALRM, lambda *_: _raise_if((folder / MAY_CONTINUE).exists())
                )
                signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
                with contextlib.suppress(InterruptedError):
                    fcntl.flock(other, fcntl.LOCK_EX)  # the rank itself holds the other one
                signal.setitimer(signal.ITIMER_REAL, 0)
        wait_for_test(folder)
    average_gradients()


def _raise_if(condition: object) -> None:
    if condition:
        raise InterruptedError


def wait_before_joining(rank: int, world_size: int, folder: Path) -> None:
    """Join a group of the script, rank 1 long after the other."""
    if rank == 1:
        wait_for_test(folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    dist.destroy_process_group()


# Ranks that call each other by torch's RPC.


def call_the_other_rank(
    rank: int, world_size: int, folder: Path, called: Callable[[Path], object], timeout_s: float
) -> None:
    """Call a function on rank 1 from rank 0."""
    rpc = _init_rpc(rank, world_size, timeout_s)
    if rank == 0:
        rpc.rpc_sync("w1", called, args=(folder,))
    rpc.shutdown()


def shut_rpc_down_alone(rank: int, world_size: int, folder: Path) -> None:
    """Return from rank 1 without the shutdown of RPC that rank 0 waits in."""
    rpc = _init_rpc(rank, world_size, 60.0)
    if rank == 0:
        threading.Thread(target=_exit_for_test, args=(folder,), daemon=True).start()
        rpc.shutdown()


def _init_rpc(rank: int, world_size: int, timeout_s: float) -> Any:
    from torch.distributed import rpc

    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12356"
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=timeout_s)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    return rpc


def _exit_for_test(folder: Path) -> None:
    wait_for_test(folder)
    mark(folder)
    os._exit(0)


def be_killed(folder: Path) -> None:
    """Be killed in the middle of the call."""
    mark(folder)
    os.kill(os.getpid(), 9)


def hang(folder: Path) -> None:
    """Never return from the call."""
    mark(folder)
    time.sleep(FOREVER_S)
