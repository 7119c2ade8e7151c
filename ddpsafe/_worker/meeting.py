"""Where ranks of another launcher meet, and how they make sure they are of one job."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import re
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import tenacity

from ddpsafe._errors import ConfigError, PreflightError, RendezvousTimeoutError, explain
from ddpsafe._world import require_int

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import Store

    from ddpsafe._clock import Deadline
    from ddpsafe._world import World

_PORTS: Final = range(20_000, 30_000)
_PROBE_S: Final = 2.0
_LONGEST_S: Final = 86_400.0
# What tells one job from another on the same address and port.
_JOB_VARIABLES: Final = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_orte_jobid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the store is.

    Attributes:
        host: Address or name.
        port: Port.
        is_served: Whether somebody else (torchrun's agent) serves it already.
    """

    host: str
    port: int
    is_served: bool

    def __str__(self) -> str:
        """Spell it host:port."""
        return f"{self.host}:{self.port}"


def find_endpoint(world: World, env: Mapping[str, str]) -> Endpoint:
    """Find where to meet: from MASTER_ADDR and MASTER_PORT, else from the launcher's variables.

    Raises:
        ConfigError: Nothing says where.
    """
    is_served = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = env.get("MASTER_ADDR") or _guess_host(world, env)
    if env.get("MASTER_PORT"):
        port = require_int(env, "MASTER_PORT", because="MASTER_ADDR")
    else:
        port = _guess_port(world, env)
    if not 0 < port < 1 << 16:
        what = f"MASTER_PORT={port} is not a port."
        cause = "a typing error; ports end at 65535."
        raise ConfigError(explain(what, cause=cause, fix="use a free port from 1024 to 65535."))
    return Endpoint(host=host, port=port, is_served=is_served)


def _guess_host(world: World, env: Mapping[str, str]) -> str:
    if world.started_by == "slurm" and "SLURM_STEP_NODELIST" in env:
        return _first_host(env["SLURM_STEP_NODELIST"])
    if world.local_world_size == world.world_size:
        return "127.0.0.1"
    what = f"MASTER_ADDR is not set, and {world} spans {world.nnodes} nodes."
    cause = f"{world.started_by} does not say where rank 0 runs."
    fix = "export MASTER_ADDR=<host of rank 0> and MASTER_PORT=<a free port there>."
    raise ConfigError(explain(what, cause=cause, fix=fix))


def _first_host(nodelist: str) -> str:
    """Return the first host of ``n[01-03,7],m5``, as ``scontrol show hostnames`` lists it."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodelist)
    if match is None:
        return nodelist
    prefix, first, suffix = match.groups()
    return f"{prefix}{first or ''}{suffix or ''}"


def _guess_port(world: World, env: Mapping[str, str]) -> int:
    """Derive a port that all ranks of the job agree on and other jobs hardly share."""
    job = _identity(env)
    if not job:
        what = f"MASTER_PORT is not set ({world}, started by {world.started_by})."
        cause = "RANK and WORLD_SIZE are set by hand, MASTER_PORT was forgotten."
        fix = "export MASTER_PORT=<a free port on the host of rank 0>, the same for all ranks."
        raise ConfigError(explain(what, cause=cause, fix=fix))
    digest = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).digest()
    return _PORTS[int.from_bytes(digest[:4], "big") % len(_PORTS)]


def _identity(env: Mapping[str, str]) -> dict[str, str]:
    """Collect what all ranks of one job share, and ranks of another job do not."""
    known = {name: env[name] for name in _JOB_VARIABLES if name in env}
    run_id = env.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        known["TORCHELASTIC_RUN_ID"] = run_id
    parent = multiprocessing.parent_process()
    if parent is not None:
        known[f"parent process on {socket.gethostname()} {_pid_namespace()}"] = str(parent.pid)
    return known


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def open_stores(
    endpoint: Endpoint, world: World, env: Mapping[str, str], *, deadline: Deadline
) -> tuple[Store, Store]:
    """Connect to the job's store, serving it where this is rank 0's task.

    Args:
        endpoint: Where.
        world: This rank's place.
        env: The environment.
        deadline: When to give up.

    Returns:
        Two connections with keys that no earlier group of this job has used: one for the process
        group, one for the talk between ranks, which must not wait for each other.

    Raises:
        PreflightError: The port is taken, or the host cannot be reached or resolved.
        RendezvousTimeoutError: Nobody serves the store.
        ConfigError: The store is another job's.
    """
    from torch.distributed import PrefixStore

    serves = world.rank == 0 and not endpoint.is_served
    if not serves:
        _await_server(endpoint, world, deadline)
    prefix = _fresh_prefix(env)
    group = PrefixStore(prefix, _connect(endpoint, world, deadline, serves=serves))
    require_same_job(group, endpoint, world, env, deadline=deadline)
    control = PrefixStore(prefix, _connect(endpoint, world, deadline, serves=False))
    return group, control


def _connect(endpoint: Endpoint, world: World, deadline: Deadline, *, serves: bool) -> Store:
    from torch.distributed import TCPStore

    try:
        return TCPStore(
            endpoint.host,
            endpoint.port,
            is_master=serves,
            timeout=timedelta(seconds=max(1.0, min(deadline.remaining_s(), _LONGEST_S))),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as exc:
        raise _cannot_serve(endpoint, world, exc) from exc


_groups = itertools.count()


def _fresh_prefix(env: Mapping[str, str]) -> str:
    """Name keys that no restart before this one and no group before this one has used.

    torchrun's agent keeps one store for all restarts, and its keys survive them.
    """
    restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"ddpsafe/restart-{restart}/group-{next(_groups)}"


def _await_server(endpoint: Endpoint, world: World, deadline: Deadline) -> None:
    """Connect with a plain socket first: torch's client takes 8 s to report a closed port."""
    last: list[OSError] = []

    def probe() -> None:
        try:
            wait_s = max(0.05, min(_PROBE_S, deadline.remaining_s()))
            socket.create_connection((endpoint.host, endpoint.port), timeout=wait_s).close()
        except OSError as exc:
            last.append(exc)
            raise

    retrying = tenacity.Retrying(
        stop=lambda _: deadline.expired(),
        wait=tenacity.wait_exponential(multiplier=0.02, max=0.5),
        retry=tenacity.retry_if_exception_type(OSError),
        reraise=True,
    )
    try:
        retrying(probe)
    except OSError as exc:
        raise _nobody_serves(endpoint, world, last[-1], deadline) from exc


