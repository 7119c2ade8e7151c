"""Trainings that keep their state in memory, and die."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import psutil
import torch

import ddpsafe
from ddpsafe._launcher.launch_parts import NodeMemory
from ddpsafe._worker.rank import this_rank
from ddpsafe.checkpoint import Checkpointer, _checksums, _memory
from ddpsafe.checkpoint._format import STATE
from ddpsafe.checkpoint._memory import StateMemory
from ddpsafe.checkpoint._slots import NodeSlots
from ddpsafe.checkpoint.errors import (
    CheckpointWarning,
    NoSpaceError,
    RestoreError,
    SaveError,
    StepOrderError,
)

STEPS = 12


def train(ctx: ddpsafe.RankContext, folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Train a small model; kill ranks by attempt and step where the plan says so.

    In its ``kill_inside``, rank 0 dies by attempt in the save of that step, or in the restore at -1, see `die_inside`.
    """
    last, what = plan.get("kill_inside", {}).get(str(ctx.attempt), (None, ""))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1))
    model: torch.nn.Module = net
    if plan.get("sharded"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=init_device_mesh("cpu", (ctx.world_size,)))
    else:
        model = ctx.wrap(net)
    torch.manual_seed(100 + ctx.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "losses": []}
    with Checkpointer(
        folder / "checkpoints",
        every=plan.get("every", 1000),
        memory_every=plan.get("memory_every", 1),
    ) as checkpointer:
        if ctx.is_main and last == -1:
            die_inside(checkpointer.directory, what)
        begin = checkpointer.restore(state) or 0
        source = None if checkpointer.restored is None else checkpointer.restored.source
        _note(folder, ctx, {"began": begin, "source": source})
        for step in range(begin + 1, STEPS + 1):
            data = torch.randn(4, 8).to(ctx.device)
            optimizer.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            state["losses"] = [*state["losses"], ctx.reduce_mean(loss.item())]
            if checkpointer.is_due(step):
                if ctx.is_main and last == step:
                    die_inside(checkpointer.directory, what)
                checkpointer.save(state, step)
            doomed = plan.get("kill", {}).get(f"{ctx.attempt}/{step}", [])
            if ctx.rank in doomed:
                os.kill(os.getpid(), signal.SIGKILL)
            elif doomed:
                ctx.barrier("the killed rank")
    whole = (p.full_tensor() if plan.get("sharded") else p for p in ctx.unwrap(model).parameters())  # type: ignore[attr-defined]
    parameters = [parameter.tolist() for parameter in whole]
    return {
        "parameters": parameters,
        "draw": torch.rand(3, device=ctx.device).tolist(),
        "losses": state["losses"],
    }


def train_on_device(ctx: ddpsafe.RankContext, folder: Path) -> dict[str, Any]:
    """Change a tensor on the GPU right after it was saved, and die; return what the next attempt has."""
    numbers = torch.zeros(1 << 24, device=ctx.device)
    with Checkpointer(folder / "checkpoints", every=1000, memory_every=1) as checkpointer:
        begin = checkpointer.restore({"numbers": numbers}) or 0
        found = {"begin": begin, "values": numbers.unique().tolist(), "device": numbers.device.type}
        for step in range(begin + 1, 6):
            for _ in range(50):  # queued on the GPU, and not done yet when the copy is asked for
                numbers.add_(1)
            if checkpointer.is_due(step):
                checkpointer.save({"numbers": numbers}, step)
            if step == 3 and ctx.attempt == 1:
                numbers.zero_()
                ctx.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
        assert checkpointer._memory is not None
        copies = checkpointer._memory._copies._buffers.values()
        found |= {"last": numbers.unique().tolist(), "pinned": [c.is_pinned() for c in copies]}
    return found


