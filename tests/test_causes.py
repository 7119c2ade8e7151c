"""Which rank is blamed, where the moment that decides cannot be made to order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpsafe._launcher.causes import find_cause
from ddpsafe._launcher.evidence import read_crash
from ddpsafe._wire.outcome import Collective, Position, Raised, RankOutcome

CRASHED_IN_GLOO = """\
starting
Fatal Python error: Segmentation fault

Thread 0x00007f (most recent call first):
  File "/x/site-packages/tqdm/_monitor.py", line 60 in run

Current thread 0x00007e (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "/home/me/train.py", line 31 in train
  File "/x/site-packages/ddpsafe/_worker/entrypoint.py", line 140 in run_rank
"""


def outcome(rank: int, **facts: Any) -> RankOutcome:
    """Make the outcome of a rank that failed while it ran."""
    usual = {"local_rank": rank, "pid": 100 + rank, "hostname": "here", "phase": "running"}
    return RankOutcome(rank=rank, **{**usual, "exit_code": 1, **facts})


def in_flight(rank: int, *, at_ns: int) -> RankOutcome:
    """Make the outcome of a rank whose error was last seen at a barrier in its ``finally``."""
    raised = Raised(
        type_name="ValueError",
        message="label 7 is out of range",
        traceback="ValueError: label 7 is out of range",
        payload=None,
        phase="running",
        where="train.py:12 in step",
        position=Position(collectives=()),
        at_ns=at_ns,
        final=False,
    )
    return outcome(rank, status="raised", raised=raised)


def test_a_crash_inside_a_collective_may_be_an_echo_of_an_error_on_its_way() -> None:
    """A barrier in `finally` meets the others' all-reduce, and gloo writes into wrong buffers."""
    stack, in_collective = read_crash(CRASHED_IN_GLOO)
    assert stack == "/home/me/train.py:31 in train"
    crashed = outcome(2, status="killed", exit_code=-11, ended_ns=1, in_collective=in_collective)
    assert find_cause({1: in_flight(1, at_ns=5), 2: crashed}).root.rank == 1


def test_a_rank_that_gloo_aborted_is_not_behind() -> None:
    """It died where it was, since what the other one does in its `finally` did not fit there."""
    here, there = (
        Position(
            collectives=(
                Collective(
                    group="default_pg",
                    number=number,
                    name="gloo:all_reduce",
                    sizes="[[8]]",
                    done=False,
                    entered_ns=number,
                ),
            )
        )
        for number in (2, 3)
    )
    crashed = outcome(
        0, status="killed", exit_code=-6, ended_ns=1, in_collective=True, position=here
    )
    failing = replace(in_flight(1, at_ns=5), position=there)
    assert find_cause({0: crashed, 1: failing}).root.rank == 1


def test_a_crash_in_the_users_own_code_is_no_echo() -> None:
    """The error on its way may have been expected and caught."""
    elsewhere = CRASHED_IN_GLOO.replace("distributed_c10d.py", "nn.py")
    _, in_collective = read_crash(elsewhere)
    crashed = outcome(2, status="killed", exit_code=-11, ended_ns=9, in_collective=in_collective)
    assert find_cause({1: in_flight(1, at_ns=5), 2: crashed}).root.rank == 2


def test_a_rank_that_was_killed_did_not_crash_in_a_collective() -> None:
    """SIGKILL leaves no stack, and nothing that a program does to itself sends it."""
    killed = outcome(2, status="killed", exit_code=-9, ended_ns=9)
    assert find_cause({1: in_flight(1, at_ns=5), 2: killed}).root.rank == 2
