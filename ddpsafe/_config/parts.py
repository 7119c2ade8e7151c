"""The parts of a `LaunchConfig`: how long each phase may take, what to retry, where the nodes meet."""

from __future__ import annotations

import builtins
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    field_serializer,
    field_validator,
)

from ddpsafe._config.durations import Duration, DurationLike, DurationOrAuto, Wait, show_duration
from ddpsafe._config.endpoint import Endpoint, parse_endpoint
from ddpsafe._config.interfaces import GLOO, find_shape_problem
from ddpsafe._config.launch_fields import validate_integer
from ddpsafe._config.paths import AbsolutePath
from ddpsafe._config.problems import Part, Problem, find_near, require_none, show, wrong
from ddpsafe._errors import FAILURE_KINDS, STARTUP_KINDS, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def _at_most(default: timedelta, bound: str, share: float = 1.0) -> Callable[[dict[str, Any]], Any]:
    """Make a default that gives way to a shorter `bound` which the user set."""

    def make(known: dict[str, Any]) -> timedelta:
        limit = known.get(bound)
        return default if limit is None else min(default, limit * share)

    return make


class Timeouts(Part):
    """How long each phase of a launch may take; every wait has an end.

    A number means seconds; text such as "30s" or "5min" is read too.
    A default is lowered where it would exceed a field that you set.
    """

    attempt: Duration | None = Field(
        default=None,
        description="From the start of an attempt to its last rank's return: AttemptTimeoutError. "
        "None: as long as it takes.",
        examples=['"12h"', "None"],
    )
    rendezvous: Duration = Field(
        default_factory=_at_most(timedelta(minutes=5), "attempt"),
        description="Until all ranks have joined: RendezvousTimeoutError. Where a script makes its "
        "group itself, under `spawn` and `ddpsafe run`, it bounds that only if you set it; else the "
        "script's own timeout does, or torch's.",
        examples=["300", '"5min"'],
    )
    collective: Duration = Field(
        default_factory=_at_most(timedelta(minutes=10), "attempt"),
        description="For one collective (all_reduce, …): CollectiveTimeoutError. Where a script makes "
        "its group itself, what it names counts, then what you set here, then torch's default: "
        "30 min, with NCCL 10.",
        examples=["600", '"10min"'],
    )
    barrier: Duration = Field(
        default_factory=_at_most(timedelta(minutes=30), "attempt"),
        description="For one `barrier()`, where the slowest rank may still have work to do: "
        "BarrierTimeoutError.",
        examples=["1800", '"30min"'],
    )
    progress: DurationOrAuto | None = Field(
        default=None,
        description="Between two steps of the training: ProgressTimeoutError. None: not watched. "
        '"auto": five times what the run itself has taken so far, at least 1 min; for the first '
        "step (known from an attempt before, at least 5 min), for steps, and for a Checkpointer's "
        "saves apart.",
        examples=['"20min"', '"auto"', "None"],
    )
    shutdown: Duration = Field(
        default=timedelta(seconds=30),
        description="From the last rank's return until every process is gone. Ranks that are "
        "left then are ended and the result stands.",
        examples=["30"],
    )
    grace: Duration = Field(
        default_factory=_at_most(timedelta(seconds=5), "shutdown", share=0.5),
        description="Between SIGTERM and SIGKILL. It has no error: the kill is what follows.",
        examples=["5"],
    )
    stop: Duration = Field(
        default=timedelta(minutes=5),
        description="From a request to stop (SIGTERM, SIGUSR1) until ranks that ask for it have "
        "saved and returned. It has no error: those that are left then are ended.",
        examples=['"5min"', "25"],
    )

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            attempt: DurationLike | None = ...,
            rendezvous: DurationLike = ...,
            collective: DurationLike = ...,
            barrier: DurationLike = ...,
            progress: DurationLike | Literal["auto"] | None = ...,
            shutdown: DurationLike = ...,
            grace: DurationLike = ...,
            stop: DurationLike = ...,
        ) -> None: ...

    @field_validator("rendezvous", "collective", "barrier", "progress")
    @classmethod
    def _end_before_the_attempt(
        cls, value: DurationOrAuto | None, info: ValidationInfo
    ) -> DurationOrAuto | None:
        attempt = info.data.get("attempt")
        if isinstance(value, timedelta) and attempt is not None and value > attempt:
            raise wrong(
                f"it is longer than timeouts.attempt ({show_duration(attempt)}), which would "
                "always end the wait first, without naming a rank",
                write=f"{info.field_name}={attempt.total_seconds():g}, or a longer attempt",
            )
        return value

    @field_validator("grace")
    @classmethod
    def _leave_time_to_kill(cls, value: timedelta, info: ValidationInfo) -> timedelta:
        shutdown = info.data.get("shutdown")
        if shutdown is not None and value >= shutdown:
            raise wrong(
                f"it has to be shorter than timeouts.shutdown ({show_duration(shutdown)}): SIGTERM, "
                "the grace, SIGKILL and the reaping all happen within the shutdown",
                write=f"grace={shutdown.total_seconds() / 2:g}, or a longer shutdown",
            )
        return value


