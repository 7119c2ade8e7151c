"""The exception of a rank, in the launcher: its own type where it can travel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpsafe._wire import payload

if TYPE_CHECKING:
    from ddpsafe._wire.outcome import Raised


class RemoteTraceback(Exception):  # noqa: N818 - shown as text above the error it belongs to
    """The traceback of another process, as text."""

    __module__ = "ddpsafe"

    def __str__(self) -> str:
        """Show it as Python shows a traceback."""
        return f"\n{self.args[0]}"


def original_of(raised: Raised) -> BaseException:
    """Return the rank's own exception where it could travel, its traceback above it."""
    remote = RemoteTraceback(raised.traceback)
    if raised.payload is None:
        return remote
    try:
        exc = payload.loads(raised.payload)
    except BaseException:  # noqa: BLE001 - a user's __reduce__ may raise anything, SystemExit too
        return remote
    if not isinstance(exc, BaseException):
        return remote
    exc.__cause__ = remote
    return exc