def lack_memory(ctx: ddpsafe.RankContext, folder: Path, on_failure: Any) -> dict[str, Any]:
    """Save where no memory may be used; return what is said, and what is on disk."""
    _memory._SHARE_LEFT = 2.0  # type: ignore[misc]  # twice the memory of the machine has to stay free
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = None
        with Checkpointer(
            folder / on_failure, every=3, memory_every=1, on_failure=on_failure
        ) as checkpointer:
            try:
                for step in range(1, 7):
                    if checkpointer.is_due(step):
                        state = {"x": torch.ones(1000, device=ctx.device)}
                        checkpointer.save(state, step)
            except NoSpaceError as exc:
                error = str(exc)
            steps = checkpointer.steps()
    said = [str(each.message) for each in caught if each.category is CheckpointWarning]
    return {"error": error, "said": said, "steps": steps, "rank": ctx.rank}


def flip_all(checkpoints: Path) -> None:
    """Change a bit in each state that this node has in memory."""
    spec = this_rank.spec
    assert spec is not None
    files = [Path(f"/proc/{spec.launcher_pid}/fd/{fd}") for fd in spec.memory]
    slots = NodeSlots(files, checkpoints)
    for number in range(2):
        if slots.read(number)[0] is not None:
            with slots[number].path(STATE).open("r+b") as file:
                file.seek(100)
                byte = file.read(1)[0]
                file.seek(100)
                file.write(bytes([byte ^ 1]))


def die_inside(folder: Path, what: str) -> None:
    """Have this process killed in its next save to the directory (``disk``), or in its next file of any kind."""
    checksum, calls = _checksums.checksum, itertools.count()

    def dying(data: Any, value: int = 0) -> int:
        counts = what != "disk" or bool(list(folder.glob(".saving-*")))
        if counts and next(calls) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return checksum(data, value)

    _checksums.checksum = dying


def _note(folder: Path, ctx: ddpsafe.RankContext, facts: dict[str, Any]) -> None:
    with (folder / f"notes-{ctx.rank}").open("a") as file:
        file.write(json.dumps({"attempt": ctx.attempt, **facts}) + "\n")


def notes_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return what a rank has noted in each attempt."""
    return [json.loads(line) for line in (folder / f"notes-{rank}").read_text().splitlines()]


class Table(torch.nn.Linear):
    """A model with state that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.table = torch.arange(100_000.0)

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        """Return the table."""
        return {"table": self.table}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        """Keep what was loaded, as it is."""
        self.table = state["table"]


def keep_a_table(ctx: ddpsafe.RankContext, folder: Path) -> bool:
    """Die once, restore, and save larger states over the one that was restored; return whether all is right."""
    model = Table()
    state: dict[str, Any] = {"first": [], "model": model}
    with Checkpointer(folder / "checkpoints", every=1000, memory_every=1) as checkpointer:
        begin = checkpointer.restore(state) or 0
        for step in range(begin + 1, 9):
            state["first"] = [-1.5] * (20_000 * step)
            if checkpointer.is_due(step):
                checkpointer.save(state, step)
            if step == 3 and ctx.attempt == 1:
                ctx.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
    return begin == 3 and torch.equal(model.table, torch.arange(100_000.0))


