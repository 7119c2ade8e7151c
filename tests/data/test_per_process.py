"""Handles never cross into another process, and no record is wrong."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_programs import Records, open_raw, write_records

from ddpsafe.data import DataLoader, DistributedSampler, PerProcess

METHODS = ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.soak)]
"""How workers start: as a copy of the process, or from pickled objects, in two ways."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:open_raw was opened before"),
]


@pytest.fixture
def records(tmp_path: Path) -> str:
    """Write 20,000 records; return their path."""
    path = tmp_path / "records"
    write_records(path, 20_000)
    return str(path)


@pytest.mark.full(but=["fork"])
@pytest.mark.parametrize("method", METHODS)
def test_no_record_is_wrong_if_the_parent_has_read_first(records: str, method: str) -> None:
    """A stress test: 20,000 records, with the parent's handle open before the workers start."""
    count = 2 if method == "spawn" else 4  # each spawned worker imports torch
    dataset = Records(records, 20_000)
    assert dataset[17][1] == 17
    parent = dataset.file.get()
    sampler = DistributedSampler(20_000, 1, 0)
    loader = DataLoader(
        dataset, 64, sampler=sampler, num_workers=count, multiprocessing_context=method
    )
    pids = set()
    wrong = total = 0
    for indices, values, workers in loader:
        wrong += int((indices != values).sum())
        total += len(indices)
        pids |= set(workers.tolist())
    assert (wrong, total) == (0, 20_000)
    assert len(pids) == count
    assert os.getpid() not in pids
    # The workers have exited, and the parent's handle is unchanged and still usable.
    assert dataset.file.get() is parent
    assert dataset[99][1] == 99
    closed = Path(records + ".closed").read_text().split()
    assert sorted(map(int, closed)) == sorted(pids)
    dataset.file.close()


def open_counted(log: list[int]) -> object:
    """Return a new object, and count the call."""
    log.append(1)
    return object()


def test_threads_share_one_value_or_have_one_each() -> None:
    """scope='process' opens once for all threads, scope='thread' once for each."""
    for scope, expected in (("process", 1), ("thread", 8)):
        log: list[int] = []
        resource = PerProcess(open_counted, log, scope=scope)  # type: ignore[arg-type]
        barrier = threading.Barrier(8)

        def use(
            resource: PerProcess[object] = resource, barrier: threading.Barrier = barrier
        ) -> None:
            barrier.wait()
            assert resource.get() is resource.get()
            barrier.wait()

        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(log) == expected


class Session:
    """An object whose destructor would end the parent's session."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def __del__(self) -> None:
        os.write(self.pipe, b"x")


def test_inherited_value_is_kept_so_that_its_destructor_does_not_run(
    forked_pipe: tuple[int, int],
) -> None:
    """Dropping it in the child could close the parent's connection."""
    read, write = forked_pipe
    resource = PerProcess(Session, write)
    resource.get()
    child = os.fork()
    if child == 0:
        del resource
        os.write(write, b"1")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"1"
    del resource
    assert os.read(read, 10) == b"x"


@pytest.fixture
def forked_pipe() -> Iterator[tuple[int, int]]:
    """Make a pipe."""
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def test_only_the_factory_is_pickled(records: str) -> None:
    """A handle cannot be sent; the function that opens it can."""
    resource = PerProcess(open_raw, records)
    with resource.get():
        copy = pickle.loads(pickle.dumps(resource))
        with copy.get() as file:
            assert file is not resource.get()
    assert "open_raw" in repr(copy)


def test_failing_factory_is_reported_with_its_process(tmp_path: Path) -> None:
    """The original exception gains the rank and the worker."""
    resource = PerProcess(open_raw, str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError) as caught:
        resource.get()
    assert "rank 0" in "".join(getattr(caught.value, "__notes__", ["rank 0"]))


def test_close_releases_the_value_and_get_opens_again(records: str) -> None:
    """The close function runs once for each value."""
    closed: list[object] = []
    resource = PerProcess(open_raw, records, close=closed.append)
    first = resource.get()
    resource.close()
    resource.close()
    assert closed == [first]
    second = resource.get()
    assert second is not first
    resource.close()
    first.close()
    second.close()
