"""The ranks that save and restore together: how they agree, and what they tell the launcher."""

from __future__ import annotations

import itertools
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar

from ddpsafe._clock import Deadline
from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._job.agreement import RankGroup, as_line
from ddpsafe._text import ranks_text
from ddpsafe._wire.messages import CHECKPOINTS
from ddpsafe.checkpoint import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ddpsafe._job.agreement import Absence
    from ddpsafe._worker.context import RankContext

E = TypeVar("E", bound=errors.CheckpointError)

_numbers: Final = itertools.count()


class Ranks(RankGroup):
    """This rank among the ranks of the job; a world of one without a process group.

    Args:
        timeout: How long an exchange may wait for rank 0, or for the other ranks.
        may_give_up: As `RankGroup.may_give_up`.

    Attributes:
        is_main: True on rank 0, which writes the checkpoint.
        attempt: This attempt, counted from 1.
        of_node: The ranks of this node; the first one writes into its memory.
        unwrap: Returns the model inside the wrappers of DDP and torch.compile.
    """

    def __init__(
        self,
        context: RankContext,
        directory: Path,
        timeout: timedelta,
        *,
        may_give_up: bool = False,
    ) -> None:
        from ddpsafe._worker import pending_exception

        self.is_main, self.attempt, self.unwrap = context.is_main, context.attempt, context.unwrap
        self.world_size = context.world_size if context.control is not None else 1
        of_node: Sequence[int] = context.world.ranks_of_node
        self.of_node = of_node if self.world_size > 1 else (context.rank,)
        self.host = socket.gethostname()
        self.timeout = timeout
        super().__init__(
            context.control,
            # New for each Checkpointer: keys of an earlier one stay in the store.
            f"{CHECKPOINTS}/{next(_numbers)}",
            context.world,
            range(self.world_size),
            # A save may wait for 30 minutes: a rank on another host that is lost must be noticed
            # before.
            sends_beats=True,
            waiting=pending_exception.waiting,
        )
        self.about = f" of {directory}"
        self.may_give_up = may_give_up

    def __str__(self) -> str:
        return f"{super().__str__()} on {self.host} in attempt {self.attempt}"

    def deadline(self, longer: timedelta = timedelta(0)) -> Deadline:
        """Return the end of a wait that begins now, and may take so much longer."""
        return Deadline.after(self.timeout + longer)

    def absence_error(
        self, error_type: Callable[..., E], doing: str, *, cause: str, fix: str
    ) -> Callable[[Absence], E]:
        """Return what makes the error for ranks that another one waited for; see `explain_absence`."""

        def make(absence: Absence) -> E:
            explanation = explain_absence(absence, self, doing, cause=cause, fix=fix)
            error = error_type(explanation, rank=absence.ranks[0])
            error.origin = absence.origin
            return error

        return make

    def as_own_error(self, error: BaseException) -> errors.CheckpointError | ConfigError:
        """Return an error that has the rank."""
        if not isinstance(error, (errors.CheckpointError, ConfigError)):
            error = errors.CheckpointError(as_line(error))
        if error.rank is None:
            error.rank = self.rank
        return error

    def other_call_error(self, rank: int, call: str, own: str) -> ConfigError:
        """Return the error for a rank that is in another call than this one."""
        explanation = super().other_call_error(rank, call, own).explanation
        return ConfigError(explanation, rank=rank)


def explain_absence(
    absence: Absence, who: object, doing: str, *, cause: str, fix: str
) -> Explanation:
    """Explain what the ranks were doing, and why it failed.

    `doing` is an infinitive without "to". `cause` is why the ranks may be late: a predicate that follows
    their names.
    """
    first = absence.ranks[0]
    if absence.lost:
        return Explanation(
            f"{who} cannot {doing}: rank {first} is lost (noticed after {absence.waited_s:.1f} s).",
            cause=absence.lost,
            fix=f"look at the last lines of rank {first}'s output; earlier checkpoints are "
            "unharmed.",
        )
    names = ranks_text(absence.ranks)
    return Explanation(
        f"{who} waited {absence.waited_s:.1f} s for {names} to {doing}.",
        cause=f"{names} {cause}",
        fix=fix,
    )
