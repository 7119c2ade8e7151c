"""Whether a failure deserves another attempt, and when: tenacity around whole attempts."""

from __future__ import annotations

import itertools
import signal
from datetime import timedelta
from threading import Event
from typing import TYPE_CHECKING, Final, TypeVar

import tenacity
from tenacity.stop import stop_base

from ddpsafe._clock import Deadline
from ddpsafe._config.parts import DETERMINISTIC
from ddpsafe._errors import (
    STARTUP_KINDS,
    DDPSafeError,
    LaunchError,
    PreflightError,
    causes_of,
)
from ddpsafe._launcher.watch.signals import Interrupted, open_inbox
from ddpsafe._logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpsafe._config import RetryPolicy

R = TypeVar("R")
logger = get_logger(__name__)
_MENTIONED: Final = 3
_LOOK_EVERY_S: Final = 0.1
_MAX_DOUBLINGS: Final = 60


def run_attempts(
    policy: RetryPolicy,
    run_attempt: Callable[[int], R],
    *,
    change: Callable[[DDPSafeError], bool] = lambda _: False,
    cancelled: Event | None = None,
) -> R:
    """Run attempts until one ends well or the policy gives up.

    Args:
        policy: How often, after which failures, with which pauses.
        run_attempt: Runs the attempt of that number, counted from 1.
        change: Called with a failure that is tried again; tells whether the next attempt differs.
            What it raises goes on, with that failure as its cause.
        cancelled: Ends a pause, and lets no further attempt begin. A signal that would end this
            process does so, too.

    Returns:
        What the good attempt returned.

    Raises:
        DDPSafeError: The last attempt's own error, or one of `change`; with the errors of the
            attempts before in `previous_attempts`.
        Interrupted: A signal came in a pause, or it was cancelled there.
    """
    earlier: list[DDPSafeError] = []
    cancelled = cancelled or Event()
    progress = _Progress(policy)
    jitter = tenacity.wait_random(0, policy.jitter.total_seconds())

    def prepare(state: tenacity.RetryCallState) -> None:
        error = _error_of(state)
        earlier.append(error)
        assert state.next_action is not None  # noqa: S101 - tenacity sets it before a sleep
        logger.warning(
            "attempt %d of %d failed (%s); trying again in %.1f s: %s",
            state.attempt_number,
            policy.attempts,
            error.kind,
            state.next_action.sleep,
            error.explanation.what,
        )
        if _ask(change, error):
            progress.forget()
        elif error.kind == "hardware":
            # The next attempt would take the same GPU.
            _say_why_not(
                error, "the same device would be used again, and on_retry changed nothing."
            )
            raise error

    retrying = tenacity.Retrying(
        stop=tenacity.stop_any(
            tenacity.stop_after_attempt(policy.attempts),
            tenacity.stop_when_event_set(cancelled),
            progress,
        ),
        sleep=lambda seconds: _pause(timedelta(seconds=seconds), cancelled),
        wait=lambda state: progress.pause_s() + jitter(state),
        retry=tenacity.retry_if_exception(lambda exc: _deserves_another(exc, policy)),
        before_sleep=prepare,
        reraise=True,
    )
    numbers = itertools.count(1)

    def attempt() -> R:
        try:
            return run_attempt(next(numbers))
        except DDPSafeError as error:
            progress.note(error)
            raise

    try:
        return retrying(attempt)
    except DDPSafeError as error:
        # `change` may raise the failure that it was called with.
        error.previous_attempts = tuple(each for each in earlier if each is not error)
        if not isinstance(error, LaunchError):
            # This error knows of no attempt: it says which have failed before, and where to read.
            failures = [each for each in error.previous_attempts if isinstance(each, LaunchError)]
            if failures:
                lines = [f"Before that, {each.explanation.what}" for each in failures[-_MENTIONED:]]
                error.add_details(*lines, f"Logs: {failures[-1].run_dir}")
        if len(earlier) + 1 < policy.attempts and not cancelled.is_set():
            _explain_refusal(error, policy)
        raise


def _pause(wait: timedelta, cancelled: Event) -> None:
    """Wait for the next attempt, and keep a signal that comes meanwhile until all is cleaned up."""
    deadline = Deadline.after(wait)
    with open_inbox() as inbox:
        while inbox.received is None and not deadline.expired():
            if cancelled.wait(min(_LOOK_EVERY_S, deadline.remaining_s())):
                break
    if inbox.received is not None or cancelled.is_set():
        raise Interrupted(inbox.received or signal.SIGINT)


_Reached = tuple[int, int]
"""The last checkpoint, -1 without one, and the optimizer steps behind it: how far an attempt came."""


