"""Ranks that go wrong, each in one way; what the tests in faults/ run.

`train` and `train_by_hand` are an ordinary training loop in which one rank meets a fault. Every
fault writes down the moment at which it strikes (`mark`), and the line on which a rank stays is
marked "# stuck here", so that a test can compare it with the line that the launcher names.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import scripts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpsafe import RankContext

    Fault = Callable[[Path], object]

STEPS = 5
FAULT_STEP = 2
FOREVER_S = 600
"""Longer than any test: a rank that waits so long is meant to be ended."""


def mark(folder: Path) -> None:
    """Write down that the fault strikes now, on the clock that all processes share."""
    temporary = folder / f"fault-{os.getpid()}"
    temporary.write_text(repr(time.monotonic()))
    temporary.rename(folder / "fault")


def since(moment: float) -> float:
    """Return how long ago a moment on that clock was, in seconds."""
    return time.monotonic() - moment


def train(ctx: RankContext, folder: Path, fault: Fault, culprit: int = 1) -> int:
    """Train; rank `culprit` meets the fault in the third step, the others wait for it."""
    for step in range(STEPS):
        if step == FAULT_STEP and ctx.rank == culprit:
            mark(folder)
            fault(folder)
        average_gradients()
    return ctx.rank


def average_gradients() -> None:
    """Take part in one all-reduce, as a step of DDP does."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(8))  # stuck here


def setup(rank: int, world_size: int, *, timeout_s: float | None = 60) -> None:
    """Make the group as the tutorials do, on a hard-coded port; most of them name no timeout."""
    import torch.distributed as dist

    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timeout)


def cleanup() -> None:
    """Destroy the group as the tutorials do."""
    import torch.distributed as dist

    dist.destroy_process_group()


def train_by_hand(
    rank: int,
    world_size: int,
    folder: Path,
    fault: Fault,
    culprit: int = 1,
    timeout_s: float | None = 60,
) -> None:
    """Be the script of a tutorial: `setup`, `train`, `cleanup` only when all went well."""
    setup(rank, world_size, timeout_s=timeout_s)
    for step in range(STEPS):
        if step == FAULT_STEP and rank == culprit:
            mark(folder)
            fault(folder)
        average_gradients()
    cleanup()


# A rank raises.


class LostSampleError(Exception):
    """An error of the user's own, with a fact that has to survive the journey."""

    def __init__(self, message: str, index: int) -> None:
        """Keep the index."""
        super().__init__(message, index)
        self.index = index


def raise_own_error(_folder: Path) -> NoReturn:
    """Raise as a broken sample does."""
    msg = "sample is broken"
    raise LostSampleError(msg, 17)  # stuck here


def raise_before_the_group(rank: int, world_size: int, folder: Path) -> None:
    """Fail while the others already wait in `setup`."""
    if rank == 1:
        mark(folder)
        raise_own_error(folder)
    setup(rank, world_size)


def raise_in_finally(ctx: RankContext, folder: Path) -> None:
    """Fail in the block that should tidy up."""
    try:
        average_gradients()
    finally:
        if ctx.rank == 1:
            mark(folder)
            raise_own_error(folder)
    average_gradients()


def raise_while_saving(ctx: RankContext, folder: Path) -> None:
    """Let rank 0 save to a directory that is not there, while the others wait at a barrier."""
    import torch
    import torch.distributed as dist

    average_gradients()
    if ctx.is_main:
        mark(folder)
        torch.save({"step": 1}, folder / "missing" / "model.pt")
    dist.barrier()


def raise_on_all(ctx: RankContext, folder: Path) -> None:
    """Fail everywhere, rank 1 first."""
    average_gradients()
    if ctx.rank != 1:
        scripts.wait_until((folder / "fault").exists)
        time.sleep(0.15)  # while rank 1 gets from the mark to its error, on a busy machine
    else:
        mark(folder)
    raise_own_error(folder)


