"""One quick check of each promise, as a script: ``nox -s matrix`` runs it for each Python and torch.

It needs only ddpsafe, and prints one line of JSON: the versions, and the result of each promise.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

import ddpsafe
from ddpsafe.checkpoint import Checkpointer

LAUNCH: Final[dict[str, Any]] = {"nproc_per_node": 2, "backend": "gloo"}


def train(ctx: ddpsafe.RankContext) -> float:
    """Run one step of DDP; return the mean of the ranks' losses."""
    import torch
    from torch import nn

    model = ctx.wrap(nn.Linear(4, 1))
    loss = model(torch.full((8, 4), ctx.rank + 1.0)).sum()
    loss.backward()
    ctx.barrier("trained")
    return ctx.reduce_mean(float(ctx.rank))


def raise_on_rank_one(ctx: ddpsafe.RankContext) -> None:
    """Raise on rank 1 while rank 0 waits for it."""
    if ctx.rank == 1:
        raise ValueError("bad batch")
    ctx.all_gather(ctx.rank)


def hang_on_rank_one(ctx: ddpsafe.RankContext) -> None:
    """Sleep on rank 1 while rank 0 waits in a collective."""
    if ctx.rank == 1:
        time.sleep(600)
    ctx.all_reduce(1.0)


def leave_as_rank_one(ctx: ddpsafe.RankContext) -> None:
    """Return on rank 1 while rank 0 waits in a collective."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    if ctx.rank == 0:
        dist.all_reduce(torch.ones(1))


def die_on_rank_one(ctx: ddpsafe.RankContext) -> None:
    """Kill rank 1 with SIGKILL."""
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.all_gather(ctx.rank)


def die_once(ctx: ddpsafe.RankContext, folder: str) -> int:
    """Train for four epochs with a loader and a checkpoint; rank 1 is killed once, after two."""
    import torch
    from torch.utils.data import TensorDataset

    loader = ctx.loader(TensorDataset(torch.arange(8)), batch_size=2)
    seen = torch.zeros(1, dtype=torch.int64)
    with Checkpointer(folder) as checkpointer:
        checkpointer.restore({"loader": loader, "seen": seen})
        for epoch in loader.epochs(4):
            for (batch,) in loader:
                seen += ctx.all_reduce(int(batch.sum()))
            checkpointer.save({"loader": loader, "seen": seen}, epoch + 1)
            ctx.barrier("saved")
            if (epoch, ctx.rank, ctx.attempt) == (1, 1, 1):
                os.kill(os.getpid(), signal.SIGKILL)
    return int(seen)


def launched() -> None:
    """Ranks connect, train, and return."""
    assert ddpsafe.launch(train, **LAUNCH).values == {0: 0.5, 1: 0.5}


def forked() -> None:
    """They do the same when started from a fork server."""
    assert ddpsafe.launch(train, start_method="forkserver", **LAUNCH).values == {0: 0.5, 1: 0.5}


def exception() -> None:
    """The rank that raised is named with its error."""
    error = _error(raise_on_rank_one)
    assert isinstance(error, ddpsafe.RankRaisedError), error
    assert error.rank == 1
    assert "bad batch" in str(error)


def killed() -> None:
    """The rank that was killed is named with its signal."""
    error = _error(die_on_rank_one)
    assert isinstance(error, ddpsafe.RankKilledError), error
    assert error.rank == 1
    assert "SIGKILL" in str(error)


def hang() -> None:
    """The absent rank is named within the timeout."""
    error = _error(hang_on_rank_one, timeouts={"collective": 3})
    assert error.setting == "collective", error
    assert error.missing_ranks == (1,)
    assert "hang_on_rank_one" in str(error)


def left_early() -> None:
    """Since torch 2.8, the rank that has returned is named long before the timeout."""
    import torch
    from torch.torch_version import TorchVersion

    if TorchVersion(torch.__version__) >= "2.8":
        before_s = time.monotonic()
        error = _error(leave_as_rank_one, timeouts={"collective": 240})
        assert isinstance(error, ddpsafe.RankLeftEarlyError), error
        assert error.rank == 1
        assert time.monotonic() - before_s < 240


def checkpoint_and_loader() -> None:
    """The attempt after a kill continues from the checkpoint, and reads every sample equally often."""
    with tempfile.TemporaryDirectory() as folder:
        retry = {"attempts": 2, "on": {"killed"}, "backoff_initial": 0.1}
        found = ddpsafe.launch(die_once, (folder,), retry=retry, **LAUNCH)
    assert found.attempts == 2
    assert found.values == dict.fromkeys(range(2), 4 * sum(range(8)))


def _work(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29511")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size
    dist.destroy_process_group()


def spawned() -> None:
    """A function for torch.multiprocessing.spawn runs unchanged."""
    ddpsafe.spawn(_work, args=(2,), nprocs=2)


def attached() -> None:
    """Torchrun's ranks join by launch()."""
    _run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run() -> None:
    """``ddpsafe run`` starts the ranks of this script."""
    _run("-m", "ddpsafe", "run", "--nproc-per-node", "2")


def _run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, *command, __file__, "rank"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "mean 0.5" in done.stdout


def _error(function: Callable[..., object], **fields: Any) -> ddpsafe.DDPSafeError:
    with tempfile.TemporaryDirectory() as folder:
        try:
            ddpsafe.launch(function, run_dir=folder, console="none", **LAUNCH, **fields)
        except ddpsafe.DDPSafeError as error:
            return error
    raise AssertionError("no error")


PROMISES: Final = (
    launched, forked, exception, killed, hang, left_early, checkpoint_and_loader, spawned, attached,
    run,
)  # fmt: skip
PACKAGES: Final = (
    "torch", "pydantic", "pydantic-settings", "tenacity", "psutil", "cloudpickle", "rich", "isal",
    "jinja2", "numpy",
)  # fmt: skip


def main() -> int:
    """Check every promise; return how many do not hold."""
    if sys.argv[1:] == ["rank"]:
        with ddpsafe.process_group("gloo") as ctx:
            ctx.print("mean", train(ctx))
        return 0
    found = {}
    for promise in PROMISES:
        try:
            promise()
        except Exception:  # noqa: BLE001, PERF203 - reported, and the other promises are checked
            traceback.print_exc()
            found[promise.__name__] = "FAILED"
        else:
            found[promise.__name__] = "ok"
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    print(json.dumps({"python": platform.python_version()} | versions | found))
    return sum(each != "ok" for each in found.values())


if __name__ == "__main__":
    sys.exit(main())
