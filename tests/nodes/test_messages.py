"""What launchers of several nodes tell each other is read and written as plain JSON."""

from __future__ import annotations

import dataclasses
import errno
import json
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from pydantic import TypeAdapter

from ddpsafe._errors import STARTUP_KINDS, PreflightError
from ddpsafe._launcher.nodes import node_messages
from ddpsafe._launcher.nodes.rendezvous import _LocalTimes
from ddpsafe._wire.messages import Position, Whereabouts
from ddpsafe.checkpoint.errors import CheckpointError

CLASSES = [
    value
    for value in vars(node_messages).values()
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
    offset = node_messages.ClockOffset(wall_ns=500)
    position = Position(collectives=(), arrivals=((1, 1000), (2, 2000)))
    assert offset.shift_position(position).arrivals == ((1, 1500), (2, 2500))
    answer = offset.shift(Whereabouts(position=position))
    assert isinstance(answer, Whereabouts)
    assert answer.position.arrivals == ((1, 1500), (2, 2500))


class Unreadable(Exception):  # noqa: N818 - what it is
    """One of a user's whose text cannot be made."""

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
def test_whatever_ends_a_launcher_can_be_told_to_the_other_nodes(
    exc: BaseException, phase: Any, kind: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only what was raised before the ranks ran is of a kind that is tried again by default.

    The log of the launcher has the traceback, which the message points at.
    """
    with pytest.raises(type(exc)):
        raise exc
    error = node_messages.as_error(exc, "node 1 ('h1')", "could not go on", phase=phase)
    assert "node 1 ('h1') could not go on\nTraceback (most recent call last):" in caplog.text
    assert "raise exc" in caplog.text
    result = node_messages.round_result_of(error, is_final=True, failed_node=1)
    text = json.dumps(node_messages.to_json(result))
    told = node_messages.error_of(
        node_messages.from_json(node_messages.RoundResult, json.loads(text))
    )
    assert isinstance(told, PreflightError)
    assert told.kind == kind
    assert words in str(told)
    assert (told.kind in STARTUP_KINDS) is (phase == "start" and not isinstance(exc, ValueError))


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
