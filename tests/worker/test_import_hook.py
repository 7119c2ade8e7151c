"""Ranks of ``ddpsafe run`` are prepared when the script imports torch, whatever it looks up before."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpsafe._worker.torch_hooks import after_import_of_torch


@pytest.fixture
def _other_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have this process find another torch, which fails if a file says so."""
    (tmp_path / "torch.py").write_text(
        "from pathlib import Path\nif Path(__file__).with_name('fails').exists(): raise OSError\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name == "torch" or name.startswith("torch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    importlib.invalidate_caches()
    yield
    sys.modules.pop("torch", None)


@pytest.mark.usefixtures("_other_torch")
def test_a_look_whether_torch_is_installed_uses_up_no_hook() -> None:
    """transformers, datasets and others ask `find_spec` before anything imports torch."""
    calls: list[bool] = []
    after_import_of_torch(lambda: calls.append("torch" in sys.modules))
    assert importlib.util.find_spec("torch") is not None
    assert importlib.util.find_spec("torch") is not None
    assert calls == []
    importlib.import_module("torch")
    importlib.import_module("torch")
    assert calls == [True]


@pytest.mark.usefixtures("_other_torch")
def test_an_import_that_fails_and_is_tried_again_has_the_hook(tmp_path: Path) -> None:
    """A library may be preloaded in between."""
    calls: list[int] = []
    after_import_of_torch(lambda: calls.append(1))
    (tmp_path / "fails").touch()
    with pytest.raises(OSError):  # noqa: PT011 - of the other torch
        importlib.import_module("torch")
    (tmp_path / "fails").unlink()
    importlib.import_module("torch")
    assert calls == [1]
