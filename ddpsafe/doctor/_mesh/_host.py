"""What the others need to know about this host besides its address."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ddpsafe._host import boot_id

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
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:  # two ranks of one launcher, at least, are told to be on one host
        network = os.getppid()
    return f"{boot_id()} {network}"
