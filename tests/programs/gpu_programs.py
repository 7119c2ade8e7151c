"""Rank functions of gpu/test_gpu.py.

If a test needs two ranks and the machine has one GPU, both share it. NCCL allows that only between
different hosts, so each rank gets its own NCCL_HOSTID before the group is made. That is for tests
only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

import ddpsafe
from ddpsafe import RankContext
from ddpsafe._worker.torch_hooks import read_recorders
from ddpsafe.checkpoint import Checkpointer
from ddpsafe.checkpoint._trees import HostCopies

Program: TypeAlias = Callable[[RankContext], dict[str, Any]]

STEPS = 4
BATCH = 8


def look_around(ctx: RankContext) -> dict[str, Any]:
    """Return the rank's device, and the one that torch uses by default."""
    group = dist.group.WORLD
    total = torch.ones(1, device="cuda") * (ctx.rank + 1)
    dist.all_reduce(total)
    return {
        "device": str(ctx.device),
        "current": torch.cuda.current_device(),
        "made_on": str(torch.empty(1, device="cuda").device),
        "backend": (ctx.backend, dist.get_backend()),
        "bound": str(getattr(group, "bound_device_id", None)),
        "total": total.item(),
    }


def return_a_device_tensor(ctx: RankContext) -> dict[str, torch.Tensor]:
    """Return a tensor on the GPU."""
    return {"tensor": torch.full((3,), float(ctx.rank), device=ctx.device)}


def reduce_on_device(ctx: RankContext) -> dict[str, Any]:
    """Use every collective of the context with tensors on the device and on the CPU."""
    loss = torch.tensor(float(ctx.rank), device=ctx.device)
    mean = ctx.reduce_mean(loss)
    on_cpu = ctx.reduce_mean(torch.tensor(float(ctx.rank)))
    return {
        "mean": (mean.item(), str(mean.device)),
        "mean_of_cpu": (on_cpu.item(), str(on_cpu.device)),
        "dict": ctx.reduce_mean({"loss": float(ctx.rank)}),
        "gathered": ctx.all_gather(ctx.rank),
        "broadcast": ctx.broadcast(f"from {ctx.rank}"),
        "stop": ctx.stop_requested(),
    }


def be_one_of_two(rank: int, program: Program, folder: Path) -> None:
    """Make the group as a script does, run the program in it, and write its result to a file."""
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % max(1, gpus))
    if gpus < 2:
        os.environ["NCCL_HOSTID"] = f"ddpsafe-test-{rank}"
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    # Each rank uses its local rank's GPU, unless the script sets another: both may use the first.
    ctx = dataclasses.replace(ddpsafe.current(), device=device, backend="nccl")
    found = program(ctx)
    dist.destroy_process_group()
    torch.save(found, folder / f"rank-{rank}.pt")


def network() -> nn.Module:
    """Make the same network in every process, on the CPU."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make the same batches in every process, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 2, generator=generator))
        for _ in range(STEPS)
    ]


def share_of(tensor: torch.Tensor, ctx: RankContext) -> torch.Tensor:
    """Return this rank's part of a batch, on its device."""
    return tensor.chunk(ctx.world_size)[ctx.rank].to(ctx.device)


def train_in_parallel(ctx: RankContext) -> dict[str, Any]:
    """Train with synchronised BatchNorm: together, the ranks do the work of one process."""
    model = ctx.wrap(network(), sync_batchnorm=True)
    train(model, [(share_of(x, ctx), share_of(y, ctx)) for x, y in batches()])
    inner = ctx.unwrap(model)
    return {"norm": type(inner[1]).__name__, "state": on_cpu(inner)}


def train_alone(device: torch.device) -> dict[str, torch.Tensor]:
    """Train on whole batches in this process."""
    model = network().to(device)
    train(model, [(x.to(device), y.to(device)) for x, y in batches()])
    return on_cpu(model)


