"""Rehearses the tests of GPUs on a machine without one, and keeps the logs of those that fail."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest

REHEARSED: Final = "DDPSAFE_REHEARSE_GPU" in os.environ
"""Whether these tests run on the CPU, each up to the line that needs a GPU, as ``nox -s gpu -- --rehearse`` does."""

NO_GPU: Final = re.compile(
    r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|CUDA driver version is insufficient|No CUDA GPUs are available"
    r"|torch sees none|Cannot access accelerator device|requires CUDA support"
    r"|instantiate dummy base class|module 'torch._C' has no attribute '_cuda"
)
"""What torch and ddpsafe say where a program needs a GPU."""


@pytest.fixture(autouse=True)
def _logs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the run directory of a launch that fails with the test's other files."""
    monkeypatch.setenv("DDPSAFE_RUN_DIR", str(tmp_path / "run"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In a rehearsal, skip a test that asked for a GPU, or that found other values than a GPU's, and say which."""
    report = yield
    if REHEARSED and report.failed and call.excinfo is not None:
        mark = item.get_closest_marker("gpu")
        compares = call.excinfo.errisinstance((AssertionError, pytest.fail.Exception))
        text = f"{report.longreprtext} {dict(item.user_properties).get('said')}"
        differs = report.when == "call" and mark and mark.args and compares
        if asked := NO_GPU.search(text):
            reason = f"went as far as the line that needs a GPU ({asked[0]})"
        elif differs:
            reason = "went as far as it compares what a GPU says"
        else:
            return report
        report.outcome = "skipped"
        report.longrepr = (str(Path(__file__)), None, f"Skipped: {reason}")
    return report
