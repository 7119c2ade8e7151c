"""Texts that say "somebody else broke": the table that tells a cause from its echoes.

gloo raises plain RuntimeError and NCCL mostly too, so the text is all there is. Each pattern names
the torch version it was seen with; a test produces the gloo ones with the installed torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from ddpsafe._kinds import FailureKind
    from ddpsafe._wire.outcome import Raised


@dataclass(frozen=True, slots=True)
class Symptom:
    """A text that one rank shows because another one broke.

    Attributes:
        pattern: Matches "TypeName: message".
        sort: The peer was lost, or a wait for it timed out.
        seen: torch versions whose output showed it.
    """

    pattern: re.Pattern[str]
    sort: Literal["peer-lost", "timeout"]
    seen: str


def _symptom(pattern: str, sort: Literal["peer-lost", "timeout"], seen: str) -> Symptom:
    return Symptom(re.compile(pattern, re.IGNORECASE), sort, seen)


SECONDARY: Final = (
    _symptom(r"Connection closed by peer", "peer-lost", "2.13 gloo"),
    # Not a plain ConnectionResetError of Python's: that is a DataLoader's worker, or the user's own.
    _symptom(r"^(?!Connection\w*Error).*Connection reset by peer", "peer-lost", "2.13 gloo"),
    _symptom(r"(?:write|writev|send).*Broken pipe", "peer-lost", "2.13 gloo"),
    _symptom(r"connectFullMesh failed", "peer-lost", "2.13 gloo"),
    _symptom(r"remote process exited or there was a network error", "peer-lost", "2.x nccl"),
    _symptom(r"ncclRemoteError", "peer-lost", "2.x nccl"),
    _symptom(r"NCCL communicator was aborted", "peer-lost", "2.x nccl"),
    _symptom(r"DistNetworkError|DistStoreError.*(?:closed|reset)", "peer-lost", "2.13 store"),
    _symptom(r"Timed out waiting \d+ms for (?:recv|send)", "timeout", "2.13 gloo"),
    _symptom(r"Application timeout caused pair closure", "timeout", "2.13 gloo"),
    _symptom(r"Socket Timeout|wait timeout after \d+ms", "timeout", "2.13 store"),
    _symptom(r"Watchdog caught collective operation timeout", "timeout", "2.x nccl"),
    _symptom(r"monitoredBarrier", "timeout", "2.13 gloo"),
    _symptom(r"ddpsafe.*RankRaisedError", "peer-lost", "ddpsafe: rank 0 failed elsewhere"),
    _symptom(r"\(met by rank \d+, seen by rank", "peer-lost", "ddpsafe: another rank's checkpoint"),
    _symptom(r"ddpsafe.*(?:Barrier|Rendezvous|Save)TimeoutError", "timeout", "ddpsafe"),
)


def find_symptom(raised: Raised) -> Symptom | None:
    """Return what marks the exception as an echo of another rank's failure."""
    text = f"{raised.type_name}: {raised.message}"
    return next((symptom for symptom in SECONDARY if symptom.pattern.search(text)), None)


def is_secondary(raised: Raised) -> bool:
    """Tell whether the rank only lost another one."""
    return find_symptom(raised) is not None


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
            r"^Connection\w*Error|^BrokenPipeError|^TimeoutError|Stale file handle|gaierror"
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
    symptom = find_symptom(raised)
    if symptom is not None:
        kind = "hang" if symptom.sort == "timeout" else "peer-lost"
    elif _lost_loader_worker(raised):
        kind = "killed"
    else:
        kind = next((name for name, pattern in _KINDS if pattern.search(text)), "user-error")
    before = raised.phase in ("starting", "loading", "joining")
    if before and kind in ("network", "peer-lost", "hang"):
        return "startup-network"
    # "port" is tried again by default, which is safe only while the function has not run.
    return "network" if kind == "port" and not before else kind
