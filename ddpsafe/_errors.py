"""Every error that ddpsafe raises, the `Explanation` that each carries, and the kinds of failure.

::

    DDPSafeError                               .explanation (what, cause, fix, details, logs)
      ConfigError (also ValueError)            before anything started; the config is wrong
      PreflightError                           before an attempt; the machine is not ready for it
      MismatchError (also ValueError)          in a rank: the ranks passed different things
      LaunchError                              after the start
        RankFailedError
          RankRaisedError | RankExitedError | RankKilledError | RankLeftEarlyError
        PreemptedError                         the ranks stopped because they were asked to
        NodeLostError                          one of several nodes was lost
        LaunchTimeoutError (also TimeoutError) .setting says which limit it was
          RendezvousTimeoutError               not all ranks or nodes have joined

A class is for what a script catches, and facts are attributes, so nothing has to parse a message. Every error
can be pickled, together with its cause and those facts that can be pickled.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Sequence  # noqa: TC003 - pydantic reads the fields of Explanation
from dataclasses import InitVar, asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args

from ddpsafe._text import name_cells, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

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
"""What kind of failure it was. The retry policy decides by it."""

FAILURE_KINDS: Final[frozenset[str]] = frozenset(get_args(FailureKind))

STARTUP_KINDS: Final[frozenset[FailureKind]] = frozenset({"startup-network", "port", "mount"})
"""Failures before the user's function ran, so a retry runs nothing twice."""

Origin = Literal["own", "peer-lost", "timeout", "mismatch"]
"""Where the error of a rank comes from: the rank itself, the loss of a peer, a wait for a peer that timed
out, or ranks that called different collectives, or one with different keys or shapes."""

Limit = Literal["start", "collective", "barrier", "progress", "finish", "attempt"]
"""The fields of `Timeouts` that end an attempt with an error of their own."""

NO_RETRY_EXIT_CODE: Final = 78
"""Exit status that tells a scheduler not to requeue: EX_CONFIG of sysexits.h."""

TRY_AGAIN_EXIT_CODE: Final = 75
"""Exit status that asks a scheduler to start the job again: EX_TEMPFAIL of sysexits.h."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What an error says, as data; ``str()`` renders it, and nothing parses that text.

    Attributes:
        what: What happened and where: rank, host, attempt, after how long.
        cause: The likely cause; empty if none is known.
        fix: What to do about it; a line to copy if possible.
        details: Further lines: the ranks that failed because of it, stacks, …
        logs: Where to look next.
    """

    what: str
    cause: str = ""
    fix: str = ""
    details: Sequence[str] = ()
    logs: Path | str | None = None

    def __str__(self) -> str:
        """Render one line for each field, the details below them."""
        lines = [self.what]
        if self.cause:
            lines.append(f"  Likely cause: {self.cause}")
        if self.fix:
            lines.append(f"  What to do: {self.fix}")
        lines += [f"  {line}" for detail in self.details for line in detail.splitlines()]
        if self.logs is not None:
            lines.append(f"  Logs: {self.logs}")
        return _shown(name_cells("\n".join(lines)))


_COLOUR: Final = re.compile(r"\x1b\[[\d;]*m")


def _shown(text: str) -> str:
    """Return a text that can be printed: an exception's own text may clear a screen, or have no encoding."""
    text = _COLOUR.sub("", text).replace("\r\n", "\n")
    return printable(text, keep="\n\t\u200c\u200d")  # Persian words and emoji contain these joiners


