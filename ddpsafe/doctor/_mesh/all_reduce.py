"""A real all-reduce between the hosts, in separate processes so that it cannot hang the doctor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import Deadline
from ddpsafe._host import interface_variables
from ddpsafe._job.channel import from_json
from ddpsafe._text import printable
from ddpsafe.doctor._findings import Finding, failed, ok, warning
from ddpsafe.doctor._mesh.findings.observations import AllReduce
from ddpsafe.doctor._mesh.protocol import Address, AnyPort, Reduced, write
from ddpsafe.doctor._mesh.transport import RESULTS, wait_for
from ddpsafe.doctor._system.torch_probe import WITHOUT_DIRECTORY, find_safe_directory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from ddpsafe.doctor._mesh.findings.observations import Results, Skipped
    from ddpsafe.doctor._mesh.job import Job
    from ddpsafe.doctor._mesh.protocol import Node
    from ddpsafe.doctor._mesh.transport import Json, Transport

# Importing torch from cold network storage on a busy host takes this long.
_IMPORT_LIMIT: Final = timedelta(seconds=90)

# The all-reduce itself, once every host has imported torch: usually milliseconds, rarely seconds.
_REDUCE_LIMIT: Final = timedelta(seconds=60)

LONGEST: Final = _IMPORT_LIMIT + _REDUCE_LIMIT

_PROGRAM: Final = Path(__file__).with_name("all_reduce_program.py")
_POLL_S: Final = 0.05
_LONGEST_ERROR_CHARS: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Node rank 0's request to take part in an all-reduce.

    Attributes:
        port: The port of its store; 0 if there is no all-reduce.
    """

    address: Address = ""
    port: AnyPort = 0


async def coordinate(
    job: Job, transport: Transport, results: Results, *, found_failures: bool
) -> AllReduce:
    """Run an all-reduce of all nodes, as node rank 0, and return the outcome."""
    skipped: Skipped = ""
    if job.collective == "skip":
        skipped = "not-asked"
    elif found_failures:
        skipped = "failures"
    elif not all(node.has_torch for node in results.nodes.values()):
        skipped = "no-torch"
    if skipped:
        await transport.put("all-reduce", write(Request()))
        return AllReduce(skipped=skipped)
    job.on_progress("all connections are open: trying an all-reduce")
    async with _started_rank(job, results.nodes[0], Request()) as own:
        importing = Deadline.after(_IMPORT_LIMIT)
        port = await own.find_port(importing)
        address = results.nodes[0].announced.address if port else ""
        await transport.put("all-reduce", write(Request(address=address, port=port)))
        reduced, imported = await _collect(transport, results.nodes.keys(), own, importing)
    waiting = tuple(sorted(results.nodes.keys() - reduced.keys()))
    late = tuple(rank for rank in waiting if rank not in imported)
    return AllReduce(said=reduced, late=late, stuck=() if late else waiting)


async def _collect(
    transport: Transport, ranks: Collection[int], own: _ReducingRank, importing: Deadline
) -> tuple[dict[int, Reduced], set[int]]:
    """Wait until all nodes have a result, one has failed, or the time is up."""
    reducing: Deadline | None = None
    while True:
        received = await transport.get("reduced")
        reduced = {rank: _result(value) for rank, value in received.items()}
        imported = {*(await transport.get("imported")), *reduced}
        if own.imported:
            imported.add(0)
        if own.result is not None:
            reduced[0] = own.result
        for rank in transport.disconnected():
            reduced.setdefault(rank, Reduced(error="the doctor there was lost"))
        # A host that is still importing torch is slow, not broken, so the time limit of the
        # all-reduce itself begins only once all hosts have imported it.
        if reducing is None and imported >= set(ranks):
            reducing = Deadline.after(_REDUCE_LIMIT)
        over = (reducing or importing).expired()
        if (
            over
            or reduced.keys() >= set(ranks)
            or any(outcome.error for outcome in reduced.values())
        ):
            return {rank: outcome for rank, outcome in reduced.items() if rank in ranks}, imported
        await asyncio.sleep(_POLL_S)


def _result(value: Json) -> Reduced:
    try:
        return from_json(Reduced, value)
    except ValueError:
        return Reduced(error="it sent an invalid result")


async def participate(job: Job, transport: Transport, request: Request, own: Node) -> None:
    """Take part in the all-reduce if node rank 0 requests one.

    Node rank 0 receives the result.
    """
    if not request.port:
        return
    job.on_progress("all connections are open: trying an all-reduce")
    async with _started_rank(job, own, request) as rank:
        deadline = Deadline.after(LONGEST)
        over = asyncio.ensure_future(wait_for(transport, RESULTS, deadline=deadline))
        try:
            has_reported = False
            while not over.done():
                if rank.imported and not has_reported:
                    await transport.put("imported", value=True)
                    has_reported = True
                if rank.result is not None:
                    await transport.put("reduced", write(rank.result))
                    return
                await asyncio.sleep(_POLL_S)
            await over
        finally:
            over.cancel()