def train_a_model(ctx: RankContext, folder: Path, culprit: int) -> float:
    """Train with DistributedDataParallel; rank `culprit` fails in its third step."""
    import torch
    from torch import nn

    model = ctx.wrap(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        if step == FAULT_STEP and ctx.rank == culprit:
            mark(folder)
            raise_own_error(folder)
        optimizer.zero_grad()
        loss = model(torch.ones(8, 4)).sum()
        loss.backward()
        optimizer.step()
    return float(loss)


def tidy_up_with_destroy(rank: int, world_size: int, folder: Path) -> None:
    """Destroy the group in ``finally``, as the official tutorial does."""
    setup(rank, world_size)
    try:
        _train_and_fail(rank, folder)
    finally:
        cleanup()


def tidy_up_with_barrier(rank: int, world_size: int, folder: Path) -> None:
    """Meet the others in ``except``, though they wait elsewhere."""
    import torch.distributed as dist

    setup(rank, world_size)
    try:
        _train_and_fail(rank, folder)
    except Exception:
        dist.barrier()
        raise
    finally:
        cleanup()


def tidy_up_with_barrier_and_destroy(rank: int, world_size: int, folder: Path) -> None:
    """Do both in ``finally``, on the good path and on the bad one."""
    import torch.distributed as dist

    setup(rank, world_size)
    try:
        _train_and_fail(rank, folder)
    finally:
        dist.barrier()
        cleanup()


def tidy_up_with_another_group(rank: int, world_size: int, folder: Path) -> None:
    """Start anew in ``finally``, though nobody else does."""
    setup(rank, world_size)
    try:
        _train_and_fail(rank, folder)
    finally:
        cleanup()
        setup(rank, world_size)


def tidy_up_with_our_barrier(ctx: RankContext, folder: Path) -> None:
    """Wait for the others at a barrier of ddpsafe's, in ``finally``."""
    try:
        _train_and_fail(ctx.rank, folder)
    finally:
        ctx.barrier("the end")


def tidy_up_with_our_cleanup(rank: int, world_size: int, folder: Path) -> None:
    """Use ddpsafe's own names in the places of the script's."""
    import ddpsafe

    ddpsafe.setup(rank, world_size)
    try:
        _train_and_fail(rank, folder)
    finally:
        ddpsafe.cleanup()


def swallow_and_go_on(rank: int, world_size: int, folder: Path) -> None:
    """Log the error and go on, as ``except Exception: print`` does: the rank is then behind."""
    setup(rank, world_size)
    for step in range(STEPS):
        with contextlib.suppress(LostSampleError):
            if rank == 1 and step == FAULT_STEP:
                mark(folder)
                raise_own_error(folder)
            average_gradients()
    cleanup()


def _train_and_fail(rank: int, folder: Path) -> None:
    for step in range(STEPS):
        if rank == 1 and step == FAULT_STEP:
            mark(folder)
            raise_own_error(folder)
        average_gradients()


class LockedError(Exception):
    """An exception that cannot be pickled."""

    def __init__(self, message: str) -> None:
        """Hold a lock."""
        super().__init__(message)
        self.lock = threading.Lock()


class KeywordError(Exception):
    """An exception that pickle takes, and cannot build again."""

    def __init__(self, *, code: int) -> None:
        """Take keywords only."""
        super().__init__(f"keyword code {code}")


class BombError(Exception):
    """An exception that does harm where it is built again: its reader must not be the victim."""

    def __reduce__(self) -> tuple[object, ...]:
        """Exit whoever unpickles it."""
        return (sys.exit, (99,))


class RudeError(BaseException):
    """No `Exception`: ``except Exception`` lets it through."""


def raise_locked(_folder: Path) -> NoReturn:
    """Raise what cannot be pickled."""
    msg = "locked text"
    raise LockedError(msg)


def raise_keyword(_folder: Path) -> NoReturn:
    """Raise what cannot be built again."""
    raise KeywordError(code=7)


def raise_bomb(_folder: Path) -> NoReturn:
    """Raise what ends the process that builds it again."""
    msg = "bomb text"
    raise BombError(msg)


def raise_large(_folder: Path) -> NoReturn:
    """Raise 50 MB of text."""
    msg = "large text " + "x" * 50_000_000 + " end of text"
    raise ValueError(msg)


def raise_rude(_folder: Path) -> NoReturn:
    """Raise a bare `BaseException`."""
    msg = "rude text"
    raise RudeError(msg)


def raise_chained(_folder: Path) -> NoReturn:
    """Raise one error from another."""
    try:
        _ = {}["key of the first"]
    except KeyError as exc:
        msg = "second text"
        raise ValueError(msg) from exc


def raise_group(_folder: Path) -> NoReturn:
    """Raise several at once."""
    parts = [ValueError("left part"), TypeError("right part")]
    raise ExceptionGroup("both parts", parts)  # noqa: F821 - Python 3.11 has it


# A rank exits.


def exit_well(_folder: Path) -> NoReturn:
    """Ask for exit code 0 in the middle of the work."""
    sys.exit(0)


def exit_badly(_folder: Path) -> NoReturn:
    """Ask for exit code 3."""
    sys.exit(3)


def exit_as_os_system(_folder: Path) -> NoReturn:
    """Exit with a wait status, of which the system keeps eight bits: those of a success."""
    sys.exit(os.system("exit 1"))


def exit_below_zero(_folder: Path) -> NoReturn:
    """Ask for exit code -1, which the system makes 255."""
    sys.exit(-1)


def vanish_well(_folder: Path) -> NoReturn:
    """End without a word, with code 0."""
    os._exit(0)


def vanish_badly(_folder: Path) -> NoReturn:
    """End without a word, with code 7."""
    os._exit(7)


def be_interrupted(_folder: Path) -> NoReturn:
    """Raise as a Ctrl-C that reaches one rank does."""
    raise KeyboardInterrupt


# A rank is killed.


def die_by_kill(_folder: Path) -> None:
    """Be ended by the strongest signal."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_by_terminate(_folder: Path) -> None:
    """Be ended by somebody's `kill`."""
    os.kill(os.getpid(), signal.SIGTERM)


def die_by_null_pointer(_folder: Path) -> None:
    """Read memory that is not there: a real SIGSEGV."""
    ctypes.string_at(0)  # stuck here


def die_by_short_mapping(folder: Path) -> None:
    """Read beyond the end of a mapped file: a real SIGBUS, as with a full /dev/shm."""
    import mmap

    with (folder / "mapped").open("w+b") as file:
        file.truncate(2 * mmap.PAGESIZE)
        memory = mmap.mmap(file.fileno(), 2 * mmap.PAGESIZE)
        file.truncate(0)
        _ = memory[mmap.PAGESIZE]


def die_by_abort(_folder: Path) -> None:
    """Give up as a failed assertion in C does: a real SIGABRT."""
    ctypes.CDLL(None).abort()


# Memory runs out.


def outgrow_the_process(_folder: Path) -> None:
    """Ask for more than the process may have: Python's own MemoryError."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (256 << 20), hard))
    hoard: list[bytearray] = []
    while True:
        hoard.append(bytearray(64 << 20))


def outgrow_torch(_folder: Path) -> None:
    """Ask torch for more than the process may have: a RuntimeError of its allocator."""
    import torch

    _soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (256 << 20), hard))
    torch.ones(1 << 30)


def outgrow_the_machine(_folder: Path) -> None:
    """Fill all the memory there is in a control group: the kernel kills.

    The test's group has less than is filled here; without it the machine shall survive.
    """
    hoard = [bytearray(os.urandom(1) * (8 << 20)) for _ in range(256)]
    msg = f"{len(hoard)} times 8 MB were there"
    raise RuntimeError(msg)


# A rank hangs.


def stop(_folder: Path) -> None:
    """Be frozen, as by a debugger or Ctrl-Z."""
    os.kill(os.getpid(), signal.SIGSTOP)  # stuck here


def sleep(_folder: Path) -> None:
    """Wait in Python for nothing."""
    time.sleep(FOREVER_S)  # stuck here


def be_busy(_folder: Path) -> None:
    """Compute in Python without an end."""
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
    """Read from a FIFO that nobody writes to, as from a mount that hangs."""
    fifo = folder / f"fifo-{os.getpid()}"
    os.mkfifo(fifo)
    fifo.read_bytes()  # stuck here


DISK: Final = "disk"


def write_to_a_frozen_disk(folder: Path) -> None:
    """Write where the kernel lets nobody write until it is thawed, as to a server that is gone."""
    (folder / DISK / f"file-{os.getpid()}").write_bytes(b"x")  # stuck here


def wait_for_each_other(_folder: Path) -> None:
    """Take two locks in two orders, in two threads."""
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


def sleep_before_a_barrier(ctx: RankContext, folder: Path) -> None:
    """Let rank 1 sleep while the others wait for it at a barrier of ddpsafe's."""
    if ctx.rank == 1:
        mark(folder)
        sleep(folder)
    ctx.barrier("after the epoch")


def sleep_everywhere(ctx: RankContext, folder: Path) -> None:
    """Let all ranks sleep: no collective is there to time out."""
    average_gradients()
    if ctx.is_main:
        mark(folder)
    sleep(folder)


class Optimizer:
    """An argument that is one parameter and its optimizer in the rank.

    torch imports its compiler when the first optimizer is made, which takes longer than the
    timeouts of these tests; so it is made while the argument is loaded.
    """

    def __reduce__(self) -> tuple[object, ...]:
        """Load through `make_optimizer`."""
        return (make_optimizer, ())


def make_optimizer() -> Any:
    """Return an optimizer of one parameter."""
    import torch

    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


def step_slowly(
    ctx: RankContext, _folder: Path, how: str, takes_s: float, optimizer: Any = None
) -> str:
    """Make steps of a third of a second for a while."""
    ends = time.monotonic() + takes_s
    while time.monotonic() < ends:
        if how == "optimizer":
            optimizer.step()
        elif how == "collective" and ctx.is_main:
            average_gradients()
        time.sleep(0.3)
    return "done"


def _count_reads(doing: Callable[[], object]) -> int:
    """Return how often torch's flight recorder is read meanwhile, which stops training."""
    import torch._C._distributed_c10d as c10d  # there is no public way

    reads = 0
    dump = c10d._dump_fr_trace_json

    def count(*args: Any, **options: Any) -> Any:
        nonlocal reads
        reads += 1
        return dump(*args, **options)

    c10d._dump_fr_trace_json = count
    doing()
    return reads


def count_reads_in_training(ctx: RankContext, folder: Path, takes_s: float, optimizer: Any) -> int:
    """Make steps for a while; return how often the rank was asked where it is."""
    return _count_reads(lambda: step_slowly(ctx, folder, "optimizer", takes_s, optimizer))


def count_reads_at_an_error(_ctx: RankContext, folder: Path, takes_s: float) -> int:
    """Take long to handle an error; return how often the rank was asked where it is meanwhile."""
    try:
        raise_own_error(folder)
    except LostSampleError:
        cleanup()
        return _count_reads(lambda: time.sleep(takes_s))


# Ranks come apart.


def skip_one(ctx: RankContext, folder: Path, culprit: int) -> None:
    """Leave out one all-reduce, as a ``continue`` on a bad batch does, and then save."""
    import torch.distributed as dist

    for step in range(STEPS):
        if step == FAULT_STEP and ctx.rank == culprit:
            mark(folder)
            continue
        average_gradients()
    dist.all_gather_object([None] * ctx.world_size, ctx.rank)


def run_out_of_batches(ctx: RankContext, folder: Path, batches: list[int]) -> int:
    """Train on as many batches as this rank has."""
    for _ in range(batches[ctx.rank]):
        average_gradients()
    if batches[ctx.rank] == min(batches):
        mark(folder)
    return ctx.rank


def return_early(ctx: RankContext, folder: Path) -> str:
    """Leave through a condition that only this rank meets."""
    average_gradients()
    if ctx.rank == 1:
        mark(folder)
        return "early stopping"
    average_gradients()
    return "trained"


def come_apart_in_the_second_group(
    rank: int, world_size: int, folder: Path, fault: Fault, calls: int, timeout_s: float = 60
) -> None:
    """Make a second group; after some calls there, rank 1 meets the fault and the others wait.

    The first group has made more calls by its end than the second one will.
    """
    setup(rank, world_size)
    for _ in range(2 * calls + STEPS):
        average_gradients()
    cleanup()
    setup(rank, world_size, timeout_s=timeout_s)
    for _ in range(calls):
        average_gradients()
    if rank == 1:
        mark(folder)
        fault(folder)
    else:
        average_gradients()


def pass_other_shapes(
    ctx: RankContext, folder: Path, culprit: int, its_size: int, others_size: int
) -> None:
    """Reduce a last batch that has another size than the others'."""
    import torch
    import torch.distributed as dist

    average_gradients()
    mark(folder)
    dist.all_reduce(torch.ones(its_size if ctx.rank == culprit else others_size))  # stuck here
    dist.all_reduce(torch.ones(4))


def call_another_collective(ctx: RankContext, folder: Path, culprit: int) -> None:
    """Broadcast where the others reduce."""
    import torch
    import torch.distributed as dist

    average_gradients()
    if ctx.rank == culprit:
        mark(folder)
        dist.all_gather([torch.ones(8)] * ctx.world_size, torch.ones(8))  # stuck here
    else:
        average_gradients()


def work_alone_at_the_end(ctx: RankContext, _folder: Path, takes_s: float) -> str:
    """Let rank 0 save and evaluate after the others have returned."""
    average_gradients()
    if not ctx.is_main:
        return "done"
    time.sleep(takes_s)
    return "saved"


def evaluate_on_rank_zero(ctx: RankContext, folder: Path) -> None:
    """Evaluate on rank 0 alone through the wrapper: BatchNorm's buffers are then broadcast."""
    model = _train_with_buffers(ctx)
    if ctx.is_main:
        mark(folder)
        model(_batch())
    for _ in range(STEPS):
        model(_batch()).sum().backward()


def evaluate_unwrapped_on_rank_zero(ctx: RankContext, _folder: Path) -> str:
    """Evaluate on rank 0 alone, through the bare model."""
    model = _train_with_buffers(ctx)
    if ctx.is_main:
        ctx.unwrap(model)(_batch())
    for _ in range(STEPS):
        model(_batch()).sum().backward()
    return "evaluated" if ctx.is_main else "trained"


def _train_with_buffers(ctx: RankContext) -> Any:
    """Make one step of a wrapped model that has buffers."""
    from torch import nn

    # DDP imports 800 modules when it is first made; its first collective comes after that, and on a
    # busy machine the ranks would be further apart than the timeout of these tests.
    importlib.import_module("torch._dynamo")
    ctx.barrier()
    model = ctx.wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model(_batch()).sum().backward()
    return model


def _batch() -> Any:
    import torch

    return torch.ones(8, 4)


# A rank does not join.


class FailsToLoad:
    """An argument that rank 1 cannot unpickle."""

    def __init__(self, folder: Path) -> None:
        """Keep what `__reduce__` needs."""
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        """Load through `load_badly`."""
        return (load_badly, (self.folder,))


def load_badly(folder: Path) -> str:
    """Unpickle; fail on rank 1."""
    if os.environ.get("RANK") == "1":
        mark(folder)
        raise_own_error(folder)
    return "loaded"


def join_never(rank: int, world_size: int, folder: Path, timeout_s: float = 60) -> None:
    """Hang before `setup`."""
    if rank == 1:
        mark(folder)
        sleep(folder)
    setup(rank, world_size, timeout_s=timeout_s)


def join_late(rank: int, world_size: int, folder: Path, delay_s: float) -> None:
    """Come to `setup` after the others have waited for a while."""
    if rank == 1:
        time.sleep(delay_s)
    setup(rank, world_size)
    average_gradients()
    (folder / f"done-{rank}").touch()
    cleanup()


class SlowToLoad:
    """An argument that takes its time to unpickle on rank 1: stuck before the function runs."""

    def __init__(self, folder: Path, delay_s: float = FOREVER_S) -> None:
        """Keep what `__reduce__` needs."""
        self.folder = folder
        self.delay_s = delay_s

    def __reduce__(self) -> tuple[object, ...]:
        """Load through `load_slowly`."""
        return (load_slowly, (self.folder, self.delay_s))


def load_slowly(folder: Path, delay_s: float) -> str:
    """Unpickle, on rank 1 with a delay; once, so that a check in the caller is quick."""
    if os.environ.get("RANK") == "1":
        mark(folder)
        time.sleep(delay_s)  # stuck here
    return "loaded"


def take(ctx: RankContext, _folder: Path, _argument: object) -> int:
    """Take an argument and do nothing with it."""
    return ctx.rank


# Ports.


def do_nothing_about_it(_folder: Path) -> None:
    """Be no fault at all."""


def listen_on(ctx: RankContext, folder: Path, port: int) -> None:
    """Open a hard-coded port on rank 1."""
    average_gradients()
    if ctx.rank == 1:
        mark(folder)
        socket.create_server(("127.0.0.1", port))
    average_gradients()


def count_ranks_by_hand(rank: int, world_size: int, folder: Path) -> None:
    """Add up one for each rank, on a hard-coded port."""
    import torch
    import torch.distributed as dist

    setup(rank, world_size)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    (folder / f"count-{rank}").write_text(str(ones.item()))
    cleanup()


# A rank does not end.


def ignore_terminate(ctx: RankContext, folder: Path) -> None:
    """Let rank 0 ignore SIGTERM, and rank 1 fail."""
    if ctx.rank != 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        average_gradients()
        sleep(folder)
    average_gradients()
    mark(folder)
    raise_own_error(folder)


def return_and_stay(ctx: RankContext, folder: Path) -> str:
    """Return a value, and leave a thread behind that never ends."""
    average_gradients()
    if ctx.rank == 1:
        threading.Thread(target=sleep, args=(folder,), name="never ends").start()
        mark(folder)
    return f"value of {ctx.rank}"


# What ranks start.

_STUBBORN = (
    "import signal, sys, time\n"
    "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):\n"
    "    signal.signal(number, signal.SIG_IGN)\n"
    "print('up', flush=True)\n"
    f"time.sleep({FOREVER_S})\n"
)


def start_stubborn(*, own_session: bool) -> int:
    """Start a process that ignores every signal that can be ignored; return its pid."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _STUBBORN],
        stdout=subprocess.PIPE,
        start_new_session=own_session,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process.pid


def leave_children_and_fail(ctx: RankContext, folder: Path) -> None:
    """Start two stubborn processes on each rank, then let rank 1 fail."""
    pids = [start_stubborn(own_session=own) for own in (False, True)]
    (folder / f"children-{ctx.rank}").write_text(" ".join(map(str, pids)))
    ctx.barrier("all have children")
    if ctx.rank == 1:
        mark(folder)
        raise_own_error(folder)
    average_gradients()


def leave_children_and_return(ctx: RankContext, _folder: Path) -> list[int]:
    """Start two stubborn processes on each rank, and return their pids."""
    ctx.barrier("all are there")
    return [start_stubborn(own_session=own) for own in (False, True)]


class Numbers:
    """A dataset whose worker is killed at one sample."""

    def __init__(self, folder: Path, deadly: int | None) -> None:
        """Keep the sample's index."""
        self.folder = folder
        self.deadly = deadly

    def __len__(self) -> int:
        """Be long enough for a few batches."""
        return 64

    def __getitem__(self, index: int) -> int:
        """Return the index; at the deadly one, kill the process that asks."""
        if index == self.deadly:
            mark(self.folder)
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def lose_a_loader_worker(ctx: RankContext, folder: Path) -> None:
    """Read through a DataLoader whose worker dies on rank 1."""
    from torch.utils.data import DataLoader

    numbers: Any = Numbers(folder, 40 if ctx.rank == 1 else None)
    for _ in DataLoader(numbers, batch_size=8, num_workers=1):
        average_gradients()


def work_with_everything(ctx: RankContext, folder: Path, how: str) -> None:
    """Hold a DataLoader's worker and stubborn children, then wait in Python, in gloo or in C."""
    from torch.utils.data import DataLoader

    numbers: Any = Numbers(folder, None)
    # Forked, it is there at once; a rank's own start method would import torch once more.
    loader = iter(DataLoader(numbers, batch_size=8, num_workers=1, multiprocessing_context="fork"))
    next(loader)
    pids = [os.getpid(), *(start_stubborn(own_session=own) for own in (False, True))]
    pids += [worker.pid for worker in loader._workers]
    (folder / f"pids-{ctx.rank}.tmp").write_text(" ".join(map(str, pids)))
    (folder / f"pids-{ctx.rank}.tmp").rename(folder / f"pids-{ctx.rank}")
    ctx.barrier("all have children")
    wait_somewhere(ctx, folder, how)


def wait_somewhere(ctx: RankContext, folder: Path, how: str) -> None:
    """Be in Python, blocked in gloo, in C with the GIL held, or deaf to signals."""
    if how == "deaf":
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
    (folder / f"ready-{ctx.rank}").touch()
    if how == "gil":
        hold_the_gil(folder)
    if how != "gloo" or ctx.rank == 1:
        sleep(folder)
    average_gradients()


def wait_for_go(ctx: RankContext, folder: Path) -> str:
    """Wait for a file that the test makes."""
    (folder / f"ready-{ctx.rank}").touch()
    wait_for(folder / "go")
    return "went"


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    scripts.wait_until(path.exists, within_s=120)


def children_of(pid: int) -> list[int]:
    """Return the pids of a process' children."""
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


# Retry.


def fail_on_attempts(ctx: RankContext, folder: Path, attempts: int, error: str) -> int:
    """Fail on rank 1 in the first attempts, then work."""
    with (folder / f"ran-{ctx.rank}").open("a") as file:
        file.write(f"{ctx.attempt}\n")
    average_gradients()
    if ctx.rank == 1 and ctx.attempt <= attempts:
        mark(folder)
        if error == "killed":
            die_by_kill(folder)
        raise {"network": ConnectionError, "value": ValueError, "memory": MemoryError}[error](
            f"failure {ctx.attempt}"
        )
    average_gradients()
    return ctx.attempt


def take_the_data_and_die(folder: Path) -> None:
    """Die of what takes the next attempt's data away too, as a storage that goes down does."""
    (folder / "data").rmdir()
    die_by_kill(folder)


def die_first_and_then_wait(ctx: RankContext, folder: Path) -> None:
    """Fail in the first attempt, and stay in the second one."""
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
    """Make three optimizer steps, then be killed: the same end on every attempt."""
    with (folder / f"ran-{ctx.rank}").open("a") as file:
        file.write(f"{ctx.attempt}\n")
    for _ in range(3):
        optimizer.step()
    average_gradients()
    if ctx.rank == 1:
        mark(folder)
        die_by_kill(folder)
    average_gradients()


def do_nothing(ctx: RankContext) -> int:
    """Return the rank."""
    return ctx.rank


def describe_meeting(ctx: RankContext, folder: Path) -> dict[str, list[str]]:
    """Write down where this attempt meets and logs, and fail on the first one.

    Returns:
        Of the first attempt: the processes that are alive, and the ports that answer.
    """
    from ddpsafe._worker import session

    spec = session.find_spec()
    assert spec is not None
    assert spec.logs is not None
    facts = [str(os.getpid()), str(spec.store_port), str(spec.attempt), spec.logs.stderr]
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
        "answers": [port for _, port in first if _answers(int(port))],
    }


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def recover_together(ctx: RankContext, folder: Path) -> str:
    """Handle the same error on all ranks, and meet in its `except` block, one rank always late."""
    for late in range(2):
        _recover(ctx, folder, late)
    return "recovered"


