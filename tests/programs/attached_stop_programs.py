"""Rank functions of test_attached_stop.py, for ranks of another launcher that are asked to stop."""

from __future__ import annotations

import itertools
import os
import signal
import time
import warnings
from collections.abc import Mapping
from typing import Any, Final

import ddpsafe

PATIENT: Final = {"start": 30, "collective": 30, "barrier": 30}
"""Timeouts of ranks that find each other, on a busy machine too."""


def train(ctx: ddpsafe.RankContext, signalled: int, signum: signal.Signals) -> int:
    """Poll at this rank's own pace until a stop is requested; one rank is signalled; return the call."""
    for call in itertools.count(1):
        if ctx.stop_requested():
            return call
        if call == 10 and ctx.rank == signalled:
            os.kill(os.getpid(), signum)
        time.sleep(0.002 * (1 + ctx.rank))
    raise AssertionError


def be_asked(signalled: int, signum: signal.Signals) -> dict[str, Any]:
    """Receive a stop request in one group, and train in the next one without it."""
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    with ddpsafe.process_group(timeouts=PATIENT) as ctx:
        call = train(ctx, signalled, signum)
    after = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    with ddpsafe.process_group(timeouts=PATIENT) as ctx:
        again = [ctx.stop_requested() for _ in range(3)]
    return {"call": call, "restored": before == after, "again": again}


def be_asked_with_a_handler() -> dict[str, Any]:
    """Handle one signal and ignore the other before ddpsafe is used."""
    seen: list[int] = []

    def handle(signum: int, _frame: object) -> None:
        seen.append(signum)

    signal.signal(signal.SIGUSR1, handle)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with ddpsafe.process_group(timeouts=PATIENT) as ctx:
        answers = [ctx.stop_requested()]
        os.kill(os.getpid(), signal.SIGTERM)
        answers.append(ctx.stop_requested())
        os.kill(os.getpid(), signal.SIGUSR1)
        answers.append(ctx.stop_requested())
    kept = [signal.getsignal(signal.SIGUSR1) is handle]
    kept.append(signal.getsignal(signal.SIGTERM) == signal.SIG_IGN)
    return {"answers": answers, "seen": seen, "kept": kept}


def go_on_without_one(ways: Mapping[int, str]) -> list[int]:
    """Let ranks leave early or with an error before another one is asked to stop.

    Returns:
        The step at which this rank stopped, and the rank that is named as failed.
    """
    steps = 0
    try:
        with ddpsafe.process_group(timeouts=PATIENT) as ctx:
            ctx.barrier("all are here")
            way = ways.get(ctx.rank)
            ctx.stop_requested()
            if way == "fails":
                msg = "bad batch"
                raise ValueError(msg)
            if way != "returns":
                time.sleep(0.5)
                steps = train(ctx, 0, signal.SIGTERM)
    except ddpsafe.RankRaisedError as error:
        return [steps, error.rank]
    return [steps]


def fail_before_a_barrier() -> None:
    """Let rank 1 fail while the others wait for it at a barrier with a long timeout."""
    with ddpsafe.process_group(timeouts=PATIENT) as ctx:
        ctx.barrier("all are here")
        if ctx.rank == 1:
            msg = "bad batch"
            raise ValueError(msg)
        ctx.barrier("all have evaluated")


def forget_srun() -> list[str]:
    """Make a group in the shell of a job; return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ddpsafe.process_group(timeouts=PATIENT) as ctx:
            assert ctx.world_size == 1
    return [str(each.message) for each in caught]


def look_at_the_environment() -> list[bool]:
    """Return whether a group's variables are set inside it, and unset after it."""
    names = ("NCCL_DEBUG", "GLOO_SOCKET_IFNAME")
    before = dict(os.environ)
    with ddpsafe.process_group(timeouts=PATIENT, env={"NCCL_DEBUG": "WARN"}):
        inside = all(name in os.environ for name in names)
    return [inside, dict(os.environ) == before]
