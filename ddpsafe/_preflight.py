"""The preflight of a launch: what the doctor would say, before any process starts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from ddpsafe._config import LaunchConfig
from ddpsafe._errors import ConfigError, PreflightError

if TYPE_CHECKING:
    from ddpsafe._world import World
    from ddpsafe.doctor import Finding, Report

logger = logging.getLogger(__name__)

_LAST_PORT: Final = 65535


def require_ready_host(config: LaunchConfig, *, nproc: int, backend: str) -> None:
    """Examine this host before a launch starts its ranks.

    Args:
        config: What was asked for; its `preflight` says how much is looked at.
        nproc: Ranks that will be started.
        backend: Backend they will use, "auto" decided.

    Raises:
        PreflightError: Something was found that will break the launch.
    """
    if config.preflight == "off":
        return
    from ddpsafe import doctor

    asked = LaunchConfig.resolve(config, nproc_per_node=nproc, backend=backend)
    checks = "launch" if config.preflight == "local" else "all"
    _judge(doctor.run(asked, checks=checks, mesh=False), speaks=True)


def require_ready_nodes(config: LaunchConfig, world: World, endpoint: str | None) -> None:
    """Examine this host, and with ``preflight="full"`` its way to the other nodes, in a rank.

    Every rank does the cheap checks, so that all of them fail; what takes longer, or talks to the
    other nodes, is done by the first rank of each node.

    Args:
        config: What was asked for.
        world: This rank's place.
        endpoint: Where the ranks will meet, host and port; the nodes meet one port above.

    Raises:
        PreflightError: Something was found that will break the job.
    """
    if config.preflight == "off":
        return
    from ddpsafe import doctor

    asked = LaunchConfig.resolve(config, nproc_per_node=world.local_world_size)
    is_first = world.local_rank == 0
    _judge(doctor.run(asked, checks="launch", mesh=False), speaks=is_first)
    if config.preflight != "full" or not is_first:
        return
    if world.nnodes > 1 and endpoint is not None:
        asked = LaunchConfig.resolve(
            asked,
            nnodes=world.nnodes,
            node_rank=world.node_rank,
            rendezvous={"endpoint": next_port(endpoint)},
        )
    _judge(doctor.run(asked), speaks=True)


def next_port(endpoint: str) -> str:
    """Return an endpoint one port above: the job's own store may serve the one itself.

    Raises:
        ConfigError: There is no port above.
    """
    host, _, port = endpoint.rpartition(":")
    if int(port) >= _LAST_PORT:
        message = f"The nodes meet one port above {endpoint} to examine each other; there is none."
        raise ConfigError(message)
    return f"{host}:{int(port) + 1}"


def _judge(report: Report, *, speaks: bool) -> None:
    for finding in report.warnings if speaks else ():
        logger.warning("%s", _in_one_line(finding))
    if report.failed:
        raise PreflightError(_message(report), report=report)


def _in_one_line(finding: Finding) -> str:
    fix = " ".join(finding.fix.split())
    return f"{finding.code}: {finding.fact} What to do: {fix} ({finding.page})"


def _message(report: Report) -> str:
    count = len(report.failed)
    problems = "1 problem" if count == 1 else f"{count} problems"
    what = f"{report.hostname} is not ready for this launch: {problems}; nothing was started."
    return "\n".join([what, *(finding.as_text() for finding in report.failed)])
