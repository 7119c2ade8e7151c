"""Rank functions of tests/worker: the context in worlds of one and of three ranks, and models that differ."""

from __future__ import annotations

import inspect
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import scripts
import torch
import torch.distributed as dist
from attached_programs import train_until_asked
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_programs import mark, setup

import ddpsafe
from ddpsafe import RankContext
from ddpsafe.checkpoint import Checkpointer

SHORT = timedelta(seconds=1)


def caught(function: Callable[[], object]) -> BaseException:
    """Return the exception that the call must raise."""
    try:
        value = function()
    except Exception as error:  # noqa: BLE001 - the test checks it
        return error
    msg = f"it returned {value!r}"
    raise AssertionError(msg)


def facts(ctx: RankContext) -> dict[str, Any]:
    """Return everything that the context knows about this rank."""
    return {
        "place": (ctx.rank, ctx.local_rank, ctx.node_rank),
        "sizes": (ctx.world_size, ctx.local_world_size, ctx.nnodes),
        "device": str(ctx.device),
        "backend": ctx.backend,
        "attempt": ctx.attempt,
        "run_dir_exists": ctx.run_dir is not None and ctx.run_dir.is_dir(),
        "is_main": (ctx.is_main, ctx.is_local_main),
        "current": [_deep_down(3) is ctx, _in_a_thread(ddpsafe.current) is ctx],
    }


def _deep_down(levels: int) -> RankContext:
    return ddpsafe.current() if levels == 0 else _deep_down(levels - 1)


def _in_a_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def wrap_and_unwrap(ctx: RankContext) -> dict[str, Any]:
    """Wrap and unwrap models of several kinds."""
    plain = nn.Linear(2, 1, bias=False)
    wrapped = ctx.wrap(plain, gradient_as_bucket_view=True)
    wrapped(torch.full((1, 2), float(ctx.rank))).sum().backward()
    frozen = nn.Linear(2, 1).requires_grad_(requires_grad=False)
    normed = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped_norm = ctx.wrap(normed, sync_batchnorm=True)
    compiled = torch.compile(wrapped, backend="eager")
    return {
        "type": type(wrapped).__name__,
        "option": wrapped.gradient_as_bucket_view,
        "gradient": ctx.unwrap(wrapped).weight.grad.tolist(),
        "frozen_as_is": ctx.wrap(frozen) is frozen,
        "norm": type(ctx.unwrap(wrapped_norm)[1]).__name__,
        "unwrapped": [
            ctx.unwrap(wrapped) is plain,
            ctx.unwrap(compiled) is plain,
            ctx.unwrap(torch.compile(plain, backend="eager")) is plain,
            ctx.unwrap(plain) is plain,
            ctx.unwrap(wrapped_norm) is normed,
        ],
        "weights": ctx.all_gather(plain.weight.detach().tolist()),
    }


def reduce_everything(ctx: RankContext) -> dict[str, Any]:
    """Average rank numbers (0, 1, 2) in every form."""
    rank = ctx.rank
    found: dict[str, Any] = {
        "float": ctx.reduce_mean(float(rank)),
        "int": ctx.reduce_mean(rank),
        "weighted": ctx.reduce_mean(float(rank), weight=rank + 1),
        "weight_beside_nan": ctx.reduce_mean(
            float("nan") if rank == 0 else float(rank), weight=0 if rank == 0 else 1
        ),
        "many_samples": ctx.reduce_mean(
            torch.tensor(float(rank), dtype=torch.bfloat16), weight=100_003 if rank == 0 else 1
        ).item(),
        "dict": ctx.reduce_mean(
            dict(sorted({"a": float(rank), "b": torch.ones(2) * rank}.items(), reverse=rank == 1))
        ),
        "dict_weighted": ctx.reduce_mean({"loss": float(rank)}, weight=rank),
        "int_tensor": ctx.reduce_mean(torch.tensor([rank, 2 * rank])),
        "bool_tensor": ctx.reduce_mean(torch.tensor([rank > 0])),
    }
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for shape in ((), (0,), (3,), (2, 3)):
            found[f"{dtype} {shape}"] = ctx.reduce_mean(torch.full(shape, float(rank), dtype=dtype))
    strided = torch.arange(6.0).reshape(2, 3).t() + rank
    found["strided"] = ctx.reduce_mean(strided)
    found["reduced"] = {
        op: [
            ctx.all_reduce(rank + 1, op),
            ctx.all_reduce(rank + 0.5, op),
            ctx.all_reduce({"b": torch.tensor([rank + 1.0, 2.0]), "a": rank + 1}, op),
        ]
        for op in ("sum", "mean", "min", "max", "product")
    }
    found["reduced_kinds"] = [
        ctx.all_reduce(2**62 + rank, "max"),
        ctx.all_reduce(0 if rank == 0 else 0.5),
        ctx.all_reduce(torch.tensor([rank, 1], dtype=torch.int16)),
        ctx.all_reduce(torch.ones(2, dtype=torch.bfloat16)),
        ctx.all_reduce(rank > 0),
        ctx.all_reduce(float("nan") if rank == 0 else 1),
    ]
    return found


