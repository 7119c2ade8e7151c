"""The launcher of one node, which runs several launches in a row, each with a different fault.

``python node_programs.py FOLDER ENDPOINT CASES``: each case, in JSON, has the fault, its rank, and
the fields of `LaunchConfig`. Prints one JSON object for each.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import machine

import ddpsafe
from ddpsafe._launcher.watch import deadlock_watch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe import RankContext

STEPS = 8
FAULT_AT = 3
LONG = 1200
PACE_S = 0.1
"""How long a step takes in a training that waits for the test."""


def strike(folder: Path, name: str) -> None:
    """Record the time of a case's fault."""
    (folder / f"fault-{name}").write_text(repr(time.time()))


def train(ctx: RankContext, folder: Path, name: str, what: str, culprit: int) -> object:
    """Sum over all ranks in each step; one of them has a fault in the middle."""
    import torch
    import torch.distributed as dist

    result: object = ctx.rank
    if what in ("long", "held", "stubborn"):
        (folder / f"running-{name}-{ctx.attempt}-{ctx.rank}").write_text(str(os.getpid()))
    if what == "stubborn":
        while not ctx.stop_requested():
            time.sleep(PACE_S)
        (folder / f"stopping-{name}-{ctx.rank}").touch()
        time.sleep(600)  # saves for long
    if what == "resume":
        return go_on(ctx, folder, name)
    if what == "held":
        return hold(ctx, folder / f"release-{name}", folder / f"fail-{name}-{ctx.rank}")
    if what == "crossed":
        cross(folder, name, is_first=ctx.rank == culprit)
    for step in range(LONG if what == "long" else STEPS):
        if what == "long":
            time.sleep(PACE_S)
        if step == FAULT_AT and what == "both":
            time.sleep(0.0 if ctx.rank == culprit else 0.2)
            _fail()
        if step == 0 and what == "all-wait":
            wait_for(folder, name)
        if step == FAULT_AT and ctx.rank == culprit and what not in ("none", "long", "all-wait"):
            strike(folder, f"{name}-{ctx.attempt}" if "until" in what else name)
            if what == "return":
                return ctx.rank
            if what == "other":
                dist.broadcast(torch.zeros(1), 0)  # called here
            if what == "fill":
                hoard = [bytearray(os.urandom(1) * (8 << 20)) for _ in range(256)]
                raise RuntimeError(len(hoard))
            if what == "lose-data" and ctx.attempt == 1:
                (folder / "there" / "data" / "numbers").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "linger":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                threading.Thread(target=time.sleep, args=[600]).start()
            if what in ("wait", "upload"):
                wait_for(folder, name, in_thread=what == "upload")
            if what == "unloadable":
                result = Unloadable()
            break_down(what, ctx)
        if step == FAULT_AT and what == "skip" and ctx.rank == culprit:
            continue
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == ctx.world_size
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return [os.environ.get(each) for each in names] if what == "interface" else result


class Unloadable:
    """A value that a rank can return, but its launcher cannot load."""

    def __reduce__(self) -> tuple[object, ...]:
        return (_fail, ())


def hold(ctx: RankContext, release: Path, fail: Path) -> int:
    """Train until rank 0 sees a file; fail when the rank sees its own, also while it waits for the others."""
    import torch
    import torch.distributed as dist

    while True:
        time.sleep(PACE_S)
        if fail.exists():
            _fail()
        may_end = torch.tensor(float(ctx.rank == 0 and release.exists()))
        reduced = dist.all_reduce(may_end, async_op=True)
        while not reduced.is_completed():
            time.sleep(PACE_S / 10)
            if fail.exists():
                _fail()
        reduced.wait()
        if may_end.item():
            return ctx.rank


def cross(folder: Path, name: str, *, is_first: bool) -> None:
    """Wait in one of two groups for ranks that wait in the other one."""
    import torch
    import torch.distributed as dist

    first, second = dist.new_group(), dist.new_group()
    strike(folder, name)
    dist.all_reduce(torch.ones(1), group=first if is_first else second)


def wait_for(folder: Path, name: str, *, in_thread: bool = False) -> None:
    """Do nothing at all until the test opens the other end of a pipe, or let a thread wait for that."""
    if in_thread:
        threading.Thread(target=wait_for, args=[folder, name]).start()
    else:
        os.close(os.open(folder / f"wait-{name}", os.O_RDONLY))


def go_on(ctx: RankContext, folder: Path, name: str) -> Mapping[str, object]:
    """Save each step; when started again, resume and make ten more steps.

    In jobs whose name begins with "memory", only memory is due; in "memory-damaged", that of node 1 is
    damaged when the second attempt begins. "parts" keeps in memory what differs from node to node.
    """
    from ddpsafe.checkpoint import Checkpointer

    if name == "parts":
        from memory_programs import keep_parts

        return keep_parts(ctx, folder)

    state = {"step": 0}
    options: dict[str, Any] = {"every": 10**6, "memory_every": 1} if "memory" in name else {}
    if name == "memory-damaged" and ctx.attempt > 1 and ctx.rank == 1:
        from memory_programs import flip_all

        flip_all(folder / f"checkpoints-{name}")
    with Checkpointer(folder / f"checkpoints-{name}", **options) as checkpointer:
        checkpointer.restore(state)
        first = state["step"]
        while (first == 0 or state["step"] < first + 10) and not ctx.stop_requested():
            time.sleep(PACE_S)
            state["step"] = round(ctx.reduce_mean(float(state["step"] + 1)))
            if not options or checkpointer.is_due(state["step"]):
                checkpointer.save(state, state["step"])
            if state["step"] == first + 3:
                (folder / f"running-{name}-{ctx.attempt}-{ctx.rank}").write_text(str(os.getpid()))
    return {"first": first, "last": state["step"], "attempt": ctx.attempt, "of": ctx.world_size}


