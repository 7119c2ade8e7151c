"""Texts that say "somebody else broke": the table that tells a cause from its echoes.

gloo raises plain RuntimeError and NCCL mostly too, so the text is all there is. Each pattern names
the torch version it was seen with; a test produces the gloo ones with the installed torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Echo = Literal["peer-lost", "timeout"]
"""What another rank has done: it was lost, or a wait for it timed out."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """A text that one rank shows because another one broke.

    Attributes:
        pattern: Matches "TypeName: message".
        sort: The peer was lost, or a wait for it timed out.
        seen: torch versions whose output showed it.
    """

    pattern: re.Pattern[str]
    sort: Echo
    seen: str


def _symptom(pattern: str, sort: Echo, seen: str) -> Symptom:
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


def symptom_in(text: str) -> Symptom | None:
    """Return what marks an exception, as "TypeName: message", as an echo of another rank's failure."""
    return next((symptom for symptom in SECONDARY if symptom.pattern.search(text)), None)


_MISMATCH: Final = re.compile(r"^ValueError: reduce_mean: the ranks passed different")


def tells_of_mismatch(text: str) -> bool:
    """Tell whether a rank's error may come of others that were in another collective."""
    return _MISMATCH.search(text) is not None
