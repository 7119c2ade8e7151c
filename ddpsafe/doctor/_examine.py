"""`run` and `examine_nodes`: all checks of this host, those between several nodes, in one report."""

from __future__ import annotations

import contextlib
import logging
import socket
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._config import LaunchConfig
from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._host import count_cores
from ddpsafe._secrets import DOCTOR_SECRET, Mask, find_own_secret
from ddpsafe.doctor._checks import all_checks, launch_checks
from ddpsafe.doctor._findings import AreaStep, Report, failed, masked, warning, worst_first
from ddpsafe.doctor._subject import Subject, environment_of, find_place
from ddpsafe.doctor._system.nvidia import count_device_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from typing_extensions import Unpack

    from ddpsafe._config import LaunchFields
    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._findings import Finding, Matrix
    from ddpsafe.doctor._mesh.transport import Store
    from ddpsafe.doctor._subject import VariableSource


logger = logging.getLogger(__name__)

LIMIT: Final = timedelta(seconds=10)
"""How long one check may take; one that waits for torch has until the end of the examination."""

_ASKS_TORCH: Final = frozenset({"GPU", "VER"})


def examine_host(
    subject: Subject, checks: str | Collection[str], *, on_progress: Callable[[str], None]
) -> list[Finding]:
    """Do the checks and return what they found, in their order.

    Args:
        subject: What to look at.
        checks: ``"all"``, ``"launch"``, or names of areas.
        on_progress: Takes a line for each area.
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
    with _torch_asked(
        subject, wanted=bool(_ASKS_TORCH & chosen.keys()) and not subject.at_launch
    ) as asked:
        for area, members in chosen.items():
            on_progress(AreaStep(f"checking {area}"))
            for check in members:
                findings += do_check(check, asked, patient=area in _ASKS_TORCH)
    return findings


@contextlib.contextmanager
def _torch_asked(subject: Subject, *, wanted: bool) -> Iterator[Subject]:
    if not wanted:
        yield subject
        return
    from ddpsafe.doctor._system.torch_probe import TorchProbe

    probe = TorchProbe(subject.env)
    try:
        yield replace(subject, probe=probe)
    finally:
        probe.close()


def do_check(check: Check, subject: Subject, *, patient: bool) -> list[Finding]:
    """Do one check; one that fails or does not come back is a finding, not the end."""
    own = Deadline.after(None if patient else LIMIT).earlier(subject.deadline)
    found: list[Finding] = []  # what it said before it stuck counts
    call = BoundedCall(lambda: found.extend(check(subject)), name=f"ddpsafe-{check.__name__}")
    # A moment longer than the check's own deadline: it knows better what it waited for.
    if not call.wait(own.remaining_s() + 1.0):
        return [*found, _unfinished(check, f"has not come back after {own.waited_s():.1f} s")]
    try:
        call.result()
    except Exception as error:  # noqa: BLE001 - a check that fails must not hide what others find
        return [*found, _unfinished(check, f"failed with {type(error).__name__}: {error}")]
    return found


def _unfinished(check: Check, what: str) -> Finding:
    return warning(
        "DS-PROC-004",
        f"The check {check.__name__!r} {what}.",
        cause="this system answers in a way that the check does not know, or does not answer.",
        fix="What it would have found is unknown; the other checks are not concerned. "
        "Please report it with the output of `ddpsafe doctor --json`.",
        check=check.__name__,
    )


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
        secret: What only the nodes of the job know, for the mesh; by default
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
        missing = [
            name
            for name, value in (
                ("rendezvous.endpoint", resolved.rendezvous.endpoint),
                ("node_rank", resolved.node_rank),
            )
            if value is None
        ]
        if missing:
            what = f"The check between {resolved.nnodes} nodes lacks {' and '.join(missing)}."
            cause = "no launcher says it here, and every node has to be told."
            fix = (
                "ddpsafe doctor --nnodes N --node-rank I --rdzv-endpoint HOST:PORT on each node I."
            )
            raise ConfigError(Explanation(what, cause=cause, fix=fix))
    asked = resolved.nproc_per_node
    nproc = asked if isinstance(asked, int) else 0 if asked == "cpu" else count_device_nodes()
    nproc = nproc or count_cores()
    subject = Subject(
        config=resolved,
        env=environment_of(resolved),
        nproc=nproc,
        at_launch=checks == "launch",
        deadline=began,
    )
    findings += examine_host(subject, checks, on_progress=say)
    matrix = None
    if meets:
        from ddpsafe.doctor._fingerprint import fingerprint
        from ddpsafe.doctor._mesh import examine

        known = find_own_secret(DOCTOR_SECRET) if secret is None else secret
        between, matrix = examine(
            nnodes=resolved.nnodes,
            node_rank=resolved.node_rank or 0,
            endpoint=resolved.rendezvous.endpoint or "",
            interface=resolved.rendezvous.interface,
            backend=subject.backend,
            timeout=timeout,
            local=fingerprint(resolved),
            on_progress=say,
            secret=known,
            places=_places(resolved),
        )
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


def _places(config: LaunchConfig) -> dict[str, VariableSource]:
    return {name: find_place(config, name) for name in config.env}
