"""Files are listed in the same order on every host."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpsafe._errors import ConfigError
from ddpsafe.data import sorted_files


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
