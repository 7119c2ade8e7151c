"""The hosts that the launchers of a job run on."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hosts import Network, find_obstacle, require
from nodes_kit import Launcher

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Three hosts, which stay."""
    require(find_obstacle())
    with Network(3) as hosts:
        yield hosts


@pytest.fixture
def own_network() -> Iterator[Network]:
    """Three hosts, one of which the test takes away."""
    require(find_obstacle())
    with Network(3) as hosts:
        yield hosts
    for left in Path(tempfile.gettempdir()).glob("ddpsafe-*"):
        shutil.rmtree(left)  # of the host without power: its disk is this one here


@pytest.fixture(autouse=True)
def _no_launcher_is_left() -> Iterator[None]:
    """End the launchers of a test that failed: the next test is on the same hosts."""
    yield
    for launcher in Launcher.started:
        launcher.kill()
    Launcher.started.clear()
