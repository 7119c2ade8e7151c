"""Exceptions on their way while their rank waits for others, who may wait for it elsewhere.

``except: dist.barrier()`` and ``finally: dist.barrier()`` hide an error until a timeout: the
exception has not left the user's function, and the others are in another collective. So it is
reported before the wait, and withdrawn when the wait ends well, since a barrier in an ``except``
block may be meant.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class Witness(Protocol):
    """Who is told."""

    def exception_in_flight(self) -> BaseException | None:
        """Report the exception that this thread is handling; return it."""

    def recovered(self, exc: BaseException) -> None:
        """Take the report back."""


_witness: Witness | None = None


def tell(witness: Witness) -> None:
    """Report to `witness` from now on."""
    global _witness  # noqa: PLW0603 - one process is one rank
    _witness = witness


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Be around a wait for other ranks."""
    exc = None if _witness is None else _witness.exception_in_flight()
    yield
    if _witness is not None and exc is not None:
        _witness.recovered(exc)