def _nobody_serves(
    endpoint: Endpoint, world: World, exc: OSError, deadline: Deadline
) -> RendezvousTimeoutError:
    waited_s = deadline.waited_s()
    what = f"{world} found no store at {endpoint} within {waited_s:.1f} s: {exc}."
    cause = "rank 0 has not started or died; or MASTER_ADDR or MASTER_PORT names another place."
    if isinstance(exc, socket.gaierror):
        cause = f"the name {endpoint.host} does not resolve on {socket.gethostname()}."
    elif isinstance(exc, TimeoutError):
        cause = f"a firewall drops what this host sends to {endpoint}, or the host is down."
    fix = f"check rank 0's log, then, from {socket.gethostname()}: nc -vz {endpoint.host} "
    fix += f"{endpoint.port}"
    return RendezvousTimeoutError(
        explain(what, cause=cause, fix=fix),
        waited_s=waited_s,
        missing_ranks=[0],
        kind="startup-network",
    )


def _cannot_serve(endpoint: Endpoint, world: World, exc: RuntimeError) -> PreflightError:
    if "EADDRINUSE" in str(exc) or "Address already in use" in str(exc):
        what = f"{world} cannot serve the store at {endpoint}: the port is taken{_owner(endpoint)}."
        cause = "another job on this host uses the same MASTER_PORT, or a former one still runs."
        fix = "choose another MASTER_PORT for this job, or end the process that holds it."
        return PreflightError(explain(what, cause=cause, fix=fix), kind="port")
    what = f"{world} cannot open the store at {endpoint}: {str(exc).splitlines()[0]}"
    cause = "MASTER_ADDR is no address of this host, or its name resolves to another one."
    fix = "set MASTER_ADDR to an address of the host on which rank 0 runs (see `ip addr`)."
    return PreflightError(explain(what, cause=cause, fix=fix), kind="startup-network")


def _owner(endpoint: Endpoint) -> str:
    """Name the process that listens on a port, where we may see it."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and endpoint.port in connection.laddr:
                name = psutil.Process(connection.pid).name() if connection.pid else "?"
                return f" by {name} (pid {connection.pid})"
    except psutil.Error:
        pass
    return ""


def require_same_job(
    store: Store, endpoint: Endpoint, world: World, env: Mapping[str, str], *, deadline: Deadline
) -> None:
    """Make sure that the ranks that meet here are of one job, each of them once.

    Two jobs on one hard-coded port otherwise join each other and reduce each other's gradients
    (measured on hand-written scripts: 4 of 8 simultaneous starts).

    Raises:
        ConfigError: The store belongs to another job, or somebody has this rank already.
        RendezvousTimeoutError: Rank 0 has not said who it is.
    """
    mine = _identity(env)
    if world.rank == 0:
        store.set("job", json.dumps(mine))
    theirs = _read_job(store, endpoint, world, deadline)
    differing = [name for name in mine if name in theirs and mine[name] != theirs[name]]
    same_kind = {name.split(" on ")[0] for name in mine} & {n.split(" on ")[0] for n in theirs}
    if differing or (mine and theirs and not same_kind):
        raise _another_job(endpoint, world, f"{differing or sorted(theirs)}")
    if store.add(f"claim/{world.rank}", 1) != 1:
        raise _another_job(endpoint, world, f"rank {world.rank} has joined there already")


def _read_job(store: Store, endpoint: Endpoint, world: World, deadline: Deadline) -> dict[str, str]:
    from ddpsafe._worker.control import Control

    control = Control(store, rank=world.rank, world_size=world.world_size)
    if not control.wait_for(["job"], deadline=deadline):
        silent = ConnectionError("it answers, but rank 0 does not speak ddpsafe there")
        raise _nobody_serves(endpoint, world, silent, deadline)
    known: dict[str, str] = json.loads(store.get("job"))
    return known


def _another_job(endpoint: Endpoint, world: World, evidence: str) -> ConfigError:
    what = f"{world} reached the store of another job at {endpoint} ({evidence})."
    cause = "two jobs use the same MASTER_ADDR and MASTER_PORT; they would mix their gradients."
    fix = "give each job its own MASTER_PORT, or let ddpsafe.launch or spawn choose it."
    return ConfigError(explain(what, cause=cause, fix=fix))
