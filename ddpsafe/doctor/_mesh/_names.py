"""Names of nodes that have not spoken, from what a launcher tells all of them."""

from __future__ import annotations

import os

from ddpsafe._world import expand_hosts
from ddpsafe.doctor._mesh._messages import as_hostname


def find_node_names(nnodes: int) -> dict[int, str]:
    """Return the names of the job's nodes by node rank, where Slurm tells them."""
    nodelist = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or ""
    try:
        names = expand_hosts(nodelist)
    except ValueError:
        return {}
    return dict(enumerate(map(as_hostname, names))) if len(names) == nnodes else {}
