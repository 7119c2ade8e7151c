"""A launch that records which files of ddpsafe run in it, in the launcher and in the ranks."""

from __future__ import annotations

import inspect
import os
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch
import torch.distributed as dist

import ddpsafe

PACKAGE: Final = str(Path(ddpsafe.__file__).parent) + os.sep
FOLDER: Final = Path(os.environ["WALK_FOLDER"])
BEGUN: Final = FOLDER / "begun"


class Recorder:
    """Writes the file of each function of ddpsafe that runs once the walk has begun."""

    def __init__(self) -> None:
        self._seen: set[CodeType] = set()
        self._has_begun = False

    def start(self) -> None:
        """Record all threads of this process from now on."""
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call."""
        code = frame.f_code
        if event != "call" or code in self._seen or not code.co_filename.startswith(PACKAGE):
            return
        self._has_begun = self._has_begun or os.path.exists(BEGUN)  # noqa: PTH110 - makes no calls
        # A class body, and what a module calls while it is imported, does not count.
        if not self._has_begun or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        above = frame.f_back
        while above is not None:
            is_module = above.f_code.co_name == "<module>"
            if is_module and above.f_code.co_filename.startswith(PACKAGE):
                return
            above = above.f_back
        self._seen.add(code)
        file = code.co_filename.removeprefix(PACKAGE)
        with open(FOLDER / f"{os.getpid()}.files", "a", encoding="utf-8") as out:  # noqa: PTH123
            out.write(f"{file}\n")


def return_rank(ctx: ddpsafe.RankContext) -> int:
    """Return after a collective."""
    dist.all_reduce(torch.ones(1))
    return ctx.rank


def raise_in_rank_1(ctx: ddpsafe.RankContext) -> None:
    """Raise in one rank once all are in the function."""
    dist.all_reduce(torch.ones(1))
    if ctx.rank == 1:
        BEGUN.touch()
        message = "broken"
        raise ValueError(message)
    dist.all_reduce(torch.ones(1))


def keep_rank_0_waiting(ctx: ddpsafe.RankContext) -> None:
    """Let one rank wait in a collective until it times out."""
    dist.all_reduce(torch.ones(1))
    if ctx.rank == 1:
        threading.Event().wait(60)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        BEGUN.touch()
        raise


def main() -> None:
    """Launch two ranks; a walk of a failure begins where the exception is raised."""
    walk = sys.argv[1]
    Recorder().start()
    if walk == "launch":
        BEGUN.touch()
        result = ddpsafe.launch(return_rank, nproc_per_node=2, backend="gloo")
        assert result.values == {0: 0, 1: 1}
    elif walk == "nodes":
        BEGUN.touch()
        # Two launchers on this host stand for two nodes.
        endpoint = f"{socket.gethostname()}:{os.environ['WALK_PORT']}"
        ddpsafe.launch(
            return_rank,
            nproc_per_node=1,
            backend="gloo",
            nnodes=2,
            # Without an id, a host that comes twice is refused.
            rendezvous={"endpoint": endpoint, "id": "walk"},
        )
    elif walk == "exception":
        ddpsafe.launch(raise_in_rank_1, nproc_per_node=2, backend="gloo", run_dir=FOLDER / "run")
    else:
        timeouts = ddpsafe.Timeouts(collective=timedelta(seconds=3))
        ddpsafe.launch(
            keep_rank_0_waiting,
            nproc_per_node=2,
            backend="gloo",
            run_dir=FOLDER / "run",
            timeouts=timeouts,
        )


if __name__ == "__main__":
    main()
else:  # a rank imports its script first
    Recorder().start()
