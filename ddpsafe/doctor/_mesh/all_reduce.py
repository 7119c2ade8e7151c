"""A real all-reduce between the hosts, in processes of their own that cannot hang this one."""

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
from ddpsafe.doctor import _codes
from ddpsafe.doctor._findings import Finding, printable
from ddpsafe.doctor._mesh.findings.results import AllReduce
from ddpsafe.doctor._mesh.protocol import Address, AnyPort, Reduced, read, write
from ddpsafe.doctor._mesh.transport import RESULTS, wait_for
from ddpsafe.doctor._system.torch_probe import WITHOUT_DIRECTORY, find_safe_directory

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

    from typing_extensions import Self

    from ddpsafe.doctor._mesh.findings.results import Results, Skipped
    from ddpsafe.doctor._mesh.job import Job
    from ddpsafe.doctor._mesh.protocol import Node
    from ddpsafe.doctor._mesh.transport import Json, Transport

_IMPORT: Final = timedelta(seconds=90)
"""Importing torch from cold network storage on a busy host is what takes its time."""

_REDUCE: Final = timedelta(seconds=60)
"""For what follows once torch is there on every host: milliseconds, and seconds on a bad day."""

LONGEST: Final = _IMPORT + _REDUCE

_PROGRAM: Final = Path(__file__).with_name("all_reduce_program.py")
_LOOK_S: Final = 0.05
_LONGEST_ERROR: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Where node rank 0 wants the ranks of an all-reduce to meet.

    Attributes:
        address: Of its store.
        port: Of its store; 0 where there is no all-reduce.
    """

    address: Address = ""
    port: AnyPort = 0


async def coordinate(
    job: Job, transport: Transport, results: Results, *, found_failures: bool
) -> AllReduce:
    """Have every node take part in an all-reduce, as node rank 0; return what became of it."""
    skipped: Skipped = ""
    if job.collective == "skip":
        skipped = "not-asked"
    elif found_failures:
        skipped = "failures"
    elif not all(node.has_torch for node in results.nodes.values()):
        skipped = "no-torch"
    if skipped:
        await transport.put("all-reduce", write(Asked()))
        return AllReduce(skipped=skipped)
    job.on_progress("all connections are open: trying an all-reduce")
    async with _Member(job, results.nodes[0], Asked()) as own:
        importing = Deadline.after(_IMPORT)
        port = await own.find_port(importing)
        address = results.nodes[0].announced.address if port else ""
        await transport.put("all-reduce", write(Asked(address=address, port=port)))
        said, imported = await _collect(transport, results.nodes.keys(), own, importing)
    waiting = tuple(sorted(results.nodes.keys() - said.keys()))
    late = tuple(rank for rank in waiting if rank not in imported)
    return AllReduce(said=said, late=late, stuck=() if late else waiting)


async def _collect(
    transport: Transport, ranks: Collection[int], own: _Member, importing: Deadline
) -> tuple[dict[int, Reduced], set[int]]:
    """Wait until all have a result, or one has failed, or there is no point in waiting.

    A host where torch is still being imported is slow, not broken; only when all have it does the
    time of the all-reduce itself begin.
    """
    reducing: Deadline | None = None
    while True:
        reduced = await transport.get("reduced")
        said = {rank: _result(value) for rank, value in reduced.items()}
        imported = {*(await transport.get("imported")), *said}
        if own.imported:
            imported.add(0)
        if own.result is not None:
            said[0] = own.result
        for rank in transport.gone():
            said.setdefault(rank, Reduced(error="the doctor there was lost"))
        if reducing is None and imported >= set(ranks):
            reducing = Deadline.after(_REDUCE)
        over = (reducing or importing).expired()
        if over or said.keys() >= set(ranks) or any(each.error for each in said.values()):
            return {rank: each for rank, each in said.items() if rank in ranks}, imported
        await asyncio.sleep(_LOOK_S)


def _result(value: Json) -> Reduced:
    try:
        return read(Reduced, value)
    except ValueError:
        return Reduced(error="what it said of its part makes no sense")


async def participate(job: Job, transport: Transport, asked: Asked, own: Node) -> None:
    """Take part in the all-reduce that node rank 0 asks for, if it does.

    Args:
        job: What is examined.
        transport: Where the result is told.
        asked: Where they meet.
        own: This node.
    """
    if not asked.port:
        return
    job.on_progress("all connections are open: trying an all-reduce")
    async with _Member(job, own, asked) as rank:
        deadline = Deadline.after(LONGEST)
        over = asyncio.ensure_future(wait_for(transport, RESULTS, deadline=deadline))
        try:
            told = False
            while not over.done():
                if rank.imported and not told:
                    await transport.put("imported", value=True)
                    told = True
                if rank.result is not None:
                    await transport.put("reduced", write(rank.result))
                    return
                await asyncio.sleep(_LOOK_S)
            await over
        finally:
            over.cancel()


class _Member:
    """Owns the process that takes this host's part: when the block is left, it is gone.

    Args:
        job: What is examined.
        own: This node.
        asked: Where the store is; without a port, the process serves it.
    """

    def __init__(self, job: Job, own: Node, asked: Asked) -> None:
        """Start nothing yet."""
        self.imported = False
        self.result: Reduced | None = None
        self._port = 0
        self._asked = {
            "rank": job.node_rank,
            "world_size": job.nnodes,
            "serve": not asked.port,
            "address": asked.address or own.announced.address,
            "port": asked.port,
            "backend": job.backend,
            "timeout_s": LONGEST.total_seconds(),
        }
        self._env = job.env()
        if job.interface is not None:
            for name, value in interface_variables(own.announced.interface).items():
                self._env.setdefault(name, value)
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start the process, in a session of its own, so that what it starts ends with it."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            WITHOUT_DIRECTORY,
            str(_PROGRAM),
            json.dumps(self._asked),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=self._env,
            cwd=find_safe_directory(),
            start_new_session=True,
        )
        self._reading = asyncio.ensure_future(self._read(self._process))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the process, and what it has started."""
        assert self._process is not None  # noqa: S101 - entered
        assert self._reading is not None  # noqa: S101 - entered
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._reading.cancel()

    async def find_port(self, deadline: Deadline) -> int:
        """Wait for the port of the store that the process serves; 0 if it comes to none."""
        while (  # noqa: ASYNC110 - three things may end it
            not self._port and self.result is None and not deadline.expired()
        ):
            await asyncio.sleep(_LOOK_S)
        return self._port

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None  # noqa: S101 - a pipe
        while line := await process.stdout.readline():
            told: Json = None
            with contextlib.suppress(ValueError):  # a library printed something
                told = json.loads(line)
            if not isinstance(told, dict):
                continue
            self.imported = self.imported or "imported" in told
            if "port" in told:
                self._port = read(AnyPort, told["port"])
            if "took_s" in told or "error" in told:
                error = printable(str(told.get("error") or ""))[:_LONGEST_ERROR]
                self.result = read(Reduced, {**told, "error": error})
                return
        code = await process.wait()
        self.result = Reduced(error=f"the process ended with status {code} and without a result")


