"""The store where ranks of another launcher meet: connect in bounded time, or explain why not."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

import tenacity

from ddpsafe._advice import ADVICE
from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._errors import Explanation, PreflightError, RendezvousTimeoutError
from ddpsafe._host import listener_text, look_up, open_server, open_tcp_store, serves_by_libuv
from ddpsafe._job.agreement import Absence
from ddpsafe._job.control import Control
from ddpsafe._job.store_keys import SignedKeys
from ddpsafe._worker.join.store_endpoint import (
    fingerprint_of,
    job_secret,
    publish_job,
    require_same_job,
    require_same_secret,
)
from ddpsafe._worker.process_group import absence_error
from ddpsafe._worker.rank import this_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import Store, TCPStore

    from ddpsafe._errors import FailureKind
    from ddpsafe._job.store_keys import Keys
    from ddpsafe._worker.join.store_endpoint import StoreEndpoint
    from ddpsafe._world import World


def agree_on_generation(store: Keys, world: World, *, deadline: Deadline) -> tuple[str, list[int]]:
    """Agree on a name for this generation of ranks.

    The store may still hold keys of earlier generations. Returns the name, new in this store, and the ranks
    that did not join: on rank 0 all that it misses, on the others rank 0.
    """
    if world.rank == 0:
        # Answer greetings until every rank has seen this generation's name. A greeting may be left
        # from a dead rank, which has seen only the name of its own generation.
        name = uuid.uuid4().hex
        outside = set(range(1, world.world_size))
        answered: set[str] = set()
        for pause_s in deadline.pauses_s():
            for rank in sorted(outside):
                greeting = _read(store, f"hello/{rank}")
                if greeting is None:
                    continue
                if greeting not in answered:
                    answered.add(greeting)
                    store.set(f"welcome/{greeting}", name)
                elif _read(store, f"seen/{greeting}") == name:
                    outside.remove(rank)
            if not outside:
                break
            time.sleep(pause_s)
        return name, sorted(outside)
    greeting = uuid.uuid4().hex
    store.set(f"hello/{world.rank}", greeting)
    control = Control(store, rank=world.rank, world_size=world.world_size)
    if not control.wait_for(f"welcome/{greeting}", deadline=deadline):
        return "", [0]
    name = store.get(f"welcome/{greeting}").decode()
    store.set(f"seen/{greeting}", name)
    return name, []


def _read(store: Keys, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


_CONNECT_S: Final = 2.0
_MAX_STORE_TIMEOUT_S: Final = 86_400.0  # a deadline may be infinite, a timedelta not
# A pod's or a node's name may appear in DNS a little later than the pod itself.
_DNS_RETRY: Final = timedelta(seconds=10)

_FINGERPRINT: Final = "ddpsafe/secret"


class Stores(NamedTuple):
    """The job's store, with keys that no earlier group of this job has used.

    Attributes:
        group: For torch's process group.
        node_keys: For the examination of the connections between the nodes.
    """

    group: Store
    control: Control
    node_keys: Keys


def open_stores(
    endpoint: StoreEndpoint, world: World, env: Mapping[str, str], *, deadline: Deadline
) -> Stores:
    """Connect to the job's store; rank 0 serves it unless the launcher does.

    Raises:
        PreflightError: The port is taken, or the host cannot be reached or resolved.
        RendezvousTimeoutError: No store is served there in time.
        ConfigError: The store belongs to another job, or its rank 0 has another secret.
    """
    from torch.distributed import DistError, PrefixStore

    secret = job_secret()
    require_name(endpoint, world, deadline=Deadline.after(_DNS_RETRY).earlier(deadline))
    serves = world.rank == 0 and not endpoint.is_served
    group_client = _connection(endpoint, world, deadline, serves=serves, line=0)
    control_client = _connection(endpoint, world, deadline, serves=False, line=1)
    try:
        prefix, control = _agree(endpoint, control_client, world, env, secret, deadline)
    except DistError as exc:  # a job that ends now takes its store with it
        raise _not_served(endpoint, world, "its store has ended", deadline) from exc
    return Stores(
        group=PrefixStore(prefix, group_client),
        control=control,
        node_keys=_keys(group_client, f"{prefix}/preflight", secret),
    )


def _agree(
    endpoint: StoreEndpoint,
    control_client: TCPStore,
    world: World,
    env: Mapping[str, str],
    secret: bytes | None,
    deadline: Deadline,
) -> tuple[str, Control]:
    """Check that the store is this job's; return the prefix of its keys, and the control line."""
    # Compare the secrets first: with another one, a rank would reject every message until the deadline.
    if world.rank == 0:
        control_client.set(_FINGERPRINT, fingerprint_of(secret))
    else:
        plain = Control(control_client, rank=world.rank, world_size=world.world_size)
        if not plain.wait_for(_FINGERPRINT, deadline=deadline):
            raise _not_served(endpoint, world, "rank 0 has not written to it", deadline)
        theirs = control_client.get(_FINGERPRINT).decode(errors="replace")
        require_same_secret(theirs, secret, str(endpoint), world)
    # A generation distinguishes this start of the ranks from earlier ones at the same store.
    if not endpoint.is_served and secret is None:
        # The store is as new as rank 0. With a secret, this is not enough: values that were signed
        # earlier may be replayed.
        generation = "group"
    else:
        if endpoint not in this_rank.generations:
            keys = _keys(control_client, "ddpsafe/generation", secret)
            name, missing = agree_on_generation(keys, world, deadline=deadline)
            if missing:
                raise absence_error(world, Absence(ranks=missing, waited_s=deadline.waited_s()))
            this_rank.generations[endpoint] = name
        generation = this_rank.generations[endpoint]
    prefix = f"ddpsafe/{generation}/{next(this_rank.groups)}"
    control = Control(
        _keys(control_client, prefix, secret),
        rank=world.rank,
        world_size=world.world_size,
        served_by_rank_zero=not endpoint.is_served,
    )
    if world.rank == 0:
        publish_job(control.store, env)
    elif not control.wait_for("job", deadline=deadline):
        raise _not_served(endpoint, world, "rank 0 has not written to it", deadline)
    require_same_job(control.store, str(endpoint), world, env)
    return prefix, control


