"""One examination, both ends.

Node rank 0 lists the nodes, collects their reports, and sends the results to all of them (`Coordinator`).
Every other node registers, dials, reports, and computes the findings (`participate`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from ddpsafe._clock import Deadline
from ddpsafe._job.channel import from_json
from ddpsafe.doctor._mesh import all_reduce
from ddpsafe.doctor._mesh.channel_transport import Server
from ddpsafe.doctor._mesh.findings.assemble import (
    make_findings,
    make_findings_before_all_reduce,
    make_matrix,
)
from ddpsafe.doctor._mesh.findings.attendance import count_refused
from ddpsafe.doctor._mesh.findings.observations import Peer, Results, pack, unpack
from ddpsafe.doctor._mesh.job import find_node_names
from ddpsafe.doctor._mesh.pairs import EVERY_PAIR
from ddpsafe.doctor._mesh.probe import ANSWER_S, CONNECT_S
from ddpsafe.doctor._mesh.protocol import Attendance, Node, NodeReport, Roster, write
from ddpsafe.doctor._mesh.reach_node_zero import Obstacle, find_answer
from ddpsafe.doctor._mesh.transport import (
    RESULTS,
    TransportClosedError,
    TransportGarbledError,
    TransportLostError,
    gather,
    wait_for,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ddpsafe.doctor._findings import Finding, Matrix
    from ddpsafe.doctor._mesh.job import Job
    from ddpsafe.doctor._mesh.local_node import LocalNode
    from ddpsafe.doctor._mesh.protocol import Answer
    from ddpsafe.doctor._mesh.transport import Json, Transport


_ENDPOINT_CHECK_LIMIT: Final = timedelta(seconds=4)
_ENDPOINT_CHECK_PAUSE_S: Final = 0.5


class EndpointServer:
    """Node rank 0's server at the endpoint, and whether the endpoint leads to it.

    It does not listen at first.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._greeting = job.greeting()
        self.server = Server(self._greeting, secret=job.secret)
        self._leads_to: Answer | Obstacle | None = None
        self._checking: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen, and start to check whether the endpoint leads here.

        Raises:
            OSError: The port is not available.
        """
        await self.server.open(self._job.port)
        self._checking = asyncio.create_task(self._check_endpoint())

    def leads_to(self) -> tuple[Obstacle | None, str]:
        """Return what the endpoint leads to if not to here: an obstacle, or another node rank 0."""
        answer = self._leads_to
        if answer is None:  # the name server does not answer, which DS-MESH-046 reports
            return None, ""
        if isinstance(answer, Obstacle):
            return answer, ""
        return None, answer.greeting.hostname if answer.nonce != self.server.nonce else ""

    async def _check_endpoint(self) -> None:
        """Check until a doctor answers."""
        job = self._job
        while True:
            deadline = Deadline.after(_ENDPOINT_CHECK_LIMIT)
            self._leads_to = await find_answer(
                job.host, job.port, self._greeting, secret=job.secret, deadline=deadline
            )
            if not isinstance(self._leads_to, Obstacle):
                return
            # The host that the endpoint names may start late.
            await asyncio.sleep(_ENDPOINT_CHECK_PAUSE_S)

    async def close(self) -> None:
        """Wait until every node has read the results, then stop listening."""
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait({self._checking})  # it closes its own connection
        await self.server.close()


T = TypeVar("T")

MESH: Final = timedelta(seconds=CONNECT_S + ANSWER_S + 8.0)
"""How long nodes may take to report on their connections. This is for slow nodes: the loss of a node
is noticed within 6 s."""

_TICK_S: Final = 0.5
_REJOIN_GRACE_S: Final = 2.0
_MOST_NAMED: Final = 8


class OtherCoordinatorError(Exception):
    """Another host is node rank 0 too, and the endpoint leads the nodes there."""


class Coordinator:
    """Node rank 0 of one examination.

    It has no server at the endpoint if the nodes use a store.
    """

    def __init__(
        self,
        job: Job,
        transport: Transport,
        local_node: LocalNode,
        *,
        at_endpoint: EndpointServer | None = None,
    ) -> None:
        self._job = job
        self._transport = transport
        self._local_node = local_node
        self._at_endpoint = at_endpoint
        self._names = find_node_names(job.nnodes)
        self._missing: Collection[int] = ()
        self._garbled: dict[int, Literal["hello", "mesh", "reduced"]] = {}

    async def coordinate(self, own: Node) -> tuple[list[Finding], Matrix]:
        """Run the examination, publish the results, and return the findings.

        Raises:
            OtherCoordinatorError: The endpoint leads to another node rank 0, and no node joined here.
        """
        nodes, waited_s = await self._gather_nodes(own)
        if len(nodes) == 1 and self._at_endpoint is not None and self._at_endpoint.leads_to()[1]:
            raise OtherCoordinatorError
        roster = Roster(
            nnodes=self._job.nnodes,
            contacts=tuple(node.contact() for node in nodes.values()),
            seed=time.time_ns(),
            clock_s=time.time(),
        )
        self._job.on_progress(f"{len(nodes)} nodes: trying every connection")
        await self._transport.put("roster", write(roster))
        results = await self._collect(nodes, roster, waited_s)
        findings = make_findings_before_all_reduce(results)
        reduced = await all_reduce.coordinate(
            self._job,
            self._transport,
            results,
            found_failures=any(finding.severity == "failed" for finding in findings),
        )
        results = replace(results, all_reduce=reduced)
        # A token proves a node's identity, and refused nodes receive the results too.
        without_tokens = {rank: replace(node, token="") for rank, node in results.nodes.items()}
        await self._transport.put(RESULTS, pack(replace(results, nodes=without_tokens)))
        return make_findings(results), make_matrix(results)

    async def _gather_nodes(self, own: Node) -> tuple[dict[int, Node], float]:
        deadline = Deadline.after(self._job.timeout)
        others = range(1, self._job.nnodes)
        reporting = asyncio.ensure_future(self._report_progress(deadline))
        gathering = asyncio.ensure_future(
            gather(
                self._transport, "hello", others, deadline=deadline, on_change=self._note_missing
            )
        )
        watching = asyncio.ensure_future(self._wait_until_explained())
        try:
            await asyncio.wait({gathering, watching}, return_when=asyncio.FIRST_COMPLETED)
            received = (
                gathering.result() if gathering.done() else await self._transport.get("hello")
            )
        finally:
            for task in (reporting, gathering, watching):
                task.cancel()
        if self._at_endpoint is not None:
            # A node that comes now is not in the plan, and learns that it is late.
            self._at_endpoint.server.close_registration()
        nodes = {0: own, **self._parse(Node, "hello", received)}
        return dict(sorted(nodes.items())), deadline.waited_s()

    async def _wait_until_explained(self) -> None:
        """Wait until as many nodes were refused as are missing: no other can be expected."""
        at_endpoint = self._at_endpoint
        if at_endpoint is None:  # a store refuses no node
            await asyncio.Event().wait()
            return
        while not self._missing or count_refused(at_endpoint.server.rejected) < len(self._missing):
            if at_endpoint.leads_to()[1] and len(self._missing) == self._job.nnodes - 1:
                return  # the nodes join another node rank 0
            await asyncio.sleep(_TICK_S)
        # Nodes may still join that are late, or restarted with the right arguments.
        await asyncio.sleep(_REJOIN_GRACE_S)

    def _note_missing(self, missing: Collection[int]) -> None:
        self._missing = missing

    async def _report_progress(self, deadline: Deadline) -> None:
        """Report which nodes are missing, here and on every node that has joined."""
        while True:
            await asyncio.sleep(_TICK_S)
            missing = tuple(sorted(self._missing))[:_MOST_NAMED]
            progress = Attendance(
                came=self._job.nnodes - len(self._missing),
                nnodes=self._job.nnodes,
                missing=missing,
                names={rank: self._names[rank] for rank in missing if rank in self._names},
                waited_s=deadline.waited_s(),
                total_s=deadline.ends_s - deadline.started_s,
            )
            self._job.on_progress(str(progress))
            await self._transport.put("progress", write(progress))

    async def _collect(self, nodes: dict[int, Node], roster: Roster, waited_s: float) -> Results:
        deadline = Deadline.after(MESH)
        own = asyncio.ensure_future(self._local_node.probe(roster))
        others = [rank for rank in nodes if rank != 0]
        received = await gather(self._transport, "mesh", others, deadline=deadline)
        reports = {0: await own, **self._parse(NodeReport, "mesh", received)}
        only_closed = self._job.nnodes > EVERY_PAIR
        if only_closed:
            # Results go to every node, and the open directions would make them too large.
            for rank, report in [*reports.items()]:
                kept = (
                    each for each in report.dialled if each.result != "open" or each.path_mtu_bytes
                )
                reports[rank] = replace(report, dialled=tuple(kept))
        at_endpoint = self._at_endpoint
        obstacle, other_coordinator = (None, "") if at_endpoint is None else at_endpoint.leads_to()
        peers = {}
        for rank, (hostname, address) in (at_endpoint.server.peers if at_endpoint else {}).items():
            with contextlib.suppress(ValueError):  # a link-local address
                peers[rank] = from_json(Peer, {"hostname": hostname, "address": address})
        return Results(
            nnodes=self._job.nnodes,
            backend=self._job.backend,
            host=self._job.host,
            port=self._job.port,
            nodes=nodes,
            reports=dict(sorted(reports.items())),
            names=self._names,
            peers=peers,
            garbled=dict(self._garbled),
            seed=roster.seed,
            only_closed=only_closed,
            waited_s=waited_s,
            rejected=() if at_endpoint is None else tuple(at_endpoint.server.rejected),
            obstacle=obstacle,
            other_coordinator=other_coordinator,
            at_store=self._job.at_store,
        )

    def _parse(
        self, kind: type[T], topic: Literal["hello", "mesh"], received: Mapping[int, Json]
    ) -> dict[int, T]:
        """Return the valid messages, and remember which nodes sent invalid ones."""
        messages = {}
        for rank, value in received.items():
            try:
                message = from_json(kind, value)
            except ValueError:
                message = None
            if message is None or (isinstance(message, Node) and message.node_rank != rank):
                self._garbled[rank] = topic
            else:
                messages[rank] = message
        return messages


# Node rank 0 started its wait at a different time, and needs time to gather and compare.
_SLACK: Final = timedelta(seconds=15)


async def participate(
    job: Job, transport: Transport, local_node: LocalNode, own: Node
) -> tuple[list[Finding], Matrix]:
    """Take part in an examination until node rank 0 has sent the results of all nodes.

    Raises:
        TransportLostError: Node rank 0 was lost; a `TransportClosedError` if its process exited
            before anything was examined.
    """
    reporting = asyncio.ensure_future(_relay_progress(job, transport))
    try:
        await transport.put("hello", write(own))
        roster = await _require(transport, "roster", Roster, Deadline.after(job.timeout + _SLACK))
    finally:
        reporting.cancel()
    # Whatever node rank 0 sends is checked against this node's own arguments: it may be hostile.
    if roster.nnodes != job.nnodes:
        raise TransportGarbledError("its list of nodes belongs to another job")
    job.on_progress(f"{len(roster.contacts)} nodes: trying every connection")
    try:
        await transport.put("mesh", write(await local_node.probe(roster)))
        request = await _require(
            transport, "all-reduce", all_reduce.Request, Deadline.after(MESH + _SLACK)
        )
        await all_reduce.participate(job, transport, request, own)
        results = await wait_for_results(transport, all_reduce.LONGEST + _SLACK)
    except TransportClosedError as exc:  # its results are lost, so joining again is of no use
        raise TransportLostError(str(exc)) from exc
    if results.nnodes != job.nnodes:
        raise TransportGarbledError("its results belong to another job")
    return make_findings(results), make_matrix(results)


async def wait_for_results(transport: Transport, limit: timedelta) -> Results:
    """Wait for the results from node rank 0.

    Raises:
        TransportLostError: They do not arrive, or are invalid.
    """
    try:
        return unpack(await _require(transport, RESULTS, str, Deadline.after(limit)))
    except ValueError as exc:
        raise TransportGarbledError("its results are invalid") from exc


async def _require(transport: Transport, topic: str, kind: type[T], deadline: Deadline) -> T:
    value = await wait_for(transport, topic, deadline=deadline)
    if value is None:
        raise TransportLostError(f"it sent nothing for {deadline.waited_s():.1f} s")
    try:
        return from_json(kind, value)
    except ValueError as exc:
        raise TransportGarbledError(f"its {topic!r} message is invalid") from exc


async def _relay_progress(job: Job, transport: Transport) -> None:
    """Report here which nodes node rank 0 waits for."""
    last: Json = None
    while True:
        await asyncio.sleep(_TICK_S)
        try:
            value = (await transport.get("progress")).get(0)
            if value is not None and value != last:
                job.on_progress(str(from_json(Attendance, value)))
        except (TransportLostError, ValueError):  # the examination itself reports the error
            return
        last = value
