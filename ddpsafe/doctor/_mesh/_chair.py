"""Node rank 0's part: calls the roll, hears everybody, and comes to the verdict all nodes read."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar

from ddpsafe._clock import Deadline
from ddpsafe.doctor._mesh import _all_reduce
from ddpsafe.doctor._mesh._board import gather
from ddpsafe.doctor._mesh._case import Case
from ddpsafe.doctor._mesh._dial import ANSWER_S, CONNECT_S
from ddpsafe.doctor._mesh._mesh import make_plan
from ddpsafe.doctor._mesh._messages import Node, Roster, Testimony, read, write
from ddpsafe.doctor._mesh._names import find_node_names
from ddpsafe.doctor._mesh._roll_findings import judge_roll
from ddpsafe.doctor._mesh._verdict import judge, make_matrix, pack

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ddpsafe.doctor._finding import Finding
    from ddpsafe.doctor._matrix import Matrix
    from ddpsafe.doctor._mesh._board import Board, Json
    from ddpsafe.doctor._mesh._entrance import Entrance
    from ddpsafe.doctor._mesh._job import Job
    from ddpsafe.doctor._mesh._mesh import Member

T = TypeVar("T")

MESH: Final = timedelta(seconds=CONNECT_S + ANSWER_S + 8.0)
"""For nodes whose connection stands and who are merely slow; a lost one is noticed in 3 s."""

_TICK_S: Final = 0.5


class Chair:
    """Node rank 0 of one examination.

    Args:
        job: What is examined.
        board: Where the others are heard.
        member: This node's part in the mesh.
        entrance: The door at the endpoint; None where the nodes meet at a store.
    """

    def __init__(
        self, job: Job, board: Board, member: Member, *, entrance: Entrance | None = None
    ) -> None:
        """Start with nobody."""
        self._job, self._board, self._member = job, board, member
        self._entrance = entrance
        self._names = find_node_names(job.nnodes)
        self._missing: Collection[int] = ()

    async def preside(self, own: Node) -> tuple[list[Finding], Matrix]:
        """Take the examination to its end; publish the verdict and return it."""
        nodes, waited_s = await self._call_roll(own)
        case = await self._hear(nodes, await self._publish_roster(nodes))
        findings = [*self._judge_roll(case, waited_s), *judge(case)]
        findings += await _all_reduce.preside(self._job, self._board, case, findings)
        matrix = make_matrix(case)
        await self._board.put("verdict", write(pack(findings, matrix)))
        return findings, matrix

    def _judge_roll(self, case: Case, waited_s: float) -> list[Finding]:
        if self._entrance is None:
            return list(judge_roll(case, (), waited_s=waited_s))
        complete = len(case.nodes) == case.nnodes
        return [
            *judge_roll(case, self._entrance.rejected(), waited_s=waited_s),
            *self._entrance.judge(complete=complete),
        ]

    async def _call_roll(self, own: Node) -> tuple[dict[int, Node], float]:
        deadline = Deadline.after(self._job.timeout)
        others = range(1, self._job.nnodes)
        ticking = asyncio.ensure_future(self._tick(deadline))
        try:
            said = await gather(
                self._board, "hello", others, deadline=deadline, on_change=self._note_missing
            )
        finally:
            ticking.cancel()
        if self._entrance is not None:
            self._entrance.close_roll()
        nodes = {0: own, **_readable(Node, said)}
        return dict(sorted(nodes.items())), deadline.waited_s()

    def _note_missing(self, missing: Collection[int]) -> None:
        self._missing = missing

    async def _tick(self, deadline: Deadline) -> None:
        """Say now and then, here and on every node that has come, who is waited for."""
        while True:
            await asyncio.sleep(_TICK_S)
            named = ", ".join(self._names.get(rank) or str(rank) for rank in sorted(self._missing))
            came = self._job.nnodes - len(self._missing)
            total_s = deadline.ends_s - deadline.started_s
            text = (
                f"{came} of {self._job.nnodes} nodes have come; waiting for node rank {named}, "
                f"{deadline.waited_s():.0f} of {total_s:.0f} s"
            )
            self._job.say(text)
            await self._board.put("progress", text)

    async def _publish_roster(self, nodes: Mapping[int, Node]) -> Roster:
        roster = Roster(
            nnodes=self._job.nnodes,
            contacts=tuple(node.contact() for node in nodes.values()),
            seed=time.time_ns(),
            clock_s=time.time(),
        )
        self._job.say(f"{len(nodes)} nodes: trying every connection")
        await self._board.put("roster", write(roster))
        return roster

    async def _hear(self, nodes: Mapping[int, Node], roster: Roster) -> Case:
        deadline = Deadline.after(MESH)
        own = asyncio.ensure_future(self._member.testify(roster))
        others = [rank for rank in nodes if rank != 0]
        said = await gather(self._board, "mesh", others, deadline=deadline)
        testimonies = {0: await own, **_readable(Testimony, said)}
        return Case(
            nnodes=self._job.nnodes,
            backend=self._job.backend,
            host=self._job.host,
            port=self._job.port,
            nodes=nodes,
            testimonies=dict(sorted(testimonies.items())),
            names=self._names,
            plan=make_plan(roster),
            at_store=self._job.at_store,
        )


def _readable(kind: type[T], said: Mapping[int, Json]) -> dict[int, T]:
    """Read messages; who says what makes no sense has said nothing."""
    found = {}
    for rank, value in said.items():
        with contextlib.suppress(ValueError):
            found[rank] = read(kind, value)
    return found
