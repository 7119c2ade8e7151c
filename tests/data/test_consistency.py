"""All ranks see the same data, or every rank raises an error that names the rank and the index."""

from __future__ import annotations

import random
import traceback
from collections import UserList
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_programs import Numbers, consistency, consistency_of_pictures, refused_pictures, run_ranks

import ddpsafe
from ddpsafe.data import check_dataset_consistency
from ddpsafe.data._consistency import (
    DIFFERENCES,
    UnequalData,
    _coarse_content,
    _text_of,
    has_equal_input,
    stable_text,
)
from ddpsafe.data._loader.equal_readers import checksum
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


@pytest.mark.parametrize(
    ("parts", "others", "facts", "advice"),
    [
        ([("a", False), ("1", True)], [("a", False), ("2", True)], {}, "number them"),
        ([("7", True), ("1", True)], [("7", True), ("2", True)], {}, "number them"),
        ([("a", False), ("1", True)], [("b", False), ("1", True)], {}, "shuffled, filtered"),
        ([("a", False)], [("b", False)], {"is_split": True}, "random_split"),
        ([("a", False)], [("b", False)], {}, "shuffled, filtered"),
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
        only_labels=has_equal_input(parts, others),
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


def test_text_of_an_item_holds_no_address() -> None:
    """Equal objects in two processes have equal texts."""
    assert "0x" not in stable_text([object(), lambda: None])
    assert stable_text(torch.ones(2)) != stable_text(torch.ones(2).double())
    assert stable_text(torch.zeros(2, 1)) != stable_text(torch.zeros(1, 2))
    assert stable_text(np.arange(3)) != stable_text(np.arange(1, 4))


def objects(step: int) -> np.ndarray[Any, Any]:
    """Return an array of objects, whose bytes are their addresses."""
    return np.array([f"number {step}", {"x": [step]}], dtype=object)


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
    ],
)
def test_equal_items_have_equal_texts_and_others_have_not(make: Callable[[int], object]) -> None:
    """Also those whose bytes cannot be compared."""
    assert stable_text(make(1)) == stable_text(make(1)) != stable_text(make(2))
    assert checksum(make(1), 0) == checksum(make(1), 0) != checksum(make(2), 0)
    coarse = _text_of(make(1), _coarse_content)
    assert coarse == _text_of(make(1), _coarse_content)
