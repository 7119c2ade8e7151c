"""What launchers of several nodes send each other, and how it arrives over connections that break."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import pytest
from cut_wire import Wire, dial, listen
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from scripts import wait_until

from ddpsafe._errors import STARTUP_KINDS, PreflightError
from ddpsafe._job.channel import (
    _MAX_UNANSWERED_BEATS,
    Alive,
    Away,
    Back,
    Channel,
    ClockComparison,
    ClockOffset,
    Hello,
    Lost,
    from_json,
    to_json,
)
from ddpsafe._launcher.nodes import node_messages
from ddpsafe._launcher.nodes.node_messages import LetRanksExit, RankRequest, shift, shift_position
from ddpsafe._wire.messages import Position, Whereabouts
from ddpsafe.checkpoint.errors import CheckpointError

CLASSES = [
    value
    for value in (*vars(node_messages).values(), Hello, Alive)
    if dataclasses.is_dataclass(value) and not issubclass(value, Exception)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_message_can_be_read(cls: Any) -> None:
    """All field types exist at run time, where pydantic needs them, not only under TYPE_CHECKING."""
    adapter = TypeAdapter(cls)
    adapter.rebuild(raise_errors=True)
    json.dumps(adapter.json_schema())


def test_arrivals_at_collectives_are_shown_in_this_hosts_time() -> None:
    """Otherwise a node whose clock is behind appears to have been kept waiting by the others."""
    offset = ClockOffset(wall_ns=500)
    position = Position(collectives=(), arrivals=((1, 1000), (2, 2000)))
    assert shift_position(position, offset).arrivals == ((1, 1500), (2, 2500))
    answer = shift(Whereabouts(position=position), offset)
    assert isinstance(answer, Whereabouts)
    assert answer.position.arrivals == ((1, 1500), (2, 2500))


MS: Final = 1_000_000


@given(
    ahead_ns=st.integers(-(10**13), 10**13),
    trips=st.lists(st.tuples(*[st.integers(0, 600)] * 2), min_size=2, max_size=80),
)
def test_clocks_are_compared_to_half_of_the_shortest_round_trip(
    ahead_ns: int, trips: list[tuple[int, int]]
) -> None:
    """However far apart the clocks are, and however long single messages wait."""
    here, there = ClockComparison(), ClockComparison()
    now_ns, shortest_ms = 10**15, 600 * 2
    here.note_hello(Hello(mono_ns=now_ns - ahead_ns, wall_ns=0), now_ns + 5000 * MS)
    for out_ms, back_ms in trips:
        beat = replace(here.answer(), sent_ns=now_ns)
        now_ns += out_ms * MS
        there.note_alive(beat, now_ns - ahead_ns)
        now_ns += 1000 * MS  # until the next beat of the other side
        answer = replace(there.answer(), sent_ns=now_ns - ahead_ns)
        now_ns += back_ms * MS
        here.note_alive(answer, now_ns)
    shortest_ms = min(out_ms + back_ms for out_ms, back_ms in trips[-60:])
    assert abs(here.offset().mono_ns - ahead_ns) <= shortest_ms * MS / 2


def test_the_clocks_of_nodes_are_known_although_node_0_reads_late(
    channel: Channel, node: Channel
) -> None:
    """It reads its first messages after its ranks have started: that took up to a minute."""
    wait_until(channel.connected)
    clocks = channel._peers[1].clocks
    wait_until(lambda: min(clocks._samples, default=(math.inf,))[0] < math.inf)
    ahead_ns = channel.offset_of(1).mono_ns  # the hello of this test says that its clock shows 1
    assert abs(ahead_ns) <= min(clocks._samples)[0] / 2
    assert node.connected() == {0}


class Unreadable(Exception):  # noqa: N818 - named for what it is
    """A user's exception whose text cannot be made."""

    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("exc", "phase", "kind", "words"),
    [
        (OSError(errno.EADDRINUSE, "in use"), "start", "port", "a limit of that machine"),
        (OSError(errno.EMFILE, "too many"), "start", "startup-network", "a limit of that machine"),
        (RuntimeError("no store"), "start", "startup-network", "a limit of that machine"),
        (OSError(errno.EMFILE, "too many"), "attempt", "user-error", "a limit of that machine"),
        (RuntimeError("bad batch"), "retry", "user-error", "on_retry"),
        (ValueError("bad"), "start", "user-error", "a bug in ddpsafe"),
        (CheckpointError("no disk"), "retry", "user-error", "on_retry"),
        (SystemExit(3), "retry", "user-error", "on_retry"),
        (Unreadable(), "retry", "user-error", "its __str__ raised"),
    ],
)
def test_whatever_ends_a_launcher_can_be_sent_to_the_other_nodes(
    exc: BaseException, phase: Any, kind: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the end of its traceback; by default only what is raised before the ranks run is retried."""
    with pytest.raises(type(exc)):
        raise exc
    error = node_messages.as_error(exc, "node 1 ('h1')", "could not go on", phase=phase)
    assert "node 1 ('h1') could not go on\nTraceback (most recent call last):" in caplog.text
    assert "raise exc" in caplog.text
    result = node_messages.round_result_of(error, is_final=True, failed_node=1)
    text = json.dumps(to_json(result))
    told = node_messages.error_of(from_json(node_messages.RoundResult, json.loads(text)))
    assert isinstance(told, PreflightError)
    assert told.kind == kind
    assert words in str(told)
    here = f"  {__file__}:"
    assert [each.startswith(here) for each in told.explanation.details[1:]] == [True]
    assert (told.kind in STARTUP_KINDS) is (phase == "start" and not isinstance(exc, ValueError))


WITHOUT_FILES: Final = """
import errno, resource, signal
from ddpsafe._config import LaunchConfig
from ddpsafe._launcher.nodes import node_messages, rendezvous
from ddpsafe._launcher.watch.signals import open_inbox

rendezvous_of = dict(endpoint="h0:29400")
config = LaunchConfig(nnodes=2, nproc_per_node=1, backend="gloo", rendezvous=rendezvous_of)
with open_inbox() as inbox:
    rendezvous.NodeRendezvous(config, inbox)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    error = node_messages.as_error(OSError(errno.EMFILE, "x"), "h0", "could not", phase="start")
    print(node_messages.CODEC.pack(node_messages.round_result_of(error)).decode())
"""


def test_a_launcher_that_cannot_open_files_can_still_report_to_the_others() -> None:
    """Writing a message needs imports, so they happen beforehand."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FILES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "could not: OSError" in done.stdout


@pytest.fixture
def node(channel: Channel) -> Iterator[Channel]:
    """Connect as node 1."""
    with contextlib.closing(dial(channel.port)) as dialled:
        yield dialled


def test_a_waiting_launcher_keeps_sending_signs_of_life(channel: Channel, node: Channel) -> None:
    """Both ends do: waiting for ranks to end or for a decision is not being stopped."""
    for end in (channel, node):
        wait_until(lambda end=end: any(isinstance(each, Alive) for _, each in end.events()))


def test_a_stopped_launcher_receives_a_bounded_number_of_signs_of_life(
    channel: Channel, node: Channel
) -> None:
    """More would fill its host's buffer, and it would be considered lost."""
    with node._lock:  # its thread cannot answer
        for _ in range(10 * _MAX_UNANSWERED_BEATS):
            channel._send_alive()
        channel.send(LetRanksExit())
    heard: list[object] = []

    def has_all() -> bool:
        heard.extend(event for _, event in node.events())
        return LetRanksExit() in heard

    wait_until(has_all)
    # At most one beat came before the lock was taken, and each of its answers allows for as many again.
    assert _MAX_UNANSWERED_BEATS <= len(heard) <= 3 * _MAX_UNANSWERED_BEATS


MESSAGES: Final = 200


@pytest.fixture
def wire(channel: Channel) -> Iterator[Wire]:
    """Lay a way to node 0."""
    laid = Wire(channel.port)
    yield laid
    laid.close()


class Heard:
    """What one end has received."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.numbers: list[int] = []
        self.away = self.back = 0
        self.lost: list[Lost] = []

    def take(self) -> None:
        """Take in what has arrived."""
        for _, event in self._channel.events():
            if isinstance(event, RankRequest):
                self.numbers.append(event.rank)
            elif isinstance(event, Away):
                self.away += 1
            elif isinstance(event, Back):
                self.back += 1
            elif isinstance(event, Lost):
                self.lost.append(event)


@pytest.mark.parametrize("seed", range(3))
def test_messages_arrive_once_and_in_order_over_a_wire_that_is_cut(
    channel: Channel, wire: Wire, seed: int
) -> None:
    """In both directions, wherever it is cut."""
    chance = random.Random(seed)
    with contextlib.closing(dial(wire.port)) as node:
        ends = (channel, node)
        heard = tuple(map(Heard, ends))
        cuts = 0
        for number in range(MESSAGES):
            for end in ends:
                end.send(RankRequest(rank=number, request="ab" * chance.randrange(100)))
            if chance.random() < 0.03:
                wire.cut()
                cuts += 1

        def have_all() -> bool:
            for each in heard:
                each.take()
            return all(len(each.numbers) >= MESSAGES for each in heard)

        wait_until(have_all, otherwise=lambda: [vars(each) for each in heard])
        assert [each.numbers for each in heard] == [list(range(MESSAGES))] * 2
        assert heard[1].back == heard[1].away > 0
        assert [each.lost for each in heard] == [[], []]


def test_a_node_that_stays_away_is_lost_at_both_ends(channel: Channel, wire: Wire) -> None:
    """Each reports why its last connection ended."""
    with contextlib.closing(dial(wire.port, node_loss=timedelta(seconds=1))) as node:
        heard = tuple(map(Heard, (channel, node)))
        wait_until(lambda: channel.connected() == {1})
        wire.drops = math.inf
        wire.cut()
        wait_until(lambda: not node.connected())
        wait_until(lambda: channel.away() == {1})
        channel.give_up_away()
        for each in heard:
            each.take()
        assert [[lost.how for lost in each.lost] for each in heard] == [["reset"], ["reset"]]
        assert channel.offset_of(1).mono_ns is not None


def test_a_node_does_not_connect_again_to_the_successor_of_node_0(wire: Wire) -> None:
    """That has another scope: the node is not among those that it knows, and knows at once."""
    with (
        contextlib.closing(dial(wire.port)) as node,
        contextlib.closing(listen(scope="next")) as successor,
    ):
        heard = Heard(node)
        wire.leads_to = successor.port
        wire.cut()
        wait_until(lambda: not node.connected())
        heard.take()
        assert [lost.how for lost in heard.lost] == ["reset"]
        assert not successor.connected()


def test_a_launcher_that_takes_leave_is_told_apart(channel: Channel, wire: Wire) -> None:
    """A closed channel is a goodbye; a connection that ends without one is a launcher that has died."""
    heard = Heard(channel)
    dial(wire.port).close()
    wait_until(lambda: heard.take() or heard.lost)
    assert heard.lost[0].how == "goodbye"
