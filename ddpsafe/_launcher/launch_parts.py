"""What one launch hands unchanged to each of its attempts, on one node or on several."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field, replace
from threading import Event
from typing import TYPE_CHECKING

from ddpsafe._launcher.watch.hang_detection import LearnedGaps

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpsafe._launcher.handle import GracePeriod, OnStart
    from ddpsafe._launcher.plan import Calls, LaunchPlan
    from ddpsafe._launcher.processes.start import RunRank
    from ddpsafe._launcher.run_directory import RunDirectory


class NodeMemory:
    """Memory of the launcher in which the ranks of a node keep states of the training: two places for a state.

    It outlives the ranks, so the next attempt restores from it, and it is gone with the launcher: no file
    has a name. The files are empty until a rank writes into them.
    `memfd_create` charges their pages to the control group of the rank that writes them, and needs no room
    in /dev/shm.
    """

    def __init__(self) -> None:
        self._fds: list[int] = []
        self.close = weakref.finalize(self, _close, self._fds)

    def files(self, nproc: int) -> tuple[int, ...]:
        """Return the descriptors in this process, slot by slot; none where the system has no such files."""
        if not self._fds and hasattr(os, "memfd_create"):
            try:
                # Twice: manifest, state, the ranks' own parts, and for each rank one for its shards.
                for _ in range(2 * (3 + nproc)):
                    self._fds.append(os.memfd_create("ddpsafe-state"))
            except OSError:  # the job runs without, and a Checkpointer that wants them says so
                _close(self._fds)
        return tuple(self._fds)


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchParts:
    """The parts of one launch on this node.

    Attributes:
        plan: What to start here. With several nodes, its ranks are numbered again in each round.
        examine_nodes: Examines the connections between the nodes, see `_preflight`.
        on_start: Called with the ranks of this node and the inbox that interrupts them, once all have
            started.
        cancelled: Set when the launcher has received a signal: no further attempt is wanted.
        grace_period: Returns how many seconds the other ranks may keep running after one has failed;
            called when that happens. ``None`` means ``timeouts.grace``.
        learned: How long the attempts so far went without a step; each attempt adds to it.
    """

    plan: LaunchPlan
    calls: Calls
    run_rank: RunRank
    examine_nodes: Callable[..., None]
    directory: RunDirectory
    on_start: OnStart | None = None
    cancelled: Event = field(default_factory=Event)
    grace_period: GracePeriod = lambda: None
    learned: LearnedGaps = field(default_factory=LearnedGaps)
    memory: NodeMemory = field(default_factory=NodeMemory)

    def with_plan(self, plan: LaunchPlan) -> LaunchParts:
        """Return the same parts with the ranks of one round."""
        return replace(self, plan=plan)
