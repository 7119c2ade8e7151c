"""Durations as people write them: timedelta, seconds, "30s", "5min"; always finite."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    TypeAdapter,
    ValidationError,
    WrapSerializer,
    WrapValidator,
)

from ddpsafe._config.problems import show, wrong
from ddpsafe._errors import ConfigError, Explanation

DurationLike = timedelta | float | int | str
"""The accepted forms of a duration; a bare number means seconds."""

SHORTEST: Final = timedelta(milliseconds=1)
"""torch counts timeouts in whole milliseconds, and its stores take 0 to mean "wait for ever"."""

LONGEST: Final = timedelta(days=365)
"""Longer than any job, and far below the 292 years at which nanosecond clocks overflow."""

_SPELLINGS: Final = {
    0.001: "ms millisecond milliseconds",
    1.0: "s sec secs second seconds",
    60.0: "m min mins minute minutes",
    3600.0: "h hr hrs hour hours",
    86400.0: "d day days",
}
_UNIT_OF: Final = {
    "": 1.0,
    **{word: s for s, words in _SPELLINGS.items() for word in words.split()},
}
_TEXT: Final = re.compile(r"\s*([+-]?[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.ASCII)
_MAX_CHARS: Final = 64
_HOW: Final = 'seconds as a number (30), or a string such as "30s", "5min", "1h", "2 days"'


def parse_duration(value: object, *, shortest: timedelta = SHORTEST) -> object:
    """Read a duration as people write it.

    Returns:
        The timedelta; strings in other forms (ISO 8601, HH:MM:SS) are returned for pydantic to parse.

    Raises:
        PydanticCustomError: It is not a duration, not finite, too short or too long.
    """
    if isinstance(value, bool) or not isinstance(value, (timedelta, int, float, str)):
        raise wrong(f"expected a duration, got a {type(value).__name__}", write=_HOW)
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)):
        # float() raises OverflowError for an integer beyond its range.
        seconds = float(value) if abs(value) <= LONGEST.total_seconds() else math.inf
    else:
        match = _TEXT.fullmatch(value.lower()) if len(value) <= _MAX_CHARS else None
        if match is None or match[2] not in _UNIT_OF:
            return value
        seconds = float(match[1]) * _UNIT_OF[match[2]]
    if math.isnan(seconds):
        raise wrong("NaN is not a duration", write=_HOW)
    if seconds > LONGEST.total_seconds():
        raise wrong(
            "it is longer than 365 days, the longest wait that ddpsafe allows",
            write='a shorter duration, e.g. "2 days"',
        )
    if seconds < shortest.total_seconds():
        least = "zero or longer" if not shortest else "longer than zero (1 ms at least)"
        raise wrong(f"a duration must be {least}", write=_HOW)
    return timedelta(seconds=seconds)


def _parse_wait(value: object) -> object:
    return parse_duration(value, shortest=timedelta(0))


def show_duration(value: timedelta) -> str:
    """Return a duration as its reader would write it: "5 s", "10 min", "2 h"."""
    seconds = value.total_seconds()
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"


# The bounds are checked again afterwards: pydantic parses ISO 8601 and HH:MM:SS without any.
Duration = Annotated[timedelta, BeforeValidator(parse_duration), AfterValidator(parse_duration)]
"""A timedelta of at least 1 ms and at most 365 days; a number means seconds."""

if TYPE_CHECKING:
    DurationOrAuto: TypeAlias = timedelta | Literal["auto"]
else:
    DurationOrAuto = Annotated[
        Duration,
        WrapValidator(lambda value, read: value if value == "auto" else read(value)),
        WrapSerializer(lambda value, write: value if value == "auto" else write(value)),
    ]
"""A `Duration`, or ``"auto"``: derived from what the run itself measures."""

Wait = Annotated[timedelta, BeforeValidator(_parse_wait), AfterValidator(_parse_wait)]
"""Like `Duration`, but zero is allowed and means not to wait."""


def require_wait(value: object, *, name: str) -> timedelta:
    """Read a wait that was passed to a call as `name`, e.g. ``barrier(timeout=…)``.

    Raises:
        ConfigError: It is not a duration, or out of range.
    """
    if isinstance(value, timedelta) and timedelta(0) <= value <= LONGEST:  # the common case
        return value
    try:
        return TypeAdapter(Wait).validate_python(value)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        why = detail["msg"].rstrip(".")
        write = detail.get("ctx", {}).get("write", _HOW)
        text = Explanation(f"{name}: got {show(value)}.", cause=f"{why}.", fix=f"write {write}.")
        raise ConfigError(text) from None
