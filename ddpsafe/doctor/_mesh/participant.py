"""Every other node's part: come, dial, tell, and make the findings from what node rank 0 collected."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar

from ddpsafe._clock import Deadline
from ddpsafe.doctor._mesh import all_reduce
from ddpsafe.doctor._mesh.coordinator import MESH
from ddpsafe.doctor._mesh.findings.all import judge, make_matrix
from ddpsafe.doctor._mesh.findings.attendance import hub_garbled, hub_lost
from ddpsafe.doctor._mesh.findings.results import unpack
from ddpsafe.doctor._mesh.messages import Progress, Roster, read, write
from ddpsafe.doctor._mesh.transport import BoardGarbledError, BoardLostError, wait_for

if TYPE_CHECKING:
    from ddpsafe.doctor._mesh.findings.results import Case
    from ddpsafe.doctor._mesh.job import Job
    from ddpsafe.doctor._mesh.messages import Node
    from ddpsafe.doctor._mesh.node import Member
    from ddpsafe.doctor._mesh.transport import Board, Json
    from ddpsafe.doctor._report import Finding, Matrix

T = TypeVar("T")

_SLACK: Final = timedelta(seconds=15)
"""Node rank 0 started to wait at another moment, and has to gather and to judge."""

_TICK_S: Final = 0.5


async def attend(
    job: Job, board: Board, member: Member, own: Node, *, hub_hostname: str
) -> tuple[list[Finding], Matrix]:
    """Take part in an examination until node rank 0 has collected what all nodes said."""
    ticking = asyncio.ensure_future(_repeat_progress(job, board))
    try:
        case = await _take_part(job, board, member, own)
        return judge(case), make_matrix(case)
    except BoardGarbledError as exc:
        return [hub_garbled(hub_hostname, str(exc))], job.empty_matrix()
    except BoardLostError as exc:
        return [hub_lost(hub_hostname, str(exc), at_store=job.at_store)], job.empty_matrix()
    finally:
        ticking.cancel()


async def _take_part(job: Job, board: Board, member: Member, own: Node) -> Case:
    await board.put("hello", write(own))
    roster = await _require(board, "roster", Roster, Deadline.after(job.timeout + _SLACK))
    if roster.nnodes != job.nnodes:
        raise BoardGarbledError("its list of nodes is not of this job")
    job.say(f"{len(roster.contacts)} nodes: trying every connection")
    await board.put("mesh", write(await member.probe(roster)))
    asked = await _require(board, "all-reduce", all_reduce.Asked, Deadline.after(MESH + _SLACK))
    await all_reduce.attend(job, board, asked, own)
    packed = await _require(board, "case", str, Deadline.after(all_reduce.LONGEST + _SLACK))
    try:
        case = unpack(packed)
    except ValueError as exc:
        raise BoardGarbledError("what it collected makes no sense") from exc
    if case.nnodes != job.nnodes:
        raise BoardGarbledError("what it collected is not about this job")
    return case


async def _require(board: Board, topic: str, kind: type[T], deadline: Deadline) -> T:
    value = await wait_for(board, topic, deadline=deadline)
    if value is None:
        raise BoardLostError(f"it said nothing for {deadline.waited_s():.1f} s")
    try:
        return read(kind, value)
    except ValueError as exc:
        raise BoardGarbledError(f"its message about {topic!r} makes no sense") from exc


async def _repeat_progress(job: Job, board: Board) -> None:
    """Pass on what node rank 0 says about who is missing."""
    last: Json = None
    while True:
        await asyncio.sleep(_TICK_S)
        try:
            value = (await board.get("progress")).get(0)
            if value is not None and value != last:
                job.say(str(read(Progress, value)))
        except (BoardLostError, ValueError):  # the examination itself says what is wrong
            return
        last = value
