"""A worker's death says which worker, which rank, which sample, and which limit."""

from __future__ import annotations

import sys

import pytest
from data_programs import Lethal

from ddpsafe.data import DataLoader
from ddpsafe.data.errors import WorkerDiedError


def read(how: str) -> None:
    """Read a dataset whose sample 13 is lethal, with two workers."""
    for _ in DataLoader(Lethal(40, 13, how), 4, num_workers=2):
        pass


@pytest.mark.parametrize(
    ("how", "text", "limit"),
    [
        ("SIGKILL", "was killed by SIGKILL", "MiB available"),
        ("SIGBUS", "was killed by SIGBUS", "/dev/shm has"),
        ("SIGSEGV", "was killed by SIGSEGV", "PerProcess"),
        ("exit", "exited with code 3", "os._exit()"),
    ],
)
def test_death_names_worker_rank_index_path_and_limit(how: str, text: str, limit: str) -> None:
    """Instead of "DataLoader worker (pid 4711) exited unexpectedly"."""
    with pytest.raises(WorkerDiedError) as caught:
        read(how)
    message = str(caught.value)
    assert text in message
    assert "worker 1" in message
    assert "of rank 0 (world_size 1)" in message
    assert "index 13 (/data/00013.jpg)" in message
    assert limit in message
    assert (caught.value.worker, caught.value.rank, caught.value.index) == (1, 0, 13)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
@pytest.mark.parametrize(
    ("how", "kind", "texts"),
    [
        ("missing", FileNotFoundError, ["/data/00013.jpg"]),
        ("files", OSError, ["RLIMIT_NOFILE", "ulimit -n", "/data/00013.jpg"]),
    ],
)
def test_exception_in_a_worker_keeps_its_type_and_gains_where(
    how: str, kind: type[Exception], texts: list[str]
) -> None:
    """A user's except clause still catches it."""
    with pytest.raises(kind) as caught:
        read(how)
    for text in [*texts, "While reading index 13", "DataLoader worker 1 of rank 0"]:
        assert text in str(caught.value)
