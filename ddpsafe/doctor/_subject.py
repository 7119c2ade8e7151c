"""What is examined: this host, as the ranks of one job would find it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpsafe._config.endpoint import Endpoint, parse_endpoint
from ddpsafe.doctor._nvml import count_device_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe._clock import Deadline
    from ddpsafe._config import LaunchConfig
    from ddpsafe.doctor._torch_probe import TorchProbe


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What the checks look at.

    Attributes:
        config: What the job asks for.
        env: The variables its ranks would have: those of this process, and the config's on top.
        nproc: Ranks on this node, as far as is known without torch.
        at_launch: Whether a launch waits: limits are then those that break it, not those that
            a careful user would like to know.
        deadline: When the examination ends.
        probe: What torch says in a process of its own; ``None`` where nobody asked.
    """

    config: LaunchConfig
    env: Mapping[str, str]
    nproc: int
    at_launch: bool
    deadline: Deadline
    probe: TorchProbe | None = None

    @property
    def nnodes(self) -> int:
        """Number of nodes of the job."""
        return self.config.nnodes

    @property
    def endpoint(self) -> Endpoint | None:
        """Where the nodes meet: the config's endpoint, else MASTER_ADDR and MASTER_PORT."""
        if self.config.rendezvous.endpoint is not None:
            return self.config.rendezvous.parsed()
        host, port = self.env.get("MASTER_ADDR"), self.env.get("MASTER_PORT")
        if not host or not port:
            return None
        try:
            return parse_endpoint(f"{host}:{port}")
        except ValueError:  # DS-ENV-003 and DS-ENV-004 say why
            return None

    @property
    def backend(self) -> str:
        """The backend, "auto" decided by whether the driver has made devices."""
        if self.config.backend != "auto":
            return self.config.backend
        return "nccl" if count_device_nodes() and self.config.nproc_per_node != "cpu" else "gloo"

    @property
    def wants_gpus(self) -> bool:
        """Whether the job asks for GPUs by name, not only takes them where there are any."""
        return "nccl" in self.config.backend or self.config.nproc_per_node == "gpu"


def environment_of(config: LaunchConfig) -> dict[str, str]:
    """Return the variables that the ranks of a config would have."""
    return {**os.environ, **config.env}


def count_cores() -> int:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