DETERMINISTIC: Final = frozenset({"config", "user-error", "unpicklable"})
"""Kinds of failure that come back the same way however often one tries."""


def _split_kinds(value: object) -> object:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    if isinstance(value, type):
        return [value]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    raise wrong(
        f"expected kinds of failure, got a {type(value).__name__}",
        write='a set of kinds and exception types: {"peer-lost", ConnectionError}',
    )


def _validate_kind(value: object) -> object:
    if isinstance(value, type):
        if issubclass(value, Exception):
            return value
        raise wrong(
            f"{value.__name__} is not a subclass of Exception; KeyboardInterrupt, SystemExit and "
            "the like are requests to stop",
            write="an exception type such as ConnectionError",
        )
    if isinstance(value, str) and value in DETERMINISTIC:
        raise wrong(
            "a failure of this kind comes back the same way on every attempt",
            write="the exception type you expect to pass, e.g. ConnectionError",
        )
    if isinstance(value, str) and value in FAILURE_KINDS:
        return value
    by_name = getattr(builtins, value, None) if isinstance(value, str) else None
    if isinstance(by_name, type) and issubclass(by_name, Exception):
        return by_name
    choices = sorted(FAILURE_KINDS - DETERMINISTIC)
    near = find_near(value, choices)
    raise wrong(
        f"{show(value)} is neither a kind of failure nor an exception type",
        write=repr(near) if near else f"one of {', '.join(choices)}",
        is_guess=near is not None,
    )


class RetryPolicy(Part):
    """Which failures deserve another attempt, how many, and how long to wait between them."""

    attempts: Annotated[int, BeforeValidator(validate_integer)] = Field(
        default=3,
        ge=1,
        le=1000,
        description="Attempts in all, the first one included; 1 never retries.",
        examples=["3", "1 (never retry)"],
    )
    on: Annotated[
        frozenset[Annotated[FailureKind | type[Exception], BeforeValidator(_validate_kind)]],
        BeforeValidator(_split_kinds),
    ] = Field(
        default=STARTUP_KINDS,
        description="Kinds of failure and exception types that are worth another attempt. "
        "The default ones happen before your function runs.",
        examples=['{"startup-network", "port", "mount", "peer-lost", ConnectionError}'],
    )
    # Everything of the attempt before is gone by then, so that the first pause may be short.
    backoff_initial: Wait = Field(
        default=timedelta(milliseconds=250),
        description="Wait before the second attempt; doubles from one attempt to the next, and is "
        "this short again after an attempt that made progress.",
        examples=["1"],
    )
    backoff_max: Wait = Field(
        default_factory=lambda known: max(
            timedelta(seconds=30), known.get("backoff_initial", timedelta(0))
        ),
        description="The longest wait between two attempts, jitter aside.",
        examples=["30"],
    )
    jitter: Wait = Field(
        default=timedelta(milliseconds=250),
        description="Up to this much is added to each wait at random, so that jobs which failed "
        "together do not come back together.",
        examples=["1"],
    )

    no_progress: Annotated[int, BeforeValidator(validate_integer), Field(ge=1)] | None = Field(
        default=2,
        description="Give up after so many attempts in a row in which your function ran and made no "
        "progress: no optimizer step, or behind a `Checkpointer` no newer checkpoint and no more "
        "steps than an attempt before. None: never for this reason.",
        examples=["2", "None"],
    )

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            attempts: int = ...,
            on: Iterable[FailureKind | type[Exception]] | type[Exception] = ...,
            backoff_initial: DurationLike = ...,
            backoff_max: DurationLike = ...,
            jitter: DurationLike = ...,
            no_progress: int | None = ...,
        ) -> None: ...

    @field_validator("backoff_max")
    @classmethod
    def _cover_the_first_wait(cls, value: timedelta, info: ValidationInfo) -> timedelta:
        initial = info.data.get("backoff_initial", value)
        if value < initial:
            raise wrong(
                f"it is shorter than retry.backoff_initial ({show_duration(initial)}), where the "
                "waits begin",
                write=f"backoff_max={initial.total_seconds():g}, or a shorter backoff_initial",
            )
        return value

    @field_serializer("on", when_used="json")
    def _name_kinds(self, kinds: frozenset[str | type[Exception]]) -> list[str]:
        return sorted(kind if isinstance(kind, str) else kind.__name__ for kind in kinds)


