"""A real all-reduce between the hosts, in processes of their own that cannot hang this one."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import Deadline
from ddpsafe.doctor._finding import Finding
from ddpsafe.doctor._mesh import _codes
from ddpsafe.doctor._mesh._board import gather
from ddpsafe.doctor._mesh._reducer import Reducer

if TYPE_CHECKING:
    from ddpsafe.doctor._mesh._board import Board, Json
    from ddpsafe.doctor._mesh._case import Case
    from ddpsafe.doctor._mesh._job import Job
    from ddpsafe.doctor._mesh._node import Node

LIMIT: Final = timedelta(seconds=90)
"""Importing torch from cold network storage on a busy host is what takes its time."""

_FAREWELL: Final = timedelta(seconds=5)


async def preside(job: Job, board: Board, case: Case, findings: list[Finding]) -> list[Finding]:
    """Have every node take part in an all-reduce, as node rank 0; return what became of it."""
    reason = _find_reason_to_skip(job, case, findings)
    if reason:
        await board.put("all-reduce", {"endpoint": ""})
        skipped = f"No all-reduce was tried: {reason}."
        return [Finding(code=_codes.ALL_REDUCE_SKIPPED, severity="ok", fact=skipped)]
    job.say("all connections are open: trying an all-reduce")
    deadline = Deadline.after(LIMIT)
    others = [rank for rank in case.nodes if rank != 0]
    async with Reducer(job, case.nodes[0], endpoint="") as reducer:
        endpoint = await reducer.find_endpoint(deadline)
        await board.put("all-reduce", {"endpoint": endpoint})
        said: dict[int, Json] = {0: await reducer.finish(deadline)}
    patience = _FAREWELL if endpoint else timedelta(0)
    said |= await gather(board, "reduced", others, deadline=Deadline.after(patience))
    return [_judge(case, said)]


async def attend(job: Job, board: Board, asked: Json, own: Node) -> None:
    """Take part in the all-reduce that node rank 0 asks for, if it does."""
    endpoint = asked.get("endpoint") if isinstance(asked, dict) else None
    if not endpoint:
        return
    job.say("all connections are open: trying an all-reduce")
    async with Reducer(job, own, endpoint=str(endpoint)) as reducer:
        await board.put("reduced", await reducer.finish(Deadline.after(LIMIT)))


def _find_reason_to_skip(job: Job, case: Case, findings: list[Finding]) -> str:
    if job.collective == "skip":
        return "nobody asked for it"
    if any(finding.severity == "failed" for finding in findings):
        return "what failed above has to be repaired first"
    without = [case.label(rank) for rank, node in case.nodes.items() if not node.has_torch]
    return f"torch is not installed on {', '.join(without)}" if without else ""


def _judge(case: Case, said: dict[int, Json]) -> Finding:
    tables = {rank: each if isinstance(each, dict) else {} for rank, each in said.items()}
    errors = {
        rank: str(tables.get(rank, {}).get("error") or "it said nothing")
        for rank in case.nodes
        if not tables.get(rank, {}).get("took_s")
    }
    if not errors:
        took_s = max(float(str(each["took_s"])) for each in tables.values())
        backends = ", ".join(map(str, tables[0].get("backends") or []))  # type: ignore[arg-type]
        return Finding(
            code=_codes.ALL_REDUCE,
            severity="ok",
            fact=f"An all-reduce over {len(case.nodes)} hosts is right ({backends}, {took_s:.2f} s "
            "with the start of the process group).",
            details={"took_s": took_s},
        )
    first = min(errors)
    return Finding(
        code=_codes.ALL_REDUCE,
        severity="failed",
        fact=f"An all-reduce failed on {', '.join(map(case.label, errors))}: {errors[first]}",
        cause="connections open between all hosts, so it is not the network's ports: look at what "
        "torch says; versions that differ, an interface variable, or a GPU.",
        fix="Run it again with TORCH_DISTRIBUTED_DEBUG=INFO and NCCL_DEBUG=INFO in the environment.",
        hosts=case.hostnames(errors),
        details={"errors": {case.name_of(rank): text for rank, text in errors.items()}},
    )
