"""The error of an attempt that ended because it was asked to."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

from ddpsafe._errors import TRY_AGAIN_EXIT_CODE, Explanation, PreemptedError, ranks_text
from ddpsafe._launcher.diagnosis.messages import positions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe._launcher.diagnosis.errors import EndedAttempt
    from ddpsafe._launcher.stop_request import StopRequest

_CAUSE: Final = (
    "a scheduler takes the machine back (preemption, time limit, drained node), or the signal was sent "
    "by hand."
)


def conclude_stop(
    ended: EndedAttempt, request: StopRequest, values: Mapping[int, object], *, keeps_logs: bool
) -> PreemptedError:
    """Say who has stopped, who has not, and how the job goes on.

    Args:
        ended: What is known of the attempt.
        request: The request.
        values: What ranks returned, by rank.
        keeps_logs: Whether the run directory stays.
    """
    late = sorted(set(ended.outcomes) - set(values))
    ranks = f"{ranks_text(late or ended.outcomes)} (world_size {len(ended.outcomes)})"
    where = f"on {socket.gethostname()}, {ended.when('preempted')}"
    limit_s = request.limit.total_seconds()
    if late:
        what = f"{ranks} did not return within {limit_s:g} s of {request.source()}, {where}."
        fix = "raise timeouts.stop if saving takes longer, else see where they were."
    else:
        what = f"{ranks} stopped on {request.source()} and returned, {where}."
        fix = f"start the same command again; exit code {TRY_AGAIN_EXIT_CODE} tells a scheduler to do so."
    details = positions(ended.outcomes.values()) if late else []
    logs = ended.run_dir if late or keeps_logs else None
    return PreemptedError(
        Explanation(what, cause=_CAUSE, fix=fix, details=details, logs=logs),
        values=values,
        unfinished_ranks=late,
        attempt=ended.attempt,
        attempts=ended.retry.attempts,
        outcomes=ended.outcomes,
        run_dir=logs,
    )
