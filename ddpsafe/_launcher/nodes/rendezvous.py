"""TorchElastic's rendezvous on a store bound to one address, and the plan of each round.

The stock rendezvous keeps its state as a pickle in an open store: whoever reaches the port runs code
in every launcher. Here each value in the store is sealed with the job's secret, and the seal is
checked before anything is read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import inspect
import io
import json
import os
import pickle
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import tenacity

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._errors import ConfigError, Explanation, PreflightError, RendezvousTimeoutError
from ddpsafe._host import find_address_towards, find_interface_of, list_interfaces
from ddpsafe._launcher.nodes.messages import (
    GarbledError,
    NodeFacts,
    from_json,
    to_json,
)
from ddpsafe._launcher.watch.signals import Interrupted
from ddpsafe._logging import get_logger
from ddpsafe._secrets import JOB_SECRET, find_own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import Store, TCPStore

    from ddpsafe._config import LaunchConfig
    from ddpsafe._launcher.watch.signals import SignalInbox

T = TypeVar("T")
logger = get_logger(__name__)

_ELASTIC: Final = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_STATE_CLASSES: Final = frozenset(
    {
        (_ELASTIC, "_RendezvousState"),
        (_ELASTIC, "_NodeDesc"),
        ("datetime", "datetime"),
        ("datetime", "timezone"),
        ("datetime", "timedelta"),
        ("builtins", "set"),
        ("builtins", "object"),
        ("copyreg", "_reconstructor"),
    }
)
"""All that a state of torch's rendezvous is made of, in torch 2.6 to 2.15."""

_UNSHARED: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Keeps torch's handler from opening a second store, on all interfaces, which ends with a round."""

_MAC_BYTES: Final = hashlib.sha256().digest_size
_ANSWER: Final = timedelta(seconds=5)
_CLOSE: Final = timedelta(seconds=3)
_LOOK_S: Final = 0.05
_PROBE_S: Final = 2.0
_BACKLOG: Final = 1024
_NAME_WAIT_S: Final = 10.0
_FORGET_S: Final = 2.5
"""Nodes that wait to join look once a second; so long the store stays for them to read its end."""


class _CheckedUnpickler(pickle.Unpickler):
    """Loads a rendezvous state and nothing else: the second lock, behind the seal."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STATE_CLASSES:
            msg = f"{module}.{name} is not part of a rendezvous state"
            raise pickle.UnpicklingError(msg)
        return super().find_class(module, name)


class Seal:
    """Signs what this job writes to its store, and refuses what others have written there."""

    def __init__(self, secret: bytes, job: str) -> None:
        """Use the secret for the values of one job."""
        self._secret, self._job = secret, job.encode()

    def close(self, key: str, value: bytes) -> bytes:
        """Return a value with the job's seal, for one key."""
        return self._mac(key, value) + value

    def open(self, key: str, sealed: bytes) -> bytes | None:
        """Return the value under a seal; ``None`` where it is not this job's."""
        value = sealed[_MAC_BYTES:]
        return value if hmac.compare_digest(sealed[:_MAC_BYTES], self._mac(key, value)) else None

    def _mac(self, key: str, value: bytes) -> bytes:
        # Length first: no pair of job and key may read as another one.
        head = b"%d:%s%d:%s" % (len(self._job), self._job, len(key), key.encode())
        return hmac.new(self._secret, head + value, hashlib.sha256).digest()


def make_sealed_backend(store: Store, job: str, seal: Seal) -> Any:
    """Return torch's rendezvous backend behind a seal.

    Its `cancelled` attribute, once set, ends a wait of the handler at its next look.
    """
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousStateError
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

    inner = C10dRendezvousBackend(store, job)

    def opened(sealed: bytes) -> bytes:
        state = seal.open("state", sealed)
        if state is None:
            raise RendezvousStateError("another job, or a stranger, writes to the store")
        try:
            _CheckedUnpickler(io.BytesIO(state)).load()
        except Exception as exc:
            raise RendezvousStateError(str(exc)) from exc
        return state

    class SealedBackend(RendezvousBackend):
        cancelled = False

        @property
        def name(self) -> str:
            return "ddpsafe"

        def get_state(self) -> Any:
            self._require_not_cancelled()
            found = inner.get_state()
            return None if found is None else (opened(found[0]), found[1])

        def set_state(self, state: bytes, token: Any = None) -> Any:
            self._require_not_cancelled()
            found = inner.set_state(seal.close("state", state), token)
            return None if found is None else (opened(found[0]), found[1], found[2])

        def _require_not_cancelled(self) -> None:
            if self.cancelled:
                raise RendezvousClosedError

    return SealedBackend()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """This node's place in a round, as the rendezvous gave it.

    Attributes:
        node_rank: This node among those of the round.
        nnodes: How many there are.
        board: The round's own keys in the store.
    """

    node_rank: int
    nnodes: int
    board: Board


