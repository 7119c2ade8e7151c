"""How errors cross to another process with their facts and their cause."""

from __future__ import annotations

import pickle
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def rebuild(
    cls: type[E],
    args: tuple[object, ...],
    facts: dict[str, object],
    cause: BaseException | None,
) -> E:
    """Make an error from its facts: keyword-only arguments do not survive the default protocol."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(facts)
    error.__cause__ = cause
    return error


def portable(exc: BaseException | None) -> BaseException | None:
    """Return an exception if it survives pickling; Python itself drops every cause."""
    try:
        pickle.loads(pickle.dumps(exc))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - a user's exception may refuse in any way
        return None
    return exc
