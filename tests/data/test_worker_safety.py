"""Objects that must not cross into a worker are found, with the path to each."""

from __future__ import annotations

import functools
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scripts
from data_programs import Droppable, EagerRecords, Numbers, write_records

from ddpsafe.data import DataLoader, check_worker_safety
from ddpsafe.data.errors import DataWarning, UnsafeWorkersError


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
