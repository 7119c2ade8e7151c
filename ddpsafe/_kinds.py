"""The sorts of failure that a retry is decided by."""

from __future__ import annotations

from typing import Final, Literal, get_args

FailureKind = Literal[
    "config",
    "user-error",
    "unpicklable",
    "startup-network",
    "port",
    "mount",
    "network",
    "peer-lost",
    "killed",
    "hang",
    "preempted",
    "out-of-memory",
    "hardware",
]
"""What sort of failure it was, which is what a retry is decided by."""

FAILURE_KINDS: Final[frozenset[str]] = frozenset(get_args(FailureKind))

STARTUP_KINDS: Final[frozenset[FailureKind]] = frozenset({"startup-network", "port", "mount"})
"""Failures from before the user's function ran: trying again repeats nothing."""