class _Progress(stop_base):
    """Which attempts came further than those before: decides about the pauses and about giving up."""

    def __init__(self, policy: RetryPolicy) -> None:
        self.policy = policy
        self._doublings = 0
        self.forget()

    def forget(self) -> None:
        """Forget the attempts so far: the next one is made with other arguments."""
        self._row = 0
        self._best: _Reached | None = None

    def note(self, error: DDPSafeError) -> None:
        """Compare a failed attempt with those before it."""
        reached = _reached(error)
        # Scripts that resume by themselves do not say where: each step of theirs may be a new one.
        is_counted = reached is not None and reached[0] >= 0
        if reached is not None and (self._best is None or reached > self._best or not is_counted):
            self._best, self._row, self._doublings = reached, 0, 0
            return
        self._row = self._row + 1 if _has_begun(error) else 0
        self._doublings += 1

    def pause_s(self) -> float:
        """Return how long to wait before the next attempt, in seconds: short again after progress."""
        initial_s = self.policy.backoff_initial.total_seconds()
        longest_s = self.policy.backoff_max.total_seconds()
        doublings = max(0, self._doublings - 1)
        return min(longest_s, initial_s * 2.0 ** min(doublings, _MAX_DOUBLINGS))

    def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
        longest_row = self.policy.no_progress
        if longest_row is None or self._row < longest_row:
            return False
        why = f"{self._row} attempts in a row made no optimizer step"
        if self._best is not None and self._best[0] >= 0:
            checkpoint, steps = self._best
            why = (
                f"{self._row} attempts in a row came no further than one before: checkpoint "
                f"{checkpoint} and {steps} optimizer step{'s' * (steps != 1)}"
            )
        _say_why_not(_error_of(retry_state), f"{why} (RetryPolicy.no_progress).")
        return True


def _reached(error: DDPSafeError) -> _Reached | None:
    """Return how far the foremost rank came; ``None`` if no rank made a step or saved a checkpoint."""
    outcomes = error.outcomes.values() if isinstance(error, LaunchError) else ()
    ranks = [each.progress for each in outcomes]
    if not any(each.steps or each.saves for each in ranks):
        return None
    return max(
        (-1 if each.checkpoint is None else each.checkpoint, each.steps_since_checkpoint)
        for each in ranks
    )


def _explain_refusal(error: DDPSafeError, policy: RetryPolicy) -> None:
    """Tell a reader who has asked for retries that this failure is none of those they are for."""
    has_asked = policy.model_fields_set & {"attempts", "on"}
    is_failure = isinstance(error, (LaunchError, PreflightError))
    if not has_asked or not is_failure or _deserves_another(error, policy):
        return
    if error.kind in policy.on:
        _say_why_not(error, f"the function had begun, and {error.kind!r} is for what fails before.")
    elif error.kind not in DETERMINISTIC:
        _say_why_not(error, f"RetryPolicy.on does not name the kind {error.kind!r}.")
    elif error.kind == "user-error":
        _say_why_not(
            error, "RetryPolicy.on lists neither this exception type nor a base class of it."
        )


def _say_why_not(error: DDPSafeError, why: str) -> None:
    error.add_details(f"Not retried: {why}")


def _ask(change: Callable[[DDPSafeError], bool], failure: DDPSafeError) -> bool:
    """Call `change`; what it raises gets the failure as the first of its causes."""
    try:
        return change(failure)
    except Exception as exc:
        first = causes_of(exc)[-1]
        if all(first is not each for each in causes_of(failure)):
            first.__cause__ = failure
        raise


def _has_begun(error: DDPSafeError) -> bool:
    """Tell whether the user's function ran on some rank."""
    outcomes = error.outcomes.values() if isinstance(error, LaunchError) else ()
    return any(outcome.phase in ("running", "leaving") for outcome in outcomes)


def _error_of(state: tenacity.RetryCallState) -> DDPSafeError:
    assert state.outcome is not None  # noqa: S101 - the callback runs after a failure
    error = state.outcome.exception()
    assert isinstance(error, DDPSafeError)  # noqa: S101 - only those are retried
    return error


def _deserves_another(exc: BaseException, policy: RetryPolicy) -> bool:
    if not isinstance(exc, (LaunchError, PreflightError)):
        return False
    if exc.kind in STARTUP_KINDS and _has_begun(exc):
        return False
    types = tuple(entry for entry in policy.on if isinstance(entry, type))
    is_retried = isinstance(exc, LaunchError) and exc.is_of_retried_type
    return is_retried or exc.kind in policy.on or isinstance(exc.__cause__, types)
