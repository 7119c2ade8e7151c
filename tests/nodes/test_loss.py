"""A launcher or a host of several is gone: the others name it, end their ranks, and exit with 75."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import scripts
from hosts import Network, find_obstacle, require
from nodes_kit import Case, Launcher, require_in_time, require_nothing_left, start_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.root

AGAIN: Final = 75
"""Exit code that asks for another start: EX_TEMPFAIL."""

_ports = itertools.count(29400, 50)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two hosts, which stay."""
    require(find_obstacle())
    with Network(2) as hosts:
        yield hosts


@pytest.fixture
def own_network() -> Iterator[Network]:
    """Two hosts, one of which the test takes away."""
    require(find_obstacle())
    with Network(2) as hosts:
        yield hosts


def start_training(network: Network, folder: Path) -> list[Launcher]:
    """Start a long training with two ranks on each of two hosts; wait until all train."""
    case = Case(name="long", what="long", fields={"timeouts": {"collective": 60, "grace": 3}})
    launchers = start_job(network, [case], folder, nproc=[2, 2], port=next(_ports))
    scripts.wait_until(
        lambda: len(list(folder.glob("running-long-1-*"))) == 4,
        otherwise=lambda: [launcher.err for launcher in launchers],
        within_s=120,
    )
    return launchers


def require_named(said: dict[str, Any], *, node: int, from_s: float, within_s: float) -> None:
    """Fail unless a launcher has named a lost node in time."""
    ranks = {0: "ranks 0 and 1", 1: "ranks 2 and 3"}[node]
    assert (said["error"], said["code"], said["kind"]) == ("NodeLostError", AGAIN, "peer-lost")
    assert f"node {node} ('h{node}', {ranks} of world_size 4) was lost" in said["text"]
    require_in_time(said["at"] - from_s, within_s, "the loss is named")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_launcher_that_is_killed_is_named_at_once(
    network: Network, tmp_path: Path, victim: int
) -> None:
    """The other launcher names its node within a second, and no rank of either is left."""
    launchers = start_training(network, tmp_path)
    os.kill(launchers[victim].pid, signal.SIGKILL)
    killed_s = launchers[victim].wait_for_end()
    launchers[1 - victim].end()
    said = launchers[1 - victim].results()["long"]
    require_named(said, node=victim, from_s=killed_s, within_s=1.0)
    assert "its launcher has ended" in said["text"]
    require_nothing_left(network)


LOSSES: Final[dict[str, Callable[[Network, int], None]]] = {
    "power": lambda network, victim: network[victim].power_off(),
    "cable": lambda network, victim: network[victim].unplug(),
}


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", LOSSES)
def test_a_host_that_vanishes_is_named_within_seconds(
    own_network: Network, tmp_path: Path, how: str, victim: int
) -> None:
    """No packet says that it is gone: each side that still runs names the other within 5 s."""
    launchers = start_training(own_network, tmp_path)
    before_s = time.time()
    LOSSES[how](own_network, victim)
    there = [1 - victim] if how == "power" else [0, 1]
    for node in there:
        launchers[node].end()
        require_named(
            launchers[node].results()["long"], node=1 - node, from_s=before_s, within_s=5.0
        )
    require_nothing_left(own_network, besides=[victim] if how == "power" else [])
    for left in Path(tempfile.gettempdir()).glob("ddpsafe-store-*"):
        shutil.rmtree(left)  # of the host without power: its disk is this one here


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_a_signal_to_one_launcher_ends_all_of_them_alike(
    network: Network, tmp_path: Path, signum: int, code: int
) -> None:
    """As on one node: the ranks of all nodes end, then each launcher does as the signal says."""
    launchers = start_training(network, tmp_path)
    os.kill(launchers[1].pid, signum)
    assert [launcher.end() for launcher in launchers] == [code, code]
    for launcher in launchers:
        assert "no rank is left running" in launcher.err
    require_nothing_left(network)
