"""What one launch hands unchanged to each of its attempts, on one node or on several."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from threading import Event
from typing import TYPE_CHECKING

from ddpsafe._launcher.node_memory import NodeMemory
from ddpsafe._launcher.watch.hang_detection import LearnedGaps

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpsafe._launcher.handle import GracePeriod, OnStart
    from ddpsafe._launcher.plan import Calls, LaunchPlan
    from ddpsafe._launcher.processes.start import RunRank
    from ddpsafe._launcher.run_directory import RunDirectory


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
