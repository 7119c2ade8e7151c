"""Checks of arguments; each raises what was given, and what to give instead."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray  # noqa: TC002 - in a public signature

from ddpsafe._errors import ConfigError, Explanation


def bad_arguments(subject: str, what: str, fix: str) -> ConfigError:
    """Make the error for arguments of `subject` that do not fit."""
    return ConfigError(
        Explanation(f"{subject}: {what}.", cause="the arguments do not fit.", fix=f"{fix}.")
    )


def require_int(value: object, name: str, *, least: int | None = None) -> int:
    """Return `value` as an int, or raise for anything that is not a whole number from `least` on."""
    try:
        number = operator.index(None if isinstance(value, bool) else value)  # type: ignore[arg-type]  # it raises then
    except TypeError:
        raise ConfigError(
            Explanation(
                f"{name} must be a whole number, not {value!r}.",
                cause=f"{type(value).__name__} was given.",
                fix=f"pass an int for {name}.",
            )
        ) from None
    if least is not None and number < least:
        raise ConfigError(
            Explanation(
                f"{name} is {number}, and must be at least {least}.",
                cause="it counts something.",
                fix=f"pass {name} >= {least}.",
            )
        )
    return number


def require_choice(value: object, name: str, choices: tuple[object, ...]) -> None:
    """Raise if a value is none of those to choose from."""
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ConfigError(
            Explanation(
                f"{name} cannot be {value!r}.",
                cause="the name is misspelled, or belongs to a newer ddpsafe.",
                fix=f"choose one of {listed}.",
            )
        )


def require_amounts(values: Any, name: str, subject: str) -> NDArray[np.float64]:
    """Return finite values of zero or more as shape (n,), float64, or raise naming the first bad one."""
    detach = getattr(values, "detach", None)
    plain = values if detach is None else detach().cpu().numpy()
    amounts = np.ascontiguousarray(plain, dtype=np.float64)
    if np.ndim(plain) != 1 or len(amounts) == 0:
        raise bad_arguments(
            subject,
            f"{name} must have the shape (n,) with n >= 1, not {np.shape(plain)}",
            "pass one for each sample",
        )
    bad = np.flatnonzero(~np.isfinite(amounts) | (amounts < 0))
    if len(bad):
        raise bad_arguments(
            subject,
            f"{len(bad)} {name} are negative or not finite, the first is "
            f"{name}[{bad[0]}] = {amounts[bad[0]]}",
            "pass finite ones of zero or more",
        )
    return amounts
