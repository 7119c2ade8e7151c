"""Trainings that keep their state in memory, and die."""

from __future__ import annotations

import itertools
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import torch

from ddpsafe.checkpoint import Checkpointer, _checksums

if TYPE_CHECKING:
    from pathlib import Path

    import ddpsafe

STEPS = 12


def train(ctx: ddpsafe.RankContext, folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Train a small model; kill ranks where the plan says so.

    Args:
        ctx: The rank.
        folder: Where checkpoints and notes go.
        plan: ``kill`` is the ranks to kill, by attempt and step; ``every`` and ``memory_every`` are as for
            `Checkpointer`. ``kill_inside`` is where rank 0 dies, by attempt: the step whose save does not
            end, -1 for the restore, and in what, see `die_inside`.
    """
    last, what = plan.get("kill_inside", {}).get(str(ctx.attempt), (None, ""))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1))
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
            data = torch.randn(4, 8)
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
    parameters = [parameter.tolist() for parameter in ctx.unwrap(model).parameters()]
    return {"parameters": parameters, "draw": torch.rand(3).tolist(), "losses": state["losses"]}


def die_inside(folder: Path, what: str) -> None:
    """Have this process killed in the middle of what it writes or reads next.

    Args:
        folder: The checkpoints.
        what: ``disk`` for its next save to the directory, else its next file of any kind.
    """
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
