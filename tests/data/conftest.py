"""Settings and fixtures of the data tests."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A shared machine is slow at times, and these tests are about the result, not the time.
settings.register_profile("data", deadline=None)
settings.load_profile("data")


@pytest.fixture(autouse=True)
def _workers_are_forks() -> Iterator[None]:
    """Start workers as before Python 3.14: a new interpreter does not find the classes of a test file."""
    if sys.version_info < (3, 14):
        yield
        return
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture(autouse=True)
def _drop_iterators_that_tracebacks_hold() -> Iterator[None]:
    """End the workers of a failed test: the frames of its traceback hold the iterator, in a cycle."""
    yield
    if multiprocessing.active_children():
        gc.collect()
