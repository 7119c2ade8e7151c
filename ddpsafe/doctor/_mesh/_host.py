"""What the others need to know about this host besides its address."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_PORTS: Final = (32768, 60999)


def find_port_range() -> tuple[int, int]:
    """Return the ports that this system hands out to who asks for any."""
    try:
        first, last = _PORTS.read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return _USUAL_PORTS


def machine_id() -> str:
    """Return what two nodes share if they are on one host and in one network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return f"{socket.gethostname()} {os.getppid()}"
