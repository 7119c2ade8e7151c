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
"""What a duration may be written as; a bare number means seconds."""

SHORTEST: Final = timedelta(milliseconds=1)
"""torch counts timeouts in whole milliseconds and its stores read 0 as "wait for ever"."""

LONGEST: Final = timedelta(days=365)
"""Longer than any job, and far from where nanosecond clocks overflow (292 years)."""

_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SPELLINGS: Final = {
    "ms": ("ms", "millisecond", "milliseconds"),
    "s": ("", "s", "sec", "secs", "second", "seconds"),
    "m": ("m", "min", "mins", "minute", "minutes"),
    "h": ("h", "hr", "hrs", "hour", "hours"),
    "d": ("d", "day", "days"),
}
_UNIT_OF: Final = {word: _UNITS_S[unit] for unit, words in _SPELLINGS.items() for word in words}
_TEXT: Final = re.compile(r"\s*([+-]?[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.ASCII)
_LONGEST_TEXT: Final = 64
_HOW: Final = 'seconds as a number (30), or a text such as "30s", "5min", "1h", "2 days"'


def parse_duration(value: object, *, shortest: timedelta = SHORTEST) -> object:
    """Read a duration as people write it.

    Args:
        value: A timedelta, a number of seconds, or text with a unit.
        shortest: The shortest duration that makes sense.

    Returns:
        The timedelta; text in another form (ISO 8601, HH:MM:SS) is left to pydantic.

    Raises:
        PydanticCustomError: It is not a duration, not finite, too short or too long.
    """
    if isinstance(value, bool) or not isinstance(value, (timedelta, int, float, str)):
        raise wrong(f"expected a duration, got a {type(value).__name__}", write=_HOW)
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)):
        seconds = float(value) if abs(value) <= LONGEST.total_seconds() else math.inf
    else:
        match = _TEXT.fullmatch(value.lower()) if len(value) <= _LONGEST_TEXT else None
        if match is None or match[2] not in _UNIT_OF:
            return value
        seconds = float(match[1]) * _UNIT_OF[match[2]]
    if math.isnan(seconds):
        raise wrong("NaN is not a duration", write=_HOW)
    if seconds > LONGEST.total_seconds():
        raise wrong(
            "it is longer than 365 days, and every wait has an end here",
            write='a shorter duration, e.g. "2 days"',
        )
    if seconds < shortest.total_seconds():
        least = "zero or longer" if not shortest else "longer than zero (1 ms at least)"
        raise wrong(f"a duration has to be {least}", write=_HOW)
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


# The bounds are checked once more: ISO 8601 and HH:MM:SS are read by pydantic, which knows none.
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
"""A `Duration`, or ``"auto"``: it is found out by the run itself."""

Wait = Annotated[timedelta, BeforeValidator(_parse_wait), AfterValidator(_parse_wait)]
"""As `Duration`, and zero is allowed: wait not at all."""


def require_wait(value: object, *, name: str) -> timedelta:
    """Read how long to wait, an argument of a call, as the configuration reads its durations.

    Args:
        value: What was given.
        name: The argument as its caller knows it, e.g. ``barrier(timeout=…)``.

    Raises:
        ConfigError: It is not a duration, or not one that a wait can have.
    """
    if isinstance(value, timedelta) and timedelta(0) <= value <= LONGEST:  # needs no pydantic
        return value
    try:
        return TypeAdapter(Wait).validate_python(value)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        why = detail["msg"].rstrip(".")
        write = detail.get("ctx", {}).get("write", _HOW)
        text = Explanation(f"{name}: got {show(value)}.", cause=f"{why}.", fix=f"write {write}.")
        raise ConfigError(text) from None
