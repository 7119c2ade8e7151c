"""Every error ddpsafe raises, the `Explanation` that each carries, and the kinds of failure.

::

    DDPSafeError                               .explanation (what, cause, fix, details, logs)
      ConfigError (also ValueError)            before anything started; the config is wrong
      PreflightError                           before an attempt; the machine is wrong
      MismatchError (also ValueError)          in a rank: the ranks passed different things
      LaunchError                              after the start
        RankFailedError
          RankRaisedError | RankExitedError | RankKilledError | RankLeftEarlyError
        PreemptedError                         the ranks stopped because they were asked to
        NodeLostError                          a node of several is gone
        LaunchTimeoutError (also TimeoutError)
          RendezvousTimeoutError | CollectiveTimeoutError | BarrierTimeoutError
          ProgressTimeoutError | AttemptTimeoutError

One class per phase, facts as attributes: nothing has to parse a message, and ddpsafe does not.
Every error pickles, with its cause and its facts where they pickle.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
from collections.abc import Sequence  # noqa: TC003 - pydantic reads the fields of Explanation
from dataclasses import dataclass, replace
from pathlib import Path  # noqa: TC003 - as above
from typing import TYPE_CHECKING, Final, Literal, TypedDict, TypeVar, get_args

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from typing_extensions import Unpack

    from ddpsafe._wire.messages import RankOutcome

E = TypeVar("E", bound=BaseException)

FailureKind = Literal[
    "config",
    "user-error",
    "unpicklable",
    "startup-network",
    "port",
    "mount",
    "network",
    "peer-lost",
    "killed",
    "hang",
    "preempted",
    "out-of-memory",
    "hardware",
]
"""What sort of failure it was, which is what a retry is decided by."""

FAILURE_KINDS: Final[frozenset[str]] = frozenset(get_args(FailureKind))

STARTUP_KINDS: Final[frozenset[FailureKind]] = frozenset({"startup-network", "port", "mount"})
"""Failures from before the user's function ran: trying again repeats nothing."""

Origin = Literal["own", "peer-lost", "timeout", "mismatch"]
"""Where an error of a rank comes from: the rank itself, the loss of a peer, a wait for one that timed
out, or ranks that met with different collectives, keys or shapes."""

NO_RETRY_EXIT_CODE: Final = 78
"""Exit status that tells a scheduler not to requeue: EX_CONFIG of sysexits.h."""

TRY_AGAIN_EXIT_CODE: Final = 75
"""Exit status that asks a scheduler to start the job again: EX_TEMPFAIL of sysexits.h."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What an error says, as data; ``str()`` renders it, and nothing reads it back from the text.

    Attributes:
        what: What happened and where: rank, host, attempt, after how long.
        cause: The likely cause; empty where there is none to give.
        fix: What to do about it, to copy where possible.
        details: Further lines: the ranks that failed because of it, stacks, …
        logs: Where to read on.
    """

    what: str
    cause: str = ""
    fix: str = ""
    details: Sequence[str] = ()
    logs: Path | str | None = None

    def __str__(self) -> str:
        """One line for each answer, the details below."""
        lines = [self.what]
        if self.cause:
            lines.append(f"  Likely cause: {self.cause}")
        if self.fix:
            lines.append(f"  What to do: {self.fix}")
        lines += [f"  {line}" for detail in self.details for line in detail.splitlines()]
        if self.logs is not None:
            lines.append(f"  Logs: {self.logs}")
        return name_cells("\n".join(lines))


def name_cells(text: str) -> str:
    """Write ``Cell In[5]`` where a text has the file that a notebook compiled its cell 5 from.

    Such a file is never written, and its name changes with the kernel; IPython itself shows the
    number of the cell. Elsewhere than in a notebook the text stays as it is.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    if name_of is None:
        return text

    def named(found: re.Match[str]) -> str:
        label = name_of(found[0])
        return found[0] if label is None else " ".join(label)

    # The pid is that of the kernel, which is where the launcher runs.
    return re.sub(rf"[^\s\"']*/ipykernel_{os.getpid()}/\d+\.py", named, text)


def signal_name(number: int) -> str:
    """Name a signal in a message: ``SIGKILL``, or ``signal 35`` where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Name ranks in a message: ``rank 1``, ``ranks 0, 2 and 3``."""
    names = [str(rank) for rank in ranks]
    if len(names) < 2:  # noqa: PLR2004 - a single one
        return f"rank {''.join(names)}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


class DDPSafeError(Exception):
    """Base of every error of ddpsafe: ``except ddpsafe.DDPSafeError`` catches them all.

    Attributes:
        explanation: What happened, the likely cause, what to do, as data. ``str()`` renders it.
        exit_code: The status a script ends with when the error is not caught: the rank's own
            code, 128 + signal for a rank that was killed, 78 where a retry cannot help, else 1.
        kind: What sort of failure it is, for the retry policy.
        origin: Where the error comes from, if a rank raises it: ``"own"`` unless another rank is
            the reason.
        previous_attempts: Where the error ended a retry, the errors of the attempts before,
            oldest first.
        shown_as_json: Whether it is a line of JSON if it is not caught: its launch had
            ``console="json"``.
    """

    exit_code: int = 1
    kind: FailureKind = "config"
    origin: Origin = "own"
    previous_attempts: tuple[DDPSafeError, ...] = ()
    shown_as_json: bool = False

    def __init__(self, explanation: Explanation | str) -> None:
        """Keep the explanation; a plain text is one that says only what happened."""
        if isinstance(explanation, str):
            explanation = Explanation(explanation)
        super().__init__(str(explanation))
        self.explanation = explanation

    def __str__(self) -> str:
        """Render the explanation."""
        return str(self.explanation)

    def add_details(self, *lines: str) -> None:
        """Say more, below what is said already."""
        details = (*self.explanation.details, *lines)
        self.explanation = replace(self.explanation, details=details)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by facts: keyword-only arguments do not survive the default protocol."""
        facts = dict(self.__dict__)
        is_circle = causes_of(self)[-1].__cause__ is not None  # would be pickled for ever
        cause = None if is_circle else portable(self.__cause__)
        return (rebuild, (type(self), self.args, facts, cause))


