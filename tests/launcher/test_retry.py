"""The retry policy, without any process: which failures are retried, and after which pause."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import pytest

import ddpsafe
from ddpsafe import RetryPolicy
from ddpsafe._launcher.retry import _Progress, run_attempts
from ddpsafe._wire.messages import Phase, RankOutcome
from ddpsafe._wire.rank_pipe import Progress

ATTEMPTS: Final = 9
NO_BACKOFF: Final[dict[str, Any]] = {"backoff_initial": 0, "backoff_max": 0, "jitter": 0}


def failed(
    *progress: Progress, phase: Phase = "running", kind: ddpsafe.FailureKind = "killed"
) -> ddpsafe.LaunchError:
    """Return the failure of an attempt whose ranks made this progress."""
    outcomes = {
        rank: RankOutcome(
            rank=rank,
            local_rank=rank,
            pid=1,
            hostname="here",
            status="killed",
            phase=phase,
            exit_code=-9,
            progress=each,
        )
        for rank, each in enumerate(progress)
    }
    return ddpsafe.LaunchError("it failed", outcomes=outcomes, kind=kind)


def steps(count: int) -> ddpsafe.LaunchError:
    """Return the failure of an attempt that made `count` steps and has no checkpoint."""
    return failed(Progress(steps=count), Progress(steps=count))


def resumed(checkpoint: int, count: int, saves: int = 0) -> ddpsafe.LaunchError:
    """Return the failure of an attempt that made `count` steps after a checkpoint."""
    at = Progress(steps=count + 5 * saves, saves=saves, checkpoint=checkpoint)
    at = Progress(steps=at.steps, saves=saves, checkpoint=checkpoint, steps_at_checkpoint=5 * saves)
    return failed(Progress(), at)


NOT_BEGUN: Final = failed(Progress(), phase="joining", kind="startup-network")

LOOPS: Final = [
    pytest.param([steps(0), steps(0)], 2, id="no step, twice"),
    pytest.param([steps(3)] * ATTEMPTS, ATTEMPTS, id="steps of a script that resumes by itself"),
    pytest.param([steps(3), steps(0), steps(0)], 3, id="no step any more"),
    pytest.param([resumed(6, 1, saves=1), *[resumed(6, 1)] * 8], 3, id="dies behind a checkpoint"),
    pytest.param([resumed(6, 0), resumed(6, 0)], 2, id="dies at a checkpoint of an earlier job"),
    pytest.param([resumed(5, 2, saves=1), resumed(5, 1), resumed(5, 3), resumed(5, 3), resumed(5, 2)], 5,
        id="a little further once"),
    pytest.param([resumed(5 * n, 1, saves=1) for n in range(1, ATTEMPTS + 1)], ATTEMPTS, id="gets on"),
    pytest.param([resumed(10, 4, saves=2), resumed(5, 9, saves=1), resumed(5, 9)], 3,
        id="an older checkpoint does not count as progress"),
    pytest.param([NOT_BEGUN] * ATTEMPTS, ATTEMPTS, id="never begun"),
]  # fmt: skip
"""The failure of each attempt, and how many of nine attempts are made."""


@pytest.mark.parametrize(("failures", "made"), LOOPS)
def test_retries_stop_when_attempts_make_no_progress(
    failures: list[ddpsafe.LaunchError], made: int
) -> None:
    """Progress is a newer checkpoint, or more steps after it, than in any earlier attempt."""
    policy = RetryPolicy(attempts=ATTEMPTS, on={"killed", "startup-network"}, **NO_BACKOFF)
    numbers = []

    def attempt(number: int) -> None:
        numbers.append(number)
        raise failures[number - 1]

    with pytest.raises(ddpsafe.LaunchError) as caught:
        run_attempts(policy, attempt)
    assert numbers == list(range(1, made + 1))
    assert ("Not retried: " in str(caught.value)) == (made < ATTEMPTS)
    assert "checkpoint -1" not in str(caught.value)


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ddpsafe.ConfigError("the directory is relative"), False),
        (NameError("name 'mdoel' is not defined"), False),
        (ValueError("bad batch"), True),
        (ConnectionError("reset"), True),
    ],
)
def test_no_line_about_retries_where_no_retry_helps(raised: Exception, *, told: bool) -> None:
    """It would invite to list the type of a mistake in the configuration or the program."""

    def attempt(_: int) -> None:
        raise failed(Progress(steps=3), kind="user-error") from raised

    with pytest.raises(ddpsafe.LaunchError) as caught:
        run_attempts(RetryPolicy(attempts=ATTEMPTS, **NO_BACKOFF), attempt)
    assert ("Not retried: " in str(caught.value)) == told


PAUSES: Final = [
    pytest.param([steps(0)] * 6, [1, 2, 4, 8, 10, 10], id="doubled up to the longest"),
    pytest.param([NOT_BEGUN] * 3, [1, 2, 4], id="before the function"),
    pytest.param([steps(5)] * 4, [1, 1, 1, 1], id="progress each time"),
    pytest.param([steps(0), steps(0), steps(0), steps(9), steps(0), steps(0)], [1, 2, 4, 1, 1, 2],
        id="short again after progress"),
    pytest.param([resumed(6, 1, saves=1), resumed(6, 1), resumed(6, 1), resumed(7, 1)], [1, 1, 2, 1],
        id="behind a checkpoint"),
    pytest.param([steps(0)] * 1000, [1, 2, 4, 8, *[10] * 996], id="a thousand attempts"),
]  # fmt: skip
"""The failure of each attempt, and the pause after it."""


@pytest.mark.parametrize(("failures", "pauses_s"), PAUSES)
def test_the_pause_is_short_again_after_progress(
    failures: list[ddpsafe.LaunchError], pauses_s: list[float]
) -> None:
    """A job that is killed often but makes progress does not wait for the longest pause."""
    policy = RetryPolicy(backoff_initial=timedelta(seconds=1), backoff_max=10, jitter=0)
    progress = _Progress(policy)
    found_s = []
    for failure in failures:
        progress.note(failure)
        found_s.append(progress.pause_s())
    assert found_s == pauses_s


BEGUN: Final = [
    pytest.param("running", "startup-network", 1, id="a rank's function had begun"),
    pytest.param("leaving", "port", 1, id="or was over"),
    pytest.param("joining", "startup-network", 2, id="all were still joining"),
    pytest.param("loading", "mount", 2, id="or loading"),
    pytest.param("running", "killed", 1, id="another kind"),
]


@pytest.mark.parametrize(("phase", "kind", "made"), BEGUN)
def test_by_default_no_function_runs_twice(
    phase: Phase, kind: ddpsafe.FailureKind, made: int
) -> None:
    """The default policy covers only kinds of failures that occur before the function runs."""
    numbers = []

    def attempt(number: int) -> None:
        numbers.append(number)
        raise failed(Progress(steps=1), phase=phase, kind=kind)

    with pytest.raises(ddpsafe.LaunchError):
        run_attempts(RetryPolicy(attempts=2, **NO_BACKOFF), attempt)
    assert len(numbers) == made


@pytest.mark.parametrize("changes", [False, True])
def test_a_hardware_failure_is_retried_only_if_on_retry_changes_something(*, changes: bool) -> None:
    """Otherwise the next attempt would use the same GPU again."""
    made: list[int] = []

    def attempt(number: int) -> str:
        made.append(number)
        if number == 1:
            raise failed(Progress(steps=3), kind="hardware")
        return "done"

    policy = RetryPolicy(attempts=2, on={"hardware"}, **NO_BACKOFF)
    if changes:
        assert run_attempts(policy, attempt, change=lambda _: True) == "done"
    else:
        with pytest.raises(ddpsafe.LaunchError, match="the same device would be used again"):
            run_attempts(policy, attempt, change=lambda _: False)
    assert made == ([1, 2] if changes else [1])
