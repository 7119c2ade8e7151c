"""A failure occurs in one attempt or in all of them, and is retried or not."""

from __future__ import annotations

import logging
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import join_programs as programs
import pytest
from fault_kit import WORLD_SIZES, WORLDS, World
from training_programs import Optimizer, train

import ddpsafe
from ddpsafe import RetryPolicy

SHORT_BACKOFF: dict[str, Any] = {"backoff_initial": 0.05, "backoff_max": 0.05, "jitter": 0}


def attempts_of(folder: Path, rank: int = 1) -> list[int]:
    """Return the attempts in which a rank's function ran."""
    return [int(line) for line in (folder / f"ran-{rank}").read_text().split()]


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "start_method"), WORLDS)
def test_the_next_attempt_succeeds(
    tmp_path: Path, ranks: int, start_method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It knows its number, and one log line gives the reason for the retry."""
    world = World(folder=tmp_path, ranks=ranks, start_method=start_method)
    policy = RetryPolicy(on={"killed"}, **SHORT_BACKOFF)
    with caplog.at_level(logging.WARNING):
        result = world.launch(programs.fail_on_attempts, 1, "killed", retry=policy)
    assert result.attempts == 2
    assert result.values == dict.fromkeys(range(ranks), 2)
    assert attempts_of(tmp_path, rank=0) == attempts_of(tmp_path) == [1, 2]
    (line,) = caplog.messages
    assert line.startswith("attempt 1 of 3 failed (killed); trying again in 0.")
    assert f"rank 1 (world_size {ranks}) was killed by SIGKILL" in line
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_a_new_attempt_shares_nothing_with_the_previous_one(tmp_path: Path, ranks: int) -> None:
    """It has its own store, port, log files and processes, and the first attempt's files remain."""
    world = World(folder=tmp_path, ranks=ranks)
    values = world.launch(
        programs.describe_meeting, retry=RetryPolicy(on={"killed"}, **SHORT_BACKOFF)
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


@pytest.mark.full
@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_the_last_error_is_raised_when_every_attempt_fails(tmp_path: Path, ranks: int) -> None:
    """The earlier errors are attached, and each attempt has its report."""
    world = World(folder=tmp_path, ranks=ranks)
    error = world.launch_fails(
        ddpsafe.RankKilledError,
        programs.fail_on_attempts,
        3,
        "killed",
        retry=RetryPolicy(attempts=3, on={"killed"}, no_progress=None, **SHORT_BACKOFF),
    )
    assert (error.attempt, error.attempts) == (3, 3)
    assert [earlier.attempt for earlier in error.previous_attempts] == [1, 2]
    assert all(type(earlier) is ddpsafe.RankKilledError for earlier in error.previous_attempts)
    assert "attempt 3 of 3" in str(error)
    assert attempts_of(tmp_path) == [1, 2, 3]
    reports = sorted(path.parent.name for path in tmp_path.glob("run/*/report.json"))
    assert reports == ["attempt-1", "attempt-2", "attempt-3"]


@pytest.mark.full(but=["default"])
@pytest.mark.parametrize(
    "on",
    [
        set(),
        {"killed", "hang", "network", "peer-lost", "out-of-memory", "hardware", "preempted"},
        {ConnectionError, KeyError},
    ],
    ids=["default", "every-kind", "other-types"],
)
def test_a_deterministic_error_is_not_retried(tmp_path: Path, on: set[Any]) -> None:
    """It would occur again, whatever kinds the policy names."""
    world = World(folder=tmp_path)
    policy = RetryPolicy(on=on, **SHORT_BACKOFF) if on else RetryPolicy(**SHORT_BACKOFF)
    error = world.launch_fails(
        ddpsafe.RankRaisedError, programs.fail_on_attempts, 1, "value", retry=policy
    )
    assert (error.attempt, error.previous_attempts) == (1, ())
    assert attempts_of(tmp_path) == [1]
    assert ", attempt 1, after " in error.explanation.what  # not "attempt 1 of 3"
    assert (
        "RetryPolicy.on lists neither this exception type nor a base class of it" in str(error)
    ) == bool(on)


@pytest.mark.full(but=["default"])
@pytest.mark.parametrize("policy", [None, RetryPolicy(attempts=2)], ids=["default", "attempts"])
def test_a_killed_rank_is_not_retried_unless_the_policy_names_the_kind(
    tmp_path: Path, policy: RetryPolicy | None
) -> None:
    """The default retries only failures before the function ran; a policy gets the reason."""
    world = World(folder=tmp_path)
    retry = {} if policy is None else {"retry": policy}
    error = world.launch_fails(
        ddpsafe.RankKilledError, programs.fail_on_attempts, 1, "killed", **retry
    )
    assert attempts_of(tmp_path) == [1]
    assert ", attempt 1, after " in error.explanation.what
    reason = "Not retried: RetryPolicy.on does not name the kind 'killed'."
    assert (reason in str(error)) == (policy is not None)


@pytest.mark.full
@pytest.mark.parametrize("on", [{ConnectionError}, {OSError}, {"network"}], ids=str)
def test_an_exception_type_is_retried_where_the_policy_names_it(
    tmp_path: Path, on: set[Any]
) -> None:
    """The policy may name the type, a base class or the kind."""
    world = World(folder=tmp_path)
    policy = RetryPolicy(on=on, **SHORT_BACKOFF)
    result = world.launch(programs.fail_on_attempts, 1, "network", retry=policy)
    assert result.attempts == 2


@pytest.mark.full
def test_arguments_may_change_between_attempts(tmp_path: Path) -> None:
    """`on_retry` receives the failure and returns other arguments, here a smaller batch."""
    world = World(folder=tmp_path)
    seen: list[ddpsafe.DDPSafeError] = []

    def halve(failure: ddpsafe.DDPSafeError) -> tuple[Path, int]:
        seen.append(failure)
        return (tmp_path, 64 // 2 ** len(seen))

    result = world.launch(
        programs.needs_less,
        64,
        retry=RetryPolicy(attempts=9, on={"out-of-memory"}, **SHORT_BACKOFF),
        on_retry=halve,
    )
    assert result.values == {0: 8, 1: 8}
    assert result.attempts == 4
    assert [type(failure) for failure in seen] == [ddpsafe.RankRaisedError] * 3
    assert isinstance(seen[0].__cause__, MemoryError)


@pytest.mark.full
def test_on_retry_keeps_the_arguments_by_returning_none(tmp_path: Path) -> None:
    """A callback that only logs need not return the arguments."""
    world = World(folder=tmp_path)
    result = world.launch(
        programs.fail_first_and_return_arguments,
        *(32, "adam"),
        retry=RetryPolicy(on={"killed"}, **SHORT_BACKOFF),
        on_retry=lambda _failure: None,
    )
    assert result.attempts == 2
    assert result.values == {0: [32, "adam"], 1: [32, "adam"]}


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
    """The failure is the cause of that error, and its logs remain."""
    world = World(folder=tmp_path)
    policy = RetryPolicy(on={"killed"}, **SHORT_BACKOFF)
    with pytest.raises(ValueError, match="no more") as caught:
        world.launch(
            *(programs.fail_on_attempts, 1, "killed"), retry=policy, on_retry=on_retry, run_dir=None
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


@pytest.mark.full
def test_a_callback_may_raise_the_failure_itself(tmp_path: Path) -> None:
    """It ends the launch as if no other attempt was allowed, and is not chained to itself."""

    def give_up(failure: ddpsafe.DDPSafeError) -> None:
        raise failure

    error = World(folder=tmp_path).launch_fails(
        *(ddpsafe.RankKilledError, programs.fail_on_attempts, 1, "killed"),
        retry=RetryPolicy(on={"killed"}, **SHORT_BACKOFF),
        on_retry=give_up,
    )
    assert (error.__cause__, error.previous_attempts) == (None, ())


@pytest.mark.full
def test_wrong_arguments_from_a_callback_raise_config_error(tmp_path: Path) -> None:
    """It also reports the earlier failure, as every error that ends a retry does."""
    with pytest.raises(ddpsafe.ConfigError, match="cannot be called with") as caught:
        World(folder=tmp_path).launch(
            *(programs.fail_on_attempts, 1, "killed"),
            retry=RetryPolicy(on={"killed"}, **SHORT_BACKOFF),
            on_retry=lambda _failure: (tmp_path,),
        )
    (earlier,) = caught.value.previous_attempts
    assert isinstance(earlier, ddpsafe.RankKilledError)
    assert f"\n  Before that, {str(earlier).splitlines()[0]}\n" in str(caught.value)


@pytest.mark.full
def test_a_failure_is_reported_when_the_next_attempt_cannot_start(tmp_path: Path) -> None:
    """The data disappeared in the first attempt, so its error and logs show the cause."""
    (tmp_path / "data").mkdir()
    with pytest.raises(ddpsafe.PreflightError, match="data path 'train' is not ready") as caught:
        World(folder=tmp_path).launch(
            *(train, programs.take_the_data_and_die),
            retry=RetryPolicy(attempts=2, on={"killed"}, **SHORT_BACKOFF),
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


@pytest.mark.full
def test_two_attempts_without_a_step_end_the_retries(tmp_path: Path) -> None:
    """A job that fails twice before its first step does not fail by chance."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.RankKilledError,
        programs.fail_on_attempts,
        9,
        "killed",
        retry=RetryPolicy(attempts=9, on={"killed"}, **SHORT_BACKOFF),
    )
    assert attempts_of(tmp_path) == [1, 2]
    assert (error.attempt, len(error.previous_attempts)) == (2, 1)
    assert "Not retried: 2 attempts in a row made no optimizer step" in str(error)


@pytest.mark.full
def test_attempts_that_make_steps_are_retried(tmp_path: Path) -> None:
    """A job that makes some progress each time uses all its attempts."""
    world = World(folder=tmp_path)
    error = world.launch_fails(
        ddpsafe.RankKilledError,
        programs.step_and_die,
        Optimizer(),
        retry=RetryPolicy(attempts=4, on={"killed"}, **SHORT_BACKOFF),
    )
    assert attempts_of(tmp_path) == [1, 2, 3, 4]
    assert [outcome.steps for outcome in error.outcomes.values()] == [3, 3]


@pytest.mark.full
def test_a_failure_at_the_same_step_after_a_checkpoint_ends_the_retries(tmp_path: Path) -> None:
    """Attempts 2 and 3 restore step 6 and make step 7, and so get no further than the first."""
    error = World(folder=tmp_path).launch_fails(
        *(ddpsafe.RankKilledError, programs.resume_and_die, Optimizer()),
        retry=RetryPolicy(attempts=9, on={"killed"}, **SHORT_BACKOFF),
    )
    assert attempts_of(tmp_path) == [1, 2, 3]
    reason = (
        "2 attempts in a row got no further than an earlier one: checkpoint 6 and 1 optimizer step"
    )
    assert reason in str(error)
