"""A real all-reduce between the hosts, in processes of their own that cannot hang this one."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import Deadline
from ddpsafe.doctor import _mesh_codes as _codes
from ddpsafe.doctor._finding import Finding
from ddpsafe.doctor._mesh._board import gather, wait_for
from ddpsafe.doctor._mesh._messages import Reduced, read, write
from ddpsafe.doctor._mesh._reducer import Reducer

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from ddpsafe.doctor._mesh._board import Board
    from ddpsafe.doctor._mesh._case import Case
    from ddpsafe.doctor._mesh._job import Job
    from ddpsafe.doctor._mesh._messages import Node

LIMIT: Final = timedelta(seconds=90)
"""Importing torch from cold network storage on a busy host is what takes its time."""

_FAREWELL: Final = timedelta(seconds=2)
_LOOK_S: Final = 0.1


async def preside(job: Job, board: Board, case: Case, findings: list[Finding]) -> list[Finding]:
    """Have every node take part in an all-reduce, as node rank 0; return what became of it."""
    reason = _find_reason_to_skip(job, case, findings)
    if reason:
        await board.put("all-reduce", "")
        skipped = f"No all-reduce was tried: {reason}."
        return [Finding(code=_codes.ALL_REDUCE_SKIPPED, severity="ok", fact=skipped)]
    job.say("all connections are open: trying an all-reduce")
    deadline = Deadline.after(LIMIT)
    others = [rank for rank in case.nodes if rank != 0]
    async with Reducer(job, case.nodes[0], endpoint="") as reducer:
        endpoint = await reducer.find_endpoint(deadline)
        await board.put("all-reduce", endpoint)
        failing = _wait_for_failure(board)
        own = await _unless(failing, reducer.finish(deadline))
    said = {} if own is None else {0: own}
    patience = Deadline.after(_FAREWELL if endpoint else timedelta(0))
    for rank, value in (await gather(board, "reduced", others, deadline=patience)).items():
        said[rank] = read(Reduced, value)
    return [_judge(case, said)]


async def attend(job: Job, board: Board, asked: str, own: Node) -> None:
    """Take part in the all-reduce that node rank 0 asks for, if it does.

    Args:
        job: What is examined.
        board: Where the result is told.
        asked: host:port of the store at which they meet; empty if there is no all-reduce.
        own: This node.
    """
    if not asked:
        return
    job.say("all connections are open: trying an all-reduce")
    async with Reducer(job, own, endpoint=asked) as reducer:
        deadline = Deadline.after(LIMIT)
        judged = wait_for(board, "verdict", deadline=deadline)
        result = await _unless(judged, reducer.finish(deadline))
        if result is not None:
            await board.put("reduced", write(result))


async def _wait_for_failure(board: Board) -> None:
    """Wait until some node says that its part has failed: the others' then never ends well."""
    while True:
        said = (await board.get("reduced")).values()
        if any(isinstance(each, dict) and each.get("error") for each in said):
            return
        await asyncio.sleep(_LOOK_S)


async def _unless(
    event: Coroutine[None, None, object], result: Coroutine[None, None, Reduced]
) -> Reduced | None:
    """Wait for a result, or for what makes it pointless; None if that comes first."""
    waiting, watching = asyncio.ensure_future(result), asyncio.ensure_future(event)
    try:
        await asyncio.wait({waiting, watching}, return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        waiting.cancel()
        watching.cancel()


def _find_reason_to_skip(job: Job, case: Case, findings: list[Finding]) -> str:
    if job.collective == "skip":
        return "nobody asked for it"
    if any(finding.severity == "failed" for finding in findings):
        return "what failed above has to be repaired first"
    without = [case.label(rank) for rank, node in case.nodes.items() if not node.has_torch]
    return f"torch is not installed on {', '.join(without)}" if without else ""


def _judge(case: Case, said: Mapping[int, Reduced]) -> Finding:
    errors = {rank: each.error for rank, each in said.items() if each.error}
    if not errors:
        errors = dict.fromkeys(case.nodes.keys() - said.keys(), "it said nothing")
    if not errors:
        took_s = max(each.took_s for each in said.values())
        return Finding(
            code=_codes.ALL_REDUCE,
            severity="ok",
            fact=f"An all-reduce over {len(case.nodes)} hosts is right "
            f"({', '.join(said[0].backends)}, {took_s:.2f} s with the start of the process group).",
            details={"took_s": round(took_s, 3)},
        )
    return Finding(
        code=_codes.ALL_REDUCE,
        severity="failed",
        fact=f"An all-reduce failed on {', '.join(map(case.label, errors))}: {errors[min(errors)]}",
        cause="connections open between all hosts, so it is not the network's ports: look at what "
        "torch says; versions that differ, an interface variable, or a GPU.",
        fix="Run it again with TORCH_DISTRIBUTED_DEBUG=INFO and NCCL_DEBUG=INFO in the environment.",
        hosts=case.hostnames(errors),
        details={"errors": {case.name_of(rank): text for rank, text in errors.items()}},
    )
