"""What launchers of several nodes tell each other is read and written as plain JSON."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from pydantic import TypeAdapter

from ddpsafe._launcher.nodes import messages
from ddpsafe._launcher.nodes.rendezvous import _LocalTimes
from ddpsafe._wire.messages import Position

CLASSES = [
    value
    for value in vars(messages).values()
    if isinstance(value, type) and dataclasses.is_dataclass(value)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_message_can_be_read(cls: Any) -> None:
    """Each type that a field names is there when pydantic reads it, not for type checkers only."""
    adapter = TypeAdapter(cls)
    adapter.rebuild(raise_errors=True)
    json.dumps(adapter.json_schema())


def test_arrivals_at_collectives_are_shown_on_this_hosts_clock() -> None:
    """Else a node whose clock is behind looks as if the others kept it waiting."""
    offset = messages.ClockOffset(wall_ns=500)
    position = Position(collectives=(), arrivals=((1, 1000), (2, 2000)))
    assert offset.shift_position(position).arrivals == ((1, 1500), (2, 2500))


class NamedNode(NamedTuple):
    """A node in a state of the rendezvous, as torch names it."""

    addr: str
    pid: int


def test_a_node_that_comes_back_under_its_old_name_and_pid_is_heard_again() -> None:
    """As a container does; until then it is gone, whatever heartbeat it left behind."""
    times = _LocalTimes(timedelta(seconds=1))
    node = NamedNode("h1", 1)

    def shown(second: int) -> bool:
        """Tell whether it counts as heard of lately, with this heartbeat in the store."""
        beat = datetime(2020, 1, 1, 0, 0, second, tzinfo=timezone.utc)
        state = SimpleNamespace(last_heartbeats={node: beat}, deadline=None)
        found: datetime = next(iter(times.show(state).last_heartbeats.values()))
        return datetime.now(timezone.utc) - found < timedelta(minutes=1)

    assert shown(1)
    times.forget(("h1", 1))
    assert not shown(2)  # written before it died, and read only now
    assert not shown(2)
    assert shown(3)
    assert shown(3)
