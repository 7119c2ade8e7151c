"""States in memory that come from a GPU: copied at one moment, through pinned memory, and restored there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import memory_programs as programs
import pytest
import torch

import ddpsafe
from ddpsafe import _gpus

pytestmark = pytest.mark.gpu

BACKEND: Final = "nccl" if torch.cuda.is_available() else "gloo"  # gloo only in a rehearsal


@pytest.fixture(autouse=True)
def _shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two ranks use the first GPU."""
    monkeypatch.setenv(_gpus.SHARING, "1")


def two(fn: Callable[..., Any], *args: Any) -> dict[int, Any]:
    """Launch two ranks that are started again when one is killed; return their values."""
    retry = ddpsafe.RetryPolicy(
        on={"killed"}, attempts=8, backoff_initial=0, jitter=0, no_progress=None
    )
    result = ddpsafe.launch(
        fn,
        args=args,
        nproc_per_node=2,
        backend=BACKEND,
        start_method="forkserver",
        seed=1,
        retry=retry,
    )
    return dict(result.values)


@pytest.mark.gpu("its values")
def test_a_state_is_what_the_gpu_had_when_it_was_saved(tmp_path: Path) -> None:
    """Work that was queued before is in it, what follows is not; it is restored on the device."""
    found = two(programs.train_on_device, tmp_path)
    for value in found.values():
        assert value["device"] == "cuda"
        assert (value["begin"], value["values"], value["last"]) == (3, [150.0], [250.0])
    assert [value["pinned"] for value in found.values()] == [[True], []]


def test_killed_ranks_continue_on_the_gpu_with_the_same_result(tmp_path: Path) -> None:
    """One rank, the other, and both: no step is repeated, and every bit is as without a kill."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = two(programs.train, tmp_path / "whole", {})
    kills = {"1/5": [1], "2/8": [0], "3/9": [0, 1]}
    assert two(programs.train, tmp_path / "killed", {"kill": kills}) == whole
    for rank in range(2):
        notes = programs.notes_of(tmp_path / "killed", rank)
        assert [note["began"] for note in notes] == [0, 5, 8, 9]
        assert {note["source"] for note in notes[1:]} == {"memory"}


@pytest.mark.gpu("its values")
def test_the_pinned_copy_counts_when_memory_is_asked_for(tmp_path: Path) -> None:
    """It has the size of a state, and is taken from the same memory."""
    for value in two(programs.lack_memory, tmp_path, "raise").values():
        assert "two states and a pinned copy need" in value["error"]
