"""`run`: all checks of this host, and with several nodes those between them, in one report."""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal

from ddpsafe._clock import Deadline
from ddpsafe._config import LaunchConfig
from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._secrets import Mask
from ddpsafe.doctor._examination import examine_host
from ddpsafe.doctor._finding import failed
from ddpsafe.doctor._nvml import count_device_nodes
from ddpsafe.doctor._report import Report, masked, worst_first
from ddpsafe.doctor._subject import Subject, count_cores, environment_of, find_place

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from typing_extensions import Unpack

    from ddpsafe._config import LaunchFields
    from ddpsafe.doctor._finding import Finding
    from ddpsafe.doctor._matrix import Matrix
    from ddpsafe.doctor._mesh._store_board import Store
    from ddpsafe.doctor._subject import Place

logger = logging.getLogger(__name__)

TIMEOUT: Final = timedelta(minutes=1)
"""How long an examination may take by default, each half of it."""


def run(
    config: LaunchConfig | None = None,
    *,
    checks: Literal["all", "launch"] | Collection[str] = "all",
    mesh: bool | None = None,
    timeout: timedelta = TIMEOUT,
    on_progress: Callable[[str], None] | None = None,
    secret: str | None = None,
    **fields: Unpack[LaunchFields],
) -> Report:
    """Examine this host, and its connections to the other nodes of the job.

    Args:
        config: What the job asks for; without one, from environment and file, where what is wrong
            becomes a finding.
        checks: ``"all"``, ``"launch"`` (those within 100 ms that every launch does), or names of
            areas, e.g. ``{"NET", "GPU"}``; none of them where it is empty.
        mesh: Whether to examine the connections between the nodes, which every node has to do at
            the same time; by default with more than one node, unless `checks` is ``"launch"``.
        timeout: How long the examination of the host may take, and again the one of the mesh.
        on_progress: Takes a line now and then on what is being waited for.
        secret: What all nodes know and nobody else, for the mesh; by default
            ``DDPSAFE_DOCTOR_SECRET``. Without one, whoever reaches the endpoint may speak for a node.
        **fields: Fields of `LaunchConfig` that win over it: `nnodes`, `node_rank`, `rendezvous`,
            `backend`, `data_paths`, `run_dir`, …

    Returns:
        What was found. What is wrong with the machine is never raised.

    Raises:
        ConfigError: The arguments are wrong, or the mesh lacks the node's rank or the endpoint.
    """
    began = Deadline.after(timeout)
    say = on_progress or logger.debug
    resolved, findings = _resolve(config, fields)
    meets = (resolved.nnodes > 1 and checks != "launch") if mesh is None else mesh
    if meets:
        _require_meeting_point(resolved)
    subject = Subject(
        config=resolved,
        env=environment_of(resolved),
        nproc=_nproc(resolved),
        at_launch=checks == "launch",
        deadline=began,
    )
    findings += examine_host(subject, checks, on_progress=say)
    matrix = None
    if meets:
        known = os.environ.get("DDPSAFE_DOCTOR_SECRET", "") if secret is None else secret
        between, matrix = _examine_mesh(resolved, subject.backend, timeout, say, known)
        findings += between
    return _report(findings, matrix, subject.env, began)


def examine_nodes(
    store: Store,
    config: LaunchConfig,
    *,
    nnodes: int,
    node_rank: int,
    endpoint: str,
    backend: str,
    timeout: timedelta,
) -> Report:
    """Examine the connections between nodes whose ranks have met already, and nothing else.

    Args:
        store: Where they have met, with keys that nothing else uses.
        config: What the job asks for.
        nnodes: How many nodes there are.
        node_rank: Which of them this is.
        endpoint: Where the store is.
        backend: The backend of the job, "auto" decided.
        timeout: How long to wait for nodes that have not come.

    Returns:
        What was found, the same on every node but for its host name.
    """
    from ddpsafe.doctor._fingerprint import fingerprint
    from ddpsafe.doctor._mesh import examine_at_store

    began = Deadline.after(timeout)
    findings, matrix = examine_at_store(
        store,
        nnodes=nnodes,
        node_rank=node_rank,
        endpoint=endpoint,
        interface=config.rendezvous.interface,
        backend=backend,
        timeout=timeout,
        local=fingerprint(config),
        on_progress=logger.debug,
        places=_places(config),
    )
    return _report(findings, matrix, environment_of(config), began)


def _report(
    findings: list[Finding], matrix: Matrix | None, env: Mapping[str, str], began: Deadline
) -> Report:
    mask = Mask.of(env)
    return Report(
        findings=worst_first([masked(finding, mask) for finding in findings]),
        hostname=socket.gethostname(),
        matrix=matrix,
        took_s=began.waited_s(),
    )


def _resolve(
    config: LaunchConfig | None, fields: LaunchFields
) -> tuple[LaunchConfig, list[Finding]]:
    try:
        return LaunchConfig.resolve(config, **fields), []
    except ConfigError as error:
        if config is not None or fields:
            raise
        return LaunchConfig.model_construct(), [_unreadable(error)]


def _unreadable(error: ConfigError) -> Finding:
    first, *others = error.problems
    return failed(
        "DS-ENV-007",
        f"The configuration cannot be read: {' '.join(str(first).split())}",
        cause="a DDPSAFE_* variable or [tool.ddpsafe] in the pyproject.toml of this directory.",
        fix="Correct it as said above"
        + (f", and {len(others)} more: `ddpsafe config` lists them all." if others else "."),
        problems=[str(problem) for problem in error.problems],
    )


def _nproc(config: LaunchConfig) -> int:
    asked = config.nproc_per_node
    if isinstance(asked, int):
        return asked
    return (0 if asked == "cpu" else count_device_nodes()) or count_cores()


def _places(config: LaunchConfig) -> dict[str, Place]:
    return {name: find_place(config, name) for name in config.env}


def _require_meeting_point(config: LaunchConfig) -> None:
    missing = [
        name
        for name, value in (
            ("rendezvous.endpoint", config.rendezvous.endpoint),
            ("node_rank", config.node_rank),
        )
        if value is None
    ]
    if missing:
        what = f"The check between {config.nnodes} nodes lacks {' and '.join(missing)}."
        cause = "no launcher says it here, and every node has to be told."
        fix = "ddpsafe doctor --nnodes N --node-rank I --rdzv-endpoint HOST:PORT on each node I."
        raise ConfigError(Explanation(what, cause=cause, fix=fix))


def _examine_mesh(
    config: LaunchConfig, backend: str, timeout: timedelta, say: Callable[[str], None], secret: str
) -> tuple[list[Finding], Matrix]:
    from ddpsafe.doctor._fingerprint import fingerprint
    from ddpsafe.doctor._mesh import examine

    return examine(
        nnodes=config.nnodes,
        node_rank=config.node_rank or 0,
        endpoint=config.rendezvous.endpoint or "",
        interface=config.rendezvous.interface,
        backend=backend,
        timeout=timeout,
        local=fingerprint(config),
        on_progress=say,
        secret=secret,
        places=_places(config),
    )
