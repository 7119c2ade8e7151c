"""Where the ranks of another launcher meet, and whether the store there belongs to their job."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import multiprocessing
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._host import plain_host, show_endpoint
from ddpsafe._job.secret import find_job_secret
from ddpsafe._secrets import JOB_SECRET
from ddpsafe._world import expand_hosts, job_variables, require_int, trimmed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe._job.store_keys import Keys
    from ddpsafe._world import World


def job_secret() -> bytes | None:
    """Return the secret of this job's ranks, if they were given one.

    Raises:
        ConfigError: It can be guessed.
    """
    # Never derived from the job's identifiers, which other users of a cluster can read.
    text = find_job_secret()
    return hashlib.sha256(text.encode()).digest() if text else None


def fingerprint_of(secret: bytes | None) -> str:
    """Return a public text that differs for every secret, and for none."""
    if secret is None:
        return "none"
    return hmac.new(secret, b"ddpsafe fingerprint", "sha256").hexdigest()[:16]


def require_same_secret(theirs: str, secret: bytes | None, place: str, world: World) -> None:
    """Check that rank 0 has the same secret as this rank.

    Raises:
        ConfigError: Rank 0 has another secret, or only one of the two ranks has one.
    """
    if theirs == fingerprint_of(secret):
        return
    mine = "has none" if secret is None else "has one"
    other = (
        "has none" if theirs == fingerprint_of(None) else "has another one" if secret else "has one"
    )
    what = f"{JOB_SECRET}: {world} on {socket.gethostname()} {mine}, and rank 0 at {place} {other}."
    cause = "the variable did not reach every rank; or rank 0 there belongs to another job."
    fix = f"give all ranks of the job the same {JOB_SECRET}; srun --export=ALL and mpirun -x pass it on."
    raise ConfigError(Explanation(what, cause=cause, fix=fix))


def identity_of(env: Mapping[str, str]) -> dict[str, list[str]]:
    """Collect identifiers that all ranks of a job share, and other jobs do not.

    Each has the scope in which it can be compared (empty for everywhere) and its value.
    """
    identifiers = {name: ["", value] for name, value in job_variables(env).items()}
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A pid means one process only on one host, and in one namespace of pids.
        pid_namespace = ""
        with contextlib.suppress(OSError):
            pid_namespace = str(Path("/proc/self/ns/pid").readlink())
        identifiers["parent process"] = [f"{socket.gethostname()} {pid_namespace}", str(parent.pid)]
    return identifiers


def publish_job(store: Keys, env: Mapping[str, str]) -> None:
    """Publish, as rank 0, which job this is."""
    store.set("job", json.dumps(identity_of(env)))


def require_same_job(store: Keys, place: str, world: World, env: Mapping[str, str]) -> None:
    """Refuse the store of another job, and a rank that is already taken.

    Raises:
        ConfigError: The store belongs to another job, or the rank is taken.
    """
    mine = identity_of(env)
    theirs: dict[str, list[str]] = json.loads(store.get("job"))
    shared = mine.keys() & theirs.keys()
    differing = [
        name
        for name in sorted(shared)
        if mine[name][0] == theirs[name][0] and mine[name][1] != theirs[name][1]
    ]
    # Two jobs with the same hard-coded port would join each other and mix their gradients (measured
    # with hand-written scripts: 4 of 8 simultaneous starts).
    if differing or (mine and theirs and not shared):
        raise _another_job(place, world, ", ".join(differing or sorted(theirs)) + " differs")
    # Ranks that were started by hand have no identifiers: their second job is noticed when it takes
    # a rank again.
    claim = secrets.token_hex(16)
    if store.compare_set(f"claim/{world.rank}", "", claim) != claim.encode():
        raise _another_job(place, world, f"rank {world.rank} has joined there already")


def _another_job(place: str, world: World, evidence: str) -> ConfigError:
    what = f"{world} reached the store of another job at {place} ({evidence})."
    cause = "two jobs use the same MASTER_ADDR and MASTER_PORT; they would mix their gradients."
    fix = "give each job its own MASTER_PORT, or let ddpsafe.launch or spawn choose it."
    return ConfigError(Explanation(what, cause=cause, fix=fix))


_PORTS: Final = range(20_000, 30_000)
_MASTER: Final = ("MASTER_ADDR", "MASTER_PORT")
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEndpoint:
    """Where the store is.

    Attributes:
        is_served: Whether another process (torchrun's agent) serves it already.
        is_on_this_host: Whether all ranks are certainly on this host, according to the launcher or
            because the address is loopback.
    """

    host: str
    port: int
    is_served: bool
    is_on_this_host: bool

    def __str__(self) -> str:
        return show_endpoint(self.host, self.port)


def find_endpoint(world: World, env: Mapping[str, str]) -> StoreEndpoint:
    """Find where the ranks meet: from MASTER_ADDR and MASTER_PORT, else from the launcher's variables.

    Raises:
        ConfigError: Neither defines the place, or a variable has an impossible value.
    """
    env = trimmed(env)
    is_served = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # A pod with one rank may have only torchrun's own variables.
    env = {
        **env,
        **{
            name: env[f"PET_{name}"]
            for name in _MASTER
            if not env.get(name) and env.get(f"PET_{name}")
        },
    }
    host = plain_host(env.get("MASTER_ADDR", ""))
    if not host and world.started_by == "slurm" and "SLURM_STEP_NODELIST" in env:
        try:
            host = expand_hosts(env["SLURM_STEP_NODELIST"])[0]
        except ValueError as exc:
            what = f"SLURM_STEP_NODELIST does not say where rank 0 runs: {exc}."
            fix = "export MASTER_ADDR=<host of rank 0> and MASTER_PORT=<a free port there>."
            cause = "the variable was changed by hand."
            raise ConfigError(Explanation(what, cause=cause, fix=fix)) from exc
    elif not host and world.local_world_size == world.world_size:
        host = "127.0.0.1"
    elif not host:
        what = f"MASTER_ADDR is not set, and {world} spans {world.nnodes} nodes."
        cause = f"{world.started_by} does not say where rank 0 runs."
        fix = "export MASTER_ADDR=<host of rank 0> and MASTER_PORT=<a free port there>."
        raise ConfigError(Explanation(what, cause=cause, fix=fix))
    if env.get("MASTER_PORT"):
        port = require_int(env, "MASTER_PORT", because="MASTER_ADDR")
    else:  # all ranks of the job derive the same port, and other jobs most likely another one
        job = identity_of(env)
        if not job:
            what = f"MASTER_PORT is not set ({world}, started by {world.started_by})."
            cause = "RANK and WORLD_SIZE were set by hand, but MASTER_PORT was not."
            fix = "export MASTER_PORT=<a free port on the host of rank 0>, the same for all ranks."
            raise ConfigError(Explanation(what, cause=cause, fix=fix))
        digest = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).digest()
        port = _PORTS[int.from_bytes(digest[:4], "big") % len(_PORTS)]
    if not 0 < port < 1 << 16:
        what = f"MASTER_PORT={port} is not a port."
        cause = "a typo; the highest port is 65535."
        raise ConfigError(Explanation(what, cause=cause, fix="use a free port from 1024 to 65535."))
    # RANK and WORLD_SIZE set by hand do not prove that all ranks are on this host.
    is_one_node = world.nnodes == 1 and world.started_by != "environment"
    return StoreEndpoint(
        host=host, port=port, is_served=is_served, is_on_this_host=is_one_node or host in _LOOPBACK
    )
