"""The check between nodes: which are present, which reaches which, and what differs.

`examine` connects the nodes at the endpoint, `examine_at_store` through an existing torch store. Node
rank 0 coordinates, every other node takes part (`examination`). They exchange messages over a `Transport`:
the job's channel (`channel_transport`, `reach_node_zero`), or a store that their ranks share already
(`transport`).
Node rank 0 collects the reports of all nodes and sends them to every node. Each computes its findings from
them (`findings`), so the findings are the same everywhere.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._host import listener_text
from ddpsafe.doctor._mesh.all_reduce import LONGEST
from ddpsafe.doctor._mesh.examination import (
    MESH,
    Coordinator,
    EndpointServer,
    OtherCoordinatorError,
    participate,
    wait_for_results,
)
from ddpsafe.doctor._mesh.findings.assemble import make_findings, make_matrix
from ddpsafe.doctor._mesh.findings.attendance import (
    cannot_serve,
    coordinator_lost,
    describe_obstacle,
    describe_trouble,
    garbled,
)
from ddpsafe.doctor._mesh.firewall import find_filter_chains
from ddpsafe.doctor._mesh.job import Job
from ddpsafe.doctor._mesh.local_node import LocalNode
from ddpsafe.doctor._mesh.reach_node_zero import (
    Obstacle,
    Refused,
    find_addresses,
    reach_coordinator,
)
from ddpsafe.doctor._mesh.transport import (
    StoreTransport,
    TransportClosedError,
    TransportGarbledError,
    TransportLostError,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from ddpsafe._job.store_keys import Keys
    from ddpsafe.doctor._findings import Finding, Matrix
    from ddpsafe.doctor._mesh.protocol import Greeting, Node

    Examined = tuple[list[Finding], Matrix]

__all__ = ["Job", "examine", "examine_at_store"]


def examine(job: Job) -> Examined:
    """Examine the connections between the nodes of a job; every node calls it.

    Returns the findings, the same on every node that reached the endpoint, and the matrix.
    """
    return _run(_serve(job) if job.node_rank == 0 else _join(job))


def examine_at_store(job: Job, store: Keys) -> Examined:
    """Examine like `examine`, on nodes that already share a torch store.

    One rank of each node calls it. It does not end with an all-reduce: the job's own comes next. The endpoint
    is where the store listens; the route to it is taken as the route to the others. The store has a key
    prefix that nothing else uses and no earlier examination used.
    """
    return _run(_examine_over_store(replace(job, collective="skip", at_store=True), store))


_REJOIN_LIMIT: Final = timedelta(seconds=4)


async def _examine_over_store(job: Job, store: Keys) -> Examined:
    """Examine over a torch store that all nodes share."""
    transport = StoreTransport(store, node_rank=job.node_rank, nnodes=job.nnodes)
    local_node = LocalNode(job)
    try:
        own = await local_node.introduce(await find_addresses(job.host, job.port))
        if job.node_rank == 0:
            return await Coordinator(job, transport, local_node).coordinate(own)
        return await participate(job, transport, local_node, own)
    except TransportLostError as exc:
        return _without_coordinator(exc, job, job.host)
    finally:
        await local_node.close()


async def _serve(job: Job) -> Examined:
    at_endpoint, local_node = EndpointServer(job), LocalNode(job)
    try:
        await at_endpoint.open()
    except OSError as exc:
        owner = listener_text(job.port)  # empty if this user may not see it
        owner = owner and f"; {owner} on {socket.gethostname()} uses it"
        return [cannot_serve(exc, port=job.port, owner=owner)], job.empty_matrix()
    coordinator = Coordinator(job, at_endpoint.server, local_node, at_endpoint=at_endpoint)
    try:
        addresses = await find_addresses(job.host, job.port)
        return await coordinator.coordinate(await local_node.introduce(addresses))
    except OtherCoordinatorError:
        pass  # it takes part there instead, so that all nodes end with the same findings
    finally:
        await local_node.close()
        await at_endpoint.close()
    return await _join(job)


async def _join(job: Job) -> Examined:
    deadline, greeting = Deadline.after(job.timeout), job.greeting()
    local_node = LocalNode(job)
    own: Node | None = None
    lost: Examined | None = None
    try:
        while True:
            reached = await reach_coordinator(
                job.host,
                job.port,
                greeting,
                secret=job.secret,
                deadline=deadline,
                on_trouble=lambda obstacle: job.on_progress(
                    describe_trouble(obstacle, host=job.host, port=job.port)
                ),
            )
            if isinstance(reached, Obstacle):
                return lost or ([await _describe(reached, job)], job.empty_matrix())
            if isinstance(reached, Refused):
                return await _wait_refused(reached, job, greeting)
            try:
                own = own or await local_node.introduce([reached.coordinator_address])
                return await participate(job, reached, local_node, own)
            except TransportLostError as exc:
                lost = _without_coordinator(exc, job, reached.coordinator_hostname)
                if not isinstance(exc, TransportClosedError):
                    return lost
                # It exited before anything was examined, perhaps to be restarted: join again.
                deadline = Deadline.after(_REJOIN_LIMIT).earlier(deadline)
            finally:
                await reached.close()
    finally:
        await local_node.close()


async def _wait_refused(refused: Refused, job: Job, greeting: Greeting) -> Examined:
    """Wait for the results of the accepted nodes, so that all nodes end with the same findings."""
    job.on_progress("refused by node rank 0: waiting for the results of the others")
    own = [await _describe(refused.obstacle, job)]
    try:
        results = await wait_for_results(refused.client, job.timeout + MESH + LONGEST)
    except TransportLostError:
        return own, job.empty_matrix()
    finally:
        await refused.client.close()
    known = {(node.greeting.hostname, node.greeting.pid) for node in results.rejected}
    if (greeting.hostname, greeting.pid) in known:
        own = []  # the results have this finding
    return [*own, *make_findings(results)], make_matrix(results)


async def _describe(obstacle: Obstacle, job: Job) -> Finding:
    """Return the finding on what keeps this node from node rank 0, perhaps its own packet filter."""
    closed = obstacle.trouble in ("dropped", "refused", "no-route")
    return describe_obstacle(
        obstacle,
        host=job.host,
        port=job.port,
        node_rank=job.node_rank,
        nnodes=job.nnodes,
        chains=await asyncio.to_thread(find_filter_chains) if closed else None,
    )


def _without_coordinator(exc: TransportLostError, job: Job, hostname: str) -> Examined:
    finding = (
        garbled(f"{hostname} (node rank 0)", str(exc), (hostname,), node_rank=0)
        if isinstance(exc, TransportGarbledError)
        else coordinator_lost(hostname, str(exc), at_store=job.at_store)
    )
    return [finding], job.empty_matrix()


def _run(examination: Coroutine[None, None, Examined]) -> Examined:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(examination)
    # A notebook runs an event loop already, and a thread can have only one.
    call = BoundedCall(lambda: asyncio.run(examination), name="ddpsafe-mesh")
    call.wait(float("inf"))
    return call.result()
