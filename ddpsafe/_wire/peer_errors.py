"""Texts of torch, gloo and NCCL that say that another rank broke.

gloo raises plain RuntimeError and NCCL mostly too, so the text is all there is. Each pattern names
the torch version it was seen with; a test produces the gloo ones with the installed torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

PeerOrigin = Literal["peer-lost", "timeout"]
"""The origins (`Origin`) that blame another rank: it was lost, or a wait for it timed out."""


@dataclass(frozen=True, slots=True)
class PeerError:
    """A text that one rank shows because another one broke.

    Attributes:
        pattern: Matches "TypeName: message".
        origin: The peer was lost, or a wait for it timed out.
        seen: torch versions whose output showed it.
    """

    pattern: re.Pattern[str]
    origin: PeerOrigin
    seen: str


def _peer_error(pattern: str, origin: PeerOrigin, seen: str) -> PeerError:
    return PeerError(re.compile(pattern, re.IGNORECASE), origin, seen)


PEER_ERRORS: Final = (
    _peer_error(r"Connection closed by peer", "peer-lost", "2.13 gloo"),
    # Not a plain ConnectionResetError of Python's: that is a DataLoader's worker, or the user's own.
    _peer_error(r"^(?!Connection\w*Error).*Connection reset by peer", "peer-lost", "2.13 gloo"),
    _peer_error(r"(?:write|writev|send).*Broken pipe", "peer-lost", "2.13 gloo"),
    _peer_error(r"connectFullMesh failed", "peer-lost", "2.13 gloo"),
    _peer_error(r"remote process exited or there was a network error", "peer-lost", "2.x nccl"),
    _peer_error(r"ncclRemoteError", "peer-lost", "2.x nccl"),
    _peer_error(r"NCCL communicator was aborted", "peer-lost", "2.x nccl"),
    _peer_error(r"DistNetworkError|DistStoreError.*(?:closed|reset)", "peer-lost", "2.13 store"),
    _peer_error(r"Timed out waiting \d+ms for (?:recv|send)", "timeout", "2.13 gloo"),
    _peer_error(r"Application timeout caused pair closure", "timeout", "2.13 gloo"),
    _peer_error(r"Socket Timeout|wait timeout after \d+ms", "timeout", "2.13 store"),
    _peer_error(r"Watchdog caught collective operation timeout", "timeout", "2.x nccl"),
    _peer_error(r"monitoredBarrier", "timeout", "2.13 gloo"),
)


def find_peer_error(text: str) -> PeerError | None:
    """Return the row that an exception, as "TypeName: message", matches first."""
    return next((row for row in PEER_ERRORS if row.pattern.search(text)), None)
