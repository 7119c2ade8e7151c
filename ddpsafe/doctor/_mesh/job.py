"""What one node was asked to examine."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ddpsafe._host import LIBRARY_VARIABLES
from ddpsafe._world import expand_hosts, job_variables
from ddpsafe.doctor._findings import Matrix, printable
from ddpsafe.doctor._mesh.connection import (
    VERSION,
)
from ddpsafe.doctor._mesh.protocol import Greeting, as_hostname

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta

    from ddpsafe.doctor._mesh.transport import Json
    from ddpsafe.doctor._subject import VariableSource


def find_node_names(nnodes: int) -> dict[int, str]:
    """Return the names of the job's nodes by node rank, where Slurm tells them."""
    nodelist = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or ""
    try:
        names = expand_hosts(nodelist)
    except ValueError:
        return {}
    return dict(enumerate(map(as_hostname, names))) if len(names) == nnodes else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One examination, as one node sees it.

    Attributes:
        nnodes: How many nodes take part.
        node_rank: Which of them this is.
        host: Of the endpoint.
        port: Of the endpoint.
        interface: ``Rendezvous.interface``.
        backend: Whose rules the addresses follow: ``nccl`` or ``gloo``.
        timeout: How long to wait for nodes that have not come.
        facts: This host's fingerprint.
        on_progress: Takes a line now and then on what is being waited for.
        collective: Whether an all-reduce closes the examination.
        at_store: Whether ranks of the job meet at its store, and not doctors at the endpoint.
        secret: What only the nodes of the job know; empty where there is none.
        places: Where variables of the ranks were set that are not this process's.
    """

    nnodes: int
    node_rank: int
    host: str
    port: int
    interface: str | None
    backend: str
    timeout: timedelta
    facts: Mapping[str, Json]
    on_progress: Callable[[str], None]
    collective: Literal["run", "skip"]
    at_store: bool = False
    secret: str = ""
    places: Mapping[str, VariableSource] = field(default_factory=dict)

    def greeting(self) -> Greeting:
        """Return how this node introduces itself."""
        job = " ".join(f"{name}={value}" for name, value in job_variables(os.environ).items())
        return Greeting(
            version=VERSION,
            nnodes=self.nnodes,
            node_rank=self.node_rank,
            hostname=as_hostname(socket.gethostname()),
            pid=os.getpid(),
            job=printable(job)[:500],
            challenge=secrets.token_hex(8),
        )

    def env(self) -> dict[str, str]:
        """Return the environment of the ranks, as far as it decides on interfaces.

        The fingerprint has the variables that the job's configuration adds to this process's.
        """
        added = self.facts.get("env")
        table = added if isinstance(added, dict) else {}
        chosen = {name: str(value) for name, value in table.items() if name in LIBRARY_VARIABLES}
        return {**os.environ, **chosen}

    def empty_matrix(self) -> Matrix:
        """Return the matrix of a node that has learned nothing about the others."""
        nothing = ("",) * self.nnodes
        return Matrix(hostnames=nothing, addresses=nothing, directions=())
