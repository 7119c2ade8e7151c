"""Trainings and rank functions of the checkpoint tests; new processes import them from here."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import ddpsafe
from ddpsafe import data
from ddpsafe.checkpoint import Checkpointer, PerRank, errors
from ddpsafe.checkpoint._lock import DirectoryLock, Owner

SHORT = timedelta(seconds=1)


class Points(Dataset[tuple[torch.Tensor, int]]):
    """Sample i is a fixed random point and the number i."""

    def __init__(self, n: int) -> None:
        self.points = torch.randn(n, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.points[index], index


class Training:
    """A small training that uses every kind of state, dropout's random numbers included."""

    def __init__(
        self, ctx: ddpsafe.RankContext, *, n: int = 24, batch: int = 12, dropout: float = 0.5
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1)
        )
        torch.manual_seed(100 + ctx.rank)  # each rank draws its own dropout
        self.ctx = ctx
        self.model = ctx.wrap(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.9)
        points = Points(n)
        sampler = data.DistributedSampler(points, pad=False)
        self.loader = data.DataLoader(points, batch // ctx.world_size, sampler=sampler)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "seen": [],
        }

    def run(self, epochs: int, step: int, after: Callable[[int], None]) -> int:
        """Train; after each step, call `after` with the number of completed steps."""
        for epoch in self.loader.epochs(epochs):
            for points, indices in self.loader:
                self.optimizer.zero_grad()
                self.model(points).square().mean().backward()
                self.optimizer.step()
                self.scheduler.step()
                step += 1
                everyone = self.ctx.all_gather(indices.tolist())
                self.state["seen"] = [*self.state["seen"], [epoch, everyone]]
                after(step)
        return step

    def digest(self) -> str:
        """Return a hash of the parameters, bit for bit."""
        whole = hashlib.sha256()
        for name, value in self.ctx.unwrap(self.model).state_dict().items():
            whole.update(name.encode() + value.numpy().tobytes())
        return whole.hexdigest()


def train(
    ctx: ddpsafe.RankContext,
    directory: Path,
    *,
    epochs: int = 3,
    dropout: float = 0.5,
    kill: tuple[int, int, int] | None = None,
    asynchronous: bool = False,
) -> dict[str, Any]:
    """Train to the end from the last checkpoint; one rank kills itself in an attempt, at a step, in the save."""
    training = Training(ctx, dropout=dropout)
    with Checkpointer(directory) as checkpointer:
        begun = checkpointer.restore(training.state)

        def after(step: int) -> None:
            checkpointer.save(training.state, step, asynchronous=asynchronous)
            if kill == (ctx.attempt, ctx.rank, step):
                os.kill(os.getpid(), signal.SIGKILL)

        steps = training.run(epochs, begun or 0, after)
    return {
        "begun": begun,
        "steps": steps,
        "digest": training.digest(),
        "parameters": [each.tolist() for each in training.model.parameters()],
        "seen": training.state["seen"],
        "attempt": ctx.attempt,
    }


def caught(call: Callable[..., object], *args: object, **options: object) -> dict[str, Any]:
    """Call a function that must raise an error of ddpsafe; return its class, text and facts."""
    try:
        call(*args, **options)
    except ddpsafe.DDPSafeError as exc:
        return {"class": type(exc).__name__, "text": str(exc), **vars(exc)}
    return {"class": "nothing"}


