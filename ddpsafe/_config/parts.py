"""The parts of a `LaunchConfig`: how long phases may take, what to retry, where nodes connect."""

from __future__ import annotations

import builtins
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_serializer, field_validator

from ddpsafe._config.durations import Duration, DurationLike, DurationOrAuto, Wait, show_duration
from ddpsafe._config.endpoint import Endpoint, parse_endpoint, parse_ports
from ddpsafe._config.field_validators import validate_integer
from ddpsafe._config.interfaces import GLOO, find_shape_problem
from ddpsafe._config.paths import AbsolutePath
from ddpsafe._config.problems import Part, Problem, find_near, require_none, show, wrong
from ddpsafe._errors import FAILURE_KINDS, STARTUP_KINDS, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def _at_most(default: timedelta, bound: str) -> Callable[[dict[str, Any]], Any]:
    """Make a default factory that lowers `default` to the field `bound` if that is less."""

    def make(known: dict[str, Any]) -> timedelta:
        limit = known.get(bound)
        return default if limit is None else min(default, limit)

    return make


class Timeouts(Part):
    """How long each phase of a launch may take; every wait has an end.

    A number means seconds; strings such as "30s" or "5min" are accepted too.
    A default is lowered if it would exceed a field that you set.
    """

    attempt: Duration | None = Field(
        default=None,
        description="From the start of an attempt to its last rank's return. "
        "None: as long as it takes.",
        examples=['"12h"', "None"],
    )
    start: Duration = Field(
        default_factory=_at_most(timedelta(minutes=5), "attempt"),
        description="From the start of the ranks until all have joined, else RendezvousTimeoutError. If a script creates its "
        "process group itself, under `spawn` and `ddpsafe run`, this limit applies only if you set "
        "it; else the script's own timeout applies, or torch's.",
        examples=["300", '"5min"'],
    )
    collective: Duration = Field(
        default_factory=_at_most(timedelta(minutes=10), "attempt"),
        description="For one collective (all_reduce, …). If a script creates "
        "its process group itself, the timeout it passes applies, else what you set here, else "
        "torch's default: 30 min, or 10 min with NCCL.",
        examples=["600", '"10min"'],
    )
    barrier: Duration = Field(
        default_factory=_at_most(timedelta(minutes=30), "attempt"),
        description="For one `barrier()`, where the slowest rank may still have work to do.",
        examples=["1800", '"30min"'],
    )
    progress: DurationOrAuto | None = Field(
        default=None,
        description="Between two steps of the training. None: not watched. "
        '"auto": five times what this run has measured so far, at least 1 min. It is measured '
        "separately for the first step (from an earlier attempt, at least 5 min), for later steps, "
        "and for the saves of a Checkpointer.",
        examples=['"20min"', '"auto"', "None"],
    )
    finish: Duration | None = Field(
        default=None,
        description="From when a rank has left its process group, for what it left running: threads, "
        "executors, exit functions (atexit), queues. None: as long as it takes; a "
        "warning names what the launcher waits for.",
        examples=['"10min"', "None"],
    )
    grace: Duration = Field(
        default=timedelta(seconds=5),
        description="Between SIGTERM and SIGKILL. It has no error, as the kill follows.",
        examples=["5"],
    )
    stop: Duration = Field(
        default=timedelta(minutes=5),
        description="From a request to stop (SIGTERM, SIGUSR1) until the ranks that call "
        "stop_requested() have saved and returned. It has no error: remaining ranks are then ended.",
        examples=['"5min"', "25"],
    )
    node_loss: Wait = Field(
        default=timedelta(seconds=30),
        description="How long the launchers of two nodes may be unable to reach each other: NodeLostError. "
        "Training continues meanwhile. A launcher that has ended is lost at once, and so is a node that is "
        "away while a rank fails. 0: at the first broken connection.",
        examples=["30", '"2min"'],
    )

    if TYPE_CHECKING:

        def __init__(  # noqa: PLR0913 - one for each field
            self,
            *,
            attempt: DurationLike | None = ...,
            start: DurationLike = ...,
            collective: DurationLike = ...,
            barrier: DurationLike = ...,
            progress: DurationLike | Literal["auto"] | None = ...,
            finish: DurationLike | None = ...,
            grace: DurationLike = ...,
            stop: DurationLike = ...,
            node_loss: DurationLike = ...,
        ) -> None: ...

    @field_validator("start", "collective", "barrier", "progress")
    @classmethod
    def _check_against_attempt(
        cls, value: DurationOrAuto | None, info: ValidationInfo
    ) -> DurationOrAuto | None:
        attempt = info.data.get("attempt")
        if isinstance(value, timedelta) and attempt is not None and value > attempt:
            raise wrong(
                f"it is longer than timeouts.attempt ({show_duration(attempt)}), which would always "
                "expire first, without naming a rank",
                write=f"{info.field_name}={attempt.total_seconds():g}, or a longer attempt",
            )
        return value