def _recover(ctx: RankContext, folder: Path, late: int) -> None:
    import torch.distributed as dist

    try:
        (folder / "no-checkpoint").read_text()
    except FileNotFoundError:
        if ctx.rank == late:
            time.sleep(1)
        dist.barrier()
        ctx.barrier("all have recovered")
        if ctx.rank == 1 - late:
            time.sleep(1)
        average_gradients()


def start_anew_with_another_group(
    rank: int, world_size: int, folder: Path, where: str, late_s: float
) -> None:
    """Handle the same error on all ranks with another group; rank 0 is late there."""
    setup(rank, world_size)
    try:
        raise_own_error(folder)
    except LostSampleError:
        cleanup()
        if where == "inside":
            _meet_late(rank, world_size, late_s)
    if where == "after":
        _meet_late(rank, world_size, late_s)


def _meet_late(rank: int, world_size: int, late_s: float) -> None:
    setup(rank, world_size)
    average_gradients()
    if rank == 0:
        time.sleep(late_s)
    average_gradients()


def fail_beside_a_rank_that_steps(
    rank: int, world_size: int, folder: Path, optimizer: Any, where: str
) -> None:
    """Handle an error on all ranks with a destroy, and let rank 0 train on; then rank 1 fails."""
    setup(rank, world_size)
    try:
        raise_own_error(folder)
    except LostSampleError:
        cleanup()
        if where == "inside":
            optimizer.step()
    if where == "after":
        optimizer.step()
    (folder / f"stepped-{rank}").touch()
    if rank != 1:
        sleep(folder)
    scripts.wait_until((folder / "stepped-0").exists)
    mark(folder)
    raise_own_error(folder)


