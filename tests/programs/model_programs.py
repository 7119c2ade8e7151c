"""Models that differ between ranks although their tensors have equal shapes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_programs import mark, setup

import ddpsafe
from ddpsafe import RankContext
from ddpsafe.checkpoint import Checkpointer

KINDS = ("full", "sliding", "linear", "local")


def _model(kind: str, rank: int) -> nn.Module:
    """Build a model that differs on rank 1 in what `kind` says."""
    is_odd = rank == 1
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    order = reversed(KINDS) if kind == "order of buffers" and is_odd else KINDS
    for place, name in enumerate(order):
        model.register_buffer(f"{name}_freq", torch.full((4,), float(place)))
    if kind == "order of parameters":
        for name in reversed(KINDS) if is_odd else KINDS:
            model.register_parameter(f"{name}_bias", nn.Parameter(torch.zeros(2)))
    elif kind == "another name":
        model.add_module("head_b" if is_odd else "head_a", nn.Linear(3, 3))
    elif kind == "one more":
        model.add_module("extra", nn.Linear(3, 3) if is_odd else nn.Identity())
    elif kind == "one less":
        model.add_module("extra", nn.Identity() if is_odd else nn.Linear(3, 3))
    elif kind == "shape":
        model.add_module("head", nn.Linear(3, 5 if is_odd else 4))
    elif kind == "dtype":
        model[2].to(torch.float64 if is_odd else torch.float32)
    elif kind == "frozen":
        model[0].requires_grad_(not is_odd)
    elif kind == "tied" and is_odd:
        model[2].weight = model[0].weight
    elif kind == "own buffers" or kind.startswith("allowed"):
        model.register_buffer(f"shard_of_rank_{rank}", torch.zeros(rank + 1))
    elif kind == "long name":
        model.register_buffer(("ä" * 5_000) + ("1" if is_odd else ""), torch.zeros(1))
    return model


def compare(ctx: RankContext, _folder: Path, kinds: list[str]) -> dict[str, Any]:
    """Wrap a model of each kind; return the message of each error, or an empty text."""
    found: dict[str, Any] = {}
    names = [*inspect.signature(DistributedDataParallel).parameters]  # torch 2.6 has no init_sync
    pair = dist.new_group([0, 1])
    others = dist.new_group([0, 2])
    for kind in kinds:
        model = _model(kind, ctx.rank)
        options: dict[str, Any] = {}
        if kind == "allowed: without synchronization" and "init_sync" in names:
            options = {"init_sync": False}
        elif kind in {"allowed: not copied", "allowed: without synchronization"}:
            options = {"broadcast_buffers": False}
        elif kind == "allowed: ignored":
            names = {f"shard_of_rank_{ctx.rank}"}
            model._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
        try:
            if kind == "order of parameters":  # in a group of some ranks, by position
                group = pair if ctx.rank < 2 else None
                if group is not None:
                    before = [None, None, 0, True, True][: names.index("process_group") - 1]
                    DistributedDataParallel(model, *before, group)
            elif kind == "frozen":
                ctx.wrap(model)
            else:
                DistributedDataParallel(model, **options)
            found[kind] = ""
        except ddpsafe.MismatchError as error:
            found[kind] = (str(error), error.ranks, error.name)
    if ctx.rank != 1:  # ranks that are equal in a group of their own
        DistributedDataParallel(_model("shape", ctx.rank), process_group=others)
    return found


def wrap_by_hand(rank: int, world_size: int, folder: Path) -> None:
    """Make buffers in an order that is the rank's own, and wrap the model without ddpsafe."""
    setup(rank, world_size)
    mark(folder)
    DistributedDataParallel(_model("order of buffers", rank))


def draw_after_wrap(ctx: RankContext, folder: Path, how: str) -> dict[str, Any]:
    """Wrap two models; return the first one's weights, a dropout mask, and what a second wrap changes."""
    model = nn.Linear(4, 4)
    weights = model.weight.tolist()
    if how == "restored":
        with Checkpointer(folder / "checkpoints") as checkpointer:
            checkpointer.save({"model": model}, 1)
            torch.rand(3)
            checkpointer.restore({"model": model})
    elif how == "own seed":
        torch.manual_seed(5)
    before = torch.get_rng_state()
    if how == "by hand":
        DistributedDataParallel(model)
    else:
        ctx.wrap(model)
    unchanged = torch.equal(before, torch.get_rng_state())
    mask = nn.Dropout(0.5)(torch.ones(64)).tolist()
    after = torch.get_rng_state()
    ctx.wrap(nn.Sequential(model))
    return {
        "weights": weights,
        "mask": mask,
        "unchanged": unchanged,
        "second wrap": not torch.equal(after, torch.get_rng_state()),
    }
