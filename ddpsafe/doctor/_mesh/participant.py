"""The part of every node except node rank 0: register, dial, report, and compute the findings."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar

from ddpsafe._clock import Deadline
from ddpsafe.doctor._mesh import all_reduce
from ddpsafe.doctor._mesh.coordinator import MESH
from ddpsafe.doctor._mesh.findings.assemble import make_findings, make_matrix
from ddpsafe.doctor._mesh.findings.observations import unpack
from ddpsafe.doctor._mesh.protocol import Attendance, Roster, read, write
from ddpsafe.doctor._mesh.transport import (
    RESULTS,
    TransportClosedError,
    TransportGarbledError,
    TransportLostError,
    wait_for,
)

if TYPE_CHECKING:
    from ddpsafe.doctor._findings import Finding, Matrix
    from ddpsafe.doctor._mesh.findings.observations import Results
    from ddpsafe.doctor._mesh.job import Job
    from ddpsafe.doctor._mesh.local_node import LocalNode
    from ddpsafe.doctor._mesh.protocol import Node
    from ddpsafe.doctor._mesh.transport import Json, Transport

T = TypeVar("T")

_SLACK: Final = timedelta(seconds=15)
"""Node rank 0 started its wait at a different time, and needs time to gather and compare."""

_TICK_S: Final = 0.5


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
    if roster.nnodes != job.nnodes:
        raise TransportGarbledError("its list of nodes belongs to another job")
    job.on_progress(f"{len(roster.contacts)} nodes: trying every connection")
    try:
        await transport.put("mesh", write(await local_node.probe(roster)))
        asked = await _require(
            transport, "all-reduce", all_reduce.Asked, Deadline.after(MESH + _SLACK)
        )
        await all_reduce.participate(job, transport, asked, own)
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
        return read(kind, value)
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
                job.on_progress(str(read(Attendance, value)))
        except (TransportLostError, ValueError):  # the examination itself reports the error
            return
        last = value