def _keys(client: TCPStore, prefix: str, secret: bytes | None) -> Keys:
    """Return the keys below a prefix, signed if the ranks have a secret."""
    from torch.distributed import PrefixStore

    plain = PrefixStore(prefix, client)
    return plain if secret is None else SignedKeys(plain, secret, prefix)


def has_met(endpoint: StoreEndpoint) -> bool:
    """Return whether this process has connected to the store there before."""
    return any(where == endpoint for where, _, _ in this_rank.stores)


def require_name(endpoint: StoreEndpoint, world: World, *, deadline: Deadline) -> None:
    """Wait until the host's name resolves.

    Raises:
        PreflightError: It does not resolve before the deadline.
    """
    retrying = tenacity.Retrying(
        stop=lambda _: deadline.expired(),
        wait=tenacity.wait_fixed(0.5),
        retry=tenacity.retry_if_exception_type(OSError),
        reraise=True,
    )
    # A resolver whose server does not answer may hang for ever.
    lookup = BoundedCall(
        lambda: retrying(look_up, endpoint.host, endpoint.port), name="ddpsafe-resolve"
    )
    # Longer than the tries, so that the last one's error is reported.
    if not lookup.wait(deadline.remaining_s() + 1.0):
        raise _unresolved(endpoint, world, "no name server answers", deadline)
    try:
        lookup.result()
    except (OSError, UnicodeError) as exc:
        raise _unresolved(endpoint, world, str(exc), deadline) from exc


def _connection(
    endpoint: StoreEndpoint, world: World, deadline: Deadline, *, serves: bool, line: int
) -> TCPStore:
    key = (endpoint, world.world_size, line)
    # It stays for the life of the process: a second group on the same port would otherwise race
    # with the end of the first one's server.
    if key not in this_rank.stores:
        if not serves:
            # Try a plain socket first: torch's client takes 8 s to report a closed port.
            retrying = tenacity.Retrying(
                stop=lambda _: deadline.expired(),
                wait=tenacity.wait_exponential(multiplier=0.02, max=0.5),
                retry=tenacity.retry_if_exception_type(OSError),
                reraise=True,
            )
            try:
                retrying(_probe, endpoint, deadline)
            except TimeoutError as exc:
                dropped = f"a firewall drops what is sent to {endpoint}, or the host is down"
                raise _not_served(endpoint, world, dropped, deadline) from exc
            except OSError as exc:
                raise _not_served(endpoint, world, str(exc.strerror or exc), deadline) from exc
        this_rank.stores[key] = _connect(endpoint, world, deadline, serves=serves)
    return this_rank.stores[key]


