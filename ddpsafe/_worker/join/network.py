"""Which interface a rank uses, and whether the nodes reach each other."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._errors import ConfigError, Explanation, PreflightError
from ddpsafe._host import (
    find_address_towards,
    find_interface_of,
    interface_variables,
    list_names,
    look_up,
)
from ddpsafe._job.agreement import RankGroup
from ddpsafe._logging import get_logger
from ddpsafe._worker import environment
from ddpsafe._worker.rank import this_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe._config import LaunchConfig
    from ddpsafe._job.agreement import Absence
    from ddpsafe._job.control import Control
    from ddpsafe._job.store_keys import Keys
    from ddpsafe._worker.join.store_endpoint import StoreEndpoint
    from ddpsafe._world import World


logger = get_logger(__name__)

_RESOLVE: Final = timedelta(seconds=5)


def prefer(variables: Mapping[str, str]) -> None:
    """Set those variables that the user has not set, for as long as the process group lives."""
    environment.borrow({name: text for name, text in variables.items() if name not in os.environ})


def choose(interface: str | None, endpoint: StoreEndpoint, *, deadline: Deadline) -> None:
    """Keep gloo, NCCL and TensorPipe on one interface, unless the user has set their variables.

    Args:
        interface: ``Rendezvous.interface``: a name, ``"auto"``, or None to leave it to the libraries.
        endpoint: Where rank 0 is; its name has resolved before.
        deadline: When to stop waiting for a name server nevertheless.

    Raises:
        ConfigError: This host does not have the interface that was asked for.
    """
    if interface is None:
        return
    name = _find_way(endpoint, deadline) if interface == "auto" else _require(interface)
    if name is None:
        logger.warning("no interface leads to %s: gloo and NCCL choose one themselves", endpoint)
        return
    prefer(interface_variables(name))


def _require(name: str) -> str:
    existing = list_names()
    if name in existing:
        return name
    what = f"rendezvous.interface={name!r}: {socket.gethostname()} has no such interface."
    cause = "interface names differ from host to host."
    fix = f'set interface="auto", or one of {", ".join(existing)}.'
    raise ConfigError(Explanation(what, cause=cause, fix=fix))


def _find_way(endpoint: StoreEndpoint, deadline: Deadline) -> str | None:
    lookup = BoundedCall(lambda: look_up(endpoint.host, endpoint.port), name="ddpsafe-resolve")
    addresses: list[str] = []
    # A resolver whose server does not answer may hang for ever.
    if lookup.wait(Deadline.after(_RESOLVE).earlier(deadline).remaining_s()):
        with contextlib.suppress(OSError):  # it no longer resolves: the default route decides
            addresses = lookup.result()
    own = find_address_towards(addresses)
    interface = None if own is None else find_interface_of(own)
    return None if interface is None else interface.name


_KEY: Final = "preflight"

_EXAMINATION: Final = timedelta(seconds=45)
"""How long the examination may take once all nodes have joined: connecting, comparing, and slack."""


def require_connected_nodes(
    config: LaunchConfig,
    world: World,
    endpoint: StoreEndpoint,
    keys: Keys,
    control: Control,
    *,
    backend: str,
    deadline: Deadline,
) -> None:
    """Examine the connections between the nodes, through the store that their ranks have joined.

    The first rank of each node does it, and sends the result to the other ranks of its node. For a
    second group of the same process, nothing is examined again.

    Nothing else uses `keys`. The deadline is for nodes that have not joined.

    Raises:
        PreflightError: Some connections will break the job; the error of each node's first rank has
            the report.
    """
    if endpoint in this_rank.examined:
        return
    name = f"{_KEY}/{world.node_rank}"
    try:
        group = RankGroup(control, name, world, world.ranks_of_node, error_type=PreflightError)
        exchange = group.begin("the check of the nodes")
        if group.leads:
            with exchange.leading():
                _examine(config, world, endpoint, keys, backend=backend, deadline=deadline)
        else:
            # Ranks that never join are named by the group that is made later.
            limit = timedelta(seconds=deadline.remaining_s()) + _EXAMINATION
            exchange.receive(Deadline.after(limit), partial(_not_reported, world))
    except BaseException:
        if world.rank == 0:  # the store may end with this rank, and other nodes still read it
            control.stay(_KEY)
        raise
    finally:
        if world.rank != 0:
            with contextlib.suppress(RuntimeError):  # the store has ended with rank 0
                control.acknowledge(_KEY)
    this_rank.examined.add(endpoint)


def _not_reported(world: World, absence: Absence) -> PreflightError:
    first = f"rank {absence.ranks[0]}, the first one of this node,"
    return PreflightError(
        Explanation(
            f"{world}: {first} did not report the result of the node check in time.",
            cause=absence.lost or "it hangs, or has died.",
            fix="see the error or the log of that rank.",
        )
    )


def _examine(
    config: LaunchConfig,
    world: World,
    endpoint: StoreEndpoint,
    keys: Keys,
    *,
    backend: str,
    deadline: Deadline,
) -> None:
    from ddpsafe.doctor._examine import examine_nodes
    from ddpsafe.doctor._findings import require_healthy

    # Only one rank may examine for this node.
    claim = secrets.token_hex(16)
    if keys.compare_set(f"claims/{world.node_rank}", "", claim) != claim.encode():
        what = f"{world} is not the only rank that considers itself the first of node {world.node_rank}."
        cause = "the launcher sets no node ranks, and does not fill one node after the other."
        fix = "set NODE_RANK, LOCAL_RANK and LOCAL_WORLD_SIZE, or start with mpirun --map-by slot."
        raise PreflightError(Explanation(what, cause=cause, fix=fix))
    report = examine_nodes(
        keys,
        config,
        nnodes=world.nnodes,
        node_rank=world.node_rank,
        endpoint=str(endpoint),
        backend=backend,
        timeout=timedelta(seconds=deadline.remaining_s()),
    )
    require_healthy(
        report,
        who="the nodes of this job are",
        outcome="no process group was made",
        speaks=world.node_rank == 0,
    )
