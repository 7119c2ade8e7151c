"""The driver's view of the GPUs, through nvidia-ml-py if it is installed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from ddpsafe._gpus import find_reading, open_driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The NVIDIA driver.

    Attributes:
        version: The driver version, e.g. "550.54.15".
        cuda: The newest CUDA version it supports, major and minor.
    """

    version: str
    cuda: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """One GPU as the driver reports it, with None for what it does not report.

    Attributes:
        index: As nvidia-smi counts, regardless of CUDA_VISIBLE_DEVICES.
        name: Model.
        compute_mode: 0 default, 2 prohibited, 3 one process only.
        used_bytes: Memory in use by any process.
        pids: Compute processes on it.
        uncorrected_errors: Uncorrectable memory errors since the driver was loaded.
        remapping: Whether remapping a row has failed or waits for a reset.
    """

    index: int
    name: str = ""
    compute_mode: int | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    pids: tuple[int, ...] = ()
    uncorrected_errors: int | None = None
    remapping: bool | None = None


def find_driver_error() -> Exception | None:
    """Return why the driver cannot be queried (ImportError: no nvidia-ml-py), or None if it can."""
    try:
        with open_driver():
            return None
    except Exception as error:  # noqa: BLE001 - NVMLError, a class that pynvml creates at run time
        return error


def read_driver() -> Driver | None:
    """Return the driver, or None if there is none or it cannot be queried."""
    with contextlib.suppress(Exception), open_driver() as nvml:
        number = nvml.nvmlSystemGetCudaDriverVersion()
        cuda = (number // 1000, number % 1000 // 10)  # 12040 is CUDA 12.4
        return Driver(version=_text(nvml.nvmlSystemGetDriverVersion()), cuda=cuda)
    return None


def read_health() -> list[Health]:
    """Return every GPU that the driver reports; none if it cannot be queried."""
    with contextlib.suppress(Exception), open_driver() as nvml:
        return [_health(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    return []


def find_unlinked() -> list[tuple[int, int]]:
    """Return the pairs of GPUs that cannot access each other's memory."""
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
    memory = find_reading(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    processes = find_reading(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    remapped = find_reading(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    return Health(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        compute_mode=find_reading(lambda: int(nvml.nvmlDeviceGetComputeMode(handle))),
        total_bytes=None if memory is None else int(memory.total),
        used_bytes=None if memory is None else int(memory.used),
        pids=tuple(process.pid for process in processes),
        uncorrected_errors=find_reading(
            lambda: int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            )
        ),
        # The tuple is (correctable, uncorrectable, pending, failed).
        remapping=None if remapped is None else bool(remapped[2] or remapped[3]),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
