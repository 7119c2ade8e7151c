"""Run the checks of this host and those between nodes, and return one report."""

from __future__ import annotations

import contextlib
import logging
import socket
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal, get_args

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._config import LaunchConfig
from ddpsafe._config.endpoint import split_endpoint
from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._gpus import count_device_nodes
from ddpsafe._host import count_cores
from ddpsafe._job.secret import find_job_secret
from ddpsafe._secrets import Mask
from ddpsafe.doctor._checks import all_checks, launch_checks
from ddpsafe.doctor._findings import AreaStep, Report, Severity, failed, masked, warning
from ddpsafe.doctor._subject import Subject, environment_of, find_place

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from typing_extensions import Unpack

    from ddpsafe._config import LaunchFields
    from ddpsafe._job.store_keys import Keys
    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._findings import Finding, Matrix
    from ddpsafe.doctor._mesh import Job


logger = logging.getLogger(__name__)

CHECK_LIMIT: Final = timedelta(seconds=10)
"""How long one check may take, unless it waits for torch."""

# These areas wait for the torch probe, whose import alone can exceed CHECK_LIMIT on slow storage:
# they have until the deadline of the examination.
_TORCH_AREAS: Final = frozenset({"GPU", "VER"})


def examine_host(
    subject: Subject, checks: str | Collection[str], *, on_progress: Callable[[str], None]
) -> list[Finding]:
    """Run the checks and return their findings, in the order of the checks.

    The checks are ``"all"``, ``"launch"``, or names of areas. `on_progress` is called with one line for each
    area.
    """
    chosen = launch_checks() if checks == "launch" else all_checks()
    if checks not in ("launch", "all"):
        wanted = {checks} if isinstance(checks, str) else set(checks)
        unknown = wanted - chosen.keys()
        if unknown:
            what = f"checks: there is no area {', '.join(sorted(unknown))}."
            fix = f'write "all", "launch", or a set of {", ".join(chosen)}.'
            raise ConfigError(Explanation(what, cause="a typo.", fix=fix))
        chosen = {area: members for area, members in chosen.items() if area in wanted}
    findings: list[Finding] = []
    with contextlib.ExitStack() as stack:
        if _TORCH_AREAS & chosen.keys() and not subject.at_launch:
            from ddpsafe.doctor._system.torch_probe import TorchProbe

            probe = stack.enter_context(contextlib.closing(TorchProbe(subject.env)))
            subject = replace(subject, probe=probe)
        for area, members in chosen.items():
            on_progress(AreaStep(f"checking {area}"))
            for check in members:
                limit = None if area in _TORCH_AREAS else CHECK_LIMIT
                findings += run_check(check, subject, limit=limit)
    return findings


def run_check(check: Check, subject: Subject, *, limit: timedelta | None) -> list[Finding]:
    """Run one check. A check that raises or hangs becomes a finding, and the others still run."""
    own = Deadline.after(limit).earlier(subject.deadline)
    findings: list[Finding] = []  # keeps what a check found before it got stuck
    call = BoundedCall(lambda: findings.extend(check(subject)), name=f"ddpsafe-{check.__name__}")
    # A second longer than the check's own deadline: its own finding says what it waited for.
    if not call.wait(own.remaining_s() + 1.0):
        return [*findings, _unfinished(check, f"has not returned after {own.waited_s():.1f} s")]
    try:
        call.result()
    except Exception as error:  # noqa: BLE001 - a failing check must not hide the other findings
        return [*findings, _unfinished(check, f"failed with {type(error).__name__}: {error}")]
    return findings


def _unfinished(check: Check, what: str) -> Finding:
    return warning(
        "DS-PROC-004",
        f"The check {check.__name__!r} {what}.",
        cause="this system gave the check an answer it does not know, or no answer at all.",
        fix="What it would have found is unknown; the other checks are not affected. "
        "Please report it with the output of `ddpsafe doctor --json`.",
        check=check.__name__,
    )