def rebuild(
    cls: type[E],
    args: tuple[object, ...],
    facts: dict[str, object],
    cause: BaseException | None,
) -> E:
    """Make an error again from its facts, in the process that unpickles it."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(facts)
    error.__cause__ = cause
    return error


def causes_of(error: BaseException) -> list[BaseException]:
    """Return an error and, one after the other, what they were raised from; it may be its own cause."""
    chain = [error]
    # By identity: two exceptions that are dataclasses may be equal, and a user's __eq__ may raise.
    while (cause := chain[-1].__cause__) is not None and all(cause is not each for each in chain):
        chain.append(cause)
    return chain


def portable(exc: BaseException | None) -> BaseException | None:
    """Return an exception if it survives pickling; Python itself drops every cause."""
    try:
        pickle.loads(pickle.dumps(exc))  # noqa: S301 - bytes that this line has made
    except Exception:  # noqa: BLE001 - a user's exception may refuse in any way
        return None
    return exc


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigProblem:
    """One thing that is wrong with a configuration, as data; ``str()`` renders it.

    Attributes:
        field: The field, e.g. ``timeouts.collective``.
        given: The value as it may be shown: short, and without secrets.
        why: Why it is wrong, as a clause.
        write: What to write instead, to copy where possible.
        source: The variable or the file that the value came from; empty for an argument.
        is_guess: Whether `write` is a guess at what was meant.
    """

    field: str
    given: str
    why: str
    write: str
    source: str = ""
    is_guess: bool = False

    def __str__(self) -> str:
        """Two lines: what is wrong, and what to write where the value came from."""
        came_from = f" from {self.source}" if self.source else ""
        place = " there:" if self.source else ""
        advice = f"Did you mean {self.write}?" if self.is_guess else f"Write{place} {self.write}."
        return f"{self.field}: got {self.given}{came_from}: {self.why}.\n  {advice}"


class ConfigError(DDPSafeError, ValueError):
    """The configuration or a call is wrong; nothing was started with it.

    Attributes:
        problems: The problems of the configuration, all of them at once; empty where it is not a
            field of the configuration that is wrong.
    """

    exit_code = NO_RETRY_EXIT_CODE

    def __init__(
        self, explanation: Explanation | str, *, problems: Sequence[ConfigProblem] = ()
    ) -> None:
        """Keep the explanation and the problems one by one."""
        super().__init__(explanation)
        self.problems: tuple[ConfigProblem, ...] = tuple(problems)


class MismatchError(DDPSafeError, ValueError):
    """The ranks met in one collective with different keys or shapes."""

    kind: FailureKind = "user-error"
    origin = "mismatch"


class PreflightError(DDPSafeError):
    """The machine or the network is not as an attempt needs it, and the attempt did not begin.

    A retry may have made other attempts before: they are in `previous_attempts`.

    Attributes:
        report: What was checked and found; ``None`` where no doctor looked, or another rank has it.
        kind: What sort of failure it is, for the retry policy.
    """

    def __init__(
        self,
        explanation: Explanation | str,
        *,
        report: object = None,
        kind: FailureKind = "config",
    ) -> None:
        """Keep the text and the report behind it."""
        super().__init__(explanation)
        self.report = report
        self.kind = kind
        self.exit_code = NO_RETRY_EXIT_CODE if kind == "config" else 1


class LaunchFacts(TypedDict, total=False):
    """What every `LaunchError` takes beside its explanation."""

    attempt: int
    attempts: int
    outcomes: Mapping[int, RankOutcome] | None
    run_dir: Path | None
    kind: FailureKind


class LaunchError(DDPSafeError):
    """A launch started and did not end well.

    Attributes:
        attempt: The attempt that failed, counted from 1.
        attempts: How many attempts the retry policy allowed.
        outcomes: What became of each rank, by rank.
        run_dir: Where logs and reports of the launch lie; ``None`` inside a rank.
        kind: What sort of failure it was, for the retry policy.
        is_of_retried_type: Whether the rank's exception is of a type in `RetryPolicy.on`, where the
            rank is on another node and the exception itself is not ``__cause__``.
    """

    kind: FailureKind = "user-error"
    is_of_retried_type: bool = False

    def __init__(self, explanation: Explanation | str, **facts: Unpack[LaunchFacts]) -> None:
        """Keep the facts of the launch beside the text."""
        super().__init__(explanation)
        self.attempt = facts.get("attempt", 1)
        self.attempts = facts.get("attempts", 1)
        self.outcomes: dict[int, RankOutcome] = dict(facts.get("outcomes") or {})
        self.run_dir = facts.get("run_dir")
        self.kind = facts.get("kind", type(self).kind)


class PreemptedError(LaunchError):
    """The job was asked to stop, and its ranks have saved and returned.

    No failure, but no end of the training either, so the code after `launch` must not run.

    Attributes:
        values: What each rank returned, by rank.
        unfinished_ranks: Ranks that did not return within ``timeouts.stop`` and were ended.
    """

    exit_code = TRY_AGAIN_EXIT_CODE
    kind: FailureKind = "preempted"

    def __init__(
        self,
        explanation: Explanation | str,
        *,
        values: Mapping[int, object] | None = None,
        unfinished_ranks: Sequence[int] = (),
        **facts: Unpack[LaunchFacts],
    ) -> None:
        """Keep what the ranks returned."""
        super().__init__(explanation, **facts)
        self.values: dict[int, object] = dict(values or {})
        self.unfinished_ranks = tuple(unfinished_ranks)


class NodeLostError(LaunchError):
    """A node of several is gone: its host, its network, or its launcher.

    Attributes:
        node_rank: The node.
        hostname: Its host.
        ranks: Its ranks.
        why: What is known of it, as a clause.
    """

    exit_code = TRY_AGAIN_EXIT_CODE
    kind: FailureKind = "peer-lost"
    origin = "peer-lost"

    def __init__(
        self,
        explanation: Explanation | str,
        *,
        node_rank: int,
        hostname: str,
        ranks: Sequence[int] = (),
        why: str = "",
        **facts: Unpack[LaunchFacts],
    ) -> None:
        """Keep which node it was."""
        super().__init__(explanation, **facts)
        self.node_rank = node_rank
        self.hostname = hostname
        self.ranks = tuple(ranks)
        self.why = why


class RankFailedError(LaunchError):
    """One rank broke; the others failed because of it.

    Attributes:
        rank: The rank that broke, its local rank, and where it ran.
        local_rank: Its index on its host.
        hostname: Its host.
        pid: Its process id; ``None`` if it never started.
        log_path: What it wrote to stderr.
    """

    def __init__(
        self,
        explanation: Explanation | str,
        *,
        rank: int,
        local_rank: int,
        hostname: str,
        pid: int | None = None,
        log_path: Path | None = None,
        exit_code: int = 1,
        **facts: Unpack[LaunchFacts],
    ) -> None:
        """Keep the facts of the rank that broke."""
        super().__init__(explanation, **facts)
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
    """The rank returned or exited with code 0 although the job still needed it."""


class LaunchTimeoutError(LaunchError, TimeoutError):
    """A deadline of `Timeouts` passed.

    Attributes:
        setting: The field of `Timeouts` whose deadline it was, e.g. ``"collective"``.
        waited_s: How long was waited, in seconds.
        missing_ranks: The ranks that did not come.
        stacks: Where each rank was, by rank, as text; empty where unknown.
    """

    kind: FailureKind = "hang"
    origin = "timeout"
    setting: str = ""

    def __init__(
        self,
        explanation: Explanation | str,
        *,
        waited_s: float,
        missing_ranks: Sequence[int] = (),
        stacks: Mapping[int, str] | None = None,
        **facts: Unpack[LaunchFacts],
    ) -> None:
        """Keep who was missing and where the others were."""
        super().__init__(explanation, **facts)
        self.waited_s = waited_s
        self.missing_ranks = tuple(missing_ranks)
        self.stacks: dict[int, str] = dict(stacks or {})


class RendezvousTimeoutError(LaunchTimeoutError):
    """Not all ranks joined within ``Timeouts.rendezvous``."""

    setting = "rendezvous"


class CollectiveTimeoutError(LaunchTimeoutError):
    """A collective did not end within ``Timeouts.collective``."""

    setting = "collective"


class BarrierTimeoutError(LaunchTimeoutError):
    """Not all ranks reached a barrier within ``Timeouts.barrier``."""

    setting = "barrier"


class ProgressTimeoutError(LaunchTimeoutError):
    """No rank made a step within ``Timeouts.progress``."""

    setting = "progress"


class AttemptTimeoutError(LaunchTimeoutError):
    """The attempt as a whole took longer than ``Timeouts.attempt``."""

    setting = "attempt"


for _cls in [value for value in globals().values() if isinstance(value, type)]:
    if issubclass(_cls, DDPSafeError):
        _cls.__module__ = "ddpsafe"  # the name to import it by, as a traceback should show it
