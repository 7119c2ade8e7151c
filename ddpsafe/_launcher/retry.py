"""Whether a failure deserves another attempt, and when: tenacity around whole attempts."""

from __future__ import annotations

import itertools
import logging
from threading import Event
from typing import TYPE_CHECKING, TypeVar

import tenacity

from ddpsafe._errors import DDPSafeError, LaunchError, PreflightError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpsafe._config import RetryPolicy

R = TypeVar("R")
logger = logging.getLogger(__name__)


def run_attempts(
    policy: RetryPolicy, run_attempt: Callable[[int], R], *, cancelled: Event | None = None
) -> R:
    """Run attempts until one ends well or the policy gives up.

    Args:
        policy: How often, after which failures, with which pauses.
        run_attempt: Runs the attempt of that number, counted from 1.
        cancelled: Ends a pause, and lets no further attempt begin.

    Returns:
        What the good attempt returned.

    Raises:
        DDPSafeError: The last attempt's own error, the earlier ones attached to it.
    """
    earlier: list[DDPSafeError] = []
    cancelled = cancelled or Event()

    def note(state: tenacity.RetryCallState) -> None:
        error = _error_of(state)
        earlier.append(error)
        assert state.next_action is not None  # noqa: S101 - tenacity sets it before a sleep
        logger.warning(
            "attempt %d of %d failed (%s); trying again in %.1f s: %s",
            state.attempt_number,
            policy.attempts,
            _kind_of(error),
            state.next_action.sleep,
            str(error).splitlines()[0],
        )

    retrying = tenacity.Retrying(
        stop=tenacity.stop_any(
            tenacity.stop_after_attempt(policy.attempts), tenacity.stop_when_event_set(cancelled)
        ),
        sleep=tenacity.sleep_using_event(cancelled),
        wait=tenacity.wait_exponential(
            multiplier=policy.backoff_initial.total_seconds(),
            max=policy.backoff_max.total_seconds(),
        )
        + tenacity.wait_random(0, policy.jitter.total_seconds()),
        retry=tenacity.retry_if_exception(lambda exc: _deserves_another(exc, policy)),
        before_sleep=note,
        reraise=True,
    )
    numbers = itertools.count(1)
    try:
        return retrying(lambda: run_attempt(next(numbers)))
    except LaunchError as error:
        error.previous_attempts = tuple(earlier)
        raise


def _error_of(state: tenacity.RetryCallState) -> DDPSafeError:
    assert state.outcome is not None  # noqa: S101 - the callback runs after a failure
    error = state.outcome.exception()
    assert isinstance(error, DDPSafeError)  # noqa: S101 - only those are retried
    return error


def _deserves_another(exc: BaseException, policy: RetryPolicy) -> bool:
    if not isinstance(exc, (LaunchError, PreflightError)):
        return False
    types = tuple(entry for entry in policy.on if isinstance(entry, type))
    return _kind_of(exc) in policy.on or isinstance(exc.__cause__, types)


def _kind_of(error: DDPSafeError) -> str:
    return getattr(error, "kind", "config")
