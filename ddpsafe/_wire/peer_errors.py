"""Texts of torch, gloo, NCCL, CUDA and Python that tell where a failure comes from, or its kind.

gloo raises plain RuntimeError and NCCL mostly too, so the text is all there is. This is the only
module that knows texts of others, and no text of ddpsafe's own is ever matched: its errors carry
their origin and kind as data. Each row names where it was seen; a test produces the gloo ones with
the installed torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from ddpsafe._errors import FailureKind

PeerOrigin = Literal["peer-lost", "timeout"]
"""The origins (`Origin`) that blame another rank: it was lost, or a wait for it timed out."""


@dataclass(frozen=True, slots=True)
class PeerText:
    """A text that one rank shows because another one broke.

    Attributes:
        pattern: Matches "TypeName: message", in either case of letters.
        origin: The peer was lost, or a wait for it timed out.
        seen: Versions whose output showed it.
    """

    pattern: re.Pattern[str]
    origin: PeerOrigin
    seen: str


@dataclass(frozen=True, slots=True)
class KindText:
    """A text that tells the kind of a failure.

    Attributes:
        pattern: Matches "TypeName: message", in either case of letters.
        kind: The kind.
        seen: Versions whose output showed it.
    """

    pattern: re.Pattern[str]
    kind: FailureKind
    seen: str


def _peer(pattern: str, origin: PeerOrigin, seen: str) -> PeerText:
    return PeerText(re.compile(pattern, re.IGNORECASE), origin, seen)


def _kind(pattern: str, kind: FailureKind, seen: str) -> KindText:
    return KindText(re.compile(pattern, re.IGNORECASE), kind, seen)


PEER_TEXTS: Final = (
    _peer(r"Connection closed by peer", "peer-lost", "2.13 gloo"),
    # Not a plain ConnectionResetError of Python's: that is a DataLoader's worker, or the user's own.
    _peer(r"^(?!Connection\w*Error).*Connection reset by peer", "peer-lost", "2.13 gloo"),
    _peer(r"(?:write|writev|send).*Broken pipe", "peer-lost", "2.13 gloo"),
    _peer(r"connectFullMesh failed", "peer-lost", "2.13 gloo"),
    _peer(r"remote process exited or there was a network error", "peer-lost", "2.x nccl"),
    _peer(r"ncclRemoteError", "peer-lost", "2.x nccl"),
    _peer(r"NCCL communicator was aborted", "peer-lost", "2.x nccl"),
    _peer(r"DistNetworkError|DistStoreError.*(?:closed|reset)", "peer-lost", "2.13 store"),
    _peer(r"Timed out waiting \d+ms for (?:recv|send)", "timeout", "2.13 gloo"),
    _peer(r"Application timeout caused pair closure", "timeout", "2.13 gloo"),
    _peer(r"Socket Timeout|wait timeout after \d+ms", "timeout", "2.13 store"),
    _peer(r"Watchdog caught collective operation timeout", "timeout", "2.x nccl"),
    _peer(r"monitoredBarrier", "timeout", "2.13 gloo"),
)
"""Exceptions that blame another rank, the first match wins."""

NATIVE_TEXTS: Final[tuple[PeerText, ...]] = ()
"""What native code writes to stderr before it ends the process with SIGABRT, such as NCCL's watchdog.

A rank that died so failed because of another one, as one that raised a text of `PEER_TEXTS`.
"""

KIND_TEXTS: Final = (
    _kind(r"^[\w.]+: DataLoader worker \(pid", "killed", "2.13 torch"),
    _kind(
        r"OutOfMemoryError|MemoryError|out of memory|(?:can't|cannot) allocate memory",
        "out-of-memory",
        "2.13 torch, Python 3.11",
    ),
    _kind(r"uncorrectable ECC|\bXid\b|fallen off the bus", "hardware", "CUDA 12"),
    _kind(r"EADDRINUSE|Address already in use", "port", "2.13 store, Linux"),
    # A TimeoutError of a socket's: those of futures and of asyncio are the same class.
    _kind(
        r"^TimeoutError: (?:\[Errno \d+\]|_ssl\.c|timed out$|The \w+ operation timed out)",
        "network",
        "Python 3.11",
    ),
    _kind(
        r"^Connection\w*Error|^BrokenPipeError|Stale file handle|gaierror"
        r"|Name or service not known|Temporary failure in name resolution|No route to host",
        "network",
        "Python 3.11, Linux",
    ),
)
"""What kind of failure an exception is, the first match wins."""

_OF_A_BACKEND: Final = re.compile(
    r"/gloo/|nccl|c10d|ProcessGroup|(?:Read error|closed by peer) \[", re.IGNORECASE
)
_OF_TORCH: Final = re.compile(r"/torch/(?:distributed/(?!elastic/)|nn/parallel/|autograd/)")
_GLOO_SOURCE: Final = re.compile(r"\[\S*/gloo/\S+:\d+\] ")


def find_peer_text(line: str) -> PeerText | None:
    """Return the row that an exception, as "TypeName: message", matches first."""
    return next((row for row in PEER_TEXTS if row.pattern.search(line)), None)


def find_native_text(stderr: str) -> PeerText | None:
    """Return the row that what a rank wrote before it died of SIGABRT matches first."""
    return next((row for row in NATIVE_TEXTS if row.pattern.search(stderr)), None)


def find_kind(line: str) -> FailureKind | None:
    """Return the kind that an exception, as "TypeName: message", matches first."""
    return next((row.kind for row in KIND_TEXTS if row.pattern.search(line)), None)


def is_of_a_backend(line: str, file: str) -> bool:
    """Tell whether a RuntimeError is torch's: by its text, or by the file that raised it."""
    return _OF_A_BACKEND.search(line) is not None or _OF_TORCH.search(file) is not None


def without_source(line: str) -> str:
    """Return a line of gloo's without the place in gloo's source code."""
    return _GLOO_SOURCE.sub("", line)
