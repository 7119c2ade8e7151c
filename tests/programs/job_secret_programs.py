"""Rank functions of test_job_secret.py: another user can reach the ranks' store."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import scripts

import ddpsafe

if TYPE_CHECKING:
    from torch.distributed import TCPStore

PATIENT: Final = {"start": 30, "collective": 30, "barrier": 30}
SOON: Final = {"start": 4, "collective": 30, "barrier": 30}

STEPS: Final = 8
STEP_S: Final = 0.1


def train_beside_a_stranger(folder: str) -> dict[str, Any]:
    """Wait for the other user's messages, train for some steps, and return the result."""
    told: dict[str, Any] = {"stopped": False, "error": ""}
    try:
        with ddpsafe.process_group(timeouts=PATIENT) as ctx:
            ctx.stop_requested()
            Path(folder, f"joined-{ctx.rank}").touch()
            scripts.wait_until(Path(folder, "forged").exists)
            for _ in range(STEPS):
                time.sleep(STEP_S)  # the store is read twice a second
                told["stopped"] |= ctx.stop_requested()
            ctx.barrier("trained")
            told["sum"] = ctx.all_reduce(ctx.rank)
    except ddpsafe.DDPSafeError as error:
        told["error"] = f"{type(error).__name__}: {error}"
    return told


def join_soon() -> str:
    """Join; return the error."""
    try:
        with ddpsafe.process_group(timeouts=SOON):
            return ""
    except ddpsafe.DDPSafeError as error:
        return f"{type(error).__name__}: {error}"


def join_twice_and_start_a_program() -> list[object]:
    """Join two groups in turn; return their sums, and the secrets that a program inherits."""
    found: list[object] = []
    for _ in range(2):
        with ddpsafe.process_group(timeouts=PATIENT) as ctx:
            found.append(ctx.all_reduce(ctx.rank))
    show = "import os, json; print(json.dumps([os.environ.get('DDPSAFE_JOB_SECRET')]))"
    found += json.loads(subprocess.check_output([sys.executable, "-S", "-c", show], text=True))
    return found


def forge(port: int, world_size: int) -> list[str]:
    """Connect as another user, and write under every key that ranks act on."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=False)
    keys = list(_keys_to_forge(store, world_size))
    for key, value in keys:
        store.set(key, value)
    return [key for key, _ in keys]


def _keys_to_forge(store: TCPStore, world_size: int) -> Iterator[tuple[str, str]]:
    known: list[str] = store.list_keys()
    groups = {key.partition("/job")[0] for key in known if key.endswith("/job")}
    for group in groups:
        yield f"{group}/control/control/departed", json.dumps([0, "own", "it was rank 0", True])
        yield f"{group}/control/barrier/trained/0/missing", "[1]"
        for rank in range(world_size):
            yield f"{group}/stop/promise/{rank}", "2"
        yield f"{group}/stop/agreed", "2"
        yield f"{group}/stop/asked", "SIGTERM"
