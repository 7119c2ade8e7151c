"""What kind of failure an exception of a rank is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ddpsafe._wire.peer_errors import find_kind, is_full_disk, says_worker_exited

if TYPE_CHECKING:
    from ddpsafe._errors import FailureKind
    from ddpsafe._wire.messages import Raised


Topic = Literal["port", "disk", "worker-exit"]
"""What an exception is about, where there is advice for it, whatever kind of failure that makes."""


def find_topic(raised: Raised) -> Topic | None:
    """Return what the exception is about, if there is advice for just that."""
    if raised.explanation is not None:  # it brings its advice along
        return None
    line = _line_of(raised)
    if find_kind(line) == "port":
        return "port"
    if says_worker_exited(raised.traceback):
        return "worker-exit"
    return "disk" if is_full_disk(line) else None


def kind_of(raised: Raised) -> FailureKind:
    """Return the kind: what the exception's class tells, else what its text does."""
    kind: FailureKind
    if raised.is_peer_error:
        kind = "hang" if raised.origin == "timeout" else "peer-lost"
    elif raised.kind is not None:
        kind = raised.kind
    elif says_worker_exited(raised.traceback):
        kind = "user-error"
    elif _lost_loader_worker(raised):
        kind = "killed"
    else:
        kind = find_kind(_line_of(raised)) or "user-error"
    before = raised.phase in ("starting", "loading", "joining")
    if before and kind in ("network", "peer-lost", "hang"):
        return "startup-network"
    # "port" is tried again by default, which is safe only while the function has not run.
    return "network" if kind == "port" and not before else kind


def _line_of(raised: Raised) -> str:
    return f"{raised.type_name}: {raised.message}"


def _lost_loader_worker(raised: Raised) -> bool:
    """Tell whether a read from a DataLoader's worker broke off, which has died then."""
    broke_off = raised.type_name in ("ConnectionResetError", "ConnectionRefusedError", "EOFError")
    return broke_off and "torch/utils/data/dataloader.py" in raised.traceback
