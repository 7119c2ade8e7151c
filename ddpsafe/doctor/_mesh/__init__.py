"""The check between nodes: who is there, who reaches whom, and what differs.

`examine` meets at the endpoint, `examine_at_store` at a store of torch that exists already. Node
rank 0 coordinates (`coordinator`), every other node takes part (`participant`). What they tell each
other travels over a `Transport` (`transport`): a small server on node rank 0 (`server`, `reach_node_zero`), or
the store. Node rank 0 collects what was seen and sends it to all, and every node makes its findings from
that (`findings`), so they are the same everywhere.
"""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._config.endpoint import split_endpoint
from ddpsafe.doctor._mesh.all_reduce import LONGEST
from ddpsafe.doctor._mesh.coordinator import (
    MESH,
    Coordinator,
    EndpointServer,
    OtherCoordinatorError,
    owner_of,
)
from ddpsafe.doctor._mesh.findings.all import make_findings, make_matrix
from ddpsafe.doctor._mesh.findings.attendance import (
    cannot_serve,
    coordinator_garbled,
    coordinator_lost,
    describe_obstacle,
    describe_trouble,
)
from ddpsafe.doctor._mesh.findings.fixes import find_filter_chains
from ddpsafe.doctor._mesh.job import Job
from ddpsafe.doctor._mesh.local_node import LocalNode
from ddpsafe.doctor._mesh.participant import participate, wait_for_results
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
    from collections.abc import Callable, Coroutine, Mapping

    from ddpsafe.doctor._findings import Finding, Matrix
    from ddpsafe.doctor._mesh.protocol import Greeting, Node
    from ddpsafe.doctor._mesh.transport import Store
    from ddpsafe.doctor._subject import VariableSource

    Found = tuple[list[Finding], Matrix]

__all__ = ["examine", "examine_at_store"]


def examine(  # noqa: PLR0913 - the facts of one job, all by name
    *,
    nnodes: int,
    node_rank: int,
    endpoint: str,
    interface: str | None,
    backend: str,
    timeout: timedelta,
    local: Mapping[str, object],
    on_progress: Callable[[str], None],
    collective: Literal["run", "skip"] = "run",
    secret: str = "",
    places: Mapping[str, VariableSource] | None = None,
) -> tuple[list[Finding], Matrix]:
    """Examine the connections between the nodes of a job; every node calls it.

    Args:
        nnodes: How many nodes there are.
        node_rank: Which of them this is, from 0; node rank 0 runs where the endpoint leads.
        endpoint: host:port that every node can reach.
        interface: ``Rendezvous.interface``: a name, ``"auto"``, or None for the library's choice.
        backend: Of the job, "auto" decided; what contains ``nccl`` follows NCCL's rules, all else
            gloo's.
        timeout: How long to wait for nodes that have not come; what follows takes seconds.
        local: This host's fingerprint, in what JSON takes; compared with the others'.
        on_progress: Takes a line now and then on what is being waited for.
        collective: Whether an all-reduce closes it, where torch is installed and nothing failed.
        secret: What only the nodes of the job know: who does not know it is not let in, and what
            nodes say is signed with it. Without one, whoever reaches the endpoint may speak.
        places: Where variables of the ranks were set; those that are missing, in the shell.

    Returns:
        What was found, the same on every node that reached the endpoint, and who reaches whom.
    """
    host, port = split_endpoint(endpoint)
    job = Job(
        nnodes=nnodes,
        node_rank=node_rank,
        host=host,
        port=int(port),
        interface=interface,
        backend=backend,
        timeout=timeout,
        facts=_as_json(local),
        on_progress=on_progress,
        collective=collective,
        secret=secret,
        places=places or {},
    )
    return _complete(_serve(job) if job.node_rank == 0 else _join(job))


def examine_at_store(  # noqa: PLR0913 - as `examine`
    store: Store,
    *,
    nnodes: int,
    node_rank: int,
    endpoint: str,
    interface: str | None,
    backend: str,
    timeout: timedelta,
    local: Mapping[str, object],
    on_progress: Callable[[str], None],
    places: Mapping[str, VariableSource] | None = None,
) -> tuple[list[Finding], Matrix]:
    """Examine as `examine` does, in nodes that are connected to one store of torch already.

    One rank of each node calls it. There is no all-reduce at the end: the job's own comes next.

    Args:
        store: With keys that nothing else uses and no earlier examination has used.
        nnodes: As in `examine`.
        node_rank: As in `examine`.
        endpoint: Where the store is: what leads there is the way to the others.
        interface: As in `examine`.
        backend: As in `examine`.
        timeout: As in `examine`.
        local: As in `examine`.
        on_progress: As in `examine`.
        places: As in `examine`.

    Returns:
        As `examine` does.
    """
    host, port = split_endpoint(endpoint)
    job = Job(
        nnodes=nnodes,
        node_rank=node_rank,
        host=host,
        port=int(port),
        interface=interface,
        backend=backend,
        timeout=timeout,
        facts=_as_json(local),
        on_progress=on_progress,
        collective="skip",
        at_store=True,
        places=places or {},
    )
    return _complete(_meet_at_store(job, store))