def reduce_a_live_loss(ctx: RankContext) -> dict[str, Any]:
    """Average the loss between forward and backward, which must not change it."""
    parameter = torch.ones(1, requires_grad=True)
    loss = parameter.sum() * (ctx.rank + 1)
    metrics = {"loss": loss}
    mean = ctx.reduce_mean(loss)
    ctx.reduce_mean(metrics)
    loss.backward()
    return {
        "mean": mean.item(),
        "loss": loss.item(),
        "gradient": parameter.grad.item() if parameter.grad is not None else None,
        "dict_untouched": metrics["loss"] is loss,
    }


def reduce_nonsense(ctx: RankContext) -> dict[str, Any]:
    """Pass different keys on one rank, and weights that sum to zero; then continue."""
    keys = {"loss": 1.0, "accuracy": 2.0} if ctx.rank == 1 else {"loss": 1.0}
    started_s = time.monotonic()
    errors = [
        caught(lambda: ctx.reduce_mean(keys)),
        caught(lambda: ctx.reduce_mean(1.0, weight=0)),
        caught(lambda: ctx.all_reduce(1.0, "sum" if ctx.rank else "max")),
        caught(lambda: ctx.all_reduce(1.0, "avg")),  # type: ignore[arg-type]  # type: ignore[arg-type]  # a user's mistake
    ]
    return {
        "errors": [f"{type(error).__name__}: {error}" for error in errors],
        "took_s": time.monotonic() - started_s,
        "after": ctx.reduce_mean(float(ctx.rank)),
    }


def survive_what_cannot_travel(ctx: RankContext) -> dict[str, str]:
    """On rank 1, pass what cannot be reduced or sent, catch and return the errors, and continue."""
    wrong: dict[str, Callable[[], object]] = {
        "text": lambda: ctx.all_reduce("x"),  # type: ignore[type-var]  # type: ignore[type-var]  # a user's mistake
        "complex": lambda: ctx.reduce_mean(torch.zeros(2, dtype=torch.complex64)),
        "lambda": lambda: ctx.all_gather({"loss": 1.0, "schedule": lambda: 0}),
        "rank": lambda: ctx.broadcast(1, src=7),
        "broadcast": lambda: ctx.broadcast([lambda: 0], src=1),
    }
    right: dict[str, Callable[[], object]] = {
        "text": lambda: ctx.all_reduce(1.0),
        "complex": lambda: ctx.reduce_mean(torch.zeros(2)),
        "lambda": lambda: ctx.all_gather({"loss": 1.0}),
        "rank": lambda: ctx.broadcast(1, src=0),
        "broadcast": lambda: ctx.broadcast(1, src=1),
    }
    found = {}
    for what, call in right.items():
        if ctx.rank == 1:
            found[what] = str(caught(wrong[what]))
        call()
    return found


