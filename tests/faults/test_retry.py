"""A failure on one attempt and not on the next, on every attempt, and one that is not tried again."""

from __future__ import annotations

import logging
import pickle
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import retry_programs as programs
from fault_kit import SIZES, WORLDS, World
from training_programs import Optimizer, train

import ddpsafe
from ddpsafe import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SOON: dict[str, Any] = {"backoff_initial": 0.05, "backoff_max": 0.05, "jitter": 0}


def attempts_of(folder: Path, rank: int = 1) -> list[int]:
    """Return the attempts in which a rank's function ran."""
    return [int(line) for line in (folder / f"ran-{rank}").read_text().split()]


@pytest.mark.parametrize(("ranks", "start_method"), WORLDS)
def test_a_failure_of_the_first_attempt_only(
    tmp_path: Path, ranks: int, start_method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The next attempt succeeds, knows its number, and one line says why it was made."""
    world = World(folder=tmp_path, ranks=ranks, start_method=start_method)
    policy = RetryPolicy(on={"killed"}, **SOON)
    with caplog.at_level(logging.WARNING):
        result = world.launch(programs.fail_on_attempts, 1, "killed", retry=policy)
    assert result.attempts == 2
    assert result.values == dict.fromkeys(range(ranks), 2)
    assert attempts_of(tmp_path, rank=0) == attempts_of(tmp_path) == [1, 2]
    (line,) = caplog.messages
    assert line.startswith("attempt 1 of 3 failed (killed); trying again in 0.")
    assert f"rank 1 (world_size {ranks}) was killed by SIGKILL" in line
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize("ranks", SIZES)
def test_a_new_attempt_shares_nothing_with_the_last_one(tmp_path: Path, ranks: int) -> None:
    """No store, port, log file or process; what the first one wrote is still there to read."""
    world = World(folder=tmp_path, ranks=ranks)
    values = world.launch(
        programs.describe_meeting, retry=RetryPolicy(on={"killed"}, **SOON)
    ).values
    for rank in range(ranks):
        first, second = (
            (tmp_path / f"attempt-{attempt}-rank-{rank}").read_text().splitlines()
            for attempt in (1, 2)
        )
        assert [a for a, b in zip(first, second, strict=True) if a == b] == []
        assert values[rank] == {"alive": [], "stores": []}
    assert (tmp_path / "run" / "attempt-1" / "report.json").exists()
    assert (tmp_path / "run" / "attempt-2" / "rank-1.err").exists()


@pytest.mark.parametrize("ranks", SIZES)
def test_every_attempt_fails(tmp_path: Path, ranks: int) -> None:
    """The last error comes through itself, the earlier ones attached, each with its report."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(
        ddpsafe.RankKilledError,
        programs.fail_on_attempts,
        3,
        "killed",
        retry=RetryPolicy(attempts=3, on={"killed"}, no_progress=None, **SOON),
    )
    assert (error.attempt, error.attempts) == (3, 3)
    assert [earlier.attempt for earlier in error.previous_attempts] == [1, 2]
    assert all(type(earlier) is ddpsafe.RankKilledError for earlier in error.previous_attempts)
    assert "attempt 3 of 3" in str(error)
    assert attempts_of(tmp_path) == [1, 2, 3]
    reports = sorted(path.parent.name for path in tmp_path.glob("run/*/report.json"))
    assert reports == ["attempt-1", "attempt-2", "attempt-3"]


@pytest.mark.parametrize(
    "on",
    [
        set(),
        {"killed", "hang", "network", "peer-lost", "out-of-memory", "hardware", "preempted"},
        {ConnectionError, KeyError},
    ],
    ids=["default", "every-kind", "other-types"],
)
def test_a_deterministic_error_is_not_tried_again(tmp_path: Path, on: set[Any]) -> None:
    """It would come back the same way, whatever kinds the policy names."""
    world = World(folder=tmp_path)
    policy = RetryPolicy(on=on, **SOON) if on else RetryPolicy(**SOON)
    error = world.launch_fails(
        ddpsafe.RankRaisedError, programs.fail_on_attempts, 1, "value", retry=policy
    )
    assert (error.attempt, error.previous_attempts) == (1, ())
    assert attempts_of(tmp_path) == [1]
    assert ", attempt 1, after " in error.explanation.what  # not "attempt 1 of 3"
    assert (
        "RetryPolicy.on lists neither this exception type nor a base class of it" in str(error)
    ) == bool(on)


