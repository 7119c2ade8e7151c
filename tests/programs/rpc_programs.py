"""Ranks that call each other by torch's RPC; run by faults/test_rpc.py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from hang_programs import FOREVER_S
from training_programs import mark


def call_the_other_rank(
    rank: int, world_size: int, folder: Path, called: Callable[[Path], object], timeout_s: float
) -> None:
    """Call a function on rank 1 from rank 0."""
    from torch.distributed import rpc

    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12356"
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=timeout_s)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        rpc.rpc_sync("w1", called, args=(folder,))
    rpc.shutdown()


def be_killed(folder: Path) -> None:
    """Be killed in the middle of the call."""
    mark(folder)
    os.kill(os.getpid(), 9)


def hang(folder: Path) -> None:
    """Never return from the call."""
    mark(folder)
    time.sleep(FOREVER_S)