DETERMINISTIC: Final = frozenset({"config", "user-error", "unpicklable"})
"""Kinds of failure that happen again on every attempt."""


def _split_kinds(value: object) -> object:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    if isinstance(value, type):
        return [value]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    raise wrong(
        f"expected failure kinds, got a {type(value).__name__}",
        write='a set of kinds and exception types: {"peer-lost", ConnectionError}',
    )


def _validate_kind(value: object) -> object:
    if isinstance(value, type):
        if issubclass(value, Exception):
            return value
        raise wrong(
            f"{value.__name__} is not a subclass of Exception; KeyboardInterrupt, SystemExit and "
            "the like are requests to stop, which are not retried",
            write="an exception type such as ConnectionError",
        )
    if isinstance(value, str) and value in DETERMINISTIC:
        raise wrong(
            "a failure of this kind happens again on every attempt",
            write="the exception type that another attempt can avoid, e.g. ConnectionError",
        )
    if isinstance(value, str) and value in FAILURE_KINDS:
        return value
    by_name = getattr(builtins, value, None) if isinstance(value, str) else None
    if isinstance(by_name, type) and issubclass(by_name, Exception):
        return by_name
    choices = sorted(FAILURE_KINDS - DETERMINISTIC)
    near = find_near(value, choices)
    raise wrong(
        f"{show(value)} is neither a failure kind nor an exception type",
        write=repr(near) if near else f"one of {', '.join(choices)}",
        is_guess=near is not None,
    )