def keep_parts(ctx: ddpsafe.RankContext, folder: Path) -> dict[str, str]:
    """Save what differs from node to node to memory, and return the errors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Linear(8, 4)

    sharded = model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (ctx.world_size,)))
    replica = ctx.wrap(model())
    optimizer = ZeroRedundancyOptimizer(replica.parameters(), torch.optim.Adam, lr=0.1)
    states = {"FSDP": {"model": sharded}, "ZeRO": {"model": replica, "optimizer": optimizer}}
    found = {}
    for name, state in states.items():
        with Checkpointer(folder / name, every=1000, memory_every=1) as checkpointer:
            assert checkpointer.is_due(1)
            try:
                checkpointer.save(state, 1)
            except SaveError as exc:
                found[name] = str(exc)
    return found


def _require_refusal(checkpointer: Checkpointer, step: int) -> None:
    """Require that a step before the newest in memory is refused, for memory and for the directory."""
    for asks in (True, False):
        try:
            if not asks or checkpointer.is_due(step):
                checkpointer.save({"step": step}, step)
        except StepOrderError as exc:
            if "the newest checkpoint in memory" in str(exc):
                continue
        raise AssertionError(f"step {step} was saved")


def be_killed_often(ctx: ddpsafe.RankContext, folder: Path, restarts: int) -> None:
    """Make one step in each attempt, note what the launcher holds, and die."""
    assert this_rank.spec is not None
    launcher = psutil.Process(this_rank.spec.launcher_pid)
    state: dict[str, Any] = {"numbers": torch.zeros(250_000)}
    with Checkpointer(folder / "checkpoints", every=10_000, memory_every=1) as checkpointer:
        begin = checkpointer.restore(state) or 0
        state["numbers"] += 1
        assert checkpointer.is_due(begin + 1)
        checkpointer.save(state, begin + 1)
        assert state["numbers"].unique().tolist() == [begin + 1] == [ctx.attempt]
        ctx.barrier()
        if ctx.is_main:
            memory = [Path(f"/proc/{launcher.pid}/fd/{fd}") for fd in this_rank.spec.memory]
            held = sum(file.stat().st_blocks for file in memory) * 512
            facts = {"fds": launcher.num_fds(), "threads": launcher.num_threads(), "held": held}
            _note(folder, ctx, {**facts, "rss": launcher.memory_info().rss})
        if ctx.attempt <= restarts:
            os.kill(os.getpid(), signal.SIGKILL)


def begin_again(ctx: ddpsafe.RankContext, folder: Path) -> int | None:
    """Die once, begin at step 1 again without a restore, and return the newest checkpoint in the end."""
    directory = folder / "checkpoints"
    with Checkpointer(directory, every=1000, memory_every=1) as checkpointer:
        for step in range(1, 5 if ctx.attempt == 1 else 2):
            if checkpointer.is_due(step):
                checkpointer.save({"step": step}, step)
        if ctx.attempt == 1:
            _require_refusal(checkpointer, 2)
        ctx.barrier()
        if ctx.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    ctx.barrier()
    return Checkpointer(directory, access="read").latest()


def measure_once(ctx: ddpsafe.RankContext, folder: Path) -> list[int]:
    """Save to memory, then to the directory, and die; return where the next attempt begins, and what is due."""
    state: dict[str, Any] = {"step": 0}
    with Checkpointer(folder / "checkpoints", every=12, memory_every="auto") as checkpointer:
        begin = checkpointer.restore(state) or 0
        due = []
        for step in range(begin + 1, begin + 12 + (ctx.attempt == 1)):
            if checkpointer.is_due(step):
                due.append(step)
                checkpointer.save({"step": step}, step)
        if ctx.attempt == 1:
            ctx.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    return [begin, *due]


def replace_a_node(ctx: ddpsafe.RankContext, folder: Path, plan: dict[str, Any]) -> list[Any]:
    """Let each rank be a node, of which the second is replaced; it has too little memory for the state of step 2."""
    state: dict[str, Any] = {"step": 1}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = Checkpointer(folder, every=1000, on_failure=plan["on_failure"])
        made._ranks.of_node = (ctx.rank,)
        with contextlib.suppress(ZeroDivisionError), made:
            memories = [NodeMemory(), NodeMemory()]
            paths = [[Path(f"/proc/{os.getpid()}/fd/{fd}") for fd in m.files(1)] for m in memories]
            slots = [NodeSlots(each, folder) for each in paths]
            may_give_up = plan["on_failure"] == "warn"
            made._memory = StateMemory(made._ranks, slots[0], 1, may_give_up=may_give_up)
            if plan["on_disk"]:
                made.save(state, 1)
            state["step"] = 2
            assert made.is_due(2)
            made.save(state, 2)
            made._memory.slots = slots[ctx.rank]
            lack = {"text": "two states need 5 MB more", "needed": 5, "free": 1}
            made._memory._find_lack = lambda *_: lack  # type: ignore[method-assign]
            try:
                found: object = made.restore(state)
            except (NoSpaceError, RestoreError) as exc:
                found = f"{type(exc).__name__}: {exc}"
            raise ZeroDivisionError  # it ends as if it were killed
    return [found, state["step"], [str(each.message) for each in caught]]