def exchange(ctx: RankContext) -> dict[str, Any]:
    """Gather and broadcast objects of several kinds."""
    mine = {"rank": ctx.rank, "text": "x" * ctx.rank, "tensor": torch.full((2,), ctx.rank)}
    last = ctx.world_size - 1
    return {
        "gathered": [(each["rank"], each["tensor"].tolist()) for each in ctx.all_gather(mine)],
        "by_length": [len(each["text"]) for each in ctx.all_gather(mine)],
        "broadcast": ctx.broadcast({"seed": ctx.rank + 7}),
        "broadcast_src": ctx.broadcast(f"from {ctx.rank}", src=last),
        "broadcast_none": ctx.broadcast(None if ctx.is_main else "x"),
    }


def meet(ctx: RankContext, folder: Path) -> list[list[int]]:
    """Pass barriers whose names repeat, the last rank in turn; return who had written a note before each."""
    seen = []
    for turn, name in enumerate(["epoch", None, "epoch", None, "epoch"]):
        if turn % ctx.world_size == ctx.rank:
            threading.Event().wait(0.05)
        (folder / f"{turn}-{ctx.rank}").touch()
        ctx.barrier(name, timeout=timedelta(seconds=30))
        seen.append([rank for rank in range(3) if (folder / f"{turn}-{rank}").exists()])
    return seen


def wait_for_late_rank(ctx: RankContext, work_s: float) -> None:
    """Let rank 1 reach the barrier, and later rank_zero_first, after the others."""
    if ctx.rank == 1:
        threading.Event().wait(work_s)
    ctx.barrier("after the work")
    with ctx.rank_zero_first():
        if ctx.is_main:
            threading.Event().wait(work_s)


def miss_a_barrier(ctx: RankContext) -> dict[str, Any]:
    """Rank 2 skips a barrier; return the error of the others, and how long it took."""
    if ctx.rank == 2:
        return {}
    started_s = time.monotonic()
    error = caught(lambda: ctx.barrier("save the model", timeout=SHORT))
    return {"error": error, "took_s": time.monotonic() - started_s}


def meet_under_other_names(ctx: RankContext) -> BaseException:
    """Rank 0 waits at a barrier with another name than the others."""
    name = "evaluate" if ctx.is_main else "train"
    return caught(lambda: ctx.barrier(name, timeout=SHORT))


def follow_rank_zero(ctx: RankContext, folder: Path, form: str) -> list[tuple[int, str]]:
    """Prepare two folders with rank_zero_first; return which rank prepared each."""
    found = []
    for name in ("train", "test"):
        (folder / f"{name}-wanted-by-{ctx.rank}").touch()
        if form == "call":
            found.append(ctx.rank_zero_first(_prepare, ctx, folder, name=name))
        else:
            with ctx.rank_zero_first(local=form == "local"):
                found.append(_prepare(ctx, folder, name=name))
    return found


def _prepare(ctx: RankContext, folder: Path, *, name: str) -> tuple[int, str]:
    """Do the work of the first rank; rank 0 gives the others every chance to overtake it."""
    first = folder / f"{name}-first"
    if ctx.is_main:
        wanted = [folder / f"{name}-wanted-by-{rank}" for rank in range(ctx.world_size)]
        scripts.wait_until(lambda: all(each.exists() for each in wanted))
        assert not first.exists(), f"rank {first.read_text()} was here before rank 0"
    if not first.exists():
        first.write_text(str(ctx.rank))
    return int(first.read_text()), name


def fail_first(ctx: RankContext, form: str) -> None:
    """Let rank 0 fail while the others wait for it."""
    if form == "call":
        ctx.rank_zero_first(_download, ctx)
    with ctx.rank_zero_first():
        _download(ctx)


def _download(ctx: RankContext) -> None:
    if ctx.is_main:
        msg = "the mirror is gone"
        raise ConnectionRefusedError(msg)


def survive_failure_of_rank_zero(ctx: RankContext) -> dict[str, Any]:
    """Catch the failure of rank 0 on every rank, and continue together."""
    started_s = time.monotonic()
    error = caught(lambda: fail_first(ctx, "context"))
    return {
        "error": error,
        "took_s": time.monotonic() - started_s,
        "gathered": ctx.all_gather(ctx.rank),
        "second": ctx.rank_zero_first(lambda: "well"),
    }