def _fail() -> None:
    raise ValueError("bad batch")


def break_down(what: str, ctx: RankContext) -> None:
    """Meet a fault."""
    import torch.distributed as dist

    if what == "raise" or (what.startswith("raise-until-") and ctx.attempt < int(what[12:])):
        raise ValueError("bad batch")
    if what.startswith("kill-until-") and ctx.attempt < int(what[11:]):
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "barrier":
        try:
            _fail()
        except ValueError:
            dist.barrier()
    if what == "meet":
        ctx.barrier("epoch")  # called here
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what.startswith("exit-"):
        os._exit(int(what[5:]))
    hang(what)


def hang(what: str) -> None:
    """Hang in Python, in C, or stopped."""
    if what == "sleep":
        time.sleep(600)  # stuck here
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "gil":
        ctypes.PyDLL(None).sleep(600)  # holds the lock of the interpreter


def describe(error: ddpsafe.DDPSafeError) -> dict[str, Any]:
    """Return the facts of an error that tests need."""
    return {
        "error": type(error).__name__,
        "text": error.explanation.what,
        "code": error.exit_code,
        "kind": error.kind,
        "cause": None if error.__cause__ is None else type(error.__cause__).__name__,
        "rank": getattr(error, "rank", None),
        "attempt": getattr(error, "attempt", None),
        "details": list(error.explanation.details),
        "values": getattr(error, "values", None),
        "whole": str(error),
    }


def refuse_another(_: ddpsafe.DDPSafeError) -> None:
    """Raise, as an on_retry may."""
    _fail()


def leave(when: str, said: dict[str, Any], fields: dict[str, Any]) -> None:
    """End the launcher before it starts anything: while it waits to join, once it has, or with a plan.

    Or stay until node 0 has refused it.
    """
    from ddpsafe._clock import BoundedCall
    from ddpsafe._config import LaunchConfig
    from ddpsafe._launcher.nodes.rendezvous import NodeRendezvous
    from ddpsafe._launcher.nodes.rounds import settings_of
    from ddpsafe._launcher.plan import make_plan
    from ddpsafe._launcher.watch.signals import open_inbox

    plan = make_plan(LaunchConfig.resolve(**fields), style="launch")
    with open_inbox() as inbox:
        node = NodeRendezvous(plan.config, inbox, settings=settings_of(plan), nproc=plan.nproc)
        node.open()
        if when == "waiting":
            joining = BoundedCall(node.join, name="joining")
            while node._launcher not in [each.launcher for each in node._present()]:
                assert not joining.wait(0.05)
        else:
            assert node.join() is not None
        while when == "begun" and node.membership.plan is None:
            node.look()
            time.sleep(0.05)
        while when == "stays" and node.membership.result is None:
            node.look()
            time.sleep(0.05)
    print(json.dumps(said), flush=True)
    os._exit(0)


def main(folder: Path, endpoint: str, cases: list[dict[str, Any]]) -> None:
    """Launch each case in turn."""
    host, _, port = endpoint.rpartition(":")
    for number, case in enumerate(cases):
        name = case["name"]
        said: dict[str, Any] = {"name": name}
        if not case["is_in"]:
            print(json.dumps(said), flush=True)
            continue
        while case["after"] and not list(folder.glob(case["after"])):
            time.sleep(0.02)
        os.environ.update(case["env"])
        if "QUIET_S" in case["env"]:
            deadlock_watch.SETTINGS = dataclasses.replace(
                deadlock_watch.SETTINGS,
                look_s=0.2,
                quiet_s=float(case["env"]["QUIET_S"]),
                idle_sample_s=1.0,
            )
        meets = {"endpoint": f"{host}:{int(port) + number}", "join": machine.hang_limit(120)}
        fields = {"rendezvous": {**meets, **case["fields"].pop("rendezvous", {})}}
        said["began"] = time.time()
        if case["leaves"]:
            leave(case["leaves"], said, {**fields, **case["fields"]})
        if "retry" in case["fields"]:  # JSON has no types
            on = [
                {"ValueError": ValueError}.get(each, each) for each in case["fields"]["retry"]["on"]
            ]
            case["fields"]["retry"]["on"] = on
        try:
            result = ddpsafe.launch(
                train,
                (folder, name, case["what"], case["rank"]),
                on_retry=refuse_another if "REFUSES_RETRY" in os.environ else None,
                **{**fields, **case["fields"]},
            )
            said |= {"values": result.values, "attempts": result.attempts}
        except ddpsafe.DDPSafeError as error:
            said |= describe(error)
        except ValueError as error:  # of on_retry
            said["error"] = type(error).__name__
        said["at"] = time.time()
        for variable in case["env"]:
            del os.environ[variable]
        if case["touches"]:
            (folder / case["touches"]).touch()
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
