"""Every error ddpsafe raises; `explain` words them.

::

    DDPSafeError
      ConfigError (also ValueError)            before anything started; the config is wrong
      PreflightError                           before an attempt; the machine is wrong
      LaunchError                              after the start
        RankFailedError
          RankRaisedError | RankExitedError | RankKilledError | RankLeftEarlyError
        PreemptedError                         the ranks stopped because they were asked to
        LaunchTimeoutError (also TimeoutError)
          RendezvousTimeoutError | CollectiveTimeoutError | BarrierTimeoutError
          ProgressTimeoutError | AttemptTimeoutError | ShutdownTimeoutError

One class per phase, facts as attributes: nobody has to parse a message.
Every error pickles, its cause and its facts included where they pickle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpsafe._portable import portable, rebuild
from ddpsafe._wording import explain as explain  # noqa: PLC0414 - errors and words come from one place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ddpsafe._kinds import FailureKind
    from ddpsafe._wire.outcome import RankOutcome


NO_RETRY_EXIT_CODE: Final = 78
"""Exit status that tells a scheduler not to requeue: EX_CONFIG of sysexits.h."""

TRY_AGAIN_EXIT_CODE: Final = 75
"""Exit status that asks a scheduler to start the job again: EX_TEMPFAIL of sysexits.h."""


class DDPSafeError(Exception):
    """Base of every error of ddpsafe: ``except ddpsafe.DDPSafeError`` catches them all.

    Attributes:
        exit_code: The status a script ends with when nobody catches the error: the rank's own
            code, 128 + signal for a rank that was killed, 78 where a retry cannot help, else 1.
        kind: What sort of failure it is, for the retry policy.
        previous_attempts: Where the error ended a retry, the errors of the attempts before,
            oldest first.
    """

    exit_code: int = 1
    kind: FailureKind = "config"
    previous_attempts: tuple[DDPSafeError, ...] = ()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by facts: keyword-only arguments do not survive the default protocol."""
        facts = dict(self.__dict__)
        return (rebuild, (type(self), self.args, facts, portable(self.__cause__)))


class ConfigError(DDPSafeError, ValueError):
    """The configuration or a call is wrong; nothing was started with it.

    Attributes:
        problems: One text for each problem found, all of them at once.
    """

    exit_code = NO_RETRY_EXIT_CODE

    def __init__(self, message: str, *, problems: Sequence[str] = ()) -> None:
        """Keep the whole text and the problems one by one."""
        super().__init__(message)
        self.problems: tuple[str, ...] = tuple(problems) or (message,)


class PreflightError(DDPSafeError):
    """The machine or the network is not as an attempt needs it, and the attempt did not begin.

    A retry may have made other attempts before: they are in `previous_attempts`.

    Attributes:
        report: What was checked and found; ``None`` where no doctor looked, or another rank has it.
        kind: What sort of failure it is, for the retry policy.
    """

    def __init__(
        self, message: str, *, report: object = None, kind: FailureKind = "config"
    ) -> None:
        """Keep the text and the report behind it."""
        super().__init__(message)
        self.report = report
        self.kind: FailureKind = kind
        self.exit_code = NO_RETRY_EXIT_CODE if kind == "config" else 1


class LaunchError(DDPSafeError):
    """A launch started and did not end well.

    Attributes:
        attempt: The attempt that failed, counted from 1.
        attempts: How many attempts the retry policy allowed.
        outcomes: What became of each rank, by rank.
        run_dir: Where logs and reports of the launch lie; ``None`` inside a rank.
        kind: What sort of failure it was, for the retry policy.
    """

    def __init__(
        self,
        message: str,
        *,
        attempt: int = 1,
        attempts: int = 1,
        outcomes: Mapping[int, RankOutcome] | None = None,
        run_dir: Path | None = None,
        kind: FailureKind = "user-error",
    ) -> None:
        """Keep the facts of the launch beside the text."""
        super().__init__(message)
        self.attempt = attempt
        self.attempts = attempts
        self.outcomes: dict[int, RankOutcome] = dict(outcomes or {})
        self.run_dir = run_dir
        self.kind: FailureKind = kind


