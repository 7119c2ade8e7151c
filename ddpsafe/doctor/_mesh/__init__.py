"""The check between nodes: who is there, who reaches whom, and what differs.

`examine` meets at the endpoint, `examine_at_store` at a store of torch that exists already. Node
rank 0 coordinates (`coordinator`), every other node takes part (`participant`). What they tell each
other travels over a `Board` (`transport`): a small server on node rank 0 (`server`, `reach`), or the
store. Node rank 0 collects what was seen and sends it to all, and every node makes its findings from
that (`findings`), so they are the same everywhere.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Literal

from ddpsafe._clock import BoundedCall
from ddpsafe.doctor._mesh.examination import meet_at_endpoint, meet_at_store
from ddpsafe.doctor._mesh.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from datetime import timedelta

    from ddpsafe.doctor._context import Place
    from ddpsafe.doctor._mesh.transport import Store
    from ddpsafe.doctor._report import Finding, Matrix

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
    places: Mapping[str, Place] | None = None,
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
    host, _, port = endpoint.rpartition(":")
    job = Job(
        nnodes=nnodes,
        node_rank=node_rank,
        host=host,
        port=int(port),
        interface=interface,
        backend=backend,
        timeout=timeout,
        facts=_as_json(local),
        say=on_progress,
        collective=collective,
        secret=secret,
        places=places or {},
    )
    return _complete(meet_at_endpoint(job))


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
    places: Mapping[str, Place] | None = None,
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
    host, _, port = endpoint.rpartition(":")
    job = Job(
        nnodes=nnodes,
        node_rank=node_rank,
        host=host,
        port=int(port),
        interface=interface,
        backend=backend,
        timeout=timeout,
        facts=_as_json(local),
        say=on_progress,
        collective="skip",
        at_store=True,
        places=places or {},
    )
    return _complete(meet_at_store(job, store))


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