class Rendezvous(Part):
    """Where the nodes of one job meet; a single node needs none of it."""

    endpoint: str | None = Field(
        default=None,
        description="host:port that every node can reach; an IPv6 address in brackets.",
        examples=['"gpu-01:29400"', '"[2001:db8::1]:29400"'],
    )
    interface: str | None = Field(
        default=None,
        description="Network interface the ranks of this node talk on, by its literal name. "
        'By default none is chosen (None; "null" in a variable): gloo takes the one of the '
        "host's name, NCCL the first it finds. "
        '"auto" asks the routes for the one that leads to rank 0. '
        "A variable of gloo or NCCL that you set wins.",
        examples=['"eth0"', '"auto"', "None"],
    )

    id: str | None = Field(
        default=None,
        description="Name of the job at the endpoint, the same on all its nodes; a late node of "
        "another job is refused by it. None: every job at an endpoint has the same one.",
        examples=['"run-7"', "None"],
    )
    min_nodes: Annotated[int, BeforeValidator(validate_integer)] | None = Field(
        default=None,
        ge=1,
        description="Start with so many nodes, and go on with so many after the loss of one; "
        "nnodes is the most. None: all nnodes.",
        examples=["2", "None"],
    )
    join: Duration = Field(
        default=timedelta(minutes=10),
        description="How long a node waits for the endpoint and for the other nodes.",
        examples=['"10min"', "60"],
    )
    last_call: Wait = Field(
        default=timedelta(seconds=10),
        description="How long min_nodes nodes wait for more of them before they start.",
        examples=["10", '"1min"'],
    )
    secret_file: AbsolutePath | None = Field(
        default=None,
        description="A file with the secret of the job, by which nodes know each other. None: the "
        "variable DDPSAFE_JOB_SECRET, else one derived from endpoint and id, which keeps jobs apart "
        "and does not keep attackers out.",
        examples=['"/etc/ddpsafe/secret"', "None"],
    )

    @field_validator("id")
    @classmethod
    def _validate_id(cls, value: str | None) -> str | None:
        if value is not None and not (value.strip() and value.isprintable()):
            raise wrong("the id of a job is a text that can be printed", write='id="run-7"')
        return value

    @field_validator("endpoint")
    @classmethod
    def _validate_endpoint(cls, value: str | None) -> str | None:
        return None if value is None else str(parse_endpoint(value))

    @field_validator("interface")
    @classmethod
    def _validate_interface(cls, value: str | None) -> str | None:
        several = Problem(why="it is one interface, not a list", write='interface="eth0"')
        if value is not None:
            found = several if "," in value else find_shape_problem(GLOO, value)
            require_none([found] if found else [], given=value)
        return value

    def parsed(self) -> Endpoint | None:
        """Return the endpoint as host and port, or None where there is none."""
        return None if self.endpoint is None else parse_endpoint(self.endpoint)