def run_ranks(
    function: Callable[..., Any],
    *args: object,
    ranks: int = 2,
    kwargs: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[int, Any]:
    """Run a function in gloo ranks forked from the fork server; return the values by rank."""
    return ddpsafe.launch(
        function,
        args=args,
        kwargs=kwargs,
        nproc_per_node=ranks,
        backend="gloo",
        start_method="forkserver",
        **fields,
    ).values


def everything_two_ranks_disagree_on(ctx: ddpsafe.RankContext, base: Path) -> dict[str, Any]:
    """Let one rank fail in every possible way; return what each rank raised."""
    found: dict[str, Any] = {}
    own = base / f"own-{ctx.rank}"
    own.mkdir()
    found["own directories"] = caught(Checkpointer, own)
    with Checkpointer(base / "shared", timeout=timedelta(seconds=20)) as checkpointer:
        state = {"weight": torch.ones(3), "value": ctx.rank}
        checkpointer.save(state, 1)
        found["step"] = caught(checkpointer.save, state, 2 + ctx.rank)
        wrong = state | ({"code": print} if ctx.rank == 1 else {})
        found["unsafe on rank 1"] = caught(checkpointer.save, wrong, 2)
        wrong = state | ({"code": print} if ctx.rank == 0 else {})
        found["unsafe on rank 0"] = caught(checkpointer.save, wrong, 2)
        other = checkpointer.restore if ctx.is_main else lambda state: checkpointer.save(state, 3)
        found["other calls"] = caught(other, {"value": 0})
        found["backwards"] = caught(checkpointer.save, state, 0)
        found["locked"] = caught(Checkpointer, base / "shared")
        checkpointer.save(state, 2)
        found["read"] = Checkpointer(base / "shared", access="read").restore(state)
        found["value"] = state["value"]
        found["saved again"] = checkpointer.save(state, 2)
        if ctx.is_main:
            (base / "shared" / ".lock").unlink()
        ctx.barrier()
        found["lock gone"] = caught(checkpointer.save, state, 3)
        checkpointer.save(state, 3, asynchronous=True)
        found["lock gone, asynchronous"] = caught(checkpointer.wait)
        with Checkpointer(base / "often", every=timedelta(milliseconds=50)) as often:
            found["due"] = [often.is_due(step) for step in range(200) if not time.sleep(0.001)]
    found["left"] = sorted(path.name for path in (base / "shared").iterdir())
    return found


def fail_alone(ctx: ddpsafe.RankContext, base: Path, how: str) -> Any:
    """Save while one rank is absent, or suspended during the save."""
    with Checkpointer(base / "checkpoints", timeout=SHORT) as checkpointer:
        checkpointer.save({"x": 1}, 1)
        if how == "rank 1 is absent":
            found = caught(checkpointer.save, {"x": 2}, 2) if ctx.rank != 1 else {}
            ctx.barrier()
            return found
        if ctx.is_main:
            checkpointer.save({"x": Stops()}, 2)
        found = caught(checkpointer.save, {"x": 2}, 2)
        (base / f"found-{ctx.rank}").write_text(repr(found))
        checkpointer.save({"x": 2}, 3)
    return None


class Stops:
    """An object that suspends its process when its state is taken, as a dead disk may."""

    def state_dict(self) -> dict[str, int]:
        """Suspend this process."""
        os.kill(os.getpid(), signal.SIGSTOP)
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Do nothing."""


def see_different_directories(ctx: ddpsafe.RankContext, base: Path) -> dict[str, Any]:
    """Restore where each rank sees other checkpoints, as on nodes without a shared disk."""
    found: dict[str, Any] = {}
    alone = base / f"rank-{ctx.rank}"
    cases = {"older": ([1, 2, 3], [1, 2]), "lacks": ([1, 2], []), "apart": ([1], [2])}
    for case, steps in cases.items():
        directory = alone / case
        directory.mkdir(parents=True)
        for step in steps[ctx.rank]:
            name = f"step-{step:012}"
            (directory / name).symlink_to(base / "source" / name)
        state = {"x": 0}
        reader = Checkpointer(directory, access="read", rng=False)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found[case] = caught(lambda reader=reader, state=state: reader.restore(state))
        found[case] |= {"x": state["x"], "warnings": [str(each.message) for each in warned]}
    return found


def find_damage_on_one_rank(ctx: ddpsafe.RankContext, base: Path) -> Any:
    """Restore where only one rank sees a damaged file."""
    directory = base / "source"
    if ctx.rank == 1:
        directory = base / "copy"
    state = {"x": 0}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step = Checkpointer(directory, access="read", rng=False).restore(state)
    return step, state["x"], [str(each.message) for each in warned]


def draw(ctx: ddpsafe.RankContext, directory: Path, *, save: bool) -> tuple[float, Any]:
    """Save or restore the generators; return the next draw, and this rank's own value."""
    torch.manual_seed(ctx.rank)
    own = torch.tensor([ctx.rank])
    holder = PerRank(Holder(own))
    with Checkpointer(directory) as checkpointer:
        if save:
            checkpointer.save({"holder": holder}, 1)
        else:
            torch.manual_seed(1000 + ctx.rank)
            own += 100
            checkpointer.restore({"holder": holder})
    return torch.rand(()).item(), own.item()


class Holder:
    """An object whose state differs from rank to rank."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the value."""
        return {"value": self.value.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Set the value."""
        self.value.copy_(state["value"])


def save_and_restore_shards(
    ctx: ddpsafe.RankContext, directory: Path, *, save: bool, sharded: bool = True
) -> Any:
    """Save a model, whole or sharded by FSDP2; or restore it and continue training."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0 if save else 1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (ctx.world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "epoch": 7 if save else 0}

    def step() -> None:
        points = torch.arange(12.0).reshape(2, 6)
        model(points).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = {}
    with Checkpointer(directory, rng=False) as checkpointer:
        if save:
            step()
            checkpointer.save(state, 1)
            checkpointer.save(state, 1)  # the same step again, which saves nothing
            step()
            checkpointer.save(state, 2, asynchronous=True)
        else:
            found["step"] = checkpointer.restore(state)
    step()
    whole = [
        (each.full_tensor() if sharded else each).tolist()  # type: ignore[attr-defined]
        for each in model.parameters()
    ]
    return {**found, "parameters": whole, "epoch": state["epoch"]}


def distribute_over_parts_of_the_ranks(
    ctx: ddpsafe.RankContext, directory: Path
) -> dict[str, list[bool]]:
    """Save tensors on many kinds of meshes; return whether each is restored, distributed and whole."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    some, one = DeviceMesh("cpu", [1, 2, 3]), DeviceMesh("cpu", [ctx.world_size - 1])
    cases: dict[str, tuple[DeviceMesh, list[Any]]] = {
        "half of the ranks, twice": (both["tensor"], [Shard(0)]),
        "columns": (both["data"], [Shard(1)]),
        "copies": (both["tensor"], [Replicate()]),
        "hybrid": (both, [Replicate(), Shard(0)]),
        "two dimensions": (both, [Shard(0), Shard(1)]),
        "one dimension, twice": (both, [Shard(0), Shard(0)]),
        "without rank 0": (some, [Shard(0)]),
        "one rank": (one, [Shard(0)]),
    }
    values = torch.arange(35.0).reshape(5, 7)
    found: dict[str, list[bool]] = {}
    for name, (mesh, placements) in cases.items():
        found[name] = []
        for asynchronous in (False, True):
            with Checkpointer(directory / f"{name}-{asynchronous}", rng=False) as checkpointer:
                tensor = distribute_tensor(values.clone(), mesh, placements)
                checkpointer.save({"x": tensor}, 1, asynchronous=asynchronous)
                whole, again = (
                    torch.zeros(5, 7),
                    distribute_tensor(values.clone(), mesh, placements),
                )
                has_part = mesh.get_coordinate() is not None
                if has_part:
                    again.to_local().zero_()
                checkpointer.restore({"x": whole})
                checkpointer.restore({"x": again})
            same = not has_part or torch.equal(again.to_local(), tensor.to_local())
            found[name] += [torch.equal(whole, values), same]
    return found


def refuse_shards(ctx: ddpsafe.RankContext, directory: Path) -> Any:
    """Restore a sharded model from a checkpoint of another shape; return the error, and what has not changed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (ctx.world_size,)))
    first = torch.zeros(2)
    others = [model[0].weight, model[0].bias, model[1].weight]
    before = [parameter.to_local().clone() for parameter in others]
    with Checkpointer(directory, access="read") as checkpointer:
        found = caught(checkpointer.restore, {"epoch": first, "model": model})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", errors.CheckpointWarning)
            checkpointer.restore({"model": model}, strict=False)
    same = [
        torch.equal(parameter.to_local(), own)
        for parameter, own in zip(others, before, strict=True)
    ]
    return found["class"], first.tolist(), same


