"""The GPUs of this host, and which rank gets which.

The launcher counts them before it starts ranks, without a CUDA context of its own. Ranks that another
launcher started exchange the GPUs that they see, because these may differ: all of the host's
(torchrun), one for each rank (``srun --gpus-per-task=1``, Kubernetes), or some that ranks share.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import os
import re
import socket
import sys
import time
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ddpsafe._clock import BoundedCall
from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._text import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from ddpsafe._clock import Deadline
    from ddpsafe._world import World

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"

SHARING: Final = "_DDPSAFE_TEST_RANKS_SHARE_GPUS"
"""For ddpsafe's own tests: ranks may share a GPU, which NCCL allows only on different "hosts"."""

_HIDES_ALL: Final = ("", "-1", "NoDevFiles")
"""Values that hide all GPUs; Slurm sets the last one."""

_DRIVER: Final = Path("/proc/driver/nvidia")
_DRIVER_LIMIT_S: Final = 5.0  # on a broken GPU the driver may never reply
_POLL_S: Final = 0.2
_KERNEL_LOG: Final = Path("/dev/kmsg")
_XID: Final = re.compile(r"NVRM: Xid \((?P<device>[^)]*)\): (?P<what>\d+\b.*)")
_MAX_RECORDS: Final = 100_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpus:
    """The GPUs that one rank sees, and the backend requested for it.

    Attributes:
        backend: The requested backend, or ``auto``.
        uuids: An identifier for each GPU that it sees, in CUDA's order; equal for the same GPU.
    """

    rank: int
    node_rank: int
    host: str
    local_rank: int
    local_world_size: int
    backend: str
    uuids: tuple[str, ...]

    @classmethod
    def here(cls, world: World, backend: str) -> VisibleGpus:
        """Return what this process sees; CUDA is queried only if the rank may use it."""
        host = socket.gethostname()
        uuids = []
        if backend == "auto" or uses_gpus(backend):
            import torch

            visible = os.environ.get(VISIBLE, "all")
            for index in range(torch.cuda.device_count()):  # creates no context
                uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
                # Without a UUID in this build, the index among the visible GPUs has to do.
                uuids.append(
                    f"GPU {index} of {visible} on {host}" if uuid is None else f"GPU-{uuid}"
                )
        return cls(
            rank=world.rank,
            node_rank=world.node_rank,
            host=host,
            local_rank=world.local_rank,
            local_world_size=world.local_world_size,
            backend=backend,
            uuids=tuple(uuids),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The backend and the GPUs that all ranks have agreed on.

    Attributes:
        backend: The backend of their group.
        indexes: CUDA's index of each rank's GPU, by rank; empty where the ranks use the CPU.
    """

    backend: str
    indexes: tuple[int, ...]


def uses_gpus(backend: str) -> bool:
    """Return whether a backend, such as ``cpu:gloo,cuda:nccl``, handles tensors on GPUs."""
    return "nccl" in backend or "cuda" in backend


def are_shared() -> bool:
    """Return whether ranks may share a GPU, in ddpsafe's own tests."""
    return SHARING in os.environ


def assign(ranks: Sequence[VisibleGpus]) -> Assignment:
    """Assign each rank its own GPU, or all ranks the CPU.

    `ranks` has all of the job, ordered by rank.

    Raises:
        ConfigError: Different backends are requested, only some ranks see GPUs, or two ranks would
            share a GPU.
    """
    by_backend: dict[str, list[int]] = {}
    for rank in ranks:
        by_backend.setdefault(rank.backend, []).append(rank.rank)
    if len(by_backend) > 1:
        parts = [f"{ranks_text(users)} with {name!r}" for name, users in by_backend.items()]
        what = f"the ranks request different backends for one group: {'; '.join(parts)}."
        cause = "the backend is set on some hosts only, or the script chooses it rank by rank."
        fix = "pass the same backend= on every rank (or DDPSAFE_BACKEND on every host)."
        raise ConfigError(Explanation(what, cause=cause, fix=fix))
    backend = ranks[0].backend
    blind = [rank.rank for rank in ranks if not rank.uuids]
    if backend == "auto" and len(blind) == len(ranks):
        return Assignment(backend="gloo", indexes=())
    if backend != "auto" and not uses_gpus(backend):
        return Assignment(backend=backend, indexes=())
    if blind:
        hosts = ", ".join(sorted({rank.host for rank in ranks if rank.rank in blind}))
        what = f"backend {backend!r} needs a GPU for each of {len(ranks)} ranks, but "
        what += f"{ranks_text(blind)} on {hosts} can see none"
        seeing = [rank.rank for rank in ranks if rank.uuids]
        what += f"; {ranks_text(seeing)} can." if seeing else "."
        cause = (
            f"no driver, a torch without CUDA, a container without --gpus, or an empty {VISIBLE}."
        )
        fix = "check nvidia-smi there; backend='gloo' trains on the CPU on every rank."
        raise ConfigError(Explanation(what, cause=cause, fix=fix))
    indexes = tuple(_index(rank) for rank in ranks)
    if not are_shared():
        users: dict[str, list[VisibleGpus]] = {}
        for rank, index in zip(ranks, indexes, strict=True):
            users.setdefault(rank.uuids[index], []).append(rank)
        uuid = next((uuid for uuid in users if len(users[uuid]) > 1), None)
        if uuid is not None:
            sharing = users[uuid]
            host = sharing[0].host
            there = [rank for rank in ranks if rank.host == host]
            gpus = len({uuid for rank in there for uuid in rank.uuids})
            what = (
                f"{len(there)} ranks on {host} need {len(there)} GPUs, but see {gpus}: "
                f"{ranks_text([rank.rank for rank in sharing])} would share {uuid}."
            )
            cause = (
                f"more ranks than GPUs, a wrong LOCAL_RANK, or the same {VISIBLE} for all ranks."
            )
            fix = (
                f"start {gpus} ranks there, or show each rank a GPU of its own "
                f"(srun --gpus-per-task=1, {VISIBLE}), or use backend='gloo' to train on the CPU."
            )
            raise ConfigError(Explanation(what, cause=cause, fix=fix))
    return Assignment(backend="nccl" if backend == "auto" else backend, indexes=indexes)


def _index(rank: VisibleGpus) -> int:
    """Return the index of a rank's GPU, by torchrun's convention: the local rank."""
    count = len(rank.uuids)
    if are_shared():
        return rank.local_rank % count
    # A rank that sees fewer GPUs than its host has ranks was shown its own.
    return rank.local_rank if count >= rank.local_world_size else 0


def count_visible(env: Mapping[str, str]) -> int:
    """Count the GPUs that a rank sees, without initialising CUDA in this process.

    `env` are variables of the rank, in addition to those of this process.
    """
    setting = env.get(VISIBLE)
    if "torch" not in sys.modules:  # its import takes a second or more
        visible = os.environ.get(VISIBLE) if setting is None else setting
        if sees_none(read_build(), visible, has_driver=may_have_driver()):
            return 0
    import torch

    count = torch.cuda.device_count()
    if setting is not None and setting != os.environ.get(VISIBLE):
        # GPUs that are hidden from this process may be visible to the rank.
        may_see = torch.version.hip is not None or (
            torch.version.cuda is not None and may_have_driver()
        )
        present = count_present() or (count if VISIBLE not in os.environ else None)
        count = count_named(setting, present=present) if may_see or count else 0
    elif setting is None:
        setting = os.environ.get(VISIBLE)
    return min(count, 1) if is_split(setting) else count


def sees_none(build: Mapping[str, Any], visible: str | None, *, has_driver: bool) -> bool:
    """Return whether torch certainly sees no GPU, without importing it.

    `build` is from `read_build`, and `visible` is ``CUDA_VISIBLE_DEVICES``, if it is set.
    """
    if not {"__version__", "cuda", "hip"} <= build.keys():
        return False
    made_for = [name for name in ("cuda", "hip", "rocm", "xpu") if build.get(name) is not None]
    if not made_for:
        return True
    # Other vendors build torch with their own CUDA, driver and variables. PyTorch's wheels for NVIDIA
    # have a version such as 2.13.0+cu130.
    if made_for != ["cuda"] or not re.search(r"\+cu\d+$", build["__version__"]):
        return False
    return not has_driver or (visible is not None and visible.strip() in _HIDES_ALL)


def read_build() -> dict[str, Any]:
    """Return the contents of torch's ``version.py`` without importing torch; empty if not found."""
    with contextlib.suppress(Exception):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.submodule_search_locations:
            path = Path(spec.submodule_search_locations[0], "version.py")
            module = ModuleType("torch.version")
            SourceFileLoader(module.__name__, str(path)).exec_module(module)
            return vars(module)
    return {}


def may_have_driver() -> bool:
    """Return whether any part of NVIDIA's driver is present: a device, its module or its library."""
    # Each alone may be missing: devices may be created only when a library needs them, and the library
    # may be where only torch finds it.
    if any(Path("/dev").glob("nvidia*")) or Path("/dev/dxg").exists() or _DRIVER.exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def count_named(text: str, *, present: int | None) -> int:
    """Count the GPUs that a value of ``CUDA_VISIBLE_DEVICES`` selects, by torch's rules.

    If the value begins with a name (GPU-…, MIG-…), all entries are names. Otherwise they are numbers,
    and text after a number is ignored. The first invalid entry ends the list, and a duplicate empties
    it.

    `present` is the number of GPUs of the host; ``None`` if unknown.
    """
    prefix = next((kind for kind in ("GPU-", "MIG-") if text.startswith(kind)), None)
    entries: list[str | int] = []
    for part in text.split(","):
        number = re.match(r"\+?[0-9]+", part.strip())
        if not (number if prefix is None else part.startswith(prefix)):
            break
        entry = part if number is None else int(number[0])
        if entry in entries:
            return 0
        entries.append(entry)
    if prefix is not None or not present:
        return len(entries)
    return sum(1 for _ in itertools.takewhile(lambda entry: int(entry) < present, entries))


def count_present() -> int | None:
    """Return how many GPUs the driver has found, visible or not; ``None`` if unknown."""
    try:
        return len(list((_DRIVER / "gpus").iterdir())) or None
    except OSError:
        return None


def count_device_nodes() -> int:
    """Return how many GPUs the driver has created devices for, from a listing of /dev."""
    return sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def is_split(visible: str | None) -> bool:
    """Return whether CUDA shows a process a single MIG instance, even if NVML counts more."""
    if visible:
        return visible.startswith("MIG-")
    return any(_DRIVER.glob("capabilities/gpu*/mig/gi*"))


def find_lost() -> int:
    """Return how many of the driver's GPUs torch does not see although no variable hides them."""
    import torch

    if VISIBLE in os.environ or is_split(None):
        return 0
    seen: int = torch.cuda.device_count()
    return max(0, count_device_nodes() - seen) if seen else 0


def nccl_variables(
    given: Mapping[str, str], torch_version: str, *, debug_file: str | None, folder: str | None
) -> dict[str, str]:
    """Return settings for NCCL and its watchdog, except those that the user has set.

    Without `debug_file` the output of ``NCCL_DEBUG`` stays on stdout; without `folder` torch chooses where
    the ranks' flight recorder dumps go.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", torch_version)[:3])
    # The watchdog waits four times this, 60 s by default, between its message and the abort. For that
    # long a rank whose collective timed out would keep the others waiting.
    settings = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000"}
    if version < (2, 7, 1):
        # device_id= selects NCCL's non-blocking mode there, which hangs with NCCL 2.26
        # (pytorch #153960; #154055 turned it off in 2.7.1).
        settings["TORCH_NCCL_USE_COMM_NONBLOCKING"] = "0"
    if version < (2, 9):
        settings["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "2000"  # the recorder was off by default
    elif version < (2, 11):
        settings["TORCH_FR_BUFFER_SIZE"] = "2000"  # its new name; still off in 2.10
    if debug_file is not None:
        settings["NCCL_DEBUG_FILE"] = debug_file
    dumps = ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]
    if folder is not None and not any(name in given for name in dumps):
        # torch's default is in /tmp or ~/.cache, which all jobs of the host share. torch appends the
        # rank. The second variable is the older one, for which newer versions warn.
        settings |= dict.fromkeys(
            dumps[: 1 if version >= (2, 10) else 2], f"{folder}/nccl_trace_rank_"
        )
    return {name: text for name, text in settings.items() if name not in given}


def wait_for_memory(pids: Collection[int], deadline: Deadline) -> bool:
    """Wait until the driver lists none of these processes any more, if it can be queried.

    Returns whether it lists none of them.
    """
    # A killed process disappears before the driver has freed all its memory, if that is much or
    # mapped by other processes. The next attempt would run out of memory.
    while pids and find_users(pids):
        if deadline.expired():
            return False
        time.sleep(min(_POLL_S, deadline.remaining_s()))
    return True


def read_errors(within_s: float) -> list[str]:
    """Return lines about GPUs of this host with errors that need a reset or a repair.

    The kernel's log is read for Xid errors of the last `within_s` seconds.
    """

    def memory_errors(nvml: Any) -> list[str]:
        lines = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            errors = []
            with contextlib.suppress(Exception):  # not every GPU counts errors
                kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                count = int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))
                errors += (
                    [f"{count} uncorrectable ECC errors since the last reset"] if count else []
                )
            with contextlib.suppress(Exception):
                _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
                errors += ["a row waits for a reset to be remapped"] if is_pending else []
                errors += ["a row could not be remapped"] if has_failed else []
            if errors:
                lines.append(f"the driver says of GPU {index}: {'; '.join(errors)}")
        return lines

    return _read_xids(within_s) + (_query_driver(memory_errors) or [])


def _read_xids(within_s: float) -> list[str]:
    """Return the Xid errors that the driver has written to the kernel's log within that time.

    A record is ``priority,sequence,microseconds since boot,flags;message`` (the kernel's
    Documentation/ABI/testing/dev-kmsg).
    """
    oldest_us = (time.monotonic() - within_s) * 1e6
    lines = []
    try:
        fd = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # in most containers, and for users without permission
        return []
    try:
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(fd, 8192)
            except BrokenPipeError:  # the record was overwritten
                continue
            except OSError:  # EAGAIN: no more records
                break
            head, _, message = record.decode(errors="replace").partition(";")
            match = _XID.search(message)
            if match is not None and float(head.split(",")[2]) >= oldest_us:
                lines.append(f"the kernel's log: Xid {match['what'].strip()} of {match['device']}")
            if not record:
                break
    finally:
        os.close(fd)
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """The state of a GPU as the driver reports it; ``None`` for what it does not report.

    Attributes:
        index: The driver's number of the GPU.
        sm_mhz: Clock of its processors.
        max_sm_mhz: Highest clock of its processors.
        slowdowns: The driver's bit mask of reasons that reduce the clock.
        used_bytes: Memory in use, by all processes.
    """

    index: int
    sm_mhz: int | None
    max_sm_mhz: int | None
    slowdowns: int | None
    celsius: int | None
    used_bytes: int | None
    total_bytes: int | None

    @property
    def slowed_by(self) -> list[str]:
        """What reduces its clock, in words."""
        bits = self.slowdowns or 0
        return list(dict.fromkeys(text for bit, text in _SLOWDOWNS if bits & bit))

    @property
    def is_throttled(self) -> bool:
        """Whether something is wrong with it; a power limit and fixed clocks are normal."""
        return bool((self.slowdowns or 0) & _THROTTLED)

    def __str__(self) -> str:
        parts = []
        if self.sm_mhz is not None:
            of = "" if self.max_sm_mhz is None else f" of {self.max_sm_mhz}"
            parts.append(f"{self.sm_mhz}{of} MHz")
        if self.slowed_by:
            parts.append(f"slowed by {', '.join(self.slowed_by)}")
        if self.celsius is not None:
            parts.append(f"{self.celsius} °C")
        if self.used_bytes is not None and self.total_bytes:
            parts.append(
                f"{self.used_bytes / _GIB:.1f} of {self.total_bytes / _GIB:.1f} GiB in use"
            )
        return f"GPU {self.index}: {', '.join(parts) or 'the driver reports nothing about it'}"


_GIB: Final = 1 << 30
_SLOWDOWNS: Final = (
    (0x08, "the hardware"),
    (0x40, "heat"),
    (0x20, "heat"),
    (0x80, "the power supply"),
    (0x04, "the power limit"),
    (0x10, "a slower GPU of its sync boost group"),
    (0x02, "clocks that were set"),
    (0x100, "clocks that were set"),
)
"""Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h). An idle GPU, 0x01, is not slowed."""
_THROTTLED: Final = 0x08 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """The GPUs and memory that one process uses.

    Attributes:
        memory_bytes: Its memory on all GPUs together.
    """

    memory_bytes: int
    gpus: tuple[GpuReading, ...]


def read_use() -> dict[int, GpuUse]:
    """Return each process's use of this host's GPUs; empty if nvidia-ml-py is missing."""

    def read(nvml: Any) -> dict[int, GpuUse]:
        used: dict[int, int] = {}
        on: dict[int, list[GpuReading]] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            reading = _read_gpu(nvml, index, handle) if processes else None
            for process in processes:
                used[process.pid] = used.get(process.pid, 0) + (process.usedGpuMemory or 0)
                if reading is not None:
                    on.setdefault(process.pid, []).append(reading)
        return {
            pid: GpuUse(memory_bytes=size, gpus=tuple(on.get(pid, ())))
            for pid, size in used.items()
        }

    return _query_driver(read) or {}


def find_reading(query: Callable[[], T]) -> T | None:
    """Return the result of a query of the driver; None if this GPU or driver does not support it."""
    with contextlib.suppress(Exception):
        return query()
    return None


def _read_gpu(nvml: Any, index: int, handle: Any) -> GpuReading:
    memory = find_reading(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    # The second function is the older name.
    slowdowns = find_reading(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
    if slowdowns is None:
        slowdowns = find_reading(
            lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        )
    return GpuReading(
        index=index,
        sm_mhz=find_reading(lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
        max_sm_mhz=find_reading(
            lambda: int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
        ),
        slowdowns=slowdowns,
        celsius=find_reading(
            lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        ),
        used_bytes=None if memory is None else int(memory.used),
        total_bytes=None if memory is None else int(memory.total),
    )


def find_users(pids: Collection[int]) -> set[int]:
    """Return which of these processes the driver lists on a GPU; empty if it cannot be queried."""

    def list_all(nvml: Any) -> set[int]:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        listed = map(nvml.nvmlDeviceGetComputeRunningProcesses, handles)
        return {process.pid for processes in listed for process in processes}

    return (_query_driver(list_all) or set()) & set(pids)


def _query_driver(query: Callable[[Any], T]) -> T | None:
    """Query the driver; return ``None`` if it fails or does not reply, so that the launch continues."""

    def run() -> T:
        with open_driver() as nvml:
            return query(nvml)

    call = BoundedCall(run, name="ddpsafe-driver")
    with contextlib.suppress(Exception):
        return call.result() if call.wait(_DRIVER_LIMIT_S) else None
    return None


@contextlib.contextmanager
def open_driver() -> Iterator[Any]:
    """Open the driver's library through nvidia-ml-py; raises if either is missing."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
