"""One examination from the first packet to the verdict, for each way to meet."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import Deadline
from ddpsafe.doctor._mesh.coordinator import Chair, Entrance, owner_of
from ddpsafe.doctor._mesh.findings.attendance import (
    cannot_serve,
    describe_trouble,
    hub_lost,
    judge_obstacle,
)
from ddpsafe.doctor._mesh.node import Member
from ddpsafe.doctor._mesh.participant import attend
from ddpsafe.doctor._mesh.reach import Obstacle, find_addresses, reach_hub
from ddpsafe.doctor._mesh.transport import BoardLostError, StoreBoard

if TYPE_CHECKING:
    from ddpsafe.doctor._mesh.job import Job
    from ddpsafe.doctor._mesh.transport import Store
    from ddpsafe.doctor._report import Finding, Matrix

    Found = tuple[list[Finding], Matrix]

_RESOLVE: Final = timedelta(seconds=2)


async def meet_at_endpoint(job: Job) -> Found:
    """Examine; node rank 0 serves the endpoint and the others come to it."""
    return await (_receive(job) if job.node_rank == 0 else _visit(job))


async def meet_at_store(job: Job, store: Store) -> Found:
    """Examine over a store of torch that all nodes are connected to."""
    board = StoreBoard(store, node_rank=job.node_rank, nnodes=job.nnodes)
    member = Member(job, job.env())
    addresses = await find_addresses(job.host, job.port, deadline=Deadline.after(_RESOLVE))
    try:
        own = await member.introduce(addresses)
        if job.node_rank == 0:
            return await Chair(job, board, member).preside(own)
        return await attend(job, board, member, own, hub_hostname=job.host)
    except BoardLostError as exc:
        return [hub_lost(job.host, str(exc), at_store=True)], job.empty_matrix()
    finally:
        await member.close()


async def _receive(job: Job) -> Found:
    entrance, member = Entrance(job), Member(job, job.env())
    try:
        await entrance.open()
    except OSError as exc:
        return [cannot_serve(exc, port=job.port, owner=owner_of(job.port))], job.empty_matrix()
    try:
        addresses = await find_addresses(job.host, job.port, deadline=Deadline.after(_RESOLVE))
        own = await member.introduce(addresses)
        return await Chair(job, entrance.hub, member, entrance=entrance).preside(own)
    finally:
        await member.close()
        await entrance.close()


async def _visit(job: Job) -> Found:
    reached = await reach_hub(
        job.host,
        job.port,
        job.greeting(),
        secret=job.secret,
        deadline=Deadline.after(job.timeout),
        on_trouble=lambda found: job.say(describe_trouble(found, host=job.host, port=job.port)),
    )
    if isinstance(reached, Obstacle):
        finding = judge_obstacle(
            reached, host=job.host, port=job.port, node_rank=job.node_rank, nnodes=job.nnodes
        )
        return [finding], job.empty_matrix()
    member = Member(job, job.env())
    try:
        own = await member.introduce([reached.hub_address])
        return await attend(job, reached, member, own, hub_hostname=reached.hub_hostname)
    finally:
        await member.close()
        await reached.close()
