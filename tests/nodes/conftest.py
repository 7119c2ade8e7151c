"""The hosts on which a job's launchers run."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cut_wire import listen
from hosts import Network, find_obstacle, require
from nodes_kit import Launcher

from ddpsafe._job.channel import Channel


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Three hosts that are shared by all tests."""
    require(find_obstacle())
    with Network(3) as hosts:
        yield hosts


@pytest.fixture
def own_network() -> Iterator[Network]:
    """Three hosts of which the test removes one."""
    require(find_obstacle())
    with Network(3) as hosts:
        yield hosts
    for left in Path(tempfile.gettempdir()).glob("ddpsafe-*"):
        shutil.rmtree(left)  # left by the host without power; its disk is this machine's


@pytest.fixture
def channel() -> Iterator[Channel]:
    """Open node 0's end of the channel of three nodes, without any other node."""
    with contextlib.closing(listen()) as listening:
        yield listening


@pytest.fixture(autouse=True)
def _no_launcher_is_left() -> Iterator[None]:
    """End the launchers of a failed test, because the next test uses the same hosts."""
    yield
    for launcher in Launcher.started:
        launcher.kill()
    Launcher.started.clear()
