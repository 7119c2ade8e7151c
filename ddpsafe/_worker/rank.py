"""What this process remembers as a rank: the one object of `_worker` that changes."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ddpsafe._world import World, find_world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import TCPStore

    from ddpsafe._config import LaunchConfig
    from ddpsafe._job.control import Waits
    from ddpsafe._wire.rank_pipe import StepCounter
    from ddpsafe._wire.spec import RankSpec
    from ddpsafe._worker.context import RankContext
    from ddpsafe._worker.entrypoint import Reporter
    from ddpsafe._worker.join.store_endpoint import StoreEndpoint
    from ddpsafe._worker.stop_agreement import Stopping


@dataclass(slots=True)
class ThisRank:
    """This process as a rank; all empty in one that is none.

    Attributes:
        context: Its context, while it has one.
        stopping: Its part in agreeing on a stop.
        borrowed: Variables that it has set for as long as its group exists, with their values before.
        spec: How ddpsafe's launcher has started it; ``None`` if another one has.
        since_start: The clock for waits at the rendezvous. It stands still until the launcher has
            started all ranks: if the launcher is suspended before (Ctrl-Z), it starts the rest only
            when it resumes.
        waits: Its waits at the launcher's store, and what it does for those of other ranks; ``None`` before it has
            joined, and in a launch of one rank.
        clients: Its connections to the launcher's store, by what they are for.
        reporter: Reports exceptions in flight to the launcher.
        reported: Thread and id of the exception that `pending_exception.leaving_group` has reported. A
            reference to it would keep the tensors of its frames alive.
        counter: Counts its steps where the launcher can read them.
        report_folder: Reports to the launcher where checkpoints are.
        uses_memory: Whether a `Checkpointer` uses the memory of the launcher; see `checkpoint._memory`.
        shared_seed: The launch's seed, until torch's generator has a seed of the rank's own.
        scope: What names torch's default group if that is not the group of all ranks; kept when the group has
            been destroyed.
        has_renumbered: Whether a rank has another number in the default group than in the launch; ``None`` if
            only their calls of ``new_group`` can show that.
        joined: Its context if `join_launch` has made its group, and not the script.

        opened: Its context if `setup` has joined its group, until `cleanup`.
        handled_at_setup: The exception that was handled when `setup` was called: this group has not
            failed with it.
        joined_with: The configuration with which it has joined.
        stores: Its connections to the stores of the job, by endpoint, world size and line.
        generations: The name of this start of the ranks, by the endpoint where they have met.
        examined: The endpoints whose nodes have been examined.
    """

    context: RankContext | None = None
    stopping: Stopping | None = None
    borrowed: dict[str, str | None] = field(default_factory=dict)
    groups: Iterator[int] = field(default_factory=itertools.count)

    spec: RankSpec | None = None
    since_start: Callable[[], float] = time.monotonic
    waits: Waits | None = None
    clients: dict[str, TCPStore] = field(default_factory=dict)
    reporter: Reporter | None = None
    reported: tuple[int, int] | None = None
    counter: StepCounter | None = None
    report_folder: Callable[[str], None] | None = None
    uses_memory: bool = False
    shared_seed: int | None = None
    scope: str = ""
    has_renumbered: bool | None = None
    joined: RankContext | None = None

    opened: RankContext | None = None
    handled_at_setup: BaseException | None = None
    joined_with: LaunchConfig | None = None
    stores: dict[tuple[StoreEndpoint, int, int], TCPStore] = field(default_factory=dict)
    generations: dict[StoreEndpoint, str] = field(default_factory=dict)
    examined: set[StoreEndpoint] = field(default_factory=set)

    @property
    def world(self) -> World:
        """Its world: from its context, else from the environment, else alone."""
        if self.context is not None:
            return self.context.world
        return find_world(os.environ) or World.alone()

    @property
    def is_launched(self) -> bool:
        """Whether ddpsafe's launcher has started it, and watches it."""
        return self.spec is not None


this_rank: Final = ThisRank()
