# ruff: noqa: D102 - the methods of small datasets
"""All ranks see the same data, or every rank raises an error; the check reads where training will."""

from __future__ import annotations

import collections
import os
import random
import traceback
from collections import UserList
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
import pytest
import torch
from data_programs import (
    Numbers,
    Reader,
    broken_beside_own_sampler,
    consistency,
    consistency_of_pictures,
    consistency_of_streams,
    refused_pictures,
    run_ranks,
)
from torch.utils.data import ConcatDataset, Subset
from torch.utils.data import DataLoader as TorchDataLoader

import ddpsafe
from ddpsafe._errors import ConfigError
from ddpsafe.data import DataLoader, check_dataset_consistency, check_worker_safety, sorted_files
from ddpsafe.data._consistency import (
    DIFFERENCES,
    UnequalData,
    _coarse_content,
    unequal_parts,
)
from ddpsafe.data._loader.equal_readers import checksum, stable_text, text_of
from ddpsafe.data._loader.loader import build_loader
from ddpsafe.data.errors import DatasetInconsistencyError


def test_same_data_below_different_mount_points_is_equal() -> None:
    """Only the path below the root counts, and every rank gets the same fingerprint."""
    result = run_ranks(consistency, "none")
    assert result[0] == result[1]
    assert len(result[0]) == 32


@pytest.mark.full(but=["item-first difference is at item 999-999"])
@pytest.mark.parametrize(
    ("fault", "text", "index"),
    [
        ("swap", "first difference is at item 300", 300),
        ("drop", "first difference is at item 999", 999),
        ("item", "first difference is at item 999", 999),
        ("raise", "could not read the dataset: FileNotFoundError", None),
        ("seed", "another seed: 1, where the others have 0", None),
    ],
)
def test_every_rank_raises_and_names_the_rank(fault: str, text: str, index: int | None) -> None:
    """Rank 2 has swapped items, one missing, other content, an exception or another seed."""
    result = run_ranks(consistency, fault, ranks=3)
    for rank in range(3):
        message, ranks, found = result[rank]
        assert text in message
        assert "What to do" in message
        if fault == "seed":
            assert ranks == (1, 2)
        else:
            assert ranks == (1,)
            assert "rank 1 of 3" in message
        assert found == index


PICTURES: dict[str, tuple[str, int]] = {
    "labels": ("number them in a fixed order", 0),
    "listing": ("the same files in another order", 0),
    "missing": ("files are missing on a host", 40),
    "split": ("generator=torch.Generator().manual_seed(0)", 0),
}
"""Fault of rank 1: the advice that fits it, and the first item that differs."""


def test_labels_are_compared_where_the_dataset_lists_files() -> None:
    """The advice fits what differs. A decoder's last bit, random items and mount points do not count."""
    result = run_ranks(consistency_of_pictures, [*PICTURES, "none", "decoder", "random"], ranks=3)
    assert len({str(result[rank]) for rank in range(3)}) == 1
    for fault, (advice, index) in PICTURES.items():
        text, ranks, first = result[0][fault]
        assert advice in text
        assert first == index
        assert ranks == ((1, 2) if fault == "split" else (1,))
    assert result[0]["none"] == result[0]["decoder"] == result[0]["random"]


def test_a_stream_is_never_read_by_number_and_may_be_divided() -> None:
    """Streams with a length, such as torch's ChainDataset, have a ``__getitem__`` that only raises.

    The length may be that of a rank's share, and each rank may list other files, but not the same
    ones in another order.
    """
    result = run_ranks(consistency_of_streams, ranks=3)
    equal = [{k: v for k, v in each.items() if isinstance(v, str)} for each in result.values()]
    assert equal[0] == equal[1] == equal[2]
    unequal = {"reversed", "no files", "other classes", "other versions", "no stream"}
    assert result[0].keys() - equal[0].keys() == unequal
    assert "in another order" in result[0]["reversed"][0]


A, B = ("a", "other"), ("b", "other")


