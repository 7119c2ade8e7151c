"""The examination that one node takes part in."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ddpsafe._host import LIBRARY_VARIABLES
from ddpsafe._text import printable
from ddpsafe._world import expand_hosts, job_variables
from ddpsafe.doctor._findings import Matrix
from ddpsafe.doctor._mesh.protocol import VERSION, Greeting, as_hostname

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta

    from ddpsafe.doctor._subject import VariableSource


def find_node_names(nnodes: int) -> dict[int, str]:
    """Return the host names of the job's nodes by node rank, if Slurm provides them."""
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
        node_rank: The rank of this node, from 0; node rank 0 runs on the endpoint's host.
        host: The endpoint's host, which every node can reach.
        interface: ``Rendezvous.interface``: a name, ``"auto"``, or None for the library's choice.
        backend: The job's backend, with "auto" resolved. One that contains ``nccl`` follows NCCL's
            rules, all others gloo's.
        timeout: How long to wait for missing nodes; everything after that takes seconds.
        facts: This host's fingerprint, to compare with the others'.
        on_progress: Called from time to time with a line that says what the doctor waits for.
        collective: Whether to end with an all-reduce, if torch is installed and nothing failed.
        at_store: Whether the nodes exchange messages over the job's store, not at the endpoint.
        secret: A secret that only the nodes of the job know. It signs their messages, and nodes
            without it are refused. Without one, anyone who reaches the endpoint can take part.
        places: Where variables of the ranks were set, if not in the shell.
    """

    nnodes: int
    node_rank: int
    host: str
    port: int
    interface: str | None
    backend: str
    timeout: timedelta
    facts: Mapping[str, object]
    on_progress: Callable[[str], None]
    collective: Literal["run", "skip"] = "run"
    at_store: bool = False
    secret: str = ""
    places: Mapping[str, VariableSource] = field(default_factory=dict)

    def greeting(self) -> Greeting:
        """Return the greeting of this node."""
        job = " ".join(f"{name}={value}" for name, value in job_variables(os.environ).items())
        return Greeting(
            version=VERSION,
            nnodes=self.nnodes,
            node_rank=self.node_rank,
            hostname=as_hostname(socket.gethostname()),
            pid=os.getpid(),
            job=printable(job)[:500],
        )

    def env(self) -> dict[str, str]:
        """Return this process's environment with the ranks' interface variables."""
        # The fingerprint also has the variables that the job's configuration adds.
        added = self.facts.get("env")
        table = added if isinstance(added, dict) else {}
        chosen = {name: str(value) for name, value in table.items() if name in LIBRARY_VARIABLES}
        return {**os.environ, **chosen}

    def empty_matrix(self) -> Matrix:
        """Return the matrix of a node that knows nothing about the others."""
        nothing = ("",) * self.nnodes
        return Matrix(hostnames=nothing, addresses=nothing, directions=())