@pytest.mark.parametrize("policy", [None, RetryPolicy(attempts=2)], ids=["default", "attempts"])
def test_a_killed_rank_is_not_tried_again_unless_the_policy_says_so(
    tmp_path: Path, policy: RetryPolicy | None
) -> None:
    """By default only what failed before the function ran; who has asked for retries is told why."""
    world = World(folder=tmp_path)
    retry = {} if policy is None else {"retry": policy}
    error = world.launch_fails(
        ddpsafe.RankKilledError, programs.fail_on_attempts, 1, "killed", **retry
    )
    assert attempts_of(tmp_path) == [1]
    assert ", attempt 1, after " in error.explanation.what
    told = "Not retried: RetryPolicy.on does not name the kind 'killed'."
    assert (told in str(error)) == (policy is not None)


@pytest.mark.parametrize("on", [{ConnectionError}, {OSError}, {"network"}], ids=str)
def test_an_exception_type_is_tried_again_where_it_is_named(tmp_path: Path, on: set[Any]) -> None:
    """Named itself, by a base class, or by its kind."""
    world = World(folder=tmp_path)
    policy = RetryPolicy(on=on, **SOON)
    result = world.launch(programs.fail_on_attempts, 1, "network", retry=policy)
    assert result.attempts == 2


def test_arguments_may_change_between_attempts(tmp_path: Path) -> None:
    """`on_retry` sees the failure and returns other arguments, here a smaller batch."""
    world = World(folder=tmp_path)
    seen: list[ddpsafe.DDPSafeError] = []

    def halve(failure: ddpsafe.DDPSafeError) -> tuple[Path, int]:
        seen.append(failure)
        return (tmp_path, 64 // 2 ** len(seen))

    result = world.launch(
        programs.needs_less,
        64,
        retry=RetryPolicy(attempts=9, on={"out-of-memory"}, **SOON),
        on_retry=halve,
    )
    assert result.values == {0: 8, 1: 8}
    assert result.attempts == 4
    assert [type(failure) for failure in seen] == [ddpsafe.RankRaisedError] * 3
    assert isinstance(seen[0].__cause__, MemoryError)


def test_none_keeps_the_arguments(tmp_path: Path) -> None:
    """A callback that only takes notes is welcome."""
    world = World(folder=tmp_path)
    result = world.launch(
        programs.fail_on_attempts,
        1,
        "killed",
        retry=RetryPolicy(on={"killed"}, **SOON),
        on_retry=lambda _failure: None,
    )
    assert result.attempts == 2


def _refuse(_failure: ddpsafe.DDPSafeError) -> None:
    msg = "no more"
    raise ValueError(msg)


def _refuse_for_a_reason(_failure: ddpsafe.DDPSafeError) -> None:
    msg = "no more"
    raise ValueError(msg) from LookupError("no smaller batch")


@pytest.mark.parametrize("on_retry", [_refuse, _refuse_for_a_reason])
def test_a_callback_that_raises_ends_the_launch_with_its_error(
    tmp_path: Path, on_retry: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """It is the user's own code; the failure is shown above it, and its logs stay."""
    world = World(folder=tmp_path)
    policy = RetryPolicy(on={"killed"}, **SOON)
    with pytest.raises(ValueError, match="no more") as caught:
        world.launch(
            *(programs.fail_on_attempts, 1, "killed"),
            retry=policy,
            on_retry=on_retry,
            run_dir=None,
        )
    assert attempts_of(tmp_path) == [1]
    first = caught.value.__cause__
    if on_retry is _refuse_for_a_reason:
        assert isinstance(first, LookupError)
        first = first.__cause__
    assert isinstance(first, ddpsafe.RankKilledError)
    assert first.run_dir is not None
    assert first.log_path is not None
    assert first.log_path.exists()
    assert caplog.messages[-1].endswith(f"the attempts that failed are in {first.run_dir}")
    shutil.rmtree(first.run_dir)


def test_a_callback_may_raise_the_failure_itself(tmp_path: Path) -> None:
    """It ends the launch as if no other attempt had been allowed: no error is its own cause."""

    def give_up(failure: ddpsafe.DDPSafeError) -> None:
        raise failure

    error = World(folder=tmp_path).launch_fails(
        *(ddpsafe.RankKilledError, programs.fail_on_attempts, 1, "killed"),
        retry=RetryPolicy(on={"killed"}, **SOON),
        on_retry=give_up,
    )
    assert (error.__cause__, error.previous_attempts) == (None, ())


def test_arguments_that_a_callback_gets_wrong_are_a_config_error(tmp_path: Path) -> None:
    """It says what failed before, as every error that ends a retry does."""
    with pytest.raises(ddpsafe.ConfigError, match="cannot be called with") as caught:
        World(folder=tmp_path).launch(
            *(programs.fail_on_attempts, 1, "killed"),
            retry=RetryPolicy(on={"killed"}, **SOON),
            on_retry=lambda _failure: (tmp_path,),
        )
    (earlier,) = caught.value.previous_attempts
    assert isinstance(earlier, ddpsafe.RankKilledError)
    assert f"\n  Before that, {str(earlier).splitlines()[0]}\n" in str(caught.value)


def test_a_failure_stays_known_when_the_next_attempt_cannot_begin(tmp_path: Path) -> None:
    """The data was there for the first attempt: its error and its logs are the story."""
    (tmp_path / "data").mkdir()
    with pytest.raises(ddpsafe.PreflightError, match="data path 'train' is not ready") as caught:
        World(folder=tmp_path).launch(
            *(train, programs.take_the_data_and_die),
            retry=RetryPolicy(attempts=2, on={"killed"}, **SOON),
            data_paths={"train": tmp_path / "data"},
            run_dir=None,
        )
    error = pickle.loads(pickle.dumps(caught.value))
    (earlier,) = error.previous_attempts
    assert isinstance(earlier, ddpsafe.RankKilledError)
    assert earlier.run_dir is not None
    assert (earlier.run_dir / "attempt-1" / "report.txt").exists()
    *_, before, logs = str(error).splitlines()
    assert before == f"  Before that, {str(earlier).splitlines()[0]}"
    assert logs == f"  Logs: {earlier.run_dir}"
    shutil.rmtree(earlier.run_dir)


def test_two_attempts_without_a_step_end_the_loop(tmp_path: Path) -> None:
    """What dies before its first step, twice, dies for another reason than bad luck."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.RankKilledError,
        programs.fail_on_attempts,
        9,
        "killed",
        retry=RetryPolicy(attempts=9, on={"killed"}, **SOON),
    )
    assert attempts_of(tmp_path) == [1, 2]
    assert (error.attempt, len(error.previous_attempts)) == (2, 1)
    assert "Not retried: 2 attempts in a row made no optimizer step" in str(error)


def test_attempts_with_steps_go_on(tmp_path: Path) -> None:
    """A job that gets on a little each time uses all its attempts."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.RankKilledError,
        programs.step_and_die,
        Optimizer(),
        retry=RetryPolicy(attempts=4, on={"killed"}, **SOON),
    )
    assert attempts_of(tmp_path) == [1, 2, 3, 4]
    assert [outcome.steps for outcome in error.outcomes.values()] == [3, 3]


def test_a_rank_that_dies_at_the_same_step_behind_a_checkpoint_ends_the_loop(
    tmp_path: Path,
) -> None:
    """The second and the third attempt restore step 6 and make step 7, as the first one did."""
    error = World(folder=tmp_path).launch_fails(
        *(ddpsafe.RankKilledError, programs.resume_and_die, Optimizer()),
        retry=RetryPolicy(attempts=9, on={"killed"}, **SOON),
    )
    assert attempts_of(tmp_path) == [1, 2, 3]
    said = (
        "2 attempts in a row got no further than an earlier one: checkpoint 6 and 1 optimizer step"
    )
    assert said in str(error)
