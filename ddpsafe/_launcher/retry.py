"""Whether and when a failed attempt is retried: tenacity around whole attempts."""

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
from ddpsafe._errors import STARTUP_KINDS, DDPSafeError, LaunchError, PreflightError, causes_of
from ddpsafe._launcher.watch.signals import Interrupted, open_inbox
from ddpsafe._logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpsafe._config import RetryPolicy

R = TypeVar("R")
logger = get_logger(__name__)
_LISTED_FAILURES: Final = 3
_LOOK_EVERY_S: Final = 0.1
_MAX_DOUBLINGS: Final = 60  # beyond any sensible pause; 2.0 ** 1024 is an OverflowError


def run_attempts(
    policy: RetryPolicy,
    run_attempt: Callable[[int], R],
    *,
    change: Callable[[DDPSafeError], bool] = lambda _: False,
    cancelled: Event | None = None,
) -> R:
    """Run attempts until one succeeds or the policy gives up.

    Args:
        policy: How often to retry, after which failures, with which pauses.
        run_attempt: Runs the attempt with that number, counted from 1.
        change: Called with each failure that is retried; returns whether it changed the arguments.
            If it raises, that exception ends the launch, with the failure as its cause.
        cancelled: Ends a pause, and prevents further attempts. A signal that would end this
            process does the same.

    Returns:
        What the successful attempt returned.

    Raises:
        DDPSafeError: The error of the last attempt, or of `change`; `previous_attempts` has the
            errors of earlier attempts.
        Interrupted: A signal arrived in a pause, or the launch was cancelled in one.
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
        if _call_change(change, error):
            progress.forget()
        elif error.kind == "hardware":
            _add_why_not(
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
        retry=tenacity.retry_if_exception(lambda exc: is_retried(exc, policy)),
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
        # `error` is in `earlier` where `change` has raised the failure that it was called with.
        error.previous_attempts = tuple(failure for failure in earlier if failure is not error)
        if not isinstance(error, LaunchError):
            # Unlike a LaunchError, it does not name earlier attempts and their logs by itself.
            failures = [
                failure for failure in error.previous_attempts if isinstance(failure, LaunchError)
            ]
            if failures:
                lines = [
                    f"Before that, {failure.explanation.what}"
                    for failure in failures[-_LISTED_FAILURES:]
                ]
                error.add_details(*lines, f"Logs: {failures[-1].run_dir}")
        if len(earlier) + 1 < policy.attempts and not cancelled.is_set():
            _explain_refusal(error, policy)
        raise


def _pause(wait: timedelta, cancelled: Event) -> None:
    """Wait for the next attempt; a signal that arrives ends the wait, and is acted on by the caller."""
    deadline = Deadline.after(wait)
    with open_inbox() as inbox:
        while inbox.received is None and not deadline.expired():
            if cancelled.wait(min(_LOOK_EVERY_S, deadline.remaining_s())):
                break
    if inbox.received is not None or cancelled.is_set():
        raise Interrupted(inbox.received or signal.SIGINT)


_Reached = tuple[int, int]
"""How far an attempt got: its last checkpoint, -1 without one, and the optimizer steps after it."""


class _Progress(stop_base):
    """Tracks which attempts got further than earlier ones; sets the pauses, and when to give up."""

    def __init__(self, policy: RetryPolicy) -> None:
        self.policy = policy
        self._doublings = 0
        self.forget()

    def forget(self) -> None:
        """Forget the attempts so far: the next one has other arguments."""
        self._without_progress = 0
        self._best: _Reached | None = None

    def note(self, error: DDPSafeError) -> None:
        """Compare a failed attempt with earlier ones."""
        reached = _reached(error)
        # A script that resumes without `Checkpointer` does not report where, so any step may be
        # new.
        is_comparable = reached is not None and reached[0] >= 0
        # A step alone is not progress: a rank that restores step 6 and dies in step 7 each time
        # would use up all attempts.
        if reached is not None and (
            self._best is None or reached > self._best or not is_comparable
        ):
            self._best, self._without_progress, self._doublings = reached, 0, 0
            return
        self._without_progress = self._without_progress + 1 if _has_begun(error) else 0
        self._doublings += 1

    def pause_s(self) -> float:
        """Return how long to wait before the next attempt, in seconds; progress makes it short again."""
        # Without that, thirty kills of a job that makes progress cost twelve minutes of pauses.
        initial_s = self.policy.backoff_initial.total_seconds()
        longest_s = self.policy.backoff_max.total_seconds()
        doublings = max(0, self._doublings - 1)
        return min(longest_s, initial_s * 2.0 ** min(doublings, _MAX_DOUBLINGS))

    def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
        limit = self.policy.no_progress
        if limit is None or self._without_progress < limit:
            return False
        why = f"{self._without_progress} attempts in a row made no optimizer step"
        if self._best is not None and self._best[0] >= 0:
            checkpoint, steps = self._best
            why = (
                f"{self._without_progress} attempts in a row got no further than an earlier one: "
                f"checkpoint {checkpoint} and {steps} optimizer step{'s' * (steps != 1)}"
            )
        _add_why_not(_error_of(retry_state), f"{why} (RetryPolicy.no_progress).")
        return True


def _reached(error: DDPSafeError) -> _Reached | None:
    """Return how far the foremost rank got; ``None`` if no rank made a step or saved a checkpoint."""
    outcomes = error.outcomes.values() if isinstance(error, LaunchError) else ()
    ranks = [outcome.progress for outcome in outcomes]
    if not any(progress.steps or progress.saves for progress in ranks):
        return None
    return max(
        (
            -1 if progress.checkpoint is None else progress.checkpoint,
            progress.steps_since_checkpoint,
        )
        for progress in ranks
    )


def _explain_refusal(error: DDPSafeError, policy: RetryPolicy) -> None:
    """If the user has asked for retries, add to the error why it is not retried."""
    has_asked = policy.model_fields_set & {"attempts", "on"}
    is_failure = isinstance(error, (LaunchError, PreflightError))
    if not has_asked or not is_failure or is_retried(error, policy):
        return
    if error.kind in policy.on:
        why = f"the training code had begun, and {error.kind!r} covers only failures before that."
    elif error.kind not in DETERMINISTIC:
        why = f"RetryPolicy.on does not name the kind {error.kind!r}."
    elif error.__cause__ is not None and not _is_mistake(error.__cause__):
        why = "RetryPolicy.on lists neither this exception type nor a base class of it."
    else:
        return
    _add_why_not(error, why)


def _is_mistake(raised: BaseException | None) -> bool:
    """Return whether an exception is of the program or its configuration: no list should name its type."""
    is_config = isinstance(raised, DDPSafeError) and isinstance(raised, ValueError)
    return is_config or isinstance(
        raised,
        (TypeError, NameError, AttributeError, ImportError, SyntaxError, NotImplementedError),
    )


def _add_why_not(error: DDPSafeError, why: str) -> None:
    error.add_details(f"Not retried: {why}")


def _call_change(change: Callable[[DDPSafeError], bool], failure: DDPSafeError) -> bool:
    """Call `change`; an exception that it raises gets the failure as the first of its causes."""
    try:
        return change(failure)
    except Exception as exc:
        first = causes_of(exc)[-1]
        if all(first is not cause for cause in causes_of(failure)):
            first.__cause__ = failure
        raise


def _has_begun(error: DDPSafeError) -> bool:
    """Return whether the user's function began on any rank."""
    outcomes = error.outcomes.values() if isinstance(error, LaunchError) else ()
    return any(outcome.phase in ("running", "leaving") for outcome in outcomes)


def _error_of(state: tenacity.RetryCallState) -> DDPSafeError:
    assert state.outcome is not None  # noqa: S101 - the callback runs after a failure
    error = state.outcome.exception()
    assert isinstance(error, DDPSafeError)  # noqa: S101 - only those are retried
    return error


def is_retried(exc: BaseException, policy: RetryPolicy) -> bool:
    """Return whether a policy retries after a failure, apart from how often."""
    if not isinstance(exc, (LaunchError, PreflightError)):
        return False
    # These kinds are retried by default, which must not run the function a second time.
    if exc.kind in STARTUP_KINDS and _has_begun(exc):
        return False
    types = tuple(entry for entry in policy.on if isinstance(entry, type))
    is_listed_type = isinstance(exc, LaunchError) and exc.is_of_retried_type
    return is_listed_type or exc.kind in policy.on or isinstance(exc.__cause__, types)
