"""Fixtures of the checkpoint tests: a state to save, and small file systems to save it on."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def state() -> dict[str, Any]:
    """Return a state of a few kilobytes."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 8)
    return {"model": model, "epoch": 0}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that mounts a small file system, which is unmounted after the test."""
    if os.geteuid() != 0:
        pytest.skip(f"mounting needs root (uid {os.geteuid()})")
    with contextlib.ExitStack() as stack:

        def mounted(kind: str, options: str) -> Path:
            folder = tmp_path / f"mounted-{kind}-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            source = "tmpfs"
            if kind == "ext4":
                image = tmp_path / "image"
                image.write_bytes(b"")
                os.truncate(image, 16 * 2**20)
                subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
                source = str(image)
            command = ["mount", "-t", kind, "-o", options, source, str(folder)]
            run = subprocess.run(command, check=False, capture_output=True, text=True)
            if run.returncode != 0:
                pytest.skip(f"cannot mount here: {run.stderr.strip()}")
            stack.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=True)
            return folder

        yield mounted