def look_whether_all_are_there(ctx: RankContext) -> float:
    """Enter a barrier without waiting, rank 0 after the others. Return how long it took."""
    began_s = time.monotonic()
    if ctx.world_size == 1:
        return 0.0
    if ctx.is_main:
        ctx.all_gather(ctx.rank)
    error = caught(lambda: ctx.barrier("now", timeout=timedelta(0)))
    assert isinstance(error, ddpsafe.LaunchTimeoutError)
    assert error.setting == "barrier"
    assert ctx.is_main == ("rank 0 (world_size 3) reached the barrier 'now'" in str(error)), error
    if not ctx.is_main:
        ctx.all_gather(ctx.rank)
    return time.monotonic() - began_s


def keep_them_waiting(ctx: RankContext) -> BaseException | None:
    """Rank 0 skips rank_zero_first entirely."""
    return None if ctx.is_main else caught(lambda: ctx.rank_zero_first(str))


def speak(ctx: RankContext) -> None:
    """Print on every rank; only rank 0's output appears."""
    ctx.print("hello", "from", ctx.rank, sep="-", end="!\n")
    ctx.print()
    wait_for_late_rank(ctx, 1.2)


def ask_to_stop(ctx: RankContext) -> int:
    """Poll until a stop is requested; only the last rank receives a signal, after some calls."""
    return train_until_asked(ctx, ctx.world_size - 1, signal.SIGUSR1)


def seed(ctx: RankContext) -> dict[str, Any]:
    """Seed with the function; return the next draw of every generator."""
    import random

    ddpsafe.seed_all(7)
    return {
        "torch": torch.rand(2).tolist(),
        "random": random.random(),
        "numpy": float(np.random.rand()),  # noqa: NPY002 - the generator that scripts use
        "rank": ctx.rank,
    }


def act_before_setup() -> dict[str, BaseException]:
    """Call what needs other ranks while RANK and WORLD_SIZE are set but no group exists."""
    ctx = ddpsafe.current()
    calls: dict[str, Callable[[], object]] = {
        "wrap": lambda: ctx.wrap(nn.Linear(1, 1)),
        "barrier": ctx.barrier,
        "rank_zero_first": lambda: ctx.rank_zero_first(str),
        "reduce_mean": lambda: ctx.reduce_mean(1.0),
        "all_gather": lambda: ctx.all_gather("me"),
        "all_reduce": lambda: ctx.all_reduce(1),
        "broadcast": lambda: ctx.broadcast("me"),
        "stop_requested": ctx.stop_requested,
    }
    return {name: caught(call) for name, call in calls.items()}


def show_everything(ctx: RankContext, folder: Path) -> dict[str, Any]:
    """Run every program here that succeeds; return the results by name."""
    found: dict[str, Any] = {
        "facts": facts(ctx),
        "live loss": reduce_a_live_loss(ctx),
        "nonsense": reduce_nonsense(ctx) if ctx.world_size > 1 else None,
        "not all are there": look_whether_all_are_there(ctx),
        "rank zero fails": survive_failure_of_rank_zero(ctx) if ctx.world_size > 1 else None,
        "cannot travel": survive_what_cannot_travel(ctx) if ctx.world_size > 1 else None,
        "seed": seed(ctx),
        "wrap": wrap_and_unwrap(ctx),
        "reduce": reduce_everything(ctx),
        "exchange": exchange(ctx),
        "meet": meet(ctx, folder),
    }
    for form in ("context", "local", "call"):
        (folder / form).mkdir(exist_ok=True)
        found["first", form] = follow_rank_zero(ctx, folder / form, form)
    return found


def miss_each_other(ctx: RankContext) -> dict[str, Any]:
    """Run every program here in which a rank is absent, with barriers between them."""
    found: dict[str, Any] = {}
    for program in (miss_a_barrier, meet_under_other_names, keep_them_waiting):
        found[program.__name__] = program(ctx)
        ctx.all_gather(None)
    found["seed"] = seed(ctx)
    return found


# Models that differ between ranks although their tensors have equal shapes.


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
