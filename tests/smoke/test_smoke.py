"""The quick check of ``nox -s matrix``, run here with the installed versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import scripts


@pytest.mark.soak  # each of these promises has its own tests
def test_every_promise_holds_in_one_run(tmp_path: Path) -> None:
    """Launch, exception, kill, hang, checkpoint, loader, spawn, torchrun and ``ddpsafe run``."""
    script = Path(__file__).with_name("promises.py")
    done = scripts.Script([str(script)], folder=tmp_path).end()
    assert done.code == 0, done.err
    assert "FAILED" not in json.loads(done.lines()[-1]).values()