@dataclass(eq=False, repr=False)
class DDPSafeError(Exception):
    """Base of every error of ddpsafe: ``except ddpsafe.DDPSafeError`` catches them all.

    Attributes:
        explanation: What happened, the likely cause and what to do, as data. ``str()`` renders it.
        exit_code: The exit code of a script that does not catch the error: the rank's own code,
            128 + signal for a rank that was killed, 75 if the job should be started again, 78 if a
            retry cannot help, else 1.
        kind: What kind of failure it is, for the retry policy.
        origin: Where the error comes from, if a rank raises it: ``"own"`` unless another rank is
            the reason.
        previous_attempts: The errors of the earlier attempts, oldest first, if there were any.
        shown_as_json: Whether an uncaught error is printed as a line of JSON, because its launch had
            ``console="json"``.
        is_quoted: Whether ``str()`` renders only what happened, because the error of the launch, of
            which this one is the cause, shows the rest.
    """

    said: InitVar[Explanation | str]
    exit_code: int = field(default=1, init=False)
    kind: FailureKind = field(default="config", init=False)
    origin: Origin = field(default="own", init=False)
    previous_attempts: tuple[DDPSafeError, ...] = field(default=(), init=False)
    shown_as_json: bool = field(default=False, init=False)
    is_quoted: bool = field(default=False, init=False)

    def __post_init__(self, said: Explanation | str) -> None:
        """Keep the explanation; a plain text becomes one that has only `what`."""
        self.explanation = Explanation(said) if isinstance(said, str) else said
        super().__init__(str(self.explanation))

    def __str__(self) -> str:
        return _shown(self.explanation.what) if self.is_quoted else str(self.explanation)

    def add_details(self, *lines: str) -> None:
        """Append lines to the details."""
        details = (*self.explanation.details, *lines)
        self.explanation = replace(self.explanation, details=details)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the attributes and the cause."""
        # The default protocol loses keyword-only arguments.
        facts = dict(self.__dict__)
        is_cycle = causes_of(self)[-1].__cause__ is not None  # pickling it would not end
        cause = None if is_cycle else portable(self.__cause__)
        return (rebuild, (type(self), self.args, facts, cause))


def rebuild(
    cls: type[E], args: tuple[object, ...], facts: dict[str, object], cause: BaseException | None
) -> E:
    """Make an error from its attributes, in the process that unpickles it."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(facts)
    error.__cause__ = cause
    return error


def causes_of(error: BaseException) -> list[BaseException]:
    """Return an error and its chain of causes, up to one that would repeat."""
    chain = [error]
    # Compared by identity: exceptions that are dataclasses may be equal, and a user's __eq__ may raise.
    while (cause := chain[-1].__cause__) is not None and all(cause is not known for known in chain):
        chain.append(cause)
    return chain


