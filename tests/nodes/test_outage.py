"""A connection between two launchers breaks and is made again: nothing is missing, nothing comes twice."""

from __future__ import annotations

import contextlib
import math
import random
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import pytest
from cut_wire import HERE, Wire
from scripts import wait_until

from ddpsafe._clock import Deadline
from ddpsafe._job.channel import Away, Back, Channel, Hello, Lost
from ddpsafe._launcher.nodes.node_messages import CODEC, RankRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

MESSAGES: Final = 200
NODE_LOSS: Final = timedelta(minutes=2)


@pytest.fixture
def channel() -> Iterator[Channel]:
    """Open node 0's end."""
    listening = Channel.listen(
        HERE, secret=b"secret", scope="round", codec=CODEC, nnodes=2, node_loss=NODE_LOSS
    )
    yield listening
    listening.close()


@pytest.fixture
def wire(channel: Channel) -> Iterator[Wire]:
    """Lay a way to node 0."""
    laid = Wire(channel.port)
    yield laid
    laid.close()


def dial(wire: Wire, node_loss: timedelta = NODE_LOSS) -> Channel:
    """Connect as node 1."""
    return Channel.dial(
        (HERE, wire.port),
        secret=b"secret",
        scope="round",
        codec=CODEC,
        node=1,
        hello=lambda: Hello(mono_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
        deadline=Deadline.after(timedelta(seconds=10)),
        node_loss=node_loss,
    )


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
    with contextlib.closing(dial(wire)) as node:
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
    with contextlib.closing(dial(wire, timedelta(seconds=1))) as node:
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
        contextlib.closing(dial(wire)) as node,
        contextlib.closing(
            Channel.listen(HERE, secret=b"secret", scope="next", codec=CODEC, nnodes=2)
        ) as successor,
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
    dial(wire).close()
    wait_until(lambda: heard.take() or heard.lost)
    assert heard.lost[0].how == "goodbye"