TIMEOUT: Final = timedelta(minutes=1)
"""How long the checks of the host may take by default, and again those between the nodes."""


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
        config: The job's configuration. Without one it is read from the environment and the
            configuration file, and an error in them becomes a finding.
        checks: ``"all"``, ``"launch"`` (the checks that every launch runs, within 100 ms), or names
            of areas, e.g. ``{"NET", "GPU"}``. An empty collection runs none.
        mesh: Whether to examine the connections between the nodes, which every node has to do at
            the same time. The default is yes with more than one node, unless `checks` is
            ``"launch"``.
        timeout: How long the checks of the host may take, and again those of the mesh.
        on_progress: Called from time to time with a line that says what the doctor waits for.
        secret: For the mesh: a secret that only the nodes of the job know, by default
            ``DDPSAFE_JOB_SECRET``. Without one, anyone who reaches the endpoint can pose as a node.
        **fields: Fields of `LaunchConfig` that override it: `nnodes`, `node_rank`, `rendezvous`,
            `backend`, `data_paths`, `run_dir`, …

    Returns:
        The findings. A problem of the machine is a finding and is never raised.

    Raises:
        ConfigError: The arguments are wrong, or the mesh lacks the node's rank or the endpoint.
    """
    began = Deadline.after(timeout)
    report_progress = on_progress or logger.debug
    resolved, findings = _resolve(config, fields)
    with_mesh = (resolved.nnodes > 1 and checks != "launch") if mesh is None else mesh
    if with_mesh:
        needed = {
            "rendezvous.endpoint": resolved.rendezvous.endpoint,
            "node_rank": resolved.node_rank,
        }
        missing = [name for name, value in needed.items() if value is None]
        if missing:
            what = f"The check between {resolved.nnodes} nodes needs {' and '.join(missing)}."
            cause = "no launcher sets it here, and every node needs it."
            fix = (
                "ddpsafe doctor --nnodes N --node-rank I --rdzv-endpoint HOST:PORT on each node I."
            )
            raise ConfigError(Explanation(what, cause=cause, fix=fix))
    nproc = resolved.nproc_per_node
    if not isinstance(nproc, int):
        # As the launch will count, but without torch, which may be broken.
        gpus = 0 if nproc == "cpu" else count_device_nodes()
        nproc = gpus or count_cores()
    subject = Subject(
        config=resolved,
        env=environment_of(resolved),
        nproc=nproc,
        at_launch=checks == "launch",
        deadline=began,
    )
    findings += examine_host(subject, checks, on_progress=report_progress)
    matrix = None
    if with_mesh:
        from ddpsafe.doctor._mesh import examine

        job = _job(
            resolved,
            nnodes=resolved.nnodes,
            node_rank=resolved.node_rank or 0,
            endpoint=resolved.rendezvous.endpoint or "",
            backend=subject.backend,
            timeout=timeout,
            on_progress=report_progress,
            secret=find_job_secret(resolved.rendezvous.secret_file) if secret is None else secret,
        )
        between, matrix = examine(job)
        findings += between
    return _report(findings, matrix, subject.env, began)


def examine_nodes(
    store: Keys,
    config: LaunchConfig,
    *,
    nnodes: int,
    node_rank: int,
    endpoint: str,
    backend: str,
    timeout: timedelta,
) -> Report:
    """Examine only the connections between nodes whose ranks share a store already.

    The store has a key prefix of its own, the endpoint (``host:port``) is where it listens, and "auto" is
    resolved in the backend. `timeout` is how long to wait for missing nodes. The report is the same on
    every node except for `hostname`.
    """
    from ddpsafe.doctor._mesh import examine_at_store

    began = Deadline.after(timeout)
    job = _job(
        config,
        nnodes=nnodes,
        node_rank=node_rank,
        endpoint=endpoint,
        backend=backend,
        timeout=timeout,
        on_progress=logger.debug,
    )
    findings, matrix = examine_at_store(job, store)
    return _report(findings, matrix, environment_of(config), began)


def _job(
    config: LaunchConfig,
    *,
    nnodes: int,
    node_rank: int,
    endpoint: str,
    backend: str,
    timeout: timedelta,
    on_progress: Callable[[str], None],
    secret: str = "",
) -> Job:
    from ddpsafe.doctor._fingerprint import fingerprint
    from ddpsafe.doctor._mesh import Job

    host, port = split_endpoint(endpoint)
    return Job(
        nnodes=nnodes,
        node_rank=node_rank,
        host=host,
        port=int(port),
        interface=config.rendezvous.interface,
        backend=backend,
        timeout=timeout,
        facts=fingerprint(config),
        on_progress=on_progress,
        secret=secret,
        places={name: find_place(config, name) for name in config.env},
    )


def _report(
    findings: list[Finding], matrix: Matrix | None, env: Mapping[str, str], began: Deadline
) -> Report:
    mask = Mask.of(env)
    severities = get_args(Severity)
    worst_first = sorted(findings, key=lambda finding: severities.index(finding.severity))
    return Report(
        findings=tuple(masked(finding, mask) for finding in worst_first),
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
        first, *others = error.problems
        unreadable = failed(
            "DS-ENV-007",
            f"The configuration cannot be read: {' '.join(str(first).split())}",
            cause="a DDPSAFE_* variable or [tool.ddpsafe] in the pyproject.toml of this directory.",
            fix="Correct it as described above"
            + (f", and {len(others)} more: `ddpsafe config` lists them all." if others else "."),
            problems=[str(problem) for problem in error.problems],
        )
        # The defaults, so that the checks of the machine run all the same.
        return LaunchConfig.model_construct(), [unreadable]
