"""Fixtures of the doctor's tests: a process that becomes a broken host, and whole networks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import doctor_kit
import pytest
from hosts import Network, find_obstacle, require, serving_forks
from mesh_kit import FORKED, MakeHosts


@pytest.fixture(autouse=True, scope="session")
def _server(_own_temporary_directory: None) -> Iterator[None]:
    with doctor_kit.serving():
        yield


@pytest.fixture(scope="session")
def _examining(_own_temporary_directory: None) -> Iterator[None]:
    with serving_forks(FORKED["examine"]):
        yield


@pytest.fixture
def make_hosts(_examining: None) -> Iterator[MakeHosts]:
    """Build hosts from namespaces; skip where that fails, or fail where CI requires them."""
    require(find_obstacle())
    with contextlib.ExitStack() as stack:
        yield lambda size, **kinds: stack.enter_context(Network(size, **kinds))  # type: ignore[arg-type]
