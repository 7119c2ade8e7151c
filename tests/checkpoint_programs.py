"""Trainings and rank functions of the checkpoint tests; new processes import them from here."""

from __future__ import annotations

import hashlib
import os
import signal
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

import ddpsafe
from ddpsafe import data
from ddpsafe.checkpoint import Checkpointer, errors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHORT = timedelta(seconds=1)


class Points(Dataset[tuple[torch.Tensor, int]]):
    """Sample i is a fixed random point, and i."""

    def __init__(self, n: int) -> None:
        self.points = torch.randn(n, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.points[index], index


class Training:
    """A small training that uses every kind of state, random numbers of dropout included."""

    def __init__(
        self, ctx: ddpsafe.RankContext, *, n: int = 24, batch: int = 4, dropout: float = 0.5
    ) -> None:
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
        """Train; call `after` with the number of steps done, after each."""
        for epoch in self.loader.epochs(epochs):
            for points, indices in self.loader:
                self.optimizer.zero_grad()
                self.model(points).square().mean().backward()
                self.optimizer.step()
                self.scheduler.step()
                step += 1
                everyone = self.ctx.gather(indices.tolist())
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
    epochs: int = 2,
    kill: tuple[int, int, int] | None = None,
    asynchronous: bool = False,
) -> dict[str, Any]:
    """Train to the end, from wherever the last checkpoint stands.

    Args:
        ctx: The rank's context.
        directory: Of the checkpoints.
        epochs: How many in all.
        kill: Attempt, rank and step at which that rank kills itself, after the save has begun.
        asynchronous: Save in the background.
    """
    training = Training(ctx)
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
        "seen": training.state["seen"],
        "attempt": ctx.attempt,
    }


def caught(call: Callable[..., object], *args: object, **options: object) -> dict[str, Any]:
    """Call something that has to fail with an error of ours; return its class, text and facts."""
    try:
        call(*args, **options)
    except errors.CheckpointError as exc:
        return {"class": type(exc).__name__, "text": str(exc), **vars(exc)}
    return {"class": "nothing"}


def run_ranks(
    function: Callable[..., Any], *args: object, ranks: int = 2, **fields: Any
) -> dict[int, Any]:
    """Run a function in gloo ranks from a server of forks; return the values by rank."""
    return ddpsafe.launch(
        function,
        args=args,
        nproc_per_node=ranks,
        backend="gloo",
        start_method="forkserver",
        **fields,
    ).values


def everything_two_ranks_disagree_on(ctx: ddpsafe.RankContext, base: Path) -> dict[str, Any]:
    """Let rank 0, or another one, fail in every way it can; return what each rank raised."""
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
    found["left"] = sorted(path.name for path in (base / "shared").iterdir())
    return found
