"""`Timeouts`: how long each phase of a launch may take."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from ddpsafe._config.durations import Duration, DurationLike, DurationOrAuto, show_duration
from ddpsafe._config.problems import Part, wrong

if TYPE_CHECKING:
    from collections.abc import Callable


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
