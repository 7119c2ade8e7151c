"""A list of metadata, packed in one buffer."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from data_programs import Named
from hypothesis import given
from hypothesis import strategies as st
from texts import any_text

from ddpsafe.data import DataLoader, PackedList

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
