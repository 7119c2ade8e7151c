"""Warnings that point at the line of the user's script."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from typing import Final

from ddpsafe.checkpoint.errors import CheckpointWarning

_OURS: Final = (f"{Path(__file__).parent.parent}{os.sep}", str(contextlib.__file__))
"""What stands between a warning and the line that led to it."""


def warn(text: str) -> None:
    """Warn of what does not end the training."""
    frame, level = sys._getframe(1), 2  # noqa: SLF001 - inspect.stack would read the sources
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"ddpsafe: {text}", CheckpointWarning, stacklevel=level)