class Board:
    """Sealed values under keys that no other round uses."""

    def __init__(self, store: Store, seal: Seal, rendezvous: Rendezvous) -> None:
        self._store, self._seal, self._rendezvous = store, seal, rendezvous

    def put(self, key: str, value: object) -> None:
        """Set a key to a dataclass."""
        data = self._seal.close(key, json.dumps(to_json(value)).encode())
        self._rendezvous.call(lambda: self._store.set(key, data.hex()), _ANSWER)

    def find(self, key: str, cls: type[T]) -> T | None:
        """Return the value of a key, ``None`` where it is not set, or not by this job."""

        def read() -> bytes | None:
            return self._store.get(key) if self._store.check([key]) else None

        text = self._rendezvous.call(read, _ANSWER)
        if text is None:
            return None
        with contextlib.suppress(ValueError, GarbledError):
            data = self._seal.open(key, bytes.fromhex(text.decode()))
            return None if data is None else from_json(cls, json.loads(data))
        return None

    def wait_for(self, key: str, cls: type[T], deadline: Deadline) -> T | None:
        """Return the value of a key once it is set; ``None`` if it is not by then."""
        for pause_s in deadline.pauses_s():
            if (found := self.find(key, cls)) is not None:
                return found
            self._rendezvous.require_no_signal()
            time.sleep(pause_s)
        return None


