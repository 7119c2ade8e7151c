"""Warnings of limits that workers would reach."""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import Iterator

import pytest
import torch
from data_programs import Numbers
from torch.utils.data import TensorDataset

from ddpsafe._host import count_cores
from ddpsafe.data import DataLoader
from ddpsafe.data._loader.machine_limits import check_shared_memory, tensor_bytes
from ddpsafe.data.errors import DataWarning


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
