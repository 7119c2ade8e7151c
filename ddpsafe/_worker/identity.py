"""How ranks that meet at an address make sure that they are of one job."""

from __future__ import annotations

import json
import multiprocessing
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpsafe._errors import ConfigError, Explanation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import Store

    from ddpsafe._world import World

# What tells one job from another on the same address and port.
_JOB_VARIABLES: Final = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_orte_jobid")


def identity_of(env: Mapping[str, str]) -> dict[str, list[str]]:
    """Collect what all ranks of one job share, and ranks of another job do not.

    Returns:
        For each sign of a job, where it can be compared (empty: everywhere) and its value.
    """
    known = {name: ["", env[name]] for name in _JOB_VARIABLES if name in env}
    run_id = env.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        known["TORCHELASTIC_RUN_ID"] = ["", run_id]
    parent = multiprocessing.parent_process()
    if parent is not None:
        known["parent process"] = [f"{socket.gethostname()} {_pid_namespace()}", str(parent.pid)]
    return known


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def publish_job(store: Store, env: Mapping[str, str]) -> None:
    """Say, as rank 0, which job this is."""
    store.set("job", json.dumps(identity_of(env)))


def require_same_job(store: Store, place: str, world: World, env: Mapping[str, str]) -> None:
    """Refuse the store of another job, and a rank that somebody else has taken.

    Two jobs on one hard-coded port otherwise join each other and reduce each other's gradients
    (measured on hand-written scripts: 4 of 8 simultaneous starts).

    Args:
        store: The store; rank 0 has published its job there.
        place: Where it is, for the message.
        world: This rank's place.
        env: The environment.

    Raises:
        ConfigError: The store belongs to another job, or the rank is taken.
    """
    mine = identity_of(env)
    theirs: dict[str, list[str]] = json.loads(store.get("job"))
    shared = mine.keys() & theirs.keys()
    differing = [
        name
        for name in sorted(shared)
        if mine[name][0] == theirs[name][0] and mine[name][1] != theirs[name][1]
    ]
    if differing or (mine and theirs and not shared):
        raise _another_job(place, world, ", ".join(differing or sorted(theirs)) + " differs")
    if store.add(f"claim/{world.rank}", 1) != 1:
        raise _another_job(place, world, f"rank {world.rank} has joined there already")


def _another_job(place: str, world: World, evidence: str) -> ConfigError:
    what = f"{world} reached the store of another job at {place} ({evidence})."
    cause = "two jobs use the same MASTER_ADDR and MASTER_PORT; they would mix their gradients."
    fix = "give each job its own MASTER_PORT, or let ddpsafe.launch or spawn choose it."
    return ConfigError(Explanation(what, cause=cause, fix=fix))