def train(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Run one step for each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in data:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def on_cpu(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers, copied to the CPU."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def train_with_amp(ctx: RankContext) -> dict[str, Any]:
    """Train in half precision with a gradient scaler, for ten epochs."""
    model = ctx.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cuda")
    losses, dtype = [], None
    for _ in range(10):
        for inputs, targets in batches():
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                outputs = model(share_of(inputs, ctx))
                dtype = str(outputs.dtype)
                loss = torch.nn.functional.mse_loss(outputs.float(), share_of(targets, ctx))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(ctx.reduce_mean(loss).item())
    parameters = {name: value.detach().cpu() for name, value in model.named_parameters()}
    return {"dtype": dtype, "losses": losses, "scale": scaler.get_scale(), "parameters": parameters}


def accumulate(ctx: RankContext) -> dict[str, Any]:
    """Accumulate the gradients of two batches, of which only the second synchronises."""
    model = ctx.wrap(torch.nn.Linear(4, 1, bias=False))
    ones = torch.ones(2, 4, device=ctx.device)
    with model.no_sync():
        model(ones * (ctx.rank + 1)).mean().backward()
    before = ctx.unwrap(model).weight.grad.tolist()
    model(ones).mean().backward()
    return {"before": before, "after": ctx.unwrap(model).weight.grad.tolist()}


@contextlib.contextmanager
def initialised_cuda() -> Iterator[torch.Tensor]:
    """Keep a tensor on the GPU, which initialises CUDA in this process."""
    yield torch.ones(1, device="cuda")
    torch.cuda.empty_cache()


# Faults.


SPIN_CYCLES = 10**12
"""A kernel that does nothing for minutes."""


def reduce_once(ctx: RankContext, size: int = 8) -> torch.Tensor:
    """Enqueue one all_reduce; return its future result."""
    value = torch.ones(size, device=ctx.device)
    dist.all_reduce(value)
    return value


def numbers_of_collectives(ctx: RankContext) -> list[tuple[int, str]]:
    """Reduce three times; return the collectives of the recorders, from entries and from counters."""
    for _ in range(3):
        reduce_once(ctx)
    torch.cuda.synchronize()
    time.sleep(0.5)  # the watchdog polls ten times a second
    full = read_recorders(asks_events=True)[0]
    counted = read_recorders(asks_events=False)[0]
    return [(each.number, each.state) for each in (full[-1], counted[-1])]


def sleep_before_all_reduce(ctx: RankContext) -> None:
    """Rank 1 hangs; rank 0 waits in ``.item()``."""
    reduce_once(ctx).sum().item()
    if ctx.rank == 1:
        time.sleep(600)  # stuck here
    reduce_once(ctx).sum().item()


def spin_first(ctx: RankContext) -> None:
    """Rank 1's GPU is busy for minutes; both ranks have enqueued the collective."""
    reduce_once(ctx).sum().item()
    if ctx.rank == 1:
        torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
    reduce_once(ctx).sum().item()


def run_ahead_then_miss(ctx: RankContext) -> None:
    """Rank 0 synchronises at each result; rank 1 enqueues 40, then hangs."""
    for _ in range(40):
        value = reduce_once(ctx)
        if ctx.rank == 0:
            value.sum().item()
    if ctx.rank == 1:
        time.sleep(600)  # stuck here
    reduce_once(ctx).sum().item()


def differ_then_run_ahead(ctx: RankContext) -> None:
    """The fourth collective differs, and both ranks enqueue 40 more."""
    for _ in range(3):
        reduce_once(ctx)
    value = torch.ones(8, device=ctx.device)
    if ctx.rank == 1:
        dist.broadcast(value, 0)
    else:
        dist.all_reduce(value)
    for _ in range(40):
        reduce_once(ctx)
    torch.cuda.synchronize()


def return_early(ctx: RankContext) -> None:
    """Rank 1 has one batch less."""
    for _ in range(2 - ctx.rank):
        reduce_once(ctx).sum().item()


def exit_with_zero(ctx: RankContext) -> None:
    """Rank 1 leaves the script by its fourth step, and its exit code says that all is well."""
    for step in range(20):
        if (ctx.rank, step) == (1, 3):
            sys.exit(0)
        reduce_once(ctx).sum().item()


def skip_a_step(ctx: RankContext) -> None:
    """Rank 1 leaves out its fourth step of DDP, as ``except: continue`` does."""
    model = ctx.wrap(torch.nn.Linear(8, 8))
    for step in range(20):
        if (ctx.rank, step) != (1, 3):
            model(torch.ones(4, 8, device=ctx.device)).sum().backward()
            model.module.weight.grad.sum().item()


def pass_another_shape(ctx: RankContext) -> None:
    """Rank 1 passes a quarter of the elements; both are too large for one message."""
    reduce_once(ctx).sum().item()
    for _ in range(3):
        reduce_once(ctx, 1 << (20 if ctx.rank == 1 else 22)).sum().item()


def raise_while_the_other_spins(ctx: RankContext) -> None:
    """Rank 1 raises while rank 0's GPU waits for it."""
    reduce_once(ctx).sum().item()
    if ctx.rank == 1:
        time.sleep(0.5)
        msg = "label 7 is out of range"
        raise ValueError(msg)
    reduce_once(ctx).sum().item()


def die(ctx: RankContext) -> None:
    """Rank 1 is killed while the other waits for it."""
    reduce_once(ctx).sum().item()
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    reduce_once(ctx).sum().item()


def die_while_spinning(ctx: RankContext) -> None:
    """Both GPUs are busy; rank 1 is killed."""
    reduce_once(ctx).sum().item()
    torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.cuda.synchronize()


def take_most_and_die_once(ctx: RankContext) -> int:
    """Take a third of the GPU on each rank, and be killed in the first attempt."""
    _, total = torch.cuda.mem_get_info()
    kept = torch.empty(int(total * 0.35), dtype=torch.uint8, device=ctx.device)
    reduce_once(ctx).sum().item()
    if ctx.rank == 1 and ctx.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    reduce_once(ctx).sum().item()
    return kept.numel()


def index_out_of_range(ctx: RankContext) -> None:
    """Rank 1 indexes a row that does not exist, in a kernel."""
    reduce_once(ctx).sum().item()
    if ctx.rank == 1:
        table = torch.ones(4, 4, device=ctx.device)
        table[torch.tensor([9], device=ctx.device)].sum()
        time.sleep(5)  # the watchdog reports it first
    reduce_once(ctx).sum().item()


def allocate_too_much(ctx: RankContext) -> None:
    """Allocate a tebibyte."""
    reduce_once(ctx).sum().item()
    if ctx.rank == 1:
        torch.empty(1 << 40, dtype=torch.uint8, device=ctx.device)
    reduce_once(ctx).sum().item()


def die_of_sigterm(ctx: RankContext) -> None:
    """Train; rank 0 receives SIGTERM, most likely while its main thread is in ``.item()``."""
    if ctx.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    while True:
        reduce_once(ctx).sum().item()


def look_before_cuda(rank: int, folder: Path) -> None:
    """Choose the GPU with an environment variable, as spawn's functions may."""
    before = torch.cuda.is_initialized()
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    made = torch.ones(1, device="cuda:0").device
    (folder / f"rank-{rank}").write_text(f"{before} {made} {torch.cuda.device_count()}")


def compute_on_the_cpu(rank: int, folder: Path) -> None:
    """Use gloo only; return whether a GPU is open."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    opened = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()]
    on_gpu = any(name.startswith("/dev/nvidia") for name in opened)
    (folder / f"rank-{rank}").write_text(str(on_gpu))
    dist.destroy_process_group()


def compute(ctx: RankContext) -> tuple[str, float]:
    """Compute on the rank's device."""
    return str(ctx.device), float(torch.ones(3, device=ctx.device).sum())


def load_batches(ctx: RankContext) -> dict[str, Any]:
    """Load batches in worker processes after CUDA is initialised."""
    data = torch.utils.data.TensorDataset(torch.arange(64.0))
    loader = ctx.loader(data, batch_size=4, num_workers=2)
    batches = [batch[0] for batch in loader]
    return {
        "pinned": batches[0].is_pinned(),
        "sum": sum(float(batch.to(ctx.device, non_blocking=True).sum()) for batch in batches),
    }


def copy_then_change(ctx: RankContext) -> bool:
    """Copy a state for an asynchronous save on a side stream, and change it at once."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        weights = torch.ones(1 << 24, device=ctx.device)
        copied = HostCopies().copy({"w": weights})
        weights.zero_()
    torch.cuda.synchronize()
    return bool((copied["w"] == 1).all())


def say_devices_in_use(ctx: RankContext, folder: str) -> list[int]:
    """Load a state that rank 0 saved on its GPU; return the GPUs on which this rank has memory."""
    path = Path(folder) / "state.pt"
    if ctx.rank == 0:
        torch.save({"w": torch.ones(4, device=ctx.device)}, path)
    ctx.barrier()
    model = torch.nn.Linear(4, 1).to(ctx.device)
    state = torch.load(path, map_location="cpu")
    model.weight.data.copy_(state["w"])
    return [
        index for index in range(torch.cuda.device_count()) if torch.cuda.memory_allocated(index)
    ]


def replay_a_graph(ctx: RankContext) -> float:
    """Capture a graph while another thread reads the rank's position, then replay it."""
    reduce_once(ctx).sum().item()
    ends = threading.Event()

    def ask() -> None:
        while not ends.is_set():
            read_recorders(asks_events=False)
            read_recorders(asks_events=True)

    asking = threading.Thread(target=ask)
    asking.start()
    value = torch.zeros(4, device=ctx.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value += 1
    ends.set()
    asking.join()
    for _ in range(5):
        graph.replay()
    reduce_once(ctx).sum().item()
    return value[0].item()


def leave_with_things_alive(ctx: RankContext) -> None:
    """Return with a live graph, pinned memory and a loader."""
    keep = [torch.empty(1 << 20).pin_memory(), torch.cuda.CUDAGraph()]
    with torch.cuda.graph(keep[1]):  # type: ignore[arg-type]
        torch.ones(4, device=ctx.device)
    sys.modules["__kept__"] = keep  # type: ignore[assignment]
    reduce_once(ctx)


def join_as_told() -> str:
    """Join another launcher's job, with the GPUs that it makes visible to this rank."""
    with ddpsafe.process_group(timeouts={"start": 30}) as ctx:
        return f"{ctx.device} {float(reduce_once(ctx).sum())}"


def stop_between_steps(ctx: RankContext, steps: int) -> int:
    """Step until a stop is requested; rank 0 requests it at the third step, as a scheduler would."""
    for step in range(steps):
        if ctx.stop_requested():
            return step
        if step == 3 and ctx.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        reduce_once(ctx).sum().item()
    return steps


def draw_and_scale(ctx: RankContext, folder: str) -> dict[str, list[float]]:
    """Save CUDA's random state and a GradScaler; return the draws after the save and after a restore."""
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scaler.update(512.0)
    state = {"scaler": scaler}
    with Checkpointer(Path(folder)) as checkpointer:
        checkpointer.save(state, 1)
        first = torch.rand(4, device=ctx.device).tolist()
        scaler.update(2.0)
        checkpointer.restore(state)
    again = torch.rand(4, device=ctx.device).tolist()
    return {"first": first, "again": again, "scale": [scaler.get_scale()]}