class Rendezvous:
    """Where the nodes of one job meet, round by round.

    Args:
        config: What was asked for.
        inbox: Signals to this launcher, which end every wait.
    """

    def __init__(self, config: LaunchConfig, inbox: SignalInbox) -> None:
        """Read where and as whom; nothing is opened yet."""
        endpoint = config.rendezvous.parsed()
        assert endpoint is not None, "the config requires one with more than one node"  # noqa: S101
        self._config, self.inbox, self._endpoint = config, inbox, endpoint
        self.job = config.rendezvous.id or "default"
        self.secret = find_secret(config)
        self._seal = Seal(self.secret, self.job)
        self._store: TCPStore | None = None
        self._handler: Any = None
        self._backend: Any = None
        self.serves = False
        self.address = ""

    def call(self, function: Callable[[], T], limit: timedelta | None) -> T:
        """Make a call to the store, which may hang for ever once the host of the store is gone.

        Raises:
            Interrupted: A signal came meanwhile.
            RendezvousTimeoutError: It has not come back in time.
        """
        deadline = Deadline.after(limit)
        call = BoundedCall(function, name="ddpsafe-rendezvous")
        while not call.wait(_LOOK_S):
            self.require_no_signal()
            if deadline.expired():
                raise self.lost("it does not answer", deadline)
        try:
            return call.result()
        except RuntimeError as exc:  # torch's, of a store whose host has gone
            raise self.lost(str(exc).splitlines()[0], deadline) from exc

    def require_no_signal(self) -> None:
        """Leave a wait when this launcher has been told to go.

        Raises:
            Interrupted: A signal has come.
        """
        if self.inbox.received is not None:
            if self._backend is not None:
                self._backend.cancelled = True
            raise Interrupted(self.inbox.received)

    def open(self) -> None:
        """Serve the endpoint where it is this host's, else connect to it.

        Raises:
            PreflightError: The endpoint's name leads nowhere, or its port is taken.
            RendezvousTimeoutError: No node serves it in time.
        """
        deadline = Deadline.after(self._config.rendezvous.join)
        addresses = self._resolve(deadline)
        self.address = self._own_address(addresses)
        own = {address for each in list_interfaces() for address in each.addresses}
        node_rank = self._config.node_rank
        here = [address for address in addresses if address in own]
        if node_rank == 0 or (node_rank is None and here):
            bound = here[0] if here else self.address
            if self._serve(bound):
                self.address, self.serves = bound, True
                return
        self._connect(deadline)

    def _resolve(self, deadline: Deadline) -> list[str]:
        endpoint = self._endpoint

        def look_up() -> list[str]:
            retrying = tenacity.Retrying(  # a pod's name may appear in DNS later than the pod
                stop=lambda _: deadline.expired() or deadline.waited_s() > _NAME_WAIT_S,
                wait=tenacity.wait_fixed(0.5),
                retry=tenacity.retry_if_exception_type(OSError),
                reraise=True,
            )
            found = retrying(
                socket.getaddrinfo, endpoint.host, endpoint.port, type=socket.SOCK_STREAM
            )
            return list(dict.fromkeys(str(entry[4][0]) for entry in found))

        try:
            return self.call(look_up, timedelta(seconds=2 * _NAME_WAIT_S))
        except (OSError, UnicodeError) as exc:
            here = socket.gethostname()
            what = f"{here} cannot resolve {endpoint.host}, the host of the endpoint: {exc}."
            cause = "the name is misspelled, or this host's DNS and /etc/hosts do not know it."
            fix = f"check with  getent hosts {endpoint.host}  on {here}; an IP address works, too."
            raise PreflightError(
                Explanation(what, cause=cause, fix=fix), kind="startup-network"
            ) from exc

    def _own_address(self, endpoint: Sequence[str]) -> str:
        asked = self._config.rendezvous.interface
        if asked not in (None, "auto"):
            chosen = next((each for each in list_interfaces() if each.name == asked), None)
            if chosen is None or not chosen.addresses:
                existing = ", ".join(each.name for each in list_interfaces())
                what = (
                    f"rendezvous.interface={asked!r}: {socket.gethostname()} has no such interface "
                    "with an address."
                )
                cause = "names of interfaces differ from host to host."
                fix = f'write interface="auto", or one of {existing}.'
                raise ConfigError(Explanation(what, cause=cause, fix=fix))
            return chosen.addresses[0]
        found = find_address_towards(endpoint)
        if found is None:
            what = f"{socket.gethostname()} has no address that other nodes could reach."
            cause = "no interface besides loopback is up."
            raise PreflightError(
                Explanation(what, cause=cause, fix="see  ip addr  on it."), kind="startup-network"
            )
        return found

    @property
    def interface(self) -> str | None:
        """Name of the interface that has this node's address."""
        found = find_interface_of(self.address)
        return None if found is None else found.name

    def _serve(self, address: str) -> bool:
        """Open the store at one address; tell whether the port was free."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        port = self._endpoint.port
        try:
            listening = socket.create_server((address, port), family=family, backlog=_BACKLOG)
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE and self._config.node_rank != 0:
                return False  # by another launcher of this job on this host; else it is found out
            what = f"{socket.gethostname()} cannot serve the endpoint {self._endpoint}: {exc.strerror}."
            cause = "another program has the port, or it is not an address of this host."
            fix = "choose another port for this job, or end what holds it: ss -ltnp."
            raise PreflightError(Explanation(what, cause=cause, fix=fix), kind="port") from exc
        self._store = self.call(
            lambda: open_tcp_store(address, port, listening=listening), timedelta(seconds=30)
        )
        return True

    def _connect(self, deadline: Deadline) -> None:
        host, port, why = self._endpoint.host, self._endpoint.port, ""
        for pause_s in deadline.pauses_s():
            try:
                self.call(lambda: socket.create_connection((host, port), _PROBE_S).close(), None)
                break
            except TimeoutError:
                why = "nothing answers: a firewall drops packets, or the host is down"
            except OSError as exc:
                why = str(exc.strerror or exc)
            time.sleep(pause_s)
        else:
            raise self.lost(why, deadline)
        self._store = self.call(
            lambda: open_tcp_store(host, port), timedelta(seconds=max(1, deadline.remaining_s()))
        )

    def lost(self, why: str, deadline: Deadline) -> RendezvousTimeoutError:
        """Return the error of an endpoint that does not answer."""
        here, waited_s = socket.gethostname(), deadline.waited_s()
        what = (
            f"{here} found no store of this job at {self._endpoint} within {waited_s:.1f} s: {why}."
        )
        cause = "the node of the endpoint has not started its launcher, or has lost it."
        host, port = self._endpoint.host, self._endpoint.port
        fix = f"see the log of that node; then, on {here}:  nc -vz {host} {port}"
        return RendezvousTimeoutError(
            Explanation(what, cause=cause, fix=fix), waited_s=waited_s, kind="startup-network"
        )

    def join(self) -> Seat:
        """Wait for the other nodes, and take a place in the next round.

        Raises:
            RendezvousTimeoutError: Too few nodes came.
            PreflightError: The job is over, or is another one.
        """
        from torch.distributed.elastic.rendezvous import RendezvousError

        deadline = Deadline.after(self._config.rendezvous.join)
        if self._handler is None:
            self._handler = self._make_handler()
        try:
            info = self.call(self._next_round, None)
        except RendezvousError as exc:
            raise self._not_joined(exc, deadline) from exc
        board = Board(info.store, self._seal, self)
        return Seat(node_rank=info.rank, nnodes=info.world_size, board=board)

    def _make_handler(self) -> Any:
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
            DynamicRendezvousHandler,
            RendezvousTimeout,
        )

        assert self._store is not None, "open() comes first"  # noqa: S101
        rendezvous = self._config.rendezvous
        self._backend = make_sealed_backend(self._store, self.job, self._seal)
        options: dict[str, Any] = {}
        if (
            "keep_alive_interval"
            in inspect.signature(DynamicRendezvousHandler.from_backend).parameters
        ):  # torch 2.6 has no keyword for it, and the same values
            options = {"keep_alive_interval": 5, "keep_alive_max_attempt": 3}
        # Nodes are ordered by this text: node 0 is the one that serves the endpoint, and nodes
        # keep their order from round to round.
        order = 0 if self.serves else (self._config.node_rank or 1)
        return DynamicRendezvousHandler.from_backend(
            run_id=self.job,
            store=self._store,
            backend=self._backend,
            min_nodes=rendezvous.min_nodes or self._config.nnodes,
            max_nodes=self._config.nnodes,
            local_addr=f"{order:06d} {socket.gethostname()} {self.address}",
            timeout=RendezvousTimeout(
                join=rendezvous.join,
                last_call=rendezvous.last_call,
                close=_ANSWER,
                heartbeat=_ANSWER,
            ),
            **options,
        )

    def _next_round(self) -> Any:
        before = os.environ.get(_UNSHARED)
        os.environ[_UNSHARED] = "1"
        try:
            return self._handler.next_rendezvous()
        finally:
            if before is None:
                os.environ.pop(_UNSHARED, None)
            else:
                os.environ[_UNSHARED] = before

    def _not_joined(self, exc: Exception, deadline: Deadline) -> Exception:
        from torch.distributed.elastic.rendezvous import (
            RendezvousClosedError,
            RendezvousStateError,
        )
        from torch.distributed.elastic.rendezvous import RendezvousTimeoutError as Expired

        waited_s, here = deadline.waited_s(), socket.gethostname()
        if isinstance(exc, RendezvousClosedError):
            what = f"the job at {self._endpoint} has ended; {here} came too late for it."
            fix = "start the job again on all nodes if it is to run again."
            return PreflightError(Explanation(what, fix=fix), kind="peer-lost")
        if isinstance(exc, RendezvousStateError):
            what = (
                f"{here} cannot join the job at {self._endpoint}: what is written there does not "
                "carry this job's seal."
            )
            cause = (
                "the nodes have different secrets or ids of the job, another job has the same "
                "endpoint, or a stranger writes there."
            )
            fix = (
                f"give every node the same {JOB_SECRET}, secret_file and --rdzv-id, and every job an "
                "endpoint of its own."
            )
            return PreflightError(Explanation(what, cause=cause, fix=fix), kind="config")
        if isinstance(exc, Expired):
            wanted = self._config.rendezvous.min_nodes or self._config.nnodes
            what = (
                f"fewer than {wanted} nodes came to {self._endpoint} within {waited_s:.0f} s "
                f"(rendezvous.join); {here} was one of them."
            )
            cause = "a node has not started its launcher, or cannot reach the endpoint."
            fix = "see the logs of the nodes that are missing."
            return RendezvousTimeoutError(
                Explanation(what, cause=cause, fix=fix), waited_s=waited_s, kind="startup-network"
            )
        return self.lost(str(exc).splitlines()[0] if str(exc) else type(exc).__name__, deadline)

    def introduce(self, seat: Seat, facts: NodeFacts, deadline: Deadline) -> list[NodeFacts]:
        """Introduce this node; as node 0, return all nodes once they have done so, too.

        Raises:
            RendezvousTimeoutError: A node has not.
        """
        seat.board.put(f"ddpsafe/node/{seat.node_rank}", facts)
        if seat.node_rank != 0:
            return []
        nodes = []
        for node in range(seat.nnodes):
            found = seat.board.wait_for(f"ddpsafe/node/{node}", NodeFacts, deadline)
            if found is None:
                what = f"node {node} of {seat.nnodes} joined, and then said nothing more."
                cause = "its launcher has ended or is stopped, or its host has lost the network."
                raise RendezvousTimeoutError(
                    Explanation(what, cause=cause),
                    waited_s=deadline.waited_s(),
                    kind="startup-network",
                )
            nodes.append(found)
        return nodes

    def close(self) -> None:
        """Leave; as the host of the store, tell late nodes that the job is over, and go last."""
        handler, self._handler = self._handler, None
        if handler is None:
            return
        if self.serves:
            waiting: list[int] = []
            call = BoundedCall(
                lambda: waiting.append(handler.num_nodes_waiting()), name="ddpsafe-rendezvous"
            )
            call.wait(_CLOSE.total_seconds())
            BoundedCall(handler.set_closed, name="ddpsafe-rendezvous").wait(_CLOSE.total_seconds())
            if any(waiting):
                time.sleep(_FORGET_S)
        if self._backend is not None:
            self._backend.cancelled = True


def open_tcp_store(
    host: str, port: int, *, listening: socket.socket | None = None, timeout: timedelta = _ANSWER
) -> TCPStore:
    """Open a store of torch: its server at a socket that listens already, or a client."""
    import torch
    from torch.distributed import TCPStore
    from torch.torch_version import TorchVersion

    # Up to torch 2.7 the server that is the default, libuv's, takes no listening socket.
    server = {} if TorchVersion(torch.__version__) >= "2.8" else {"use_libuv": False}
    return TCPStore(
        host,
        port,
        is_master=listening is not None,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=None if listening is None else listening.detach(),
        **server,
    )


@contextlib.contextmanager
def rank_store(address: str) -> Iterator[int]:
    """Serve a fresh store for the ranks of one round, at one address; yield its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    port = int(listening.getsockname()[1])
    store = open_tcp_store(address, port, listening=listening)
    try:
        yield port
    finally:
        del store


def find_secret(config: LaunchConfig) -> bytes:
    """Return the job's secret: of a file, of a variable, or derived from what all nodes know.

    Raises:
        ConfigError: The file cannot be read, or is empty.
    """
    path = config.rendezvous.secret_file
    if path is not None:
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as exc:
            what = f"rendezvous.secret_file {path} cannot be read: {exc.strerror}."
            raise ConfigError(Explanation(what, fix="make it readable on every node.")) from exc
        if not secret:
            fix = f"write one:  head -c 32 /dev/urandom | base64 > {path}"
            raise ConfigError(Explanation(f"rendezvous.secret_file {path} is empty.", fix=fix))
        return hashlib.sha256(b"file\0" + secret).digest()
    told = find_own(JOB_SECRET)
    if told:
        return hashlib.sha256(b"variable\0" + told.encode()).digest()
    known = (str(config.rendezvous.endpoint), config.rendezvous.id or "")
    return hashlib.sha256("\0".join(("derived", *known)).encode()).digest()


def make_round_id() -> str:
    """Return a name for a round that cannot be guessed."""
    return secrets.token_hex(16)