def portable(exc: BaseException | None) -> BaseException | None:
    """Return an exception if it survives pickling, else ``None``."""
    try:
        pickle.loads(pickle.dumps(exc))  # noqa: S301 - bytes that this line has made
    except Exception:  # noqa: BLE001 - a user's exception may raise anything
        return None
    return exc


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigProblem:
    """One problem of a configuration, as data; ``str()`` renders it.

    Attributes:
        field: The field, e.g. ``timeouts.collective``.
        given: The value, shortened and without secrets.
        why: Why it is wrong, as a clause.
        write: What to write instead; a line to copy if possible.
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
        """Render two lines: what is wrong, and what to write instead and where."""
        came_from = f" from {self.source}" if self.source else ""
        place = " there:" if self.source else ""
        advice = f"Did you mean {self.write}?" if self.is_guess else f"Write{place} {self.write}."
        return f"{self.field}: got {self.given}{came_from}: {self.why}.\n  {advice}"


@dataclass(eq=False, repr=False, kw_only=True)
class ConfigError(DDPSafeError, ValueError):
    """The configuration or a call is wrong; nothing was started with it.

    Attributes:
        problems: All problems of the configuration; empty if no field of it is wrong.
        rank: The rank that made the wrong call, if the ranks checked it together, else ``None``.
    """

    exit_code = NO_RETRY_EXIT_CODE

    problems: tuple[ConfigProblem, ...] = ()
    rank: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class MismatchError(DDPSafeError, ValueError):
    """The ranks passed different keys or shapes to one collective, or DDP different models.

    Attributes:
        ranks: The ranks whose model differs from the largest set of equal ones; empty for a collective.
        name: The first parameter or buffer that differs, as the equal ranks call it.
        origin: "own" on the ranks whose model differs, so that the launcher blames one of them.
    """

    kind: FailureKind = "user-error"

    ranks: tuple[int, ...] = ()
    name: str = ""
    origin: Origin = "mismatch"


@dataclass(eq=False, repr=False, kw_only=True)
class PreflightError(DDPSafeError):
    """The machine or the network cannot run an attempt, so the attempt did not begin.

    Earlier attempts may have run; their errors are in `previous_attempts`.

    Attributes:
        report: What was checked and found; ``None`` if no check ran, or another rank has the report.
        kind: What kind of failure it is, for the retry policy.
    """

    report: object = None
    kind: FailureKind = "config"

    def __post_init__(self, said: Explanation | str) -> None:
        super().__post_init__(said)
        self.exit_code = NO_RETRY_EXIT_CODE if self.kind == "config" else 1


@dataclass(eq=False, repr=False, kw_only=True)
class LaunchError(DDPSafeError):
    """A launch started and did not end well.

    Attributes:
        attempt: The attempt that failed, counted from 1.
        attempts: How many attempts the retry policy allowed, those that never ran included.
            (`LaunchResult.attempts` is how many ran.)
        outcomes: What became of each rank, by rank.
        run_dir: Where the logs and reports of the launch are; ``None`` inside a rank.
        kind: What kind of failure it was, for the retry policy.
        is_of_retried_type: Whether the rank's exception is of a type in `RetryPolicy.on`; set if the
            rank is on another node, so that the exception is not available as ``__cause__``.
    """

    attempt: int = 1
    attempts: int = 1
    outcomes: dict[int, RankOutcome] = field(default_factory=dict)
    run_dir: Path | None = None
    kind: FailureKind = "user-error"
    is_of_retried_type: bool = field(default=False, init=False)


@dataclass(eq=False, repr=False, kw_only=True)
class PreemptedError(LaunchError):
    """The job was asked to stop, and its ranks have saved and returned.

    This is not a failure, but the training is not finished either, so the code after `launch` must not run.

    Attributes:
        values: What each rank returned, by rank.
        unfinished_ranks: The ranks that did not return within ``timeouts.stop`` and were ended.
    """

    exit_code = TRY_AGAIN_EXIT_CODE
    kind: FailureKind = "preempted"

    values: dict[int, object] = field(default_factory=dict)
    unfinished_ranks: tuple[int, ...] = ()


@dataclass(eq=False, repr=False, kw_only=True)
class NodeLostError(LaunchError):
    """One of several nodes was lost: its host, its network or its launcher failed.

    Attributes:
        node_rank: The node.
        hostname: Its host.
        ranks: Its ranks.
        why: What is known about the loss, as a clause.
    """

    exit_code = TRY_AGAIN_EXIT_CODE
    kind: FailureKind = "peer-lost"
    origin = "peer-lost"

    node_rank: int
    hostname: str
    ranks: tuple[int, ...] = ()
    why: str = ""


@dataclass(eq=False, repr=False, kw_only=True)
class RankFailedError(LaunchError):
    """One rank broke; the others failed because of it.

    Attributes:
        rank: The rank that broke.
        local_rank: Its local rank.
        hostname: Its host.
        pid: Its process id; ``None`` if it never started.
        log_path: The log of its stderr.
    """

    rank: int
    local_rank: int
    hostname: str
    pid: int | None = None
    log_path: Path | None = None
    exit_code: int = 1


class RankRaisedError(RankFailedError):
    """The user's function raised; ``__cause__`` is that exception, if it could be pickled."""


class RankExitedError(RankFailedError):
    """The rank ended with a non-zero exit code and without a report."""


class RankKilledError(RankFailedError):
    """A signal ended the rank."""

    @property
    def signal(self) -> int:
        """The number of the signal that ended the rank, e.g. 9."""
        return self.exit_code - 128


class RankLeftEarlyError(RankFailedError):
    """The rank returned or exited with code 0 although the job still needed it."""


@dataclass(eq=False, repr=False, kw_only=True)
class LaunchTimeoutError(LaunchError, TimeoutError):
    """A timeout of `Timeouts` ran out, or a wait was proved to have no end.

    Attributes:
        setting: The field of `Timeouts` that limits the wait, e.g. ``"collective"``.
        waited_s: How long the wait was, in seconds.
        missing_ranks: The ranks that others waited for, or that did not finish in time.
        stacks: Where each rank was, as text, by rank; without ranks whose place is unknown.
    """

    kind: FailureKind = "hang"
    origin = "timeout"
    setting: Limit = "collective"
    waited_s: float
    missing_ranks: tuple[int, ...] = ()
    stacks: dict[int, str] = field(default_factory=dict)


@dataclass(eq=False, repr=False, kw_only=True)
class RendezvousTimeoutError(LaunchTimeoutError):
    """Not all ranks joined within ``Timeouts.start``, or not all nodes within ``Rendezvous.join``."""

    setting: Limit = "start"


