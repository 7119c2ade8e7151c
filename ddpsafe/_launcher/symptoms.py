"""What sort of failure an exception is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ddpsafe._errors import FailureKind
    from ddpsafe._wire.outcome import Raised


_BUSY_PORT: Final = re.compile(r"EADDRINUSE|Address already in use", re.IGNORECASE)


def wants_busy_port(raised: Raised) -> bool:
    """Tell whether a port is taken, whatever the failure's kind is called."""
    return _BUSY_PORT.search(f"{raised.type_name}: {raised.message}") is not None


_KINDS: Final[tuple[tuple[FailureKind, re.Pattern[str]], ...]] = (
    (
        "out-of-memory",
        re.compile(
            r"OutOfMemoryError|MemoryError|out of memory|(?:can't|cannot) allocate memory",
            re.IGNORECASE,
        ),
    ),
    ("hardware", re.compile(r"uncorrectable ECC|\bXid\b|fallen off the bus")),
    ("unpicklable", re.compile(r"CannotTravelError|PicklingError")),
    ("port", _BUSY_PORT),
    (
        "network",
        re.compile(
            # A TimeoutError of a socket's: those of futures and of asyncio are the same class.
            r"^TimeoutError: (?:\[Errno \d+\]|_ssl\.c|timed out$|The \w+ operation timed out)"
            r"|^Connection\w*Error|^BrokenPipeError|Stale file handle|gaierror"
            r"|Name or service not known|Temporary failure in name resolution|No route to host",
            re.IGNORECASE,
        ),
    ),
)


def _lost_loader_worker(raised: Raised) -> bool:
    """Tell whether a DataLoader's worker died: torch says so, or a read from it breaks off."""
    if raised.message.startswith("DataLoader worker (pid"):
        return True
    broke_off = raised.type_name in ("ConnectionResetError", "ConnectionRefusedError", "EOFError")
    return broke_off and "torch/utils/data/dataloader.py" in raised.traceback


def kind_of(raised: Raised) -> FailureKind:
    """Say what sort of failure an exception is."""
    text = f"{raised.type_name}: {raised.message}"
    kind: FailureKind = "user-error"
    if raised.is_peer_error:
        kind = "hang" if raised.origin == "timeout" else "peer-lost"
    elif _lost_loader_worker(raised):
        kind = "killed"
    else:
        kind = next((name for name, pattern in _KINDS if pattern.search(text)), "user-error")
    before = raised.phase in ("starting", "loading", "joining")
    if before and kind in ("network", "peer-lost", "hang"):
        return "startup-network"
    # "port" is tried again by default, which is safe only while the function has not run.
    return "network" if kind == "port" and not before else kind
