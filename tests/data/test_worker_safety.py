"""What crosses into workers and what must not, and limits that workers would reach."""

from __future__ import annotations

import functools
import gc
import os
import pickle
import re
import resource
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import scripts
import torch
from data_programs import (
    Droppable,
    EagerRecords,
    Ending,
    Gated,
    Lethal,
    Named,
    Numbers,
    Records,
    lose_a_worker_of_torchs_loader,
    open_raw,
    write_records,
)
from hypothesis import given
from hypothesis import strategies as st
from texts import any_text
from torch.utils.data import Sampler, TensorDataset

import ddpsafe
from ddpsafe._host import count_cores
from ddpsafe.data import DataLoader, DistributedSampler, PackedList, PerProcess, check_worker_safety
from ddpsafe.data._loader import worker_death
from ddpsafe.data._loader.machine_limits import check_shared_memory, tensor_bytes
from ddpsafe.data.errors import DataWarning, UnsafeWorkersError, WorkerDiedError, WorkerTimeoutError


class Slotted:
    """A class without a __dict__."""

    __slots__ = ("deep",)

    def __init__(self, deep: object) -> None:
        self.deep = deep


class Holding(Numbers):
    """A dataset that holds an object."""

    def __init__(self, what: Any) -> None:
        super().__init__(8)
        self.parts = {"inner": [Slotted(what)]}


@pytest.mark.parametrize(
    ("make", "kind", "severity"),
    [
        (tempfile.TemporaryFile, "open file", "unsafe"),
        (threading.Lock, "lock", "caution"),
        (threading.RLock, "RLock", "caution"),
        (lambda: (x for x in ()), "generator", "caution"),
    ],
)
def test_hazard_is_found_with_its_path(make: Callable[[], Any], kind: str, severity: str) -> None:
    """It may be behind attributes, dicts, lists and slots; `test_worker_kinds` has the libraries."""
    hazard = make()
    found = check_worker_safety(Holding(hazard))
    getattr(hazard, "close", bool)()
    assert found[0].path == "dataset.parts['inner'][0].deep"
    assert (kind in found[0].kind, found[0].severity) == (True, severity)
    assert found[0].fix


def test_closures_partials_and_lambdas_are_searched() -> None:
    """A transform may hold a file too, and a lambda cannot be pickled."""
    with tempfile.TemporaryFile() as file:
        assert check_worker_safety(functools.partial(Slotted, file))[0].path == "dataset.args[0]"
        assert "<closure>.file" in check_worker_safety(lambda: file)[0].path
    found = check_worker_safety(Holding(lambda: 0))
    assert "cannot be pickled" in found[0].kind
    assert found[0].path.endswith(".deep")


def test_long_lists_are_reported_as_memory_use() -> None:
    """They are correct, but copied."""
    found = check_worker_safety(Holding([str(i) for i in range(100_000)]))
    assert [h.severity for h in found] == ["memory"]
    assert "PackedList" in str(found[0])


def test_start_method_never_changes_silently(tmp_path: Path) -> None:
    """The dataset can be pickled without its handle: the error says so, and the user chooses."""
    path = tmp_path / "records"
    write_records(path, 16)
    dataset = Droppable(str(path), 16)
    loader = DataLoader(dataset, 4, num_workers=1)
    with pytest.raises(UnsafeWorkersError, match="multiprocessing_context='forkserver'"):
        iter(loader)
    assert loader.multiprocessing_context is None
    chosen = DataLoader(dataset, 4, num_workers=1, multiprocessing_context="forkserver")
    assert [int(v) for _, batch, _ in chosen for v in batch] == list(range(16))
    dataset.reader["file"].close()


def test_unsafe_dataset_raises_warns_or_is_ignored(tmp_path: Path) -> None:
    """The user chooses with worker_safety."""
    path = tmp_path / "records"
    write_records(path, 16)
    dataset = EagerRecords(str(path), 16)
    with pytest.raises(UnsafeWorkersError, match="PerProcess") as caught:
        iter(DataLoader(dataset, 4, num_workers=1))
    assert caught.value.paths == ("dataset.reader['file']",)
    with pytest.raises(UnsafeWorkersError):
        iter(DataLoader(dataset, 4, num_workers=1, multiprocessing_context="fork"))
    with pytest.warns(DataWarning, match="share an open handle"):
        list(DataLoader(dataset, 4, num_workers=1, worker_safety="warn"))
    assert len(list(DataLoader(dataset, 4, num_workers=1, worker_safety="off"))) == 4
    dataset.reader["file"].close()


def test_object_that_spawned_workers_cannot_receive_is_named() -> None:
    """PyTorch's text is only "cannot pickle 'local object'"."""
    loader = DataLoader(Holding(lambda: 0), 4, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(UnsafeWorkersError, match="deep cannot be sent to the workers"):
        iter(loader)


@pytest.mark.full
def test_class_defined_at_a_prompt_is_named_as_not_importable(tmp_path: Path) -> None:
    """It pickles by name here but cannot be imported in a new process, so it counts as unpicklable."""
    source = """
from ddpsafe.data import check_worker_safety
class Session:
    def __len__(self): return 4
    def __getitem__(self, index): return index
for hazard in check_worker_safety(Session()):
    print(hazard)
"""
    run = scripts.Script(["-c", source], folder=tmp_path).end()
    assert "where a new process cannot import it" in run.lines()[0]


# Handles that each process opens for itself.


METHODS = ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.soak)]
"""How workers start: as a copy of the process, or from pickled objects, in two ways."""