def _connect(
    endpoint: StoreEndpoint, world: World, deadline: Deadline, *, serves: bool
) -> TCPStore:
    """Open the store in bounded time."""
    timeout = timedelta(seconds=max(1.0, min(deadline.remaining_s(), _MAX_STORE_TIMEOUT_S)))
    with _listen(endpoint, world) if serves else contextlib.nullcontext() as listener:
        # A copy, since torch closes the socket that it is given, maybe later than it fails.
        server_socket = None if listener is None else listener.dup()
        # torch's handshake with an unknown program has no timeout.
        making = BoundedCall(
            lambda: open_tcp_store(
                endpoint.host,
                endpoint.port,
                listening=server_socket,
                connect_timeout=timeout,
                timeout=timeout,
            ),
            name="ddpsafe-store",
        )
        has_ended = making.wait(deadline.remaining_s())
        try:
            if has_ended:
                return making.result()
            reason = "the connection was accepted, but nothing answered"
        except RuntimeError as exc:
            reason = str(exc).splitlines()[0]
        if listener is not None:
            if serves_by_libuv():  # torch's other server would end the process
                # Free the port, although torch's client may still wait.
                listener.shutdown(socket.SHUT_RDWR)
            what = (
                f"{world} serves the store on {socket.gethostname()}, but cannot reach it itself at "
                f"{endpoint} within {deadline.waited_s():.1f} s: {reason}."
            )
            cause = (
                "MASTER_ADDR names another host, or an address that this host cannot reach itself "
                "(firewall, NAT)."
            )
            fix = "set MASTER_ADDR to an address of the host on which rank 0 runs (see `ip addr`)."
            raise PreflightError(Explanation(what, cause=cause, fix=fix), kind="startup-network")
        if not has_ended:
            what = (
                f"{world}: something listens at {endpoint}, but it is not a store of torch"
                f"{_by(endpoint)}; waited {deadline.waited_s():.1f} s."
            )
            cause = "another program is using the port, so rank 0 could not serve there."
            fix = ADVICE["DS-PORT-taken"][1]
            raise PreflightError(Explanation(what, cause=cause, fix=fix), kind="port")
        raise _not_served(endpoint, world, reason, deadline)


def _listen(endpoint: StoreEndpoint, world: World) -> socket.socket:
    """Listen on the port; on one node only at the address of MASTER_ADDR."""
    try:
        # On every interface only where other hosts need it: torch accepts whoever can connect.
        is_local = endpoint.is_on_this_host
        address = look_up(endpoint.host, endpoint.port)[0] if is_local else ""
        return open_server(address, endpoint.port)
    except OSError as exc:
        what = f"{world} cannot serve the store at {endpoint}: {exc.strerror or exc}."
        cause = "MASTER_ADDR is not an address of this host, or its name resolves to another one."
        fix = "set MASTER_ADDR to an address of the host on which rank 0 runs (see `ip addr`)."
        kind: FailureKind = "startup-network"
        if exc.errno == errno.EADDRINUSE:
            what = (
                f"{world} cannot serve the store at {endpoint}: the port is taken{_by(endpoint)}."
            )
            cause, fix = ADVICE["DS-PORT-taken"]
            kind = "port"
        raise PreflightError(Explanation(what, cause=cause, fix=fix), kind=kind) from exc


def _probe(endpoint: StoreEndpoint, deadline: Deadline) -> None:
    wait_s = max(0.05, min(_CONNECT_S, deadline.remaining_s()))
    socket.create_connection((endpoint.host, endpoint.port), timeout=wait_s).close()


def _unresolved(
    endpoint: StoreEndpoint, world: World, why: str, deadline: Deadline
) -> PreflightError:
    here = socket.gethostname()
    what = f"{world} on {here} cannot resolve {endpoint.host} after {deadline.waited_s():.1f} s: "
    cause, fix = ADVICE["DS-NAME-unresolved"]
    cause, fix = cause.format(given="MASTER_ADDR"), fix.format(name=endpoint.host, here=here)
    return PreflightError(Explanation(what + why, cause=cause, fix=fix), kind="startup-network")


def _not_served(
    endpoint: StoreEndpoint, world: World, why: str, deadline: Deadline
) -> RendezvousTimeoutError:
    waited_s = deadline.waited_s()
    here = socket.gethostname()
    what = f"{world} on {here} found no store at {endpoint} within {waited_s:.1f} s: {why}."
    cause = "rank 0 has not started, or has died; or MASTER_ADDR or MASTER_PORT is wrong."
    fix = f"check rank 0's log, then, on {here}:  nc -vz {endpoint.host} {endpoint.port}"
    return RendezvousTimeoutError(
        Explanation(what, cause=cause, fix=fix),
        waited_s=waited_s,
        missing_ranks=(0,),
        kind="startup-network",
    )


def _by(endpoint: StoreEndpoint) -> str:
    """Return a part of a message: the process that listens on the port, if this user may see it."""
    owner = listener_text(endpoint.port)
    return owner and f" by {owner}"