class _ReducingRank:
    """What this host's rank has reported.

    Attributes:
        port: The port of the store that it serves; 0 before that.
    """

    def __init__(self) -> None:
        self.imported = False
        self.port = 0
        self.result: Reduced | None = None

    async def find_port(self, deadline: Deadline) -> int:
        """Wait for the port of the store; 0 if the rank does not get that far."""
        while (  # noqa: ASYNC110 - three things may end it
            not self.port and self.result is None and not deadline.expired()
        ):
            await asyncio.sleep(_POLL_S)
        return self.port

    async def read(self, process: asyncio.subprocess.Process) -> None:
        """Read the reports until there is a result."""
        assert process.stdout is not None  # noqa: S101 - a pipe
        while line := await process.stdout.readline():
            message: Json = None
            with contextlib.suppress(ValueError):  # a library printed something
                message = json.loads(line)
            if not isinstance(message, dict):
                continue
            self.imported = self.imported or "imported" in message
            if "port" in message:
                self.port = from_json(AnyPort, message["port"])
            if "took_s" in message or "error" in message:
                error = printable(str(message.get("error") or ""))[:_LONGEST_ERROR_CHARS]
                self.result = from_json(Reduced, {**message, "error": error})
                return
        code = await process.wait()
        self.result = Reduced(error=f"the process exited with status {code} and without a result")


@contextlib.asynccontextmanager
async def _started_rank(job: Job, own: Node, request: Request) -> AsyncIterator[_ReducingRank]:
    """Run this host's rank in a process, which is killed when the block ends.

    It serves the store if the request has no port.
    """
    arguments = {
        "rank": job.node_rank,
        "world_size": job.nnodes,
        "serve": not request.port,
        "address": request.address or own.announced.address,
        "port": request.port,
        "backend": job.backend,
        "timeout_s": LONGEST.total_seconds(),
    }
    env = job.env()
    if job.interface is not None:
        # A variable that the user has set takes precedence.
        env = {**interface_variables(own.announced.interface), **env}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        WITHOUT_DIRECTORY,
        str(_PROGRAM),
        json.dumps(arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=env,
        cwd=find_safe_directory(),
        start_new_session=True,  # so that its children can be killed with it
    )
    rank = _ReducingRank()
    reading = asyncio.ensure_future(rank.read(process))
    try:
        yield rank
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        reading.cancel()


def check_all_reduce(results: Results) -> Finding:
    """Return the finding on the outcome of the all-reduce."""
    outcome = results.all_reduce
    if outcome.skipped:
        nodes = results.nodes.items()
        without = ", ".join(results.label(rank) for rank, node in nodes if not node.has_torch)
        why = {
            "not-asked": "it was not requested",
            "failures": "the failures above have to be fixed first",
            "no-torch": f"torch is not installed on {without}",
        }[outcome.skipped]
        return ok("DS-MESH-051", f"No all-reduce was tried: {why}.")
    errors = {rank: reduced.error for rank, reduced in outcome.said.items() if reduced.error}
    if errors:
        return failed(
            "DS-MESH-050",
            f"An all-reduce failed on {', '.join(map(results.label, errors))}: {errors[min(errors)]}",
            cause="connections open between all hosts, so blocked ports are not the cause. See torch's "
            "message; different versions, an interface variable, or a GPU.",
            fix="Run it again with TORCH_DISTRIBUTED_DEBUG=INFO and NCCL_DEBUG=INFO in the environment.",
            hosts=results.hostnames(errors),
            errors={results.name_of(rank): text for rank, text in errors.items()},
        )
    if outcome.late:
        return warning(
            "DS-MESH-050",
            f"No all-reduce was run: torch was not imported within {_IMPORT_LIMIT.total_seconds():.0f} s "
            f"on {', '.join(map(results.label, outcome.late))}.",
            cause="the host is busy, or reads Python's packages from slow network storage.",
            fix="Run the doctor again when the host is idle; all connections are open.",
            hosts=results.hostnames(outcome.late),
        )
    if outcome.stuck:
        return failed(
            "DS-MESH-050",
            f"An all-reduce did not finish within {_REDUCE_LIMIT.total_seconds():.0f} s; "
            f"without a result: {', '.join(map(results.label, outcome.stuck))}.",
            cause="a firewall that ends long connections, lost packets, or an interface variable that only "
            "the ranks have; all connections opened when they were tried.",
            fix="Run it again with TORCH_DISTRIBUTED_DEBUG=INFO and NCCL_DEBUG=INFO in the environment.",
            hosts=results.hostnames(outcome.stuck),
        )
    took_s = max((reduced.took_s for reduced in outcome.said.values()), default=0.0)
    backends = outcome.said[0].backends if 0 in outcome.said else ()
    return ok(
        "DS-MESH-050",
        f"An all-reduce over {len(results.nodes)} hosts is correct "
        f"({', '.join(backends)}, {took_s:.2f} s including the start of the process group).",
        took_s=round(took_s, 3),
    )
