"""The network of a host fails for some seconds at any moment of a job: the job ends as it does without."""

from __future__ import annotations

import contextlib
import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest
from hosts import Host, Network, find_obstacle, require
from nodes_kit import Case, finish_job, start_job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.root

LAUNCHERS: Final = "eth0"
RANKS: Final = "eth1"
FAULT_TENTH_S: Final = 0.1
RETRY: Final[dict[str, Any]] = {
    "attempts": 5,
    "on": ["peer-lost", "killed", "network", "startup-network"],
    "backoff_initial": 0,
    "jitter": 0,
    "no_progress": None,
}
CASE: Final = Case(
    name="any",
    what="kill-until-2",
    rank=1,
    fields={
        "nnodes": 3,
        "retry": RETRY,
        "env": {"GLOO_SOCKET_IFNAME": RANKS},
        "timeouts": {"collective": 60, "grace": 3},
    },
)
"""Rank 1 is killed once, so that the nodes join twice."""


@contextlib.contextmanager
def filtered(host: Host, directions: list[str], *, verdict: str) -> Iterator[None]:
    """Treat packets of the launchers' network so, in one direction or in both."""
    rules = "".join(
        f"chain {hook} {{ type filter hook {hook} priority 0; {way} {LAUNCHERS} {verdict}; }}\n"
        for hook, way in zip(("input", "output"), ("iifname", "oifname"), strict=True)
        if hook in directions
    )
    host.run("nft", "-f", "-", given=f"table inet outage {{\n{rules}}}\n")
    try:
        yield
    finally:
        host.run("nft", "delete", "table", "inet", "outage")


@contextlib.contextmanager
def paused(host: Host, directions: list[str]) -> Iterator[None]:
    """Stop all processes of a host, whose kernel still answers."""
    del directions
    host.shell("kill -STOP -1")
    try:
        yield
    finally:
        host.shell("kill -CONT -1")


def pass_time(parts: int) -> None:
    """Let so many tenths of a second pass."""
    for _ in range(parts):
        time.sleep(FAULT_TENTH_S)


OUTAGES: Final = {
    "away": partial(filtered, verdict="drop"),
    "reset": partial(filtered, verdict="meta l4proto tcp reject with tcp reset"),
    "lossy": partial(filtered, verdict="numgen random mod 100 < 40 drop"),
    "paused": paused,
}


@pytest.mark.full
@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 40))]
)
@pytest.mark.parametrize("outage", OUTAGES)
def test_an_outage_at_any_moment_ends_nothing(tmp_path: Path, outage: str, seed: int) -> None:
    """While nodes join, train, and join again; of any host, in both directions or one."""
    require(find_obstacle())
    chance = random.Random(seed)
    directions = ["input", "output"]
    if chance.random() < 2 / 3:
        directions.remove(chance.choice(directions))
    after, lasts = chance.randrange(3, 60), chance.randrange(20, 70)
    with Network(3, nics={LAUNCHERS: "10.77.0", RANKS: "10.78.0"}) as network:
        launchers = start_job(network, [CASE], tmp_path, nproc=(1, 1, 1))
        pass_time(after)
        with OUTAGES[outage](network[chance.randrange(3)], directions):
            pass_time(lasts)
        results = [result["any"] for result in finish_job(network, [CASE], launchers)]
    said = "\n".join(f"{launcher.host.name}: {launcher.err}" for launcher in launchers)
    assert ["error" not in result for result in results] == [True] * 3, f"{results}\n{said}"
