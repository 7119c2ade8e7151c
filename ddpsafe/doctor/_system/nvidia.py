"""The driver's own view of the GPUs, through nvidia-ml-py where it is installed."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpsafe._gpus import open_driver

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The NVIDIA driver.

    Attributes:
        version: As NVIDIA counts drivers, e.g. "550.54.15".
        cuda: The newest CUDA it can do, major and minor.
    """

    version: str
    cuda: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """One GPU as the driver knows it; what it does not know of is ``None``.

    Attributes:
        index: As nvidia-smi counts, CUDA_VISIBLE_DEVICES aside.
        name: Model.
        compute_mode: 0 default, 2 prohibited, 3 one process only.
        total_bytes: Memory.
        used_bytes: Memory in use by any process.
        pids: Processes that compute on it.
        uncorrected_errors: Double-bit errors of the memory since the last reset.
        remapping: Whether a row could not be remapped, or waits for a reset to be.
    """

    index: int
    name: str
    compute_mode: int | None
    total_bytes: int | None
    used_bytes: int | None
    pids: tuple[int, ...]
    uncorrected_errors: int | None
    remapping: bool | None


def count_device_nodes() -> int:
    """Return how many GPUs the driver has made devices for; costs a listing of one directory."""
    with contextlib.suppress(OSError):
        return sum(1 for path in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", path.name))
    return 0


def find_driver_error() -> Exception | None:
    """Return why the driver cannot be asked, ImportError without nvidia-ml-py; None when it can."""
    try:
        with open_driver():
            return None
    except Exception as error:  # noqa: BLE001 - NVMLError, made at run time by pynvml
        return error


def read_driver() -> Driver | None:
    """Return the driver, or None where there is none or it cannot be asked."""
    with contextlib.suppress(Exception), open_driver() as nvml:
        number = nvml.nvmlSystemGetCudaDriverVersion()
        cuda = (number // 1000, number % 1000 // 10)
        return Driver(version=_text(nvml.nvmlSystemGetDriverVersion()), cuda=cuda)
    return None


def read_health() -> list[Health]:
    """Return every GPU that the driver knows; none where it cannot be asked."""
    with contextlib.suppress(Exception), open_driver() as nvml:
        return [_health(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    return []


def find_unlinked() -> list[tuple[int, int]]:
    """Return the pairs of GPUs that cannot reach each other's memory."""
    with contextlib.suppress(Exception), open_driver() as nvml:
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        return [
            (a, b)
            for a in range(len(handles))
            for b in range(a + 1, len(handles))
            if nvml.nvmlDeviceGetP2PStatus(handles[a], handles[b], nvml.NVML_P2P_CAPS_INDEX_READ)
            != nvml.NVML_P2P_STATUS_OK
        ]
    return []


def _health(nvml: Any, index: int) -> Health:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _asked(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    processes = _asked(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    remapped = _asked(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    return Health(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        compute_mode=_asked(lambda: int(nvml.nvmlDeviceGetComputeMode(handle))),
        total_bytes=None if memory is None else int(memory.total),
        used_bytes=None if memory is None else int(memory.used),
        pids=tuple(process.pid for process in processes),
        uncorrected_errors=_asked(
            lambda: int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            )
        ),
        # correctable, uncorrectable, pending, failed
        remapping=None if remapped is None else bool(remapped[2] or remapped[3]),
    )


def _asked(question: Callable[[], Any]) -> Any:
    """Return the answer, or None: each GPU supports other questions."""
    with contextlib.suppress(Exception):
        return question()
    return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
