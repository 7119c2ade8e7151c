# ruff: noqa: D102 - the methods of small datasets
"""The check before training reads where training will, and leaves the dataset unchanged."""

from __future__ import annotations

import collections
import os
import random
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
import pytest
import torch
from data_programs import Numbers, Reader
from torch.utils.data import ConcatDataset, Subset
from torch.utils.data import DataLoader as TorchDataLoader

from ddpsafe.data import DataLoader, check_dataset_consistency, check_worker_safety
from ddpsafe.data._loader.build import build_loader

N = 8


class Lazy(Numbers):
    """A dataset that opens its data at the first read, as each of these libraries recommends."""

    def __init__(self, folder: Path) -> None:
        super().__init__(N)
        self.folder = folder
        self.handle: Any = None

    def __getitem__(self, index: int) -> int:
        if self.handle is None:
            self.handle = self.open()
        return int(self.read(index))

    def open(self) -> Any:
        """Open the data."""
        return (self.folder / "raw").open("rb")

    def read(self, index: int) -> int:
        """Read a sample."""
        self.handle.seek(index)
        return int(self.handle.read(1)[0])


class LazyH5(Lazy):
    """HDF5."""

    def open(self) -> Any:
        return h5py.File(self.folder / "h5", "r")

    def read(self, index: int) -> int:
        return int(self.handle["x"][index])


class LazyOnClass(Lazy):
    """One handle is shared by all instances."""

    shared: ClassVar[Any] = None

    def __getitem__(self, index: int) -> int:
        if LazyOnClass.shared is None:
            LazyOnClass.shared = self.open()
        self.handle = LazyOnClass.shared
        return self.read(index)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write the same eight numbers in each format."""
    values = bytes(range(10, 10 + N))
    (tmp_path / "raw").write_bytes(values)
    with h5py.File(tmp_path / "h5", "w") as file:
        file["x"] = list(values)
    return tmp_path


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", [Lazy, LazyH5, LazyOnClass])
def test_lazily_opened_dataset_reads_in_workers_as_with_torch(kind: Any, folder: Path) -> None:
    """The check reads items first, but the workers find nothing open."""
    dataset = kind(folder)
    check_dataset_consistency(dataset)
    assert [h for h in check_worker_safety(dataset) if h.severity == "unsafe"] == []
    ours = DataLoader(dataset, 4, num_workers=1, multiprocessing_context="fork")
    theirs = TorchDataLoader(kind(folder), 4, num_workers=1, multiprocessing_context="fork")
    assert [b.tolist() for b in ours] == [b.tolist() for b in theirs]
    # Opens again, in this process.
    assert [dataset[index] for index in range(N)] == list(range(10, 10 + N))
    LazyOnClass.shared = None


class Counting(Numbers):
    """A dataset whose reads change whatever Python can change without writing to a file."""

    reads: ClassVar[int] = 0
    last: ClassVar[list[int]] = []

    def __init__(self, file: Any) -> None:
        super().__init__(N)
        self.file = file
        self.cache: dict[int, int] = {}
        self.order: collections.OrderedDict[int, int] = collections.OrderedDict()
        self.recent: collections.deque[int] = collections.deque(maxlen=4)
        self.seen: set[int] = set()
        self.rng = random.Random(1)
        self.numpy_rng = np.random.default_rng(1)
        self.torch_rng = torch.Generator().manual_seed(1)
        self.flags = np.zeros(N, bool)
        self.counts = torch.zeros(N)

    def __getitem__(self, index: int) -> int:
        type(self).reads += 1
        self.last.append(index)
        self.cache[index] = index
        self.order[index] = index
        self.recent.append(index)
        self.seen.add(index)
        self.flags[index] = True
        self.counts[index] += 1
        if self.file is not None:
            self.file.read(1)
        self.rng.random()
        self.numpy_rng.random()
        torch.rand((), generator=self.torch_rng)
        return index

    def snapshot(self) -> object:
        """Return its complete state."""
        generators = (self.rng.getstate(), self.numpy_rng.bit_generator.state)
        return repr(
            (
                self.reads,
                self.last,
                self.cache,
                self.order,
                self.recent,
                self.seen,
                generators,
                self.torch_rng.get_state().tolist(),
                self.flags.tolist(),
                self.counts.tolist(),
            )
        )


def wraps(dataset: Any) -> Iterator[Any]:
    """Yield the dataset itself and torch's wrappers of it."""
    yield dataset
    yield Subset(dataset, range(4))
    yield ConcatDataset([Numbers(2), dataset])


def test_a_loader_with_workers_leaves_the_dataset_unchanged() -> None:
    """The check reads in a worker; attributes, class attributes, generators, arrays stay."""
    dataset = Counting(None)
    before = dataset.snapshot()
    for wrapped in wraps(dataset):
        build_loader(wrapped, num_workers=1, multiprocessing_context="fork")
        assert dataset.snapshot() == before
    assert dataset[1] == 1
    assert dataset.snapshot() != before
    Counting.reads = 0
    Counting.last.clear()


@pytest.mark.parametrize(
    ("workers", "method"),
    [
        (0, None),
        pytest.param(1, "fork", marks=pytest.mark.full),
        pytest.param(1, "spawn", marks=pytest.mark.full),
        (1, "forkserver"),
    ],
)
def test_the_check_reads_where_training_will(
    workers: int, method: str | None, tmp_path: Path
) -> None:
    """In a process that is started as the loader's workers are, else in the rank."""
    dataset = Reader(tmp_path / "pid")
    build_loader(dataset, num_workers=workers, multiprocessing_context=method)
    pid, name = dataset.file.read_text().split()
    assert (int(pid) == os.getpid()) is (workers == 0)
    kind = {"fork": "ForkProcess", "spawn": "SpawnProcess", "forkserver": "ForkServerProcess"}
    assert method is None or name.startswith(kind[method])


def test_an_open_file_is_not_moved_by_a_forked_reader(folder: Path) -> None:
    """A worker would share its position, so the rank reads: the loader refuses it later by name."""
    with (folder / "raw").open("rb") as file:
        dataset = Counting(file)
        check_dataset_consistency(dataset)
        assert file.tell() == min(N, Counting.reads) > 0
        Counting.reads = 0
        Counting.last.clear()


class UnpicklableError(ValueError):
    """It cannot be made again from its arguments, as many exceptions of libraries."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class Broken(Numbers):
    """A dataset whose items cannot be read."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(N)
        self.error = error

    def __getitem__(self, index: int) -> int:
        if self.error is None:
            os._exit(7)
        raise self.error


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (KeyError("label"), KeyError, "label"),
        (UnpicklableError(code=5), RuntimeError, "UnpicklableError: code 5"),
        (None, RuntimeError, "exited unexpectedly"),
    ],
)
def test_error_in_the_worker_that_reads_is_raised_here(
    error: Exception | None, raised: type[Exception], text: str
) -> None:
    """Its own type where that can be sent, with the traceback of the worker; a death is named, too."""
    with pytest.raises(raised, match=text) as caught:
        check_dataset_consistency(Broken(error))
    if error is not None:
        assert "While reading" in "".join(traceback.format_exception(caught.value))
