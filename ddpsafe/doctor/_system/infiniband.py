"""The ports of InfiniBand and RoCE devices, as the kernel lists them under /sys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

DEVICES: Final = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port.

    Attributes:
        state: ``ACTIVE``, the only state in which it carries data, or ``DOWN``, ``INIT``, ``ARMED``.
        rate: Such as ``200 Gb/sec (4X HDR)``.
        layer: ``InfiniBand``, or ``Ethernet`` with RoCE.
    """

    device: str
    state: str
    rate: str
    layer: str

    @property
    def is_active(self) -> bool:
        """Whether it carries data."""
        return self.state == "ACTIVE"

    def __str__(self) -> str:
        """Return what has to be the same on all hosts."""
        return f"{self.state} {self.layer} {self.rate}" if self.is_active else self.state


def list_ports() -> dict[str, Port]:
    """Return all ports by the name that ``NCCL_IB_HCA`` has for them, such as ``mlx5_0:1``."""
    ports = {}
    for folder in sorted(DEVICES.glob("*/ports/*")):
        device, number = folder.parent.parent.name, folder.name
        # The kernel writes a state as "4: ACTIVE".
        state, rate, layer = (_read(folder / name) for name in ("state", "rate", "link_layer"))
        ports[f"{device}:{number}"] = Port(
            device=device, state=state.rpartition(":")[2].strip(), rate=rate, layer=layer
        )
    return ports


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:  # a driver without it
        return "unknown"