may_warn = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:open_raw was opened before"
)


@pytest.fixture
def records(tmp_path: Path) -> str:
    """Write 20,000 records; return their path."""
    path = tmp_path / "records"
    write_records(path, 20_000)
    return str(path)


@may_warn
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


@may_warn
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


@may_warn
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


@may_warn
def test_only_the_factory_is_pickled(records: str) -> None:
    """A handle cannot be sent; the function that opens it can."""
    resource = PerProcess(open_raw, records)
    with resource.get():
        copy = pickle.loads(pickle.dumps(resource))
        with copy.get() as file:
            assert file is not resource.get()
    assert "open_raw" in repr(copy)


@may_warn
def test_failing_factory_is_reported_with_its_process(tmp_path: Path) -> None:
    """The original exception gains the rank and the worker."""
    resource = PerProcess(open_raw, str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError) as caught:
        resource.get()
    assert "rank 0" in "".join(getattr(caught.value, "__notes__", ["rank 0"]))


@may_warn
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


# Lists that workers share.


items = st.lists(
    st.one_of(
        any_text(), st.binary(), st.integers(), st.tuples(any_text(), st.integers()), st.none()
    )
)


@pytest.mark.full
@given(items=items)
def test_packed_list_equals_the_list(items: list[Any]) -> None:
    """Items, slices, negative indices, iteration and membership match."""
    packed = PackedList(items)
    assert list(packed) == items
    assert packed[1:] == items[1:]
    assert len(packed) == len(items)
    if items:
        assert packed[-1] == items[-1]
        assert items[0] in packed
    assert list(pickle.loads(pickle.dumps(packed))) == items


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_can_read_it(method: str) -> None:
    """It may be inherited or sent to them."""
    loader = DataLoader(Named(10), 5, num_workers=1, multiprocessing_context=method)
    assert [name for batch in loader for name in batch] == [f"name-{i}" for i in range(10)]
    assert "len=10" in repr(PackedList(range(10)))


# Limits that workers would reach.


@pytest.fixture
def few_files() -> Iterator[int]:
    """Lower the limit on open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    yield 400
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_batches_in_flight_than_open_files_gives_a_warning(few_files: int) -> None:
    """The warning has both numbers and the limit to raise."""
    with pytest.warns(DataWarning, match="RLIMIT_NOFILE") as caught:
        DataLoader(Numbers(10), num_workers=2, prefetch_factor=200)
    (text,) = [str(each.message) for each in caught if each.category is DataWarning]
    assert "about 808 open files" in text
    assert f"may have {few_files}" in text
    assert "What to do" in text


def test_small_loader_gives_no_warning(few_files: int) -> None:
    """Neither does a loader without workers."""
    assert few_files
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataLoader(Numbers(10), num_workers=1)
        DataLoader(Numbers(10), prefetch_factor=None)


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may use every core of the machine, even where the tests may not."""
    cores = count_cores()
    monkeypatch.setattr(os, "cpu_count", lambda: cores)


@pytest.mark.usefixtures("unpinned")
def test_workers_of_all_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """num_workers is per rank, while torch considers one rank alone."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5000")
    with pytest.warns(DataWarning, match="5000 ranks with 1 workers each are 5000 processes"):
        DataLoader(Numbers(10), num_workers=1)


@pytest.mark.usefixtures("unpinned")
def test_batches_that_exceed_shared_memory_give_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The size of the first batch is multiplied by the number in flight in all ranks of the machine."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000000")
    with pytest.warns(DataWarning, match="processes on"):
        loader = DataLoader(TensorDataset(torch.ones(64, 1000)), 32, num_workers=1)
    with pytest.warns(DataWarning, match="in flight for each of 100000000 ranks") as caught:
        list(loader)
    # Python 3.12 warns about forks.
    (said,) = [each for each in caught if each.category is DataWarning]
    assert "--shm-size" in str(said.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(loader)) == 2


def test_size_of_a_batch_is_the_size_of_its_storages() -> None:
    """Batches may be nested, and a view counts with its whole storage."""
    whole = torch.zeros(1000, dtype=torch.int16)
    assert tensor_bytes({"a": [whole, (whole[:1], "text")], "b": 3}) == 4000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_shared_memory(whole, batches=1)


# Workers that die.


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
        ("3", "exited with code 3", "os._exit()"),
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


@pytest.mark.full(but=["sys.exit-exited with code 1"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("SIGSEGV", "was killed by SIGSEGV"),
        ("0", "exited with code 0"),
        ("3", "exited with code 3"),
        ("sys.exit", "exited with code 1"),
    ],
)
def test_dead_worker_of_torchs_loader_is_named_with_its_exit(
    tmp_path: Path, how: str, said: str
) -> None:
    """PyTorch's own text is "exited unexpectedly", that a connection was reset, or that there is no such file."""
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
    text = str(caught.value)
    assert re.search(rf"DataLoader worker 1 \(pid \d+\) {said}", text)
    assert ("a DataLoader worker called sys.exit() or os._exit()" in text) == (how != "SIGSEGV")
