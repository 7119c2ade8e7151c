"""Which interface a rank uses, and whether the nodes reach each other."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._errors import (
    ConfigError,
    DDPSafeError,
    Explanation,
    PreflightError,
    from_plain,
    to_plain,
)
from ddpsafe._host import find_address_towards, find_interface_of, interface_variables, list_names
from ddpsafe._logging import get_logger
from ddpsafe._worker import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpsafe._config import LaunchConfig
    from ddpsafe._worker.join.store_endpoint import StoreEndpoint
    from ddpsafe._worker.store_sync import Control, Keys
    from ddpsafe._world import World


logger = get_logger(__name__)

_RESOLVE: Final = timedelta(seconds=5)


def prefer(variables: Mapping[str, str]) -> None:
    """Set those variables that the user has not set, for as long as the process group lives."""
    environment.borrow({name: text for name, text in variables.items() if name not in os.environ})


def choose(asked: str | None, endpoint: StoreEndpoint, *, deadline: Deadline) -> None:
    """Keep gloo, NCCL and TensorPipe on one interface, unless the user has set their variables.

    Args:
        asked: ``Rendezvous.interface``: a name, ``"auto"``, or None to leave it to the libraries.
        endpoint: Where rank 0 is; its name has resolved before.
        deadline: When to stop waiting for a name server nevertheless.

    Raises:
        ConfigError: This host does not have the interface that was asked for.
    """
    if asked is None:
        return
    name = _find_way(endpoint, deadline) if asked == "auto" else _require(asked)
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
    lookup = BoundedCall(
        lambda: socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM),
        name="ddpsafe-resolve",
    )
    addresses: list[str] = []
    if lookup.wait(Deadline.after(_RESOLVE).earlier(deadline).remaining_s()):
        with contextlib.suppress(OSError):  # it no longer resolves: the default route decides
            addresses = [str(entry[4][0]) for entry in lookup.result()]
    own = find_address_towards(addresses)
    interface = None if own is None else find_interface_of(own)
    return None if interface is None else interface.name


_KEY: Final = "preflight"

_EXAMINATION: Final = timedelta(seconds=45)
"""How long the examination may take once all nodes have joined: connecting, comparing, and slack."""

_examined: set[StoreEndpoint] = set()


def require_connected_nodes(
    config: LaunchConfig,
    world: World,
    endpoint: StoreEndpoint,
    board: Keys,
    control: Control,
    *,
    backend: str,
    deadline: Deadline,
) -> None:
    """Examine the connections between the nodes, through the store that their ranks have joined.

    The first rank of each node does it, and sends the result to the other ranks of its node. For a
    second group of the same process, nothing is examined again.

    Args:
        config: The configuration.
        world: This rank's place.
        endpoint: Where the store is.
        board: Keys of the store that nothing else uses.
        control: This rank's control line to the others.
        backend: The backend of the group that will be made.
        deadline: How long to wait for nodes that have not joined.

    Raises:
        PreflightError: Some connections will break the job; the error of each node's first rank has
            the report.
    """
    if endpoint in _examined:
        return
    try:
        if world.local_rank == 0:
            examine = partial(
                _examine, config, world, endpoint, board, backend=backend, deadline=deadline
            )
            _lead(world, control, examine)
        else:
            _follow(world, control, deadline)
    finally:
        if world.rank != 0:
            with _suppress_lost_store():
                control.acknowledge(_KEY)
    _examined.add(endpoint)


def _lead(world: World, control: Control, examine: Callable[[], None]) -> None:
    """Examine, and send the result to the other ranks of this node, whatever it is."""
    try:
        examine()
    except BaseException as error:
        what = f"{type(error).__name__}: {error}"
        sent = error if isinstance(error, DDPSafeError) else PreflightError(what)
        _send_result(world, control, sent)
        if world.rank == 0:  # the store may end with this rank
            control.stay(_KEY)
        raise
    _send_result(world, control, None)


def _examine(
    config: LaunchConfig,
    world: World,
    endpoint: StoreEndpoint,
    board: Keys,
    *,
    backend: str,
    deadline: Deadline,
) -> None:
    from ddpsafe.doctor._examine import examine_nodes
    from ddpsafe.doctor._findings import require_healthy

    # Only one rank may examine for this node.
    claim = secrets.token_hex(16)
    if board.compare_set(f"claims/{world.node_rank}", "", claim) != claim.encode():
        what = f"{world} is not the only rank that considers itself the first of node {world.node_rank}."
        cause = "the launcher sets no node ranks, and does not fill one node after the other."
        fix = "set NODE_RANK, LOCAL_RANK and LOCAL_WORLD_SIZE, or start with mpirun --map-by slot."
        raise PreflightError(Explanation(what, cause=cause, fix=fix))
    report = examine_nodes(
        board,
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


def _own_key(world: World) -> str:
    return f"{_KEY}/{world.node_rank}"


def _send_result(world: World, control: Control, error: DDPSafeError | None) -> None:
    result = None if error is None else to_plain(error)
    with _suppress_lost_store():
        control.put(_own_key(world), json.dumps(result).encode())


def _suppress_lost_store() -> contextlib.suppress:
    """Suppress torch's error for a store that has ended with rank 0."""
    return contextlib.suppress(RuntimeError)


def _follow(world: World, control: Control, deadline: Deadline) -> None:
    """Wait for the result of this node's first rank; ranks that never join are named by the group."""
    waiting = Deadline.after(timedelta(seconds=deadline.remaining_s()) + _EXAMINATION)
    result: bytes | None = None
    with _suppress_lost_store():
        result = control.take(_own_key(world), deadline=waiting)
    if result is None:
        what = "the first rank of this node did not report the result of the node check in time."
        found = Explanation(what, cause="it hangs, or has died.")
    elif (plain := json.loads(result)) is not None:
        found = from_plain(plain).explanation
    else:
        return
    raise PreflightError(
        Explanation(
            f"{world}: {found.what}",
            cause=found.cause or "the check of the nodes failed on this node.",
            fix=found.fix or "see the error of that rank, which has the report.",
        )
    )