class PreemptedError(LaunchError):
    """The job was asked to stop, and its ranks have saved and returned.

    No failure, but no end of the training either, so the code after `launch` must not run.

    Attributes:
        values: What each rank returned, by rank.
        unfinished_ranks: Ranks that did not return within ``timeouts.stop`` and were ended.
    """

    exit_code = TRY_AGAIN_EXIT_CODE

    def __init__(
        self,
        message: str,
        *,
        values: Mapping[int, object] | None = None,
        unfinished_ranks: Sequence[int] = (),
        attempt: int = 1,
        attempts: int = 1,
        outcomes: Mapping[int, RankOutcome] | None = None,
        run_dir: Path | None = None,
    ) -> None:
        """Keep what the ranks returned."""
        super().__init__(
            message,
            attempt=attempt,
            attempts=attempts,
            outcomes=outcomes,
            run_dir=run_dir,
            kind="preempted",
        )
        self.values: dict[int, object] = dict(values or {})
        self.unfinished_ranks = tuple(unfinished_ranks)


class RankFailedError(LaunchError):
    """One rank broke; the others only lost it.

    Attributes:
        rank: The rank that broke, its local rank, and where it ran.
        local_rank: Its index on its host.
        hostname: Its host.
        pid: Its process id; ``None`` if it never started.
        log_path: What it wrote to stderr.
    """

    def __init__(  # noqa: PLR0913 - the facts of a failed rank; all keyword-only
        self,
        message: str,
        *,
        rank: int,
        local_rank: int,
        hostname: str,
        pid: int | None = None,
        log_path: Path | None = None,
        exit_code: int = 1,
        attempt: int = 1,
        attempts: int = 1,
        outcomes: Mapping[int, RankOutcome] | None = None,
        run_dir: Path | None = None,
        kind: FailureKind = "user-error",
    ) -> None:
        """Keep the facts of the rank that broke."""
        super().__init__(
            message,
            attempt=attempt,
            attempts=attempts,
            outcomes=outcomes,
            run_dir=run_dir,
            kind=kind,
        )
        self.rank = rank
        self.local_rank = local_rank
        self.hostname = hostname
        self.pid = pid
        self.log_path = log_path
        self.exit_code = exit_code


class RankRaisedError(RankFailedError):
    """The user's function raised; the exception is ``__cause__`` where it could travel."""


class RankExitedError(RankFailedError):
    """The rank ended with a non-zero exit code and without a report."""


class RankKilledError(RankFailedError):
    """The rank was ended by a signal."""

    @property
    def signal(self) -> int:
        """The number of the signal that ended the rank, e.g. 9."""
        return self.exit_code - 128


class RankLeftEarlyError(RankFailedError):
    """The rank was gone, seemingly well, while its work was not done."""


class LaunchTimeoutError(LaunchError, TimeoutError):
    """A deadline of `Timeouts` passed.

    Attributes:
        waited_s: How long was waited, in seconds.
        missing_ranks: The ranks that did not come.
        stacks: Where each rank was, by rank, as text; empty where unknown.
    """

    def __init__(  # noqa: PLR0913 - the facts of a timeout; all keyword-only
        self,
        message: str,
        *,
        waited_s: float,
        missing_ranks: Sequence[int] = (),
        stacks: Mapping[int, str] | None = None,
        attempt: int = 1,
        attempts: int = 1,
        outcomes: Mapping[int, RankOutcome] | None = None,
        run_dir: Path | None = None,
        kind: FailureKind = "hang",
    ) -> None:
        """Keep who was missing and where the others were."""
        super().__init__(
            message,
            attempt=attempt,
            attempts=attempts,
            outcomes=outcomes,
            run_dir=run_dir,
            kind=kind,
        )
        self.waited_s = waited_s
        self.missing_ranks = tuple(missing_ranks)
        self.stacks: dict[int, str] = dict(stacks or {})


class RendezvousTimeoutError(LaunchTimeoutError):
    """Not all ranks joined within ``Timeouts.rendezvous``."""


class CollectiveTimeoutError(LaunchTimeoutError):
    """A collective did not end within ``Timeouts.collective``."""


class BarrierTimeoutError(LaunchTimeoutError):
    """Not all ranks reached a barrier within ``Timeouts.barrier``."""


class ProgressTimeoutError(LaunchTimeoutError):
    """No rank made a step within ``Timeouts.progress``."""


class AttemptTimeoutError(LaunchTimeoutError):
    """The attempt as a whole took longer than ``Timeouts.attempt``."""


class ShutdownTimeoutError(LaunchTimeoutError):
    """Ranks did not end within ``Timeouts.shutdown``."""


for _cls in [value for value in globals().values() if isinstance(value, type)]:
    if issubclass(_cls, DDPSafeError):
        _cls.__module__ = "ddpsafe"  # the name to import it by, as a traceback should show it