# An error as plain data, for other processes, files and programs: they get the class and the facts, and
# nothing that has to be unpickled.

_LOCAL_FACTS: Final[dict[type[DDPSafeError], dict[str, object]]] = {
    ConfigError: {"problems": ()},
    PreflightError: {"report": None},
    LaunchError: {"outcomes": {}, "run_dir": None},
    PreemptedError: {"values": {}},
}
"""Facts that each process fills in itself, with their defaults: they are not in the plain data."""

_NOT_FACTS: Final = {"explanation", "previous_attempts", "shown_as_json", "is_quoted"}
"""Attributes that the plain data has elsewhere, or that are about how this process shows the error."""

_OF_INTEGERS: Final = "stacks"
"""The fact whose keys are ranks: JSON turns keys into text."""

_PATH: Final = "log_path"


def to_plain(error: DDPSafeError) -> dict[str, Any]:
    """Return an error as plain values, which JSON can hold; `from_plain` makes the error again.

    Returns:
        ``classes`` with the names of its class and of the base classes, ``kind``, ``exit_code``,
        ``explanation`` with its fields, and ``facts`` with the other attributes.
    """
    classes = [cls for cls in type(error).__mro__ if issubclass(cls, DDPSafeError)]
    local = set(_NOT_FACTS)
    for base, defaults in _LOCAL_FACTS.items():
        if isinstance(error, base):
            local |= defaults.keys()
    plain = {
        # `spawn` raises subclasses of the same name that inherit torch's classes, too.
        "classes": list(dict.fromkeys(cls.__name__ for cls in classes)),
        "kind": error.kind,
        "exit_code": error.exit_code,
        "explanation": asdict(error.explanation),
        "facts": {
            name: value
            for name, value in vars(error).items()
            if name not in local and not name.startswith("_")
        },
    }
    return json.loads(json.dumps(plain, default=str))  # type: ignore[no-any-return]


def from_plain(plain: Mapping[str, Any], **local: object) -> DDPSafeError:
    """Make the error that plain values describe.

    It is of the first of their classes that is known here: a subclass of a user's is not, nor one of
    ``ddpsafe.checkpoint`` where that is not imported.

    `local` are this process's own facts: `outcomes`, `run_dir`, `values`.

    Raises:
        ValueError: They describe no error of ddpsafe.
    """
    known = _known_classes()
    try:
        cls = next(known[name] for name in plain["classes"] if name in known)
        explanation = Explanation(**_with_tuples(plain["explanation"]))
        facts = _with_tuples(plain["facts"])
        if _OF_INTEGERS in facts:
            facts[_OF_INTEGERS] = {int(key): value for key, value in facts[_OF_INTEGERS].items()}
        if facts.get(_PATH) is not None:
            facts[_PATH] = Path(facts[_PATH])
    except (LookupError, StopIteration, TypeError, AttributeError, ValueError) as exc:
        raise ValueError("not an error of ddpsafe") from exc
    for base, defaults in _LOCAL_FACTS.items():
        if issubclass(cls, base):
            facts |= {name: local.get(name, value) for name, value in defaults.items()}
    return rebuild(cls, (str(explanation),), {**facts, "explanation": explanation}, None)


def headline(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a program needs first of an error: its class, its kind and the exit code."""
    return {"error": plain["classes"][0], "kind": plain["kind"], "exit_code": plain["exit_code"]}


def describes(plain: Mapping[str, Any] | None, cls: type[DDPSafeError]) -> bool:
    """Return whether plain values describe an error of a class."""
    return plain is not None and cls.__name__ in plain["classes"]


def _known_classes() -> dict[str, type[DDPSafeError]]:
    modules = (__name__, "ddpsafe.checkpoint.errors", "ddpsafe.data.errors")
    return {
        cls.__name__: cls
        for module in modules
        if module in sys.modules
        for cls in vars(sys.modules[module]).values()
        if isinstance(cls, type) and issubclass(cls, DDPSafeError)
    }


def _with_tuples(value: Any) -> Any:
    """Return plain values with the tuples that JSON has turned into lists."""
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    if isinstance(value, dict):
        return {name: _with_tuples(part) for name, part in value.items()}
    return value


for _class in _known_classes().values():
    _class.__module__ = "ddpsafe"  # a traceback shows the name to import it by
