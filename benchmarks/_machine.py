"""The lines of a page that say when and on what it was measured."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

BACKEND: Final = "BENCHMARK_BACKEND"
"""The variable with the backend that ranks use; gloo without it."""


def backend() -> str:
    """Return the backend that is measured."""
    return os.environ.get(BACKEND, "gloo")


def take_device(rank: int) -> torch.device:
    """Return the device of a rank; with NCCL, its GPU, which it may share with others of a machine with one.

    Without a group, call this before it is made.
    """
    import torch

    if backend() == "gloo":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus == 1:
        os.environ["NCCL_HOSTID"] = (
            f"benchmark-{rank}"  # NCCL refuses two ranks of one host on a GPU
        )
    torch.cuda.set_device(rank % gpus)
    return torch.device("cuda", rank % gpus)


def measured_on() -> str:
    """Return the date, the machine with its load of the last quarter of an hour, and the versions."""
    today = datetime.now(tz=timezone.utc).date().isoformat()
    machine = f"{platform.system()} {platform.machine()}, load average {os.getloadavg()[2]:.1f}"
    return (
        f"Measured on {today}: {os.cpu_count()} cores, {machine},\n"
        f"Python {platform.python_version()}, torch {version('torch')}, {backend()}."
    )
