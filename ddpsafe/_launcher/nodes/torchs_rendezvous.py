"""TorchElastic's rendezvous: its engine decides who is in a round, with a state that node 0 keeps.

Each node runs torch's handler over a `RendezvousBackend`, torch's public interface for the state: a value with
a token, here in the memory of node 0, read and set over the channel. Node 0 knows by the channel which nodes are
there, so that no heartbeat has to be written. The private names are those inside the state; see `_torch_private`.
"""

from __future__ import annotations

import base64
import copy
import inspect
import io
import pickle
import threading
import time
import zlib
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ddpsafe._launcher.nodes.node_messages import Answered, Ask

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

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
_NEVER: Final = timedelta(days=365)  # torch's errors name no node, so the launchers end each wait
_BRIEF: Final = timedelta(seconds=5)


class _CheckedUnpickler(pickle.Unpickler):
    """Loads a rendezvous state and nothing else: a second line of defence behind the channel's secret."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STATE_CLASSES:
            msg = f"{module}.{name} is not part of a rendezvous state"
            raise pickle.UnpicklingError(msg)
        return super().find_class(module, name)


def _load(text: str) -> Any:
    return _CheckedUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(text)))).load()


def _dump(state: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(state), 1)).decode()


def launcher_of(node: Any) -> str:
    """Return the launcher of a node in a state."""
    label: str = node.addr
    return label.rpartition("\t")[2]


class Arrivals(NamedTuple):
    """Who has joined the next round.

    Attributes:
        left_s: How long they wait for more, if they are enough.
    """

    labels: tuple[str, ...] = ()
    left_s: float | None = None


def _arrivals(state: Any, gone: Collection[Any], left_s: float | None) -> Arrivals:
    nodes = () if state is None else state.participants.keys() - gone
    return Arrivals(tuple(sorted(node.addr for node in nodes)), left_s)


class SharedState:
    """The state of the rendezvous, as node 0 keeps it.

    Args:
        own: The launcher of node 0. Until it has joined a round itself, the others wait for their answers:
            they could complete it without node 0.
        last_call: How long a round that has enough nodes waits for more.
        is_there: Returns which of some launchers can be reached: the others do not count.

    Attributes:
        completed: Set once a round is complete.
    """

    def __init__(
        self, own: str, last_call: timedelta, is_there: Callable[[Collection[str]], Collection[str]]
    ) -> None:
        self._own, self._last_call_s, self._is_there = own, last_call.total_seconds(), is_there
        self._lock = threading.Lock()
        self._waiting: list[tuple[Ask, Callable[[Answered], None]]] = []
        self.completed = threading.Event()
        # torch's handler pauses before it joins the round with number 0, which is not needed again.
        self._token, self._round = 0, 1
        self._state: Any = None
        self._ends_s: float | None = None
        self._gone: frozenset[Any] = frozenset()
        self._text = ""

    def restart(self) -> None:
        """Begin the next round, which all nodes join again."""
        with self._lock:
            self._round += 1
            self._token += 1
            self._state = self._ends_s = None
            self.completed.clear()

    def arrivals(self) -> Arrivals:
        """Return who has joined."""
        with self._lock:
            self._look()
            left_s = None if self._ends_s is None else self._ends_s - time.monotonic()
            return _arrivals(self._state, self._gone, left_s)

    def complete_round(self) -> tuple[str, ...]:
        """Return the launchers of a round that is complete, by rank; none if it is not."""
        state = self._state
        if state is None or not state.complete:
            return ()
        places = sorted(state.participants.items(), key=lambda place: place[1])
        return tuple(launcher_of(node) for node, _ in places)

    def take(self, launcher: str, ask: Ask, answer: Callable[[Answered], None]) -> None:
        """Answer a question about the state, now or once node 0 has joined the round."""
        with self._lock:
            answers = []
            if launcher != self._own and not self._has_own():
                self._waiting.append((ask, answer))
            else:
                answers.append((answer, self._answer(ask)))
            if self._waiting and self._has_own():
                answers += [(tell, self._answer(waiting)) for waiting, tell in self._waiting]
                self._waiting = []
        for tell, found in answers:
            tell(found)

    def _has_own(self) -> bool:
        return self._state is not None and any(
            launcher_of(node) == self._own for node in self._state.participants
        )

    def _answer(self, ask: Ask) -> Answered:
        self._look()
        has_set = False
        if ask.value is not None and ask.token == (None if self._state is None else self._token):
            has_set = self._set(ask.value)
        if self._state is None:
            return Answered(number=ask.number)
        left_s = None if self._ends_s is None else self._ends_s - time.monotonic()
        is_known = ask.value is None and ask.token == self._token
        return Answered(
            number=ask.number,
            value=None if is_known else self._packed(),
            token=self._token,
            left_s=left_s,
            has_set=has_set,
        )

    def _set(self, text: str) -> bool:
        try:
            state = _load(text)
        except Exception:  # noqa: BLE001 - whatever a garbled pickle raises
            return False
        state.round = max(state.round, self._round)
        # Wall clocks of different hosts say nothing to each other: node 0's own clock counts.
        if state.deadline is None:
            self._ends_s = None
        elif self._ends_s is None:
            self._ends_s = time.monotonic() + self._last_call_s
        self._state, self._text = state, ""
        self._token += 1
        self._look()
        if state.complete:
            self.completed.set()
        return True

    def _look(self) -> None:
        """Note who has left: a node that cannot be reached, and one whose launcher has joined again."""
        if self._state is None:
            return
        last: dict[str, Any] = {}
        for node in sorted(self._state.last_heartbeats, key=lambda node: node.local_id):
            last[launcher_of(node)] = node
        there = {last[launcher] for launcher in self._is_there(last.keys())}
        gone = frozenset(self._state.last_heartbeats.keys() - there)
        if gone != self._gone:
            self._gone, self._text = gone, ""
            self._token += 1

    def _packed(self) -> str:
        if not self._text:
            state = copy.copy(self._state)
            state.deadline = None
            state.last_heartbeats = {
                node: _LONG_AGO if node in self._gone else None for node in state.last_heartbeats
            }
            self._text = _dump(state)
        return self._text


class TorchsPart:
    """This node's part in the rounds: runs torch's handler until a round is complete with this node.

    Args:
        label: What torch sorts the nodes by.
        nodes: The smallest and the largest number of nodes.
        last_call: See `SharedState`.
        ask: Asks node 0; ``None`` once this node no longer waits for an answer.

    Attributes:
        is_over: Whether this node no longer takes part: set it to leave.
        is_complete: Whether the round is complete with this node.
        arrivals: Who has joined, as far as this node knows.
    """

    def __init__(
        self,
        label: str,
        job: str,
        nodes: tuple[int, int],
        last_call: timedelta,
        ask: Callable[[Ask, Callable[[], bool]], Answered | None],
    ) -> None:
        from torch.distributed import HashStore
        from torch.distributed.elastic.rendezvous import RendezvousClosedError
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
            DynamicRendezvousHandler,
            RendezvousBackend,
            RendezvousTimeout,
        )

        launcher, part = label.rpartition("\t")[2], self
        self.is_over = self.is_complete = False
        self.arrivals = Arrivals()

        class Backend(RendezvousBackend):
            known: tuple[Any, int] | None = None

            @property
            def name(self) -> str:
                return "ddpsafe"

            def get_state(self) -> Any:
                return self._ask(None, None if self.known is None else self.known[1])

            def set_state(self, state: bytes, token: Any = None) -> Any:
                loaded = _CheckedUnpickler(io.BytesIO(state)).load()
                return self._ask(_dump(loaded), token)

            def _ask(self, value: str | None, token: int | None) -> Any:
                answer = None
                if not part.is_over:
                    answer = ask(Ask(number=0, value=value, token=token), lambda: part.is_over)
                if answer is None:
                    raise RendezvousClosedError  # ends torch's call, and starts no heartbeats
                if answer.value is None:
                    if self.known is None or answer.token != self.known[1]:
                        self.known = None
                        return None
                    state = self.known[0]
                else:
                    assert answer.token is not None  # noqa: S101 - a value has one
                    state = _load(answer.value)
                    self.known = (state, answer.token)
                now = datetime.now(timezone.utc)
                shown = copy.copy(state)
                shown.last_heartbeats = {
                    node: beat or now for node, beat in state.last_heartbeats.items()
                }
                if answer.left_s is not None:
                    shown.deadline = now + timedelta(seconds=answer.left_s)
                gone = [node for node, beat in state.last_heartbeats.items() if beat]
                part.arrivals = _arrivals(state, gone, answer.left_s)
                if shown.complete and launcher in map(launcher_of, shown.participants):
                    part.is_complete = part.is_over = True
                    raise RendezvousClosedError
                return pickle.dumps(shown), answer.token, *([answer.has_set] if value else ())

        least, most = nodes
        # torch 2.6 has no keywords for it, and the same values.
        options: dict[str, Any] = {}
        known = inspect.signature(DynamicRendezvousHandler.from_backend).parameters
        if "keep_alive_interval" in known:
            options = {"keep_alive_interval": 5, "keep_alive_max_attempt": 3}
        self._handler = DynamicRendezvousHandler.from_backend(
            run_id=job,
            store=HashStore(),
            backend=Backend(),
            min_nodes=least,
            max_nodes=most,
            local_addr=label,
            timeout=RendezvousTimeout(
                join=_NEVER, last_call=last_call, close=_BRIEF, heartbeat=_BRIEF
            ),
            **options,
        )

    def begin(self) -> None:
        """Prepare for `join`, in the thread that may leave."""
        self.is_over = self.is_complete = False

    def join(self) -> None:
        """Take part until a round is complete with this node, or `is_over` is set.

        Raises:
            Exception: Whatever torch's rendezvous raises meanwhile.
        """
        from torch.distributed.elastic.rendezvous import RendezvousClosedError

        try:
            self._handler.next_rendezvous()
        except RendezvousClosedError:
            if not self.is_over:
                raise
