"""Where this process is: on which machine, and whether its directory is still there."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return what the kernel drew when it started; the host's name where it does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def is_directory_gone() -> bool:
    """Tell whether the current directory of this process has been removed."""
    try:
        os.getcwd()  # noqa: PTH109 - asked for its error only
    except FileNotFoundError:
        return True
    return False