@pytest.mark.parametrize(
    ("parts", "others", "facts", "advice"),
    [
        ([A, ("1", "number")], [A, ("2", "number")], {}, "number them"),
        ([("7", "number"), ("1", "number")], [("7", "number"), ("2", "number")], {}, "number them"),
        (
            [A, ("cat", "text"), ("1", "number")],
            [A, ("dog", "text"), ("2", "number")],
            {},
            "number them",
        ),
        ([A, ("/0/a.png", "text")], [A, ("/1/a.png", "text")], {}, "check=False"),
        ([A, ("1", "number")], [B, ("1", "number")], {}, "shuffled, filtered"),
        ([A], [B], {"is_split": True}, "random_split"),
        ([A], [B], {}, "shuffled, filtered"),
        (None, None, {}, "shuffled, filtered"),
        # A generator changes which samples a part has, and not how many.
        (None, None, {"is_split": True, "same_length": False}, "missing on a host"),
    ],
)
def test_the_advice_is_about_what_differs(
    parts: Any, others: Any, facts: dict[str, bool], advice: str
) -> None:
    """Equal inputs with other labels are not a matter of the listing, nor is a split."""
    same: dict[str, Any] = {"same_length": True, "same_samples": False, "is_split": False}
    difference = UnequalData(
        **{**same, **facts},
        unequal=unequal_parts(parts, others),
        has_paths=False,
    )
    rule = next(rule for rule in DIFFERENCES if rule.holds(difference))
    assert advice in f"{rule.cause} {rule.fix}"


def test_an_error_that_all_ranks_raise_is_shown_once(tmp_path: Path) -> None:
    """A rank that differs is blamed; what to do stands in the launch's error alone, not in its causes."""
    with pytest.raises(ddpsafe.RankRaisedError) as caught:
        ddpsafe.launch(
            refused_pictures,
            nproc_per_node=3,
            backend="gloo",
            start_method="forkserver",
            run_dir=tmp_path / "run",
        )
    shown = "".join(traceback.format_exception(caught.value))
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, DatasetInconsistencyError)
    assert caught.value.__cause__.ranks == (1,)
    assert shown.count("number them in a fixed order") == 1
    assert shown.count("rank 1 of 3 has other data than the rest") == 2  # as the cause, and in full
    assert "ranks 0 and 2 raised the same error" in shown
    assert "in refused_pictures" in shown


def test_single_process_gets_a_fingerprint_and_keeps_its_random_state() -> None:
    """Samples are read with fixed seeds, and the generators are restored."""
    before = (random.getstate(), torch.get_rng_state())
    first = check_dataset_consistency(Numbers(100))
    assert first == check_dataset_consistency(Numbers(100))
    assert first != check_dataset_consistency(Numbers(101))
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_identity_of_a_dataset_is_the_first_it_offers() -> None:
    """The order is a key, its own fingerprint, then its items."""
    items = [torch.arange(3), {"a": np.float32(1)}, [None, "x", b"y"], 2.5]
    assert check_dataset_consistency(items) != check_dataset_consistency(items[::-1])
    by_key = check_dataset_consistency(Numbers(10), key=str)
    assert by_key != check_dataset_consistency(Numbers(10), key=lambda i: str(-i))

    class Fingerprinted(UserList[Any]):
        _fingerprint = "abc"

    assert check_dataset_consistency(Fingerprinted([1])) == check_dataset_consistency(
        Fingerprinted([1])
    )


class ByName(dict[str, int]):
    """A dataset whose keys are names, which a sampler gives."""


def test_keys_of_the_users_own_sampler_need_not_be_numbers() -> None:
    """The dataset is compared by its length then; without such a sampler, what it raises is an error."""
    dataset = ByName(a=1, b=2)
    batches = build_loader(dataset, batch_size=2, sampler=["b", "a"])
    assert [batch.tolist() for batch in batches] == [[2, 1]]
    with pytest.raises(KeyError, match="0"):
        build_loader(dataset, batch_size=2)


