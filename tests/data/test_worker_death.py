"""The error for a dead worker names the worker, the rank, the sample and the limit it reached."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import scripts
from data_programs import Ending, Gated, Lethal, Numbers, lose_a_worker_of_torchs_loader
from torch.utils.data import Sampler

import ddpsafe
from ddpsafe.data import DataLoader
from ddpsafe.data._loader import worker_death
from ddpsafe.data.errors import WorkerDiedError, WorkerTimeoutError


def read(how: str) -> None:
    """Read a dataset whose sample 13 kills its worker, with two workers."""
    for _ in DataLoader(Lethal(40, 13, how), 4, num_workers=2):
        pass


@pytest.mark.full(but=["SIGKILL-was killed by SIGKILL-MiB available"])
@pytest.mark.parametrize(
    ("how", "text", "limit"),
    [
        ("SIGKILL", "was killed by SIGKILL", "MiB available"),
        ("SIGBUS", "was killed by SIGBUS", "/dev/shm has"),
        ("SIGSEGV", "was killed by SIGSEGV", "PerProcess"),
        ("exit", "exited with code 3", "os._exit()"),
    ],
)
def test_error_names_worker_rank_index_path_and_limit(how: str, text: str, limit: str) -> None:
    """PyTorch's text is only "DataLoader worker (pid 4711) exited unexpectedly"."""
    with pytest.raises(WorkerDiedError) as caught:
        read(how)
    message = str(caught.value)
    assert text in message
    assert "worker 1" in message
    assert "of rank 0 (world_size 1)" in message
    assert "index 13 (samples[13] is /data/00013.jpg)" in message
    assert limit in message
    assert (caught.value.worker, caught.value.rank, caught.value.index) == (1, 0, 13)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize(
    ("kills", "text"),
    [
        (0, None),
        (1, "the OOM killer has ended 1 process of this cgroup so far"),
        (3, "the OOM killer has ended 3 processes of this cgroup so far"),
    ],
)
def test_kills_for_memory_are_counted(tmp_path: Path, kills: int, text: str | None) -> None:
    """Without any, the OOM killer is not mentioned."""
    (tmp_path / "memory.events").write_text(f"oom {kills}\noom_kill {kills}\noom_group_kill 0\n")
    described = worker_death.describe_memory(cgroup=tmp_path)
    assert described.endswith(f"; {text}.") if text else "OOM" not in described


def test_an_exiting_worker_is_named_even_if_one_of_its_batches_is_lost_first(
    tmp_path: Path,
) -> None:
    """Tensors of a batch are fetched from their worker, which refuses the connection before it is dead."""
    mark = tmp_path / "is-ending"
    batches = iter(DataLoader(Ending(40, 9, mark), 4, num_workers=1))
    next(batches)  # requests the third batch, with sample 9; the second is not fetched yet
    scripts.wait_until(mark.exists)
    with pytest.raises(WorkerDiedError, match=r"worker 0 .* exited with code 3"):
        next(batches)


class Unreadable(Sampler[int]):
    """A sampler whose list of samples is missing."""

    def __iter__(self) -> Iterator[int]:
        """Yield eight indices, then fail."""
        yield from range(8)
        yield int(Path("/nowhere/samples.txt").read_text(encoding="utf-8"))

    def __len__(self) -> int:
        return 40


def test_an_error_of_the_sampler_is_not_taken_for_a_lost_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is raised at once, as no worker is dying that could be waited for."""
    monkeypatch.setattr(worker_death, "_EXIT_WAIT", timedelta(minutes=10))
    batches = iter(DataLoader(Numbers(40), 4, sampler=Unreadable(), num_workers=1))
    with pytest.raises(FileNotFoundError, match="samples"):
        list(batches)


@pytest.mark.full(but=["missing-FileNotFoundError-texts0"])
@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
@pytest.mark.parametrize(
    ("how", "kind", "texts"),
    [
        ("missing", FileNotFoundError, ["/data/00013.jpg"]),
        ("files", OSError, ["RLIMIT_NOFILE", "raise the limit", "/data/00013.jpg"]),
    ],
)
def test_exception_in_a_worker_keeps_its_type_and_gains_its_place(
    how: str, kind: type[Exception], texts: list[str]
) -> None:
    """A user's except clause still catches it."""
    with pytest.raises(kind) as caught:
        read(how)
    for text in [*texts, "While reading index 13", "DataLoader worker 1 of rank 0"]:
        assert text in str(caught.value)


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    """Make a FIFO that a worker waits for."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return str(path)


def test_timeout_names_the_worker_that_owes_the_batch_and_its_sample(fifo: str) -> None:
    """PyTorch's text is only "DataLoader timed out after 1 seconds"."""
    iterator = iter(DataLoader(Gated(40, 13, fifo), 4, num_workers=2, timeout=1))
    with pytest.raises(WorkerTimeoutError) as caught:
        list(iterator)
    Path(fifo).write_bytes(b"")
    message = str(caught.value)
    assert "Rank 0 (world_size 1) received no batch within timeout=1 s" in message
    assert "worker 1 (pid " in message
    assert "is reading index 13 (samples[13] is /data/00013.jpg)" in message
    assert "What to do" in message
    assert (caught.value.worker, caught.value.index, caught.value.timeout_s) == (1, 13, 1.0)
    assert isinstance(caught.value, RuntimeError)


def test_death_between_two_batches_is_explained_where_it_is_raised(fifo: str) -> None:
    """PyTorch raises from the user's own code then, and the error still has the explanation."""
    iterator = iter(DataLoader(Gated(40, 13, fifo, "SIGKILL"), 4, num_workers=2))
    next(iterator)
    with pytest.raises(WorkerDiedError) as caught:
        open_the_gate_and_work(fifo)
    assert "worker 1" in str(caught.value)
    assert "was killed by SIGKILL while it read index 13" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


def open_the_gate_and_work(fifo: str) -> None:
    """Simulate a training step during which the worker dies."""
    Path(fifo).write_bytes(b"")
    threading.Event().wait(30)


class Cycle:
    """An object that keeps an iterator until garbage collection, as a traceback does."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self.myself = self


def test_workers_of_a_dropped_iterator_exit_by_themselves() -> None:
    """If the iterator is in a cycle, PyTorch would wait 5 s for each worker and then kill it."""
    held = Cycle(iter(DataLoader(Numbers(40), 4, num_workers=2)))
    next(held.iterator)
    workers = held.iterator._workers
    del held
    gc.collect()
    assert [worker.exitcode for worker in workers] == [0, 0]


@pytest.mark.full(but=["exit-exited with code 3"])
@pytest.mark.parametrize(
    ("how", "said"), [("SIGSEGV", "was killed by SIGSEGV"), ("exit", "exited with code 3")]
)
def test_dead_worker_of_torchs_loader_is_named_with_its_exit(
    tmp_path: Path, how: str, said: str
) -> None:
    """PyTorch's own text is "exited unexpectedly", or that a connection was reset."""
    with pytest.raises(ddpsafe.RankRaisedError) as caught:
        ddpsafe.launch(
            lose_a_worker_of_torchs_loader,
            (how,),
            nproc_per_node=2,
            backend="gloo",
            start_method="forkserver",
            run_dir=tmp_path,
        )
    assert caught.value.rank == 1
    assert re.search(rf"DataLoader worker 1 \(pid \d+\) {said}", str(caught.value))
