"""Ranks that another user of the host attacks, and the attacks."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil
import scripts
import torch
import torch.distributed as dist

from ddpsafe import RankContext

OTHER_UID: Final = 65534


def train_under_attack(ctx: RankContext, folder: Path) -> float:
    """Write where everything is, wait for the end of the attack, and return the sum of ranks."""
    from ddpsafe._worker.rank import this_rank

    spec = this_rank.spec
    assert spec is not None
    pids = [os.getpid(), spec.launcher_pid]
    ports = {pid: _listens_at(pid) for pid in pids}
    facts = {
        "pids": pids,
        "ports": ports[os.getpid()],
        "ports_of_launcher": ports[spec.launcher_pid],
        "store": spec.store_dir,
        "log": spec.logs.stderr,
        "launch_id": spec.launch_id,
    }
    told = folder / f"facts-{ctx.rank}"
    told.with_suffix(".new").write_text(json.dumps(facts))
    told.with_suffix(".new").rename(told)
    scripts.wait_until((folder / "attacked").exists)
    ctx.barrier("after the attack")
    total = torch.tensor([ctx.rank + 1.0])
    dist.all_reduce(total)
    return total.item()


def _listens_at(pid: int) -> list[int]:
    process: Any = psutil.Process(pid)
    find = process.net_connections if psutil.version_info >= (6,) else process.connections
    sockets = find("inet")
    return [each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN]


def attack(facts: dict[str, Any]) -> list[str]:
    """Run all attacks as another user; return those that succeeded."""
    from torch.distributed import FileStore, PrefixStore

    os.setgroups([])
    os.setgid(OTHER_UID)
    os.setuid(OTHER_UID)
    store = Path(facts["store"])
    tried: dict[str, Callable[[], object]] = {
        "list the store": lambda: list(store.iterdir()),
        "list the control keys": lambda: list((store / "control").iterdir()),
        "read the addresses": (store / "group-0").read_bytes,
        "write a key": lambda: (store / "control" / "key").write_text("departed"),
        "replace the store": lambda: store.rename(store.with_name("mine")),
        "be a rank": lambda: PrefixStore("0//cpu//0", FileStore(str(store / "group-0"), -1)).set(
            "1", "address"
        ),
        "read a log": lambda: Path(facts["log"]).read_bytes(),
        "write a log": lambda: Path(facts["log"]).write_bytes(b"it was rank 0"),
        **{f"stop {pid}": lambda pid=pid: os.kill(pid, signal.SIGUSR1) for pid in facts["pids"]},
        **{f"end {pid}": lambda pid=pid: os.kill(pid, signal.SIGTERM) for pid in facts["pids"]},
        **{
            f"read {name} of {pid}": lambda pid=pid, name=name: Path(
                f"/proc/{pid}/{name}"
            ).read_bytes()
            for pid in facts["pids"]
            for name in ("environ", "mem", "fd/1")
        },
    }
    for port in facts["ports"]:
        knock(port)
    names = [path.name for path in Path("/dev/shm").iterdir()] + sys.argv
    leaks = [name for name in names if facts["launch_id"][:8] in name]
    return leaks + [what for what, attempt in tried.items() if _succeeds(attempt)]


def knock(port: int) -> None:
    """Send data to a port of gloo, which accepts every connection and must ignore it."""
    with socket.socket() as client:
        client.connect(("127.0.0.1", port))
        client.sendall(bytes(8))


def _succeeds(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (OSError, RuntimeError):
        return False
    return True