def check_all_reduce(results: Results) -> Finding:
    """Say what became of the all-reduce."""
    done = results.all_reduce
    if done.skipped:
        nodes = results.nodes.items()
        without = ", ".join(results.label(rank) for rank, node in nodes if not node.has_torch)
        why = {
            "not-asked": "it was not asked for",
            "failures": "what failed above has to be repaired first",
            "no-torch": f"torch is not installed on {without}",
        }[done.skipped]
        return Finding(
            code=_codes.ALL_REDUCE_SKIPPED,
            severity="ok",
            fact=f"No all-reduce was tried: {why}.",
        )
    errors = {rank: each.error for rank, each in done.said.items() if each.error}
    if errors:
        return Finding(
            code=_codes.ALL_REDUCE,
            severity="failed",
            fact=f"An all-reduce failed on {', '.join(map(results.label, errors))}: {errors[min(errors)]}",
            cause="connections open between all hosts, so it is not the network's ports: look at what "
            "torch says; versions that differ, an interface variable, or a GPU.",
            fix="Run it again with TORCH_DISTRIBUTED_DEBUG=INFO and NCCL_DEBUG=INFO in the environment.",
            hosts=results.hostnames(errors),
            details={"errors": {results.name_of(rank): text for rank, text in errors.items()}},
        )
    if done.late:
        return Finding(
            code=_codes.ALL_REDUCE,
            severity="warning",
            fact=f"No all-reduce was done: torch was not imported within {_IMPORT.total_seconds():.0f} s "
            f"on {', '.join(map(results.label, done.late))}.",
            cause="the host is busy, or reads Python's packages from slow network storage.",
            fix="Run the doctor again when the host is idle; all connections are open.",
            hosts=results.hostnames(done.late),
        )
    if done.stuck:
        return Finding(
            code=_codes.ALL_REDUCE,
            severity="failed",
            fact=f"An all-reduce did not come to an end within {_REDUCE.total_seconds():.0f} s; "
            f"without a result: {', '.join(map(results.label, done.stuck))}.",
            cause="all connections opened when they were tried; a firewall that ends long connections, "
            "lost packets, or an interface variable that only the ranks have.",
            fix="Run it again with TORCH_DISTRIBUTED_DEBUG=INFO and NCCL_DEBUG=INFO in the environment.",
            hosts=results.hostnames(done.stuck),
        )
    took_s = max((each.took_s for each in done.said.values()), default=0.0)
    backends = done.said[0].backends if 0 in done.said else ()
    return Finding(
        code=_codes.ALL_REDUCE,
        severity="ok",
        fact=f"An all-reduce over {len(results.nodes)} hosts is right "
        f"({', '.join(backends)}, {took_s:.2f} s with the start of the process group).",
        details={"took_s": round(took_s, 3)},
    )
