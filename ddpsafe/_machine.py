"""What tells this machine, since it was last started, from every other."""

from __future__ import annotations

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
