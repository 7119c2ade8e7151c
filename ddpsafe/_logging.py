"""Log records with rank, attempt and node as fields, and output as lines of JSON.

ddpsafe's own records have the fields in every process. In a rank all records have them, including those
of the script and its libraries.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import traceback
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import headline, to_plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddpsafe._errors import DDPSafeError
    from ddpsafe._world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFields:
    """Where in a launch a record was made.

    Attributes:
        rank: The rank, or ``None`` in the launcher.
        world_size: Number of ranks, if known.
        attempt: The attempt, counted from 1.
        node_rank: The node, if known.
    """

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    attempt: int | None = None
    node_rank: int | None = None


_of_rank: RecordFields | None = None
_of_launch: ContextVar[RecordFields | None] = ContextVar("ddpsafe_record_fields", default=None)
_is_wrapped = False


def current_fields() -> RecordFields:
    """Return the fields of a record that is made now, in this context."""
    return _of_launch.get() or _of_rank or RecordFields()


def get_logger(name: str) -> logging.Logger:
    """Return the logger of one of ddpsafe's modules, whose records have the fields."""
    logger = logging.getLogger(name)
    logger.addFilter(_add_fields)
    return logger


def _add_fields(record: logging.LogRecord) -> bool:
    for field, value in asdict(current_fields()).items():
        record.__dict__.setdefault(field, value)  # fields of `extra` win
    return True


def name_rank(world: World, attempt: int) -> None:
    """Add the fields to every record of this process, which is a rank."""
    # Not by a record factory: with one, Python refuses ``extra={"rank": …}``, which distributed
    # scripts pass.
    global _of_rank, _is_wrapped  # noqa: PLW0603 - one process is one rank
    _of_rank = RecordFields(
        rank=world.rank,
        local_rank=world.local_rank,
        world_size=world.world_size,
        attempt=attempt,
        node_rank=world.node_rank,
    )
    if _is_wrapped:
        return
    _is_wrapped = True
    make = logging.Logger.makeRecord

    def make_record(self: logging.Logger, *arguments: Any, **keywords: Any) -> logging.LogRecord:
        record = make(self, *arguments, **keywords)
        _add_fields(record)
        return record

    logging.Logger.makeRecord = make_record  # type: ignore[method-assign]


@contextlib.contextmanager
def launch_fields(node_rank: int | None) -> Iterator[None]:
    """Add a launch's node to its records while the context is open; see `note_attempt`."""
    token = _of_launch.set(RecordFields(node_rank=node_rank))
    try:
        yield
    finally:
        _of_launch.reset(token)


def note_attempt(number: int, *, world_size: int, node_rank: int) -> None:
    """Add the attempt to records of the current launch from now on."""
    fields = _of_launch.get()
    if fields is not None:
        _of_launch.set(replace(fields, attempt=number, world_size=world_size, node_rank=node_rank))


# Lines of JSON.

HOSTNAME: Final = socket.gethostname()


_consoles: Final[list[tuple[object, bool]]] = []
"""For each open scope, a token and whether it writes lines of JSON; the newest last."""


@contextlib.contextmanager
def json_scope(*, on: bool) -> Iterator[None]:
    """Make ddpsafe's own output lines of JSON, or text, while the context is open."""
    scope = (object(), on)  # unique: launches in several threads end in any order
    _consoles.append(scope)
    try:
        yield
    finally:
        _consoles.remove(scope)


def is_json() -> bool:
    """Return whether ddpsafe's own output must be lines of JSON."""
    return any(on for _, on in _consoles[-1:])


def json_line(level: str, message: str, fields: RecordFields, **more: object) -> str:
    """Return one JSON object without a line end; the seven keys written here are a public promise."""
    content: dict[str, object] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "level": level,
        "message": message,
        "rank": fields.rank,
        "attempt": fields.attempt,
        "node": fields.node_rank,
        "host": HOSTNAME,
        **more,
    }
    return json.dumps(content, default=str)


def json_of_record(record: logging.LogRecord) -> str:
    """Return a record as one JSON object."""
    facts: Mapping[str, Any] = record.__dict__
    fields = RecordFields(
        rank=facts.get("rank"), attempt=facts.get("attempt"), node_rank=facts.get("node_rank")
    )
    more = {"logger": record.name}
    more |= {name: facts[name] for name in ("event", "of_node") if name in facts}
    if record.exc_info and record.exc_info[0] is not None:
        more["traceback"] = "".join(traceback.format_exception(*record.exc_info))
    return json_line(record.levelname, record.getMessage(), fields, **more)


def json_of_error(error: DDPSafeError) -> str:
    """Return an error as one JSON object, with its class, kind and exit code as fields."""
    fields = RecordFields(
        rank=getattr(error, "rank", None),
        attempt=getattr(error, "attempt", None),
        node_rank=current_fields().node_rank,
    )
    more = {
        "event": "ended",
        **headline(to_plain(error)),
        "traceback": "".join(traceback.format_exception(error.with_traceback(None))),
    }
    return json_line("ERROR", str(error), fields, **more)
