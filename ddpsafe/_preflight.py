"""The preflight: what the doctor would say, before the user's function runs in any rank.

On a host that is about to start ranks, in a rank that another launcher has started, and between the
launchers of several nodes.
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
    """Examine this host before a launch starts its ranks.

    Args:
        config: What was asked for; its `preflight` says how much is looked at.
        nproc: Ranks that will be started.
        backend: Backend they will use, "auto" decided.

    Raises:
        PreflightError: Something was found that will break the launch.
    """
    require_room(nproc)  # before the checks, which open files too
    if config.preflight == "off":
        return
    from ddpsafe import doctor
    from ddpsafe.doctor._findings import require_healthy

    asked = LaunchConfig.resolve(config, nproc_per_node=nproc, backend=backend)
    checks = "launch" if config.preflight == "local" else "all"
    require_healthy(doctor.run(asked, checks=checks, mesh=False), outcome=_NOTHING)


def require_ready_to_join(config: LaunchConfig, world: World) -> None:
    """Examine this host in a rank that another launcher has started.

    Every rank does the cheap checks, so that all of them fail; with ``preflight="full"`` the first
    rank of each node does those that take longer. The way to the other nodes is examined when the
    ranks have met.

    Args:
        config: What was asked for.
        world: This rank's place.

    Raises:
        ConfigError: The launcher does not say where the ranks meet.
        PreflightError: Something was found that will break the job.
    """
    if config.preflight == "off":
        return
    from ddpsafe import doctor
    from ddpsafe._worker.join.launcher_address import find_endpoint
    from ddpsafe._worker.join.store import has_met
    from ddpsafe.doctor._findings import require_healthy

    asked = LaunchConfig.resolve(config, nproc_per_node=world.local_world_size)
    is_first = world.local_rank == 0
    is_full = config.preflight == "full" and is_first
    if is_full and world.nnodes > 1:
        endpoint = find_endpoint(world, os.environ)
        is_full = not has_met(endpoint)  # a second launch: its own store is at that port
        asked = LaunchConfig.resolve(
            asked,
            nnodes=world.nnodes,
            node_rank=world.node_rank,
            rendezvous={"endpoint": str(endpoint)},
        )
    report = doctor.run(asked, checks="all" if is_full else "launch", mesh=False)
    require_healthy(report, outcome=_NOTHING, speaks=is_first)


def require_ready_between_nodes(
    store: Store, config: LaunchConfig, *, nnodes: int, node_rank: int, backend: str
) -> None:
    """Examine the connections between the nodes of a launch, before any of them starts its ranks.

    Args:
        store: Where their launchers have met, with keys that nothing else uses.
        config: What was asked for.
        nnodes: How many nodes there are.
        node_rank: Which of them this is.
        backend: Backend they will use, "auto" decided.

    Raises:
        PreflightError: Something was found that will break the job; the same on every node.
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
        timeout=config.timeouts.rendezvous,
    )
    speaks = node_rank == 0
    require_healthy(report, who="the nodes of this job are", outcome=_NOTHING, speaks=speaks)