def test_items_that_one_rank_cannot_read_are_no_matter_of_the_sampler() -> None:
    """The rank is named, although a sampler of the user's might give other keys."""
    result = run_ranks(broken_beside_own_sampler)
    for found in result.values():
        assert "rank 1 of 2 could not read the dataset: FileNotFoundError" in found


def test_text_of_an_item_holds_no_address() -> None:
    """Equal objects in two processes have equal texts."""
    assert "0x" not in stable_text([object(), lambda: None])
    assert stable_text(torch.ones(2)) != stable_text(torch.ones(2).double())
    assert stable_text(torch.zeros(2, 1)) != stable_text(torch.zeros(1, 2))
    assert stable_text(np.arange(3)) != stable_text(np.arange(1, 4))


def objects(step: int) -> np.ndarray[Any, Any]:
    """Return an array of objects, whose bytes are their addresses."""
    return np.array([f"number {step}", {"x": [step]}], dtype=object)


def tree(step: int) -> dict[str, Any]:
    """Return a sample that contains itself."""
    root: dict[str, Any] = {"id": step, "children": []}
    root["children"].append({"parent": root})
    return root


@pytest.mark.filterwarnings("ignore:.* nested tensors", "ignore:Sparse CSR", "ignore:.*quantize")
@pytest.mark.parametrize(
    "make",
    [
        objects,
        lambda step: torch.full((5000,), 1 + step * 1e-6).to_sparse(),
        lambda step: (torch.ones(50, 50) + step * torch.eye(50)).to_sparse_csr(),
        lambda step: torch.nested.nested_tensor([torch.ones(2000) * step, torch.ones(3)]),
        lambda step: torch.quantize_per_tensor(torch.ones(3) * step, 0.1, 0, torch.qint8),
        lambda step: torch.full((2,), complex(0, step)).conj(),
        lambda step: torch.full((5000,), 1 + step * 1e-6).to_mkldnn(),
        lambda step: torch.empty(step, device="meta"),
        tree,
    ],
    ids=[
        "array of objects",
        "sparse",
        "sparse by rows",
        "nested",
        "quantized",
        "conjugated",
        "mkldnn",
        "meta",
        "its own parent",
    ],
)
def test_equal_items_have_equal_texts_and_others_have_not(make: Callable[[int], object]) -> None:
    """Also those whose bytes cannot be compared."""
    assert stable_text(make(1)) == stable_text(make(1)) != stable_text(make(2))
    assert checksum(make(1)) == checksum(make(1)) != checksum(make(2))
    coarse = text_of(make(1), _coarse_content)
    assert coarse == text_of(make(1), _coarse_content)


# The check reads where training will, and leaves the dataset unchanged.


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


# Lists of files.


def test_files_are_ordered_by_bytes_without_hidden_ones(tmp_path: Path) -> None:
    """The order depends neither on the file system nor on a locale."""
    names = [
        "b/2.jpg",
        "b/10.JPG",
        "a-b/1.jpg",
        "a/1.jpg",
        "Z.jpg",
        "ä.jpg",
        "notes.txt",
        ".x/1.jpg",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [
        path.relative_to(tmp_path).as_posix() for path in sorted_files(tmp_path, suffixes={".jpg"})
    ]
    assert found == ["Z.jpg", "a-b/1.jpg", "a/1.jpg", "b/10.JPG", "b/2.jpg", "ä.jpg"]
    assert [path.name for path in sorted_files(str(tmp_path), "*.txt")] == ["notes.txt"]


def test_missing_directory_and_empty_directory_are_errors(tmp_path: Path) -> None:
    """An empty list would become an empty dataset, or datasets that differ by host."""
    with pytest.raises(ConfigError, match="no directory"):
        sorted_files(tmp_path / "train")
    with pytest.raises(ConfigError, match=r"No file in .* matches"):
        sorted_files(tmp_path, suffixes={".jpg"})
