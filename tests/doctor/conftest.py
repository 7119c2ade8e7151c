"""What the tests of the doctor share: one process that becomes a broken host for each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import doctor_kit
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="session")
def _server(_own_temporary_directory: None) -> Iterator[None]:
    with doctor_kit.serving():
        yield