def hold_lock(directory: Path, held: Any) -> None:
    """Hold the lock of a directory as a Slurm job does, until this process is killed."""
    lock = DirectoryLock(directory, Owner.myself({"SLURM_JOB_ID": "4711"}))
    held.set()
    threading.Event().wait()
    del lock


def die_before_the_save(
    rank: int, directory: Path, port: int, told: Path, victim: int, how: str, ready: Any
) -> None:
    """Run a rank without a launcher: the victim dies, the other one writes down its error."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    group = ddpsafe.process_group(backend="gloo", seed=0)
    with group, Checkpointer(directory) as checkpointer:
        checkpointer.save({"x": 1}, 1)
        ready.wait()  # all ranks know that it is saved
        if rank == victim:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(how)
        begun = time.monotonic()
        found = caught(checkpointer.save, {"x": 2}, 2)
        told.write_text(
            json.dumps(
                {
                    "class": found["class"],
                    "text": found["text"],
                    "rank": found["rank"],
                    "origin": found["origin"],
                    "waited_s": time.monotonic() - begun,
                }
            )
        )
        os._exit(0)


def save_large_shards(ctx: ddpsafe.RankContext, directory: Path) -> dict[str, Any]:
    """Save a sharded model of 4 MB; return the error."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(1_000, 1_000)
    fully_shard(model, mesh=init_device_mesh("cpu", (ctx.world_size,)))
    with Checkpointer(directory) as checkpointer:
        return caught(checkpointer.save, {"model": model}, 1)


