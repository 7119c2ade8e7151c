"""The preflight: checks of the doctor before the user's function runs in any rank.

It runs on a host that is about to start ranks, in a rank that another launcher started, and between
the launchers of several nodes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from ddpsafe._config import LaunchConfig
from ddpsafe._launcher.processes.start import require_room

if TYPE_CHECKING:
    from torch.distributed import Store

    from ddpsafe._world import World

_NOTHING: Final = "nothing was started"


def require_ready_to_launch(config: LaunchConfig, *, nproc: int, backend: str) -> None:
    """Check this host before a launch starts its ranks; `preflight` of the configuration selects the checks.

    The backend is not "auto".

    Raises:
        PreflightError: A check found something that will break the launch.
    """
    require_room(nproc)  # before the checks, which open files too
    if config.preflight == "off":
        return
    from ddpsafe import doctor
    from ddpsafe.doctor._findings import require_healthy

    resolved = LaunchConfig.resolve(config, nproc_per_node=nproc, backend=backend)
    checks = "launch" if config.preflight == "local" else "all"
    require_healthy(doctor.run(resolved, checks=checks, mesh=False), outcome=_NOTHING)


def require_ready_to_join(config: LaunchConfig, world: World) -> None:
    """Check this host in a rank that another launcher started.

    Every rank runs the cheap checks. With ``preflight="full"`` the first rank of each node also runs the
    long ones. Connections to other nodes are checked later, once the ranks have met at the store.

    Raises:
        ConfigError: The launcher's variables do not say where the ranks meet.
        PreflightError: A check found something that will break the job.
    """
    if config.preflight == "off":
        return
    from ddpsafe import doctor
    from ddpsafe._worker.join.store import has_met
    from ddpsafe._worker.join.store_endpoint import find_endpoint
    from ddpsafe.doctor._findings import require_healthy

    resolved = LaunchConfig.resolve(config, nproc_per_node=world.local_world_size)
    is_first = world.local_rank == 0
    is_full = config.preflight == "full" and is_first
    if is_full and world.nnodes > 1:
        endpoint = find_endpoint(world, os.environ)
        is_full = not has_met(endpoint)  # after that, the port is taken by the job's own store
        resolved = LaunchConfig.resolve(
            resolved,
            nnodes=world.nnodes,
            node_rank=world.node_rank,
            rendezvous={"endpoint": str(endpoint)},
        )
    # On every rank, so that all ranks fail together.
    report = doctor.run(resolved, checks="all" if is_full else "launch", mesh=False)
    require_healthy(report, outcome=_NOTHING, speaks=is_first)


def require_ready_between_nodes(
    store: Store, config: LaunchConfig, *, nnodes: int, node_rank: int, backend: str
) -> None:
    """Check the connections between the nodes of a launch, before any node starts its ranks.

    The store is that of the launchers, with a prefix that nothing else uses. The backend is not "auto".

    Raises:
        PreflightError: A check found something that will break the job; the same error on every
            node.
    """
    from ddpsafe.doctor._examine import examine_nodes
    from ddpsafe.doctor._findings import require_healthy

    report = examine_nodes(
        store,
        config,
        nnodes=nnodes,
        node_rank=node_rank,
        endpoint=str(config.rendezvous.parsed()),
        backend=backend,
        timeout=config.timeouts.start,
    )
    speaks = node_rank == 0
    require_healthy(report, who="the nodes of this job are", outcome=_NOTHING, speaks=speaks)