class RetryPolicy(Part):
    """Which failures are retried, how often, and how long to wait between attempts."""

    attempts: Annotated[int, BeforeValidator(validate_integer)] = Field(
        default=3,
        ge=1,
        le=1000,
        description="Number of attempts, including the first one; 1 never retries.",
        examples=["3", "1 (never retry)"],
    )
    on: Annotated[
        frozenset[Annotated[FailureKind | type[Exception], BeforeValidator(_validate_kind)]],
        BeforeValidator(_split_kinds),
    ] = Field(
        default=STARTUP_KINDS,
        description="Failure kinds and exception types that are retried. The default kinds happen "
        "before your code runs.",
        examples=['{"startup-network", "port", "mount", "peer-lost", ConnectionError}'],
    )
    # All processes of the failed attempt have ended by then, so the first wait may be short.
    backoff_initial: Wait = Field(
        default=timedelta(milliseconds=250),
        description="Wait before the second attempt. It doubles with each attempt, and starts again "
        "from this value after an attempt that made progress.",
        examples=["1"],
    )
    backoff_max: Wait = Field(
        default_factory=lambda known: max(
            timedelta(seconds=30), known.get("backoff_initial", timedelta(0))
        ),
        description="Longest wait between two attempts, not counting jitter.",
        examples=["30"],
    )
    jitter: Wait = Field(
        default=timedelta(milliseconds=250),
        description="A random time up to this is added to each wait, so that jobs which failed "
        "together do not retry together.",
        examples=["1"],
    )

    no_progress: Annotated[int, BeforeValidator(validate_integer), Field(ge=1)] | None = Field(
        default=2,
        description="Give up after this many attempts in a row in which your code ran but made no "
        "progress: no optimizer step, or with a `Checkpointer` no newer checkpoint and no more steps "
        "than an earlier attempt. None: never give up for this reason.",
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
    def _check_against_initial(cls, value: timedelta, info: ValidationInfo) -> timedelta:
        initial = info.data.get("backoff_initial", value)
        if value < initial:
            raise wrong(
                f"it is shorter than retry.backoff_initial ({show_duration(initial)}), the first wait",
                write=f"backoff_max={initial.total_seconds():g}, or a shorter backoff_initial",
            )
        return value

    @field_serializer("on", when_used="json")
    def _name_kinds(self, kinds: frozenset[str | type[Exception]]) -> list[str]:
        return sorted(kind if isinstance(kind, str) else kind.__name__ for kind in kinds)


class Rendezvous(Part):
    """Where the nodes of a job connect; a single node needs none of it."""

    endpoint: str | None = Field(
        default=None,
        description="host:port that every node can reach; an IPv6 address goes in brackets.",
        examples=['"gpu-01:29400"', '"[2001:db8::1]:29400"'],
    )
    interface: str | None = Field(
        default=None,
        description="Network interface that the ranks of this node use, by its literal name. "
        'None ("null" in a variable) chooses none: gloo then uses the one that the host name '
        "resolves to, NCCL the first it finds. "
        '"auto" uses the one on the route to rank 0. '
        "Variables of gloo or NCCL that you set override this.",
        examples=['"eth0"', '"auto"', "None"],
    )

    id: str | None = Field(
        default=None,
        description="Name of the job at the endpoint, the same on all its nodes, so that a late node "
        "of another job is refused. None: all jobs at an endpoint have the same name.",
        examples=['"run-7"', "None"],
    )
    min_nodes: Annotated[int, BeforeValidator(validate_integer)] | None = Field(
        default=None,
        ge=1,
        description="Smallest number of nodes to start with, and to continue with after nodes are "
        "lost; nnodes is the maximum. None: all nnodes.",
        examples=["2", "None"],
    )
    join: Duration = Field(
        default=timedelta(minutes=10),
        description="How long a node waits for the endpoint and for the other nodes.",
        examples=['"10min"', "60"],
    )
    last_call: Wait = Field(
        default=timedelta(seconds=10),
        description="How long min_nodes nodes wait for more nodes before they start.",
        examples=["10", '"1min"'],
    )
    signal_scope: Literal["auto", "job", "node"] = Field(
        default="auto",
        description="What SIGTERM, SIGHUP, SIGQUIT or SIGUSR1 to the launcher of another node than node 0 "
        'means. "job": all nodes stop. "node": that node leaves once the ranks have saved, and the '
        "others start another attempt, as after its loss. "
        '"auto": "node" while at least min_nodes stay.',
        examples=['"job"', '"node"'],
    )
    secret_file: AbsolutePath | None = Field(
        default=None,
        description="A file with the job's secret, by which its nodes authenticate each other. None: "
        "the variable DDPSAFE_JOB_SECRET, else a secret derived from endpoint and id, which keeps "
        "jobs apart but does not keep attackers out.",
        examples=['"/etc/ddpsafe/secret"', "None"],
    )
    ports: str | None = Field(
        default=None,
        description="Range of ports, first-last, from which node 0 takes those of the ranks' store and of "
        "MASTER_PORT, for a firewall that opens only some. None: any free ones.",
        examples=['"29401-29420"', "None"],
    )

    @field_validator("ports")
    @classmethod
    def _validate_ports(cls, value: str | None) -> str | None:
        try:
            return None if value is None else parse_ports(value)
        except ValueError as exc:
            raise wrong(str(exc), write='ports="29401-29420"') from exc

    @field_validator("id")
    @classmethod
    def _validate_id(cls, value: str | None) -> str | None:
        if value is not None and not (value.strip() and value.isprintable()):
            raise wrong("the id of a job must be printable and not empty", write='id="run-7"')
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
            problem = several if "," in value else find_shape_problem(GLOO, value)
            require_none([problem] if problem else [], given=value)
        return value

    def parsed(self) -> Endpoint | None:
        """Return the endpoint as host and port, or None if there is none."""
        return None if self.endpoint is None else parse_endpoint(self.endpoint)
