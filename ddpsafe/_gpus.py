"""The GPUs of this host, and which rank gets which.

The launcher counts them before it starts ranks, without a CUDA context of its own. Ranks of another
launcher tell each other what they see, because each may be shown other GPUs: all of the host's
(torchrun), one each (``srun --gpus-per-task=1``, Kubernetes), or some that another rank has too.
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
from ddpsafe._errors import ConfigError, Explanation, ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from ddpsafe._clock import Deadline
    from ddpsafe._world import World

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"

SHARING: Final = "_DDPSAFE_TEST_RANKS_SHARE_GPUS"
"""For ddpsafe's own tests: ranks may share a GPU, which NCCL takes only from different "hosts"."""

_HIDES_ALL: Final = ("", "-1", "NoDevFiles")
"""Values that show no GPU; Slurm sets the last."""

_DRIVER: Final = Path("/proc/driver/nvidia")
_DRIVER_ANSWER_S: Final = 5.0
_LOOK_S: Final = 0.2
_KERNEL_LOG: Final = Path("/dev/kmsg")
_XID: Final = re.compile(r"NVRM: Xid \((?P<device>[^)]*)\): (?P<what>\d+\b.*)")
_MOST_RECORDS: Final = 100_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpus:
    """What one rank is asked for, and which GPUs it sees.

    Attributes:
        rank: The rank.
        host: Its host.
        local_rank: Its index on its host.
        local_world_size: Number of ranks on its host.
        backend: The backend that it was asked for, or ``auto``.
        uuids: What identifies each GPU that it sees, in CUDA's order; the same for the same GPU.
    """

    rank: int
    host: str
    local_rank: int
    local_world_size: int
    backend: str
    uuids: tuple[str, ...]

    @classmethod
    def here(cls, world: World, backend: str) -> VisibleGpus:
        """Look at this process; CUDA is asked only where the rank may use it."""
        host = socket.gethostname()
        uuids = []
        if backend == "auto" or uses_gpus(backend):
            import torch

            shown = os.environ.get(VISIBLE, "all")
            for index in range(torch.cuda.device_count()):  # which makes no context
                uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
                # A build that does not tell it: as exact as what the process was shown.
                uuids.append(f"GPU {index} of {shown} on {host}" if uuid is None else f"GPU-{uuid}")
        return cls(
            rank=world.rank,
            host=host,
            local_rank=world.local_rank,
            local_world_size=world.local_world_size,
            backend=backend,
            uuids=tuple(uuids),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What the ranks use, agreed over all of them.

    Attributes:
        backend: The backend of their group.
        indexes: CUDA's index of each rank's GPU, by rank; empty where the ranks use the CPU.
    """

    backend: str
    indexes: tuple[int, ...]


def uses_gpus(backend: str) -> bool:
    """Tell whether a backend, ``cpu:gloo,cuda:nccl`` for one, is for tensors on GPUs."""
    return "nccl" in backend or "cuda" in backend


def are_shared() -> bool:
    """Tell whether ddpsafe's own tests let ranks share a GPU."""
    return SHARING in os.environ


def assign(ranks: Sequence[VisibleGpus]) -> Assignment:
    """Give each rank a GPU of its own, or all of them the CPU.

    Args:
        ranks: What every rank of the job sees, by rank.

    Raises:
        ConfigError: The ranks are asked for different backends, only some of them see GPUs, or
            two of them would use one GPU.
    """
    by_backend: dict[str, list[int]] = {}
    for each in ranks:
        by_backend.setdefault(each.backend, []).append(each.rank)
    if len(by_backend) > 1:
        parts = [f"{ranks_text(each)} with {name!r}" for name, each in by_backend.items()]
        what = f"the ranks would make one group with different backends: {'; '.join(parts)}."
        cause = "the backend is set on some hosts only, or the script chooses it rank by rank."
        fix = "pass the same backend= on every rank (or DDPSAFE_BACKEND on every host)."
        raise ConfigError(Explanation(what, cause=cause, fix=fix))
    asked = ranks[0].backend
    blind = [each.rank for each in ranks if not each.uuids]
    if asked == "auto" and len(blind) == len(ranks):
        return Assignment(backend="gloo", indexes=())
    if asked != "auto" and not uses_gpus(asked):
        return Assignment(backend=asked, indexes=())
    if blind:
        hosts = ", ".join(sorted({each.host for each in ranks if each.rank in blind}))
        what = f"backend {asked!r} needs a GPU for each of {len(ranks)} ranks, but "
        what += f"{ranks_text(blind)} on {hosts} can see none"
        seeing = [each.rank for each in ranks if each.uuids]
        what += f"; {ranks_text(seeing)} can." if seeing else "."
        cause = (
            f"no driver, a torch without CUDA, a container without --gpus, or an empty {VISIBLE}."
        )
        fix = "check nvidia-smi there; backend='gloo' trains on the CPU on every rank."
        raise ConfigError(Explanation(what, cause=cause, fix=fix))
    indexes = tuple(_index(each) for each in ranks)
    if not are_shared():
        users: dict[str, list[VisibleGpus]] = {}
        for rank, index in zip(ranks, indexes, strict=True):
            users.setdefault(rank.uuids[index], []).append(rank)
        shared = next((each for each in users.items() if len(each[1]) > 1), None)
        if shared is not None:
            uuid, sharing = shared
            host = sharing[0].host
            there = [each for each in ranks if each.host == host]
            gpus = len({uuid for each in there for uuid in each.uuids})
            what = (
                f"{len(there)} ranks on {host} need {len(there)} GPUs, but see {gpus}: "
                f"{ranks_text([each.rank for each in sharing])} would share {uuid}."
            )
            cause = f"more ranks than GPUs, a wrong LOCAL_RANK, or a {VISIBLE} that is the same for all."
            fix = (
                f"start {gpus} ranks there, or show each rank a GPU of its own "
                f"(srun --gpus-per-task=1, {VISIBLE}), or use backend='gloo' to train on the CPU."
            )
            raise ConfigError(Explanation(what, cause=cause, fix=fix))
    return Assignment(backend="nccl" if asked == "auto" else asked, indexes=indexes)


def _index(rank: VisibleGpus) -> int:
    """Return the index that torchrun's convention gives a rank, or 0 where it was shown its own."""
    seen = len(rank.uuids)
    if are_shared():
        return rank.local_rank % seen
    return rank.local_rank if seen >= rank.local_world_size else 0


def count_visible(env: Mapping[str, str]) -> int:
    """Count the GPUs that a rank sees, without initialising CUDA in this process.

    Args:
        env: Variables that the rank gets on top of those of this process.
    """
    named = env.get(VISIBLE)
    if "torch" not in sys.modules:
        visible = os.environ.get(VISIBLE) if named is None else named
        if sees_none(read_build(), visible, has_driver=may_have_driver()):
            return 0
    import torch

    seen = torch.cuda.device_count()
    if named is not None and named != os.environ.get(VISIBLE):
        # Hidden from this process, they would still be seen by the rank.
        may_see = torch.version.hip is not None or (
            torch.version.cuda is not None and may_have_driver()
        )
        present = count_present() or (seen if VISIBLE not in os.environ else None)
        seen = count_named(named, present=present) if may_see or seen else 0
    elif named is None:
        named = os.environ.get(VISIBLE)
    return min(seen, 1) if is_split(named) else seen


def sees_none(build: Mapping[str, Any], visible: str | None, *, has_driver: bool) -> bool:
    """Tell whether a torch would surely see no GPU, without the second or more that its import takes.

    Args:
        build: What it says of itself, see `read_build`.
        visible: ``CUDA_VISIBLE_DEVICES``, where it is set.
        has_driver: Whether there may be a driver of NVIDIA.
    """
    if not {"__version__", "cuda", "hip"} <= build.keys():
        return False
    made_for = [name for name in ("cuda", "hip", "rocm", "xpu") if build.get(name) is not None]
    if not made_for:
        return True
    # Other makers of GPUs build torch with a CUDA of their own, with its own driver and variables.
    # PyTorch's wheels, which are for NVIDIA's, have a version such as 2.13.0+cu130.
    if made_for != ["cuda"] or not re.search(r"\+cu\d+$", build["__version__"]):
        return False
    return not has_driver or (visible is not None and visible.strip() in _HIDES_ALL)


def read_build() -> dict[str, Any]:
    """Return what the torch that would be imported says of its build; nothing where it does not."""
    with contextlib.suppress(Exception):
        found = importlib.util.find_spec("torch")
        if found is not None and found.submodule_search_locations:
            path = Path(found.submodule_search_locations[0], "version.py")
            module = ModuleType("torch.version")
            SourceFileLoader(module.__name__, str(path)).exec_module(module)
            return vars(module)
    return {}


def may_have_driver() -> bool:
    """Tell whether there is something of NVIDIA's driver: a device, its module or its library.

    Devices may be made only once a library asks for them, and the library may lie where only torch
    finds it.
    """
    if any(Path("/dev").glob("nvidia*")) or Path("/dev/dxg").exists() or _DRIVER.exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def count_named(text: str, *, present: int | None) -> int:
    """Count the GPUs that a value of ``CUDA_VISIBLE_DEVICES`` shows, as torch reads it.

    Names, where it begins with one, else the numbers that the entries begin with. The first entry that
    is wrong ends the list, and one that stands there twice empties it.

    Args:
        text: The value.
        present: How many GPUs the host has; ``None`` where that is not known.
    """
    prefix = next((each for each in ("GPU-", "MIG-") if text.startswith(each)), None)
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
    """Return how many GPUs the driver has found, ``CUDA_VISIBLE_DEVICES`` aside, where that is known."""
    try:
        return len(list((_DRIVER / "gpus").iterdir())) or None
    except OSError:
        return None


def is_split(visible: str | None) -> bool:
    """Tell whether CUDA would show a process one MIG instance, whatever NVML counts."""
    if visible:
        return visible.startswith("MIG-")
    return any(_DRIVER.glob("capabilities/gpu*/mig/gi*"))


def find_lost() -> int:
    """Return how many GPUs the driver has and torch does not see though no variable hides them."""
    import torch

    if VISIBLE in os.environ or is_split(None):
        return 0
    nodes = [each for each in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", each.name)]
    return max(0, len(nodes) - torch.cuda.device_count()) if torch.cuda.device_count() else 0


def nccl_variables(
    given: Mapping[str, str], torch_version: str, *, debug_file: str | None, folder: str | None
) -> dict[str, str]:
    """Return the settings of NCCL and its watchdog that the user has not set.

    Args:
        given: The variables that the rank has so far; they win.
        torch_version: ``torch.__version__``.
        debug_file: What NCCL writes if ``NCCL_DEBUG`` asks it to; ``None`` leaves it on stdout.
        folder: Where the ranks' recorder dumps go; ``None`` leaves them to torch.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", torch_version)[:3])
    # The watchdog waits four times this between its message and the abort, 60 s by default: as
    # long as a rank whose collective has timed out would still keep the others waiting.
    wanted = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000"}
    if version < (2, 7, 1):
        # device_id= selects NCCL's non-blocking mode there, which hangs with NCCL 2.26
        # (pytorch #153960; #154055 turned it off in 2.7.1).
        wanted["TORCH_NCCL_USE_COMM_NONBLOCKING"] = "0"
    if version < (2, 9):
        wanted["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "2000"  # the recorder was off by default
    if debug_file is not None:
        wanted["NCCL_DEBUG_FILE"] = debug_file
    dumps = ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]
    if folder is not None and not any(name in given for name in dumps):
        # Else in /tmp or ~/.cache, shared by all jobs of the host. torch appends the rank. The
        # second name is the older one, of which newer versions warn.
        wanted |= dict.fromkeys(
            dumps[: 1 if version >= (2, 10) else 2], f"{folder}/nccl_trace_rank_"
        )
    return {name: text for name, text in wanted.items() if name not in given}


def wait_for_memory(pids: Collection[int], deadline: Deadline) -> bool:
    """Wait until the driver lists none of these processes any more, where it can be asked.

    A killed process is gone before the driver has given back much memory, or memory that others
    had mapped; the next attempt would run out of it.

    Returns:
        Whether it lists none.
    """
    while pids and find_users(pids):
        if deadline.expired():
            return False
        time.sleep(min(_LOOK_S, deadline.remaining_s()))
    return True


def read_errors(within_s: float) -> list[str]:
    """Say which GPUs of this host have errors that only a reset or a repair removes.

    Args:
        within_s: How far back the kernel's log is read for Xid errors, in seconds.
    """

    def memory_errors(nvml: Any) -> list[str]:
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            said = []
            with contextlib.suppress(Exception):  # not every GPU counts
                kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                count = int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))
                said += [f"{count} uncorrectable ECC errors since the last reset"] if count else []
            with contextlib.suppress(Exception):
                _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
                said += ["a row waits for a reset to be remapped"] if is_pending else []
                said += ["a row could not be remapped"] if has_failed else []
            if said:
                found.append(f"the driver says of GPU {index}: {'; '.join(said)}")
        return found

    return _read_xids(within_s) + (_ask_driver(memory_errors) or [])


def _read_xids(within_s: float, log: Path = _KERNEL_LOG) -> list[str]:
    """Return the Xid errors that the driver has written to the kernel's log of late.

    A record is ``priority,sequence,microseconds since boot,flags;message`` (the kernel's
    Documentation/ABI/testing/dev-kmsg); one that was overwritten while it was read is EPIPE.
    """
    oldest_us = (time.monotonic() - within_s) * 1e6
    found = []
    try:
        fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # most containers, and users without the right
        return []
    try:
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(fd, 8192)
            except BrokenPipeError:
                continue
            except OSError:  # EAGAIN: this was the last one
                break
            head, _, message = record.decode(errors="replace").partition(";")
            match = _XID.search(message)
            if match is not None and float(head.split(",")[2]) >= oldest_us:
                found.append(f"the kernel's log: Xid {match['what'].strip()} of {match['device']}")
            if not record:
                break
    finally:
        os.close(fd)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """How a GPU runs, as the driver says; ``None`` where it does not say.

    Attributes:
        index: The driver's number of it.
        sm_mhz: The clock of its processors.
        max_sm_mhz: The highest that they can have.
        slowdowns: The driver's bits of what holds that clock down.
        celsius: Its temperature.
        used_bytes: Memory that is in use, by whomever.
        total_bytes: Memory that it has.
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
        """What holds its clock down, in words."""
        bits = self.slowdowns or 0
        return list(dict.fromkeys(text for bit, text in _SLOWDOWNS if bits & bit))

    @property
    def is_throttled(self) -> bool:
        """Whether something is wrong with it: a power limit and set clocks are usual."""
        return bool((self.slowdowns or 0) & _THROTTLED)

    def __str__(self) -> str:
        """Say it in one line."""
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
        return f"GPU {self.index}: {', '.join(parts) or 'the driver says nothing of it'}"


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
    """What one process uses.

    Attributes:
        memory_bytes: Its memory, over all GPUs.
        gpus: The GPUs that it is on.
    """

    memory_bytes: int
    gpus: tuple[GpuReading, ...]


def read_use() -> dict[int, GpuUse]:
    """Return what each process uses of this host's GPUs; nothing where nvidia-ml-py is missing."""

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

    return _ask_driver(read) or {}


def _read_gpu(nvml: Any, index: int, handle: Any) -> GpuReading:
    def asked(question: Callable[[], T]) -> T | None:
        with contextlib.suppress(Exception):  # not every GPU and driver answers each
            return question()
        return None

    memory = asked(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    # The second name is the older one.
    slowdowns = asked(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
    if slowdowns is None:
        slowdowns = asked(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
    return GpuReading(
        index=index,
        sm_mhz=asked(lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
        max_sm_mhz=asked(lambda: int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))),
        slowdowns=slowdowns,
        celsius=asked(
            lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        ),
        used_bytes=None if memory is None else int(memory.used),
        total_bytes=None if memory is None else int(memory.total),
    )


def find_users(pids: Collection[int]) -> set[int]:
    """Return which of these processes the driver lists on a GPU; none where it cannot be asked."""

    def list_all(nvml: Any) -> set[int]:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        listed = map(nvml.nvmlDeviceGetComputeRunningProcesses, handles)
        return {process.pid for processes in listed for process in processes}

    return (_ask_driver(list_all) or set()) & set(pids)


def _ask_driver(question: Callable[[Any], T]) -> T | None:
    """Ask the driver, which may never answer where a GPU is broken: the launch goes on then."""

    def ask() -> T:
        with open_driver() as nvml:
            return question(nvml)

    call = BoundedCall(ask, name="ddpsafe-driver")
    with contextlib.suppress(Exception):
        return call.result() if call.wait(_DRIVER_ANSWER_S) else None
    return None


@contextlib.contextmanager
def open_driver() -> Iterator[Any]:
    """Open the driver's own library, as a module of nvidia-ml-py; raises where there is none."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
