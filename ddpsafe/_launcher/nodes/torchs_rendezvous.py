"""Private names of TorchElastic's rendezvous, and its state: signed, checked, and on this host's clock.

The stock rendezvous keeps its state as a pickle in an open store, so anyone who reaches the port can
run code in every launcher. Here each value is signed with the job's secret, the signature is checked
before the value is parsed, and only the classes of the state are loaded. See also `_torch_private`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import time
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._host import without_cpp_warnings

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

    from ddpsafe._job.secret import Signer

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
"""Every class in the pickled state of torch's rendezvous, in torch 2.6 to 2.15."""

_LONG_AGO: Final = datetime(2000, 1, 1, tzinfo=timezone.utc)


class _CheckedUnpickler(pickle.Unpickler):
    """Loads a rendezvous state and nothing else: a second line of defence behind the signature."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STATE_CLASSES:
            msg = f"{module}.{name} is not part of a rendezvous state"
            raise pickle.UnpicklingError(msg)
        return super().find_class(module, name)


Member = tuple[str, int]
"""Label and pid of a node, as torch's state has them."""


class _LocalTimes:
    """Converts the times in a rendezvous state to this host's clock.

    The age of a heartbeat is the time since this node first saw it, whatever the other clocks show.

    Args:
        last_call: How far in the future the end of the last call is when a node writes it.
    """

    def __init__(self, last_call: timedelta) -> None:
        self._last_call = last_call
        self._beats: dict[Member, tuple[datetime, datetime]] = {}
        self._deadline: tuple[datetime, datetime] | None = None
        self._gone: dict[Member, datetime | None] = {}

    def forget(self, member: Member) -> None:
        """Show a node as long dead until its heartbeat changes."""
        self._gone[member] = None

    def show(self, state: Any) -> Any:
        """Replace the times that others wrote by the times at which this node first saw them."""
        now = datetime.now(timezone.utc)
        beats = {(node.addr, node.pid): beat for node, beat in state.last_heartbeats.items()}
        # torch compares the wall clocks of different hosts: a node whose clock is ahead considers
        # all others dead and starts a round alone.
        for member, beat in beats.items():
            if self._beats.get(member, (None,))[0] != beat:
                self._beats[member] = (beat, now)
        for node in state.last_heartbeats:
            member = (node.addr, node.pid)
            beat, seen = self._beats[member]
            if member in self._gone:
                # The first heartbeat read after the loss is most likely the last one before it.
                last = self._gone[member] = self._gone[member] or beat
                if last != beat:  # the launcher writes again: its host was only away
                    del self._gone[member]
            state.last_heartbeats[node] = _LONG_AGO if member in self._gone else seen
        if state.deadline is not None:
            if self._deadline is None or self._deadline[0] != state.deadline:
                self._deadline = (state.deadline, now + self._last_call)
            state.deadline = self._deadline[1]
        return state

    def restore(self, state: Any) -> Any:
        """Put the times of others back as they wrote them."""
        for node, beat in state.last_heartbeats.items():
            written, seen = self._beats.get((node.addr, node.pid), (None, None))
            # A value that differs was set on this node, as torch sets this node's own.
            if beat == seen:
                state.last_heartbeats[node] = written
        if self._deadline is not None and state.deadline == self._deadline[1]:
            state.deadline = self._deadline[0]
        return state


def make_signed_backend(
    store: Store, job: str, signer: Signer, last_call: timedelta = timedelta(seconds=10)
) -> Any:
    """Return torch's rendezvous backend with its state signed.

    Setting `cancelled` ends the handler's wait at its next poll. `state` is the last one that the
    handler read, and `asked_ns` when it asked for it. Once the store's host has ended, `lost` says
    why, and the handler sees a closed rendezvous.
    """
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousStateError,
    )
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

    times = _LocalTimes(last_call)

    def opened(signed: bytes) -> Any:
        # Before anything is parsed: a pickle may run any code, and anyone who reaches the port can
        # write it.
        state = signer.verified("state", signed)
        if state is None:
            raise RendezvousStateError(
                "another job, or a program without its secret, writes to the store"
            )
        try:
            return times.show(_CheckedUnpickler(io.BytesIO(state)).load())
        except Exception as exc:
            raise RendezvousStateError(str(exc)) from exc

    class SignedBackend(RendezvousBackend):
        cancelled = False
        lost = ""
        state: Any = None
        asked_ns = 0
        _inner: C10dRendezvousBackend | None
        forget = staticmethod(times.forget)

        def __init__(self, store: Store) -> None:
            # Not in a closure: this class is part of a reference cycle, so a store that its methods
            # closed over would keep its port until the next garbage collection.
            self.use(store)

        def use(self, store: Store) -> None:
            self._store, self._inner, self.lost = store, None, ""

        @property
        def name(self) -> str:
            return "ddpsafe"

        @property
        def is_closed(self) -> bool:
            # torch remembers a state for a second. It may still see the closed one that stands for a
            # lost store when the store has been connected to again.
            return self.state is not None and self.state.closed

        def read(self) -> None:
            with contextlib.suppress(RendezvousError):  # the handler meets it again
                self.get_state()

        def get_state(self) -> Any:
            return self._ask(lambda inner: inner.get_state(), ())

        def set_state(self, state: bytes, token: Any = None) -> Any:
            restored = times.restore(_CheckedUnpickler(io.BytesIO(state)).load())
            signed = signer.sign("state", pickle.dumps(restored))
            return self._ask(lambda inner: inner.set_state(signed, token), (False,))

        def _ask(
            self, call: Callable[[C10dRendezvousBackend], Any], not_set: tuple[bool, ...]
        ) -> Any:
            if not (self.cancelled or self.lost):
                store, asked_ns = self._store, time.monotonic_ns()
                try:
                    # torch writes twenty lines of C++ frames; the exception says the same.
                    with without_cpp_warnings():
                        # Here, since it asks the store, which may be lost by now or not answer.
                        inner = self._inner or C10dRendezvousBackend(store, job)
                        answer = call(inner)
                except RendezvousConnectionError as exc:
                    self._require_in_use(store)
                    self.lost = str(exc.__cause__ or exc).splitlines()[0]
                else:
                    self._require_in_use(store)
                    self._inner = inner
                    return answer and (self._see(answer[0], asked_ns), *answer[1:])
            if self.state is None:
                raise RendezvousClosedError
            # Closed on this node only, and without nodes, to end torch's own threads: its
            # keep-alive would write a warning every five seconds.
            closed = copy.copy(self.state)
            closed.closed, closed.participants, closed.last_heartbeats = True, {}, {}
            return (pickle.dumps(closed), None, *not_set)

        def _require_in_use(self, store: Store) -> None:
            # The caller of one that outlived its connection has given it up.
            if store is not self._store:
                raise RendezvousClosedError

        def _see(self, signed: bytes, asked_ns: int) -> bytes:
            self.state = opened(signed)
            self.asked_ns = asked_ns  # after the state, as another thread may look in between
            return pickle.dumps(self.state)

    return SignedBackend(store)


def use_store(handler: Any, backend: Any, store: Store) -> None:
    """Let a handler and its backend continue with another connection to their store."""
    # A new handler would be another node to torch, and the place of the first one taken until it
    # expires.
    backend.use(store)
    handler._store = store  # noqa: SLF001 - it has no other way