def fail_beside_a_handled_error(ctx: RankContext, folder: Path) -> None:
    """Let rank 1 fail while rank 0 waits for it inside an `except` block."""
    try:
        import no_such_module_at_all  # noqa: F401 - it is not there
    except ImportError:
        average_gradients()
        if ctx.rank == 1:
            time.sleep(0.2)
            mark(folder)
            raise_own_error(folder)
        ctx.barrier("never")


def run_inside_an_except_block(rank: int, world_size: int, folder: Path) -> None:
    """Be a script whose main function is called in an `except` block."""
    import torch.distributed as dist

    import ddpsafe

    try:
        import no_such_module_at_all  # noqa: F401 - it is not there
    except ImportError:
        ddpsafe.setup(rank, world_size)
        average_gradients()
        ddpsafe.cleanup()
        (folder / f"closed-{rank}").write_text(str(not dist.is_initialized()))


class KillsWhoLoads(FailsToLoad):
    """An argument that kills rank 1 while it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        """Load through `load_and_die`."""
        return (load_and_die, (self.folder,))


def load_and_die(folder: Path) -> str:
    """Unpickle; die on rank 1."""
    if os.environ.get("RANK") == "1":
        mark(folder)
        die_by_kill(folder)
    return "loaded"


def be_killed_at_exit(ctx: RankContext, _folder: Path) -> int:
    """Return, and be killed on the way out."""
    if ctx.rank == 1:
        atexit.register(os.kill, os.getpid(), signal.SIGKILL)
    return ctx.rank


# The run directory.


def print_for_ever(ctx: RankContext, folder: Path) -> None:
    """Print on rank 1 until the disk is full."""
    average_gradients()
    while ctx.rank == 1:
        mark(folder)
        print("x" * 1_000)
    average_gradients()


def fill_and_fail(ctx: RankContext, folder: Path, filler: Path) -> None:
    """Fill the disk of the run directory, and fail."""
    average_gradients()
    if ctx.rank == 1:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"x" * 512):
                pass
        mark(folder)
        raise_own_error(folder)
    average_gradients()


def remove_run_dir(ctx: RankContext, folder: Path, how: str) -> str:
    """Remove the run directory on rank 1, and go on, raise or hang."""
    average_gradients()
    if ctx.rank == 1:
        assert ctx.run_dir is not None
        shutil.rmtree(ctx.run_dir)
        mark(folder)
        if how == "raise":
            raise_own_error(folder)
        if how == "hang":
            sleep(folder)
    print("to whom it may concern")
    average_gradients()
    return "done"


def return_rank(ctx: RankContext, _folder: Path) -> int:
    """Return the rank."""
    return ctx.rank


# Ranks that another launcher has started.


def fail_attached(folder: Path, style: str) -> None:
    """Fail on rank 1, inside the context manager or between `setup` and `cleanup`."""
    import ddpsafe

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
    """Let rank 1 go elsewhere while the others wait at a barrier."""
    import ddpsafe

    with _timed(folder), ddpsafe.process_group("gloo", timeouts={"barrier": timeout_s}) as ctx:
        average_gradients()
        if ctx.rank != 1:
            ctx.barrier("evaluated")
        mark(folder)
        scripts.wait_until(lambda: len(list(folder.glob("over-*"))) == ctx.world_size - 1)
        return "left alone"


@contextlib.contextmanager
def _timed(folder: Path) -> Iterator[None]:
    """Write down how long after the fault the block was left."""
    entered = time.monotonic()
    try:
        yield
    finally:
        fault = folder / "fault"
        struck = float(fault.read_text()) if fault.exists() else entered
        (folder / f"over-{os.environ['RANK']}").write_text(repr(since(struck)))
