"""Ranks of several nodes wait for each other: that is reported on every node, and proved where it can be."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final

import pytest
from machine import require_in_time
from nodes_kit import Case, fault_s, finish_job, require_the_same, run_job, start_job
from scripts import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from hosts import Network
    from nodes_kit import Launcher

pytestmark = [pytest.mark.root, pytest.mark.recorder]

DEFAULTS: Final[dict[str, Any]] = {"timeouts": {"grace": 3}}
"""No timeout of collectives, so that only a proof ends a hang."""

TIMEOUT: Final = "LaunchTimeoutError"
PROVED_S: Final = 5.0
QUIET: Final = {node: {"QUIET_S": "3"} for node in range(2)}


def told(launchers: list[Launcher], start: str) -> list[list[str]]:
    """Return the warnings of each launcher that begin like that."""
    return [re.findall(rf"^.*?({start}.*)$", each.err, flags=re.MULTILINE) for each in launchers]


def run_until_told(network: Network, folder: Path, what: str, start: str) -> list[str]:
    """Run a job whose ranks wait until all launchers have warned; return the warning of each."""
    case = Case(name=what, what=what, rank=2, fields=DEFAULTS, env=QUIET)
    os.mkfifo(folder / f"wait-{what}")
    launchers = start_job(network, [case], folder, nproc=(2, 1))
    wait_until(
        lambda: all(told(launchers, start)) or any(each.ended_s for each in launchers),
        otherwise=lambda: [each.err for each in launchers],
    )
    found = [each[0] for each in told(launchers, start)]
    writer = os.open(folder / f"wait-{what}", os.O_RDWR)
    for results in finish_job(network, [case], launchers):
        assert "values" in results[what], results
    os.close(writer)
    return found


def test_a_long_wait_is_told_on_every_node(network: Network, tmp_path: Path) -> None:
    """With the rank that the others wait for, its node and its line."""
    warnings = run_until_told(network, tmp_path, "wait", "ranks 0 and 1 have waited")
    for warning in warnings:
        assert re.fullmatch(
            r"ranks 0 and 1 have waited \d+ s for rank 2 in all_reduce number 4 of shape \[1\]; "
            r"rank 2 is at .*node_programs\.py:\d+ in wait_for.*, on node 1 \(h1\)",
            warning,
        ), warning


def test_ranks_that_all_do_nothing_are_told_on_every_node(network: Network, tmp_path: Path) -> None:
    """Each launcher measures its own ranks; a step that has not been made may take long otherwise."""
    warnings = run_until_told(network, tmp_path, "all-wait", "no rank has made a step")
    for warning in warnings:
        assert "and none does anything" in warning
        assert "ranks 0 and 1 are at" in warning or "rank 1 is at" in warning  # two lines of a loop
        assert ", on node 0 (h0)" in warning
        assert "rank 2 is at" in warning
        assert ", on node 1 (h1)" in warning


@pytest.mark.parametrize(
    ("what", "culprit", "error", "proof"),
    [
        ("other", 2, TIMEOUT, "the ranks can never continue"),
        pytest.param("meet", 2, TIMEOUT, "| rank 2 is in barrier 'epoch'", marks=pytest.mark.full),
        pytest.param("crossed", 2, TIMEOUT, "none of them can continue", marks=pytest.mark.full),
        pytest.param("skip", 2, "RankLeftEarlyError", "has returned", marks=pytest.mark.full),
        pytest.param("stop", 2, TIMEOUT, "is stopped", marks=pytest.mark.full),
        pytest.param("stop", 0, TIMEOUT, "is stopped", marks=pytest.mark.full),
    ],
)
def test_a_deadlock_across_nodes_is_proved(
    network: Network, tmp_path: Path, what: str, culprit: int, error: str, proof: str
) -> None:
    """It ends within seconds, although no timeout is set, with the same message on every node."""
    case = Case(name=what, what=what, rank=culprit, fields=DEFAULTS)
    said = [results[what] for results in run_job(network, [case], tmp_path, nproc=(2, 1))]
    require_the_same(said)
    for each in said:
        assert proof in each["whole"], each["whole"]
        assert each["error"] == error, each
        require_in_time(each["at"] - fault_s(tmp_path, what), PROVED_S, what)
