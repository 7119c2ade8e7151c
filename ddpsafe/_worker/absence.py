"""Words the error of ranks that waited for one that did not come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpsafe._errors import BarrierTimeoutError, Explanation, RankRaisedError

if TYPE_CHECKING:
    from ddpsafe._clock import Deadline
    from ddpsafe._worker.context import RankContext
    from ddpsafe._worker.control import Departure


def barrier_timeout_error(
    context: RankContext, label: str, missing: list[int], deadline: Deadline
) -> BarrierTimeoutError:
    """Word the error of a wait that ended without all ranks.

    Args:
        context: The rank that waited.
        label: What the ranks met for.
        missing: The ranks that did not come.
        deadline: How long it was waited.
    """
    waited_s = deadline.waited_s()
    names = ", ".join(map(str, missing))
    what = (
        f"{context.world} waited {waited_s:.1f} s at the barrier {label!r} "
        f"in attempt {context.attempt}: rank {names} did not come."
    )
    departure = None if context.control is None else context.control.departure()
    if departure is None:
        cause = f"rank {names} is slower, hangs, or took another branch of the script."
        fix = "let every rank call the same barriers in the same order, or raise timeouts.barrier."
    else:
        cause, fix = _after_departure(departure)
    return BarrierTimeoutError(
        Explanation(what, cause=cause, fix=fix),
        waited_s=waited_s,
        missing_ranks=missing,
        attempt=context.attempt,
    )


def peer_failure_line(departure: Departure) -> str:
    """Say in a line which rank failed first, for a rank that fails because of it."""
    if departure.origin in ("peer-lost", "timeout"):
        return f"rank {departure.rank} failed before, because of another rank: {departure.error}"
    return f"rank {departure.rank} failed first: {departure.error}"


def peer_failed_error(context: RankContext, departure: Departure) -> RankRaisedError:
    """Explain that a rank which has returned belongs to a job that failed."""
    what = f"{peer_failure_line(departure)} ({context.world} itself had returned)."
    cause, fix = _after_departure(departure)
    error = RankRaisedError(
        Explanation(what, cause=cause, fix=fix),
        rank=departure.rank,
        local_rank=0,
        hostname="",
        attempt=context.attempt,
    )
    error.origin = "peer-lost"
    return error


def _after_departure(departure: Departure) -> tuple[str, str]:
    """Say why a rank that has failed did not come, and where to look."""
    rank, origin, error, _ = departure
    if origin not in ("peer-lost", "timeout"):
        cause = f"rank {rank} has failed: {error}"
        fix = f"look at rank {rank}'s own error; this one only follows from it."
        return cause, fix
    # A rank that is killed tells nobody: the first to tell is one that was in touch with it.
    what = "lost" if origin == "peer-lost" else "waited in vain for"
    cause = f"rank {rank} has failed as well, since it {what} another rank: {error}"
    fix = "find the rank whose output ends without such an error; the others only follow from it."
    return cause, fix
