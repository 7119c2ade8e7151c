"""What nvidia-ml-py is asked after ranks have ended, with a fake driver."""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ddpsafe import _gpus
from ddpsafe._clock import Deadline


class Driver(ModuleType):
    """A fake nvidia-ml-py for a host with two GPUs, which lists processes for that many queries."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    def __init__(self, pids: list[int], looks: int = 10**9) -> None:
        """List those processes as users of GPU memory."""
        super().__init__("pynvml")
        self.pids, self.looks, self.ecc, self.rows = pids, looks, [0, 0], [(0, 0, 0, 0)] * 2

    def nvmlInit(self) -> None:  # noqa: N802 - as NVIDIA names it
        """Count a query."""
        self.looks -= 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        """Do nothing."""

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        """Return the number of GPUs."""
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        """Return the index as the handle."""
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, index: int) -> list[Any]:  # noqa: N802
        """List the processes, which are on the second GPU."""
        listed = self.pids if index == 1 and self.looks >= 0 else []
        return [SimpleNamespace(pid=pid) for pid in listed]

    def nvmlDeviceGetTotalEccErrors(self, index: int, *_: int) -> int:  # noqa: N802
        """Return the number of errors."""
        return self.ecc[index]

    def nvmlDeviceGetRemappedRows(self, index: int) -> tuple[int, ...]:  # noqa: N802
        """Return the remapped rows."""
        return self.rows[index]


@pytest.mark.parametrize(
    ("driver", "pids", "is_free"),
    [
        (Driver([7, 8]), [7], False),
        (Driver([7, 8]), [9], True),
        (Driver([7], looks=2), [7], True),
        (Driver([7]), [], True),
        (None, [7], True),  # nvidia-ml-py is not installed
    ],
)
def test_next_attempt_waits_until_the_driver_has_freed_the_memory(
    monkeypatch: pytest.MonkeyPatch, driver: Driver | None, pids: list[int], *, is_free: bool
) -> None:
    """It waits while the driver lists a process that has ended, up to the deadline."""
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    waiting = Deadline.after(timedelta(seconds=1))
    assert _gpus.wait_for_memory(pids, waiting) is is_free
    assert waiting.waited_s() < 10


def test_errors_that_the_driver_has_counted_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are uncorrectable errors and rows that need a reset; a healthy GPU is not mentioned."""
    driver = Driver([])
    driver.ecc[1], driver.rows[1] = 2, (0, 1, 1, 0)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    (line,) = _gpus.read_errors(within_s=0)
    assert line.startswith("the driver says of GPU 1: 2 uncorrectable ECC errors since the last")
    assert line.endswith("a row waits for a reset to be remapped")


@pytest.mark.root
@pytest.mark.skipif(not os.access("/dev/kmsg", os.W_OK), reason="writes to the kernel's log")
def test_an_xid_in_the_kernel_log_is_reported() -> None:
    """Only the driver's lines of this attempt count, not those of an earlier one."""
    message = f"NVRM: Xid (PCI:0000:ff:1f): 79, pid={os.getpid()}, a line of ddpsafe's tests"
    Path("/dev/kmsg").write_text(f"{message}\n", encoding="utf-8")
    told = [line for line in _gpus.read_errors(within_s=60) if f"pid={os.getpid()}," in line]
    assert told == [
        f"the kernel's log: Xid 79, pid={os.getpid()}, a line of ddpsafe's tests of PCI:0000:ff:1f"
    ]
    assert not any(f"pid={os.getpid()}," in line for line in _gpus.read_errors(within_s=-60))


def test_a_driver_that_never_responds_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens when a GPU has fallen off the bus: the attempt ends without its answer."""
    asked = threading.Event()
    driver = Driver([7])
    monkeypatch.setattr(driver, "nvmlInit", asked.wait)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(_gpus, "_DRIVER_LIMIT_S", 0.2)
    try:
        assert _gpus.wait_for_memory([7], Deadline.after(timedelta(seconds=60)))
        assert _gpus.read_errors(within_s=0) == []
    finally:
        asked.set()
