"""The nodes of a job examine each other when their ranks have met, before the group is made."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from ddpsafe._errors import PreflightError, explain

if TYPE_CHECKING:
    from torch.distributed import Store

    from ddpsafe._clock import Deadline
    from ddpsafe._config import LaunchConfig
    from ddpsafe._worker.control import Control
    from ddpsafe._worker.endpoint import Endpoint
    from ddpsafe._world import World

_KEY: Final = "preflight"


def require_connected_nodes(
    config: LaunchConfig,
    world: World,
    endpoint: Endpoint,
    store: Store,
    control: Control,
    *,
    backend: str,
    deadline: Deadline,
) -> None:
    """Examine the connections between the nodes, over the store at which their ranks have met.

    The first rank of each node does it, and tells the others of its node how it ended.

    Args:
        config: What was asked for.
        world: This rank's place.
        endpoint: Where the store is.
        store: The store; nothing else uses its keys yet.
        control: This rank's line to the others.
        backend: The backend of the group to come.
        deadline: How long to wait for nodes that have not come.

    Raises:
        PreflightError: Some connections will break the job.
    """
    try:
        if world.local_rank == 0:
            _examine(config, world, endpoint, store, control, backend=backend, deadline=deadline)
        else:
            _learn(world, control, deadline)
    finally:
        if world.rank != 0:
            control.acknowledge(_KEY)


def _examine(
    config: LaunchConfig,
    world: World,
    endpoint: Endpoint,
    store: Store,
    control: Control,
    *,
    backend: str,
    deadline: Deadline,
) -> None:
    from torch.distributed import PrefixStore

    from ddpsafe.doctor._runner import examine_nodes
    from ddpsafe.doctor._verdict import require_healthy

    report = examine_nodes(
        PrefixStore(_KEY, store),
        config,
        nnodes=world.nnodes,
        node_rank=world.node_rank,
        endpoint=str(endpoint),
        backend=backend,
        timeout=timedelta(seconds=deadline.remaining_s()),
    )
    try:
        require_healthy(report, outcome="no process group was made", speaks=world.node_rank == 0)
    except PreflightError as error:
        control.put(_own_key(world), str(error).partition("\n")[0].encode())
        if world.rank == 0:  # the store may go with it
            control.stay(_KEY)
        raise
    control.put(_own_key(world), b"")


def _own_key(world: World) -> str:
    return f"{_KEY}/{world.node_rank}"


def _learn(world: World, control: Control, deadline: Deadline) -> None:
    found = control.take(_own_key(world), deadline=deadline)
    if found:  # where nothing was said in time, the group names who has not come
        what = f"{world}: {found.decode()}"
        cause = "the first rank of this node has examined the nodes, and raises the findings."
        raise PreflightError(explain(what, cause=cause, fix="see the error of that rank."))