class Picky:
    """An object that refuses its state on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, int]:
        """Return a minimal state."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Refuse the state on rank 1."""
        if self.rank == 1:
            message = f"{state} is not to my taste"
            raise ValueError(message)


def refuse_on_rank_1(ctx: ddpsafe.RankContext, directory: Path) -> dict[str, Any]:
    """Restore an object that refuses its state on one rank."""
    with Checkpointer(directory) as checkpointer:
        state = {"picky": Picky(ctx.rank)}
        checkpointer.save(state, 1)
        found = caught(checkpointer.restore, state)
        ctx.barrier()
    return found


def drift(ctx: ddpsafe.RankContext, directory: Path, how: str) -> list[str]:
    """Let the copies of a model drift apart, or not; return the warnings of two saves."""
    torch.manual_seed(0)
    inner = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    )
    inner[0].requires_grad_(how != "unfrozen after wrapping")
    model = ctx.wrap(inner)
    inner[0].requires_grad_(True)  # noqa: FBT003 - torch's signature
    if how == "loaded on one rank" and ctx.rank == 1:
        inner[2].load_state_dict({"weight": torch.ones(1, 8), "bias": torch.ones(1)})
    if how == "half precision":
        inner.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(ctx.rank)
    seen: list[str] = []
    with Checkpointer(directory) as checkpointer:
        for step in range(2):
            optimizer.zero_grad()
            if how != "half precision":
                model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            with warnings.catch_warnings(record=True) as caught_now:
                warnings.simplefilter("always")
                checkpointer.save({"model": model, "optimizer": optimizer}, step)
            seen += [str(each.message) for each in caught_now]
    return seen


def resume_zero(ctx: ddpsafe.RankContext, directory: Path, to: list[int]) -> tuple[float, float]:
    """Go on with ZeroRedundancyOptimizer, whose state the script consolidates; return the sum without a cut, and with."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make() -> tuple[torch.nn.Module, ZeroRedundancyOptimizer]:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        model = ctx.wrap(layers)
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)

    def train(model: torch.nn.Module, optimizer: ZeroRedundancyOptimizer, first: int) -> float:
        for step in range(first, first + 3):
            torch.manual_seed(100 * step + ctx.rank)
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        return sum(parameter.detach().sum().item() for parameter in model.parameters())

    model, optimizer = make()
    for rank in to:  # what is consolidated before a step is out of date
        optimizer.consolidate_state_dict(to=rank)
    train(model, optimizer, 0)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save({"model": model, "optimizer": optimizer}, 3)
        went_on = train(model, optimizer, 3)
        model, optimizer = make()
        checkpointer.restore({"model": model, "optimizer": optimizer})
    return went_on, train(model, optimizer, 3)


def save_with_default_device_meta(ctx: ddpsafe.RankContext, directory: Path) -> int | None:
    """Save, restore and reduce while new tensors are made without values."""
    model = torch.nn.Linear(2, 2)
    torch.set_default_device("meta")
    with Checkpointer(directory) as checkpointer:
        checkpointer.save({"model": model, "step": 1}, 1)
        assert ctx.reduce_mean(1.0) == 1.0
        assert ctx.all_reduce(1) == ctx.world_size
        return checkpointer.restore({"model": model})
