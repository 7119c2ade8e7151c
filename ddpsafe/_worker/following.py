"""One rank goes first and the others follow, or learn at once that it failed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import Deadline
from ddpsafe._errors import Explanation, RankRaisedError
from ddpsafe._wire.exceptions import clip, text_of
from ddpsafe._worker import collectives
from ddpsafe._worker.absence import barrier_timeout_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe._worker.context import RankContext
    from ddpsafe._worker.control import Control

_MAX_MESSAGE: Final = 1_000


@contextlib.contextmanager
def following(context: RankContext, *, local: bool) -> Iterator[None]:
    """Run the body in the leading rank first; see `RankContext.rank_zero_first`."""
    control = context.control
    if control is None:
        collectives.require_group(context.world)
        yield
        return
    name = f"rank-zero-first/{context.node_rank if local else 'all'}"
    leads = context.is_local_main if local else context.is_main
    if not leads:
        # torchrun, Slurm's default and we number ranks node by node.
        leader = context.rank - context.local_rank if local else 0
        _await_leader(context, control, name, leader)
        yield
        return
    try:
        yield
    except BaseException as exc:
        control.publish(name, f"{type(exc).__name__}: {clip(text_of(exc), _MAX_MESSAGE)}")
        raise
    control.publish(name, None)


def _await_leader(context: RankContext, control: Control, name: str, leader: int) -> None:
    deadline = Deadline.after(context.barrier_timeout)
    came, failure = control.verdict(name, deadline=deadline)
    if not came:
        raise barrier_timeout_error(context, "rank_zero_first", [leader], deadline)
    if failure is not None:
        failed = failure.rank
        what = (
            f"rank {failed} failed in rank_zero_first: {failure.error} (seen by {context.world})."
        )
        fix = f"see the error of rank {failed} itself; this rank only waited for it."
        error = RankRaisedError(
            Explanation(what, cause=f"the error of rank {failed} above.", fix=fix),
            rank=failed,
            local_rank=0,
            hostname="",
            attempt=context.attempt,
        )
        error.origin = "peer-lost"
        raise error