_RESOLVE: Final = timedelta(seconds=2)
_COME_BACK: Final = timedelta(seconds=4)


async def _meet_at_store(job: Job, store: Store) -> Found:
    """Examine over a store of torch that all nodes are connected to."""
    transport = StoreTransport(store, node_rank=job.node_rank, nnodes=job.nnodes)
    local_node = LocalNode(job, job.env())
    addresses = await find_addresses(job.host, job.port, deadline=Deadline.after(_RESOLVE))
    try:
        own = await local_node.introduce(addresses)
        if job.node_rank == 0:
            return await Coordinator(job, transport, local_node).coordinate(own)
        return await participate(job, transport, local_node, own)
    except TransportLostError as exc:
        return _without_coordinator(exc, job, job.host)
    finally:
        await local_node.close()


async def _serve(job: Job) -> Found:
    at_endpoint, local_node = EndpointServer(job), LocalNode(job, job.env())
    try:
        await at_endpoint.open()
    except OSError as exc:
        return [cannot_serve(exc, port=job.port, owner=owner_of(job.port))], job.empty_matrix()
    coordinator = Coordinator(job, at_endpoint.server, local_node, at_endpoint=at_endpoint)
    try:
        addresses = await find_addresses(job.host, job.port, deadline=Deadline.after(_RESOLVE))
        return await coordinator.coordinate(await local_node.introduce(addresses))
    except OtherCoordinatorError:
        pass
    finally:
        await local_node.close()
        await at_endpoint.close()
    return await _join(job)


async def _join(job: Job) -> Found:
    deadline, greeting = Deadline.after(job.timeout), job.greeting()
    local_node = LocalNode(job, job.env())
    own: Node | None = None
    lost: Found | None = None
    try:
        while True:
            reached = await reach_coordinator(
                job.host,
                job.port,
                greeting,
                secret=job.secret,
                deadline=deadline,
                on_trouble=lambda found: job.on_progress(
                    describe_trouble(found, host=job.host, port=job.port)
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
                # Ended before anything was examined, perhaps to start it again: come back.
                deadline = Deadline.after(_COME_BACK).earlier(deadline)
            finally:
                await reached.close()
    finally:
        await local_node.close()


async def _wait_refused(refused: Refused, job: Job, greeting: Greeting) -> Found:
    """Wait for the results of those who were let in: all nodes end with the same."""
    job.on_progress("refused by node rank 0: waiting for the results of the others")
    found = [await _describe(refused.obstacle, job)]
    try:
        results = await wait_for_results(refused.client, job.timeout + MESH + LONGEST)
    except TransportLostError:
        return found, job.empty_matrix()
    finally:
        await refused.client.close()
    known = {(each.greeting.hostname, each.greeting.pid) for each in results.rejected}
    if (greeting.hostname, greeting.pid) in known:
        found = []  # it is among what was found
    return [*found, *make_findings(results)], make_matrix(results)


async def _describe(obstacle: Obstacle, job: Job) -> Finding:
    """Return the finding of what keeps this node from node rank 0: a filter of its own may do so."""
    closed = obstacle.trouble in ("dropped", "refused", "no-route")
    return describe_obstacle(
        obstacle,
        host=job.host,
        port=job.port,
        node_rank=job.node_rank,
        nnodes=job.nnodes,
        chains=await asyncio.to_thread(find_filter_chains) if closed else None,
    )


def _without_coordinator(exc: TransportLostError, job: Job, hostname: str) -> Found:
    finding = (
        coordinator_garbled(hostname, str(exc))
        if isinstance(exc, TransportGarbledError)
        else coordinator_lost(hostname, str(exc), at_store=job.at_store)
    )
    return [finding], job.empty_matrix()


def _as_json(local: Mapping[str, object]) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(json.dumps(dict(local), default=str))
    return table


def _complete(examination: Coroutine[None, None, Found]) -> Found:
    """Run it to its end, also where the caller, a notebook for one, has a loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(examination)
    call = BoundedCall(lambda: asyncio.run(examination), name="ddpsafe-mesh")
    call.wait(float("inf"))
    return call.result()
