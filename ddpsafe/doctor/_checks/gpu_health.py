"""GPUs as the driver knows them: who may use them, who does, and whether they are sound."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Final

import psutil

from ddpsafe.doctor._checks.versions import ask
from ddpsafe.doctor._report import Finding, failed, ok, to_copy, warning
from ddpsafe.doctor._system.nvidia import (
    Health,
    count_device_nodes,
    find_problem,
    find_unlinked,
    read_health,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._context import Subject

_GIB: Final = 1 << 30
_PROHIBITED: Final = 2
_EXCLUSIVE: Final = 3
_MUCH_BYTES: Final = 2 * _GIB
_CONTEXT_BYTES: Final = _GIB


def check_driver_answers(subject: Subject) -> Iterator[Finding]:
    """Look whether the driver can be asked at all."""
    del subject
    if not count_device_nodes():
        return
    problem = find_problem()
    if problem is None:
        yield ok("DS-GPU-013", "The driver answers.")
        return
    is_missing = "not installed" in problem
    make = warning if is_missing else failed
    yield make(
        "DS-GPU-013",
        f"The driver could not be asked about the GPUs: {problem}. Compute mode, memory in use, "
        "memory errors and links were not looked at.",
        cause="the extra `gpu` is not installed."
        if is_missing
        else "the library and the kernel module of the driver differ (after an upgrade without a "
        "reboot), or the container lacks the driver's library.",
        fix=to_copy("Install it:", f"{sys.executable} -m pip install 'nvidia-ml-py>=12.535'")
        if is_missing
        else to_copy("See what the driver says; after an upgrade, reboot:", "nvidia-smi"),
    )


def check_compute_mode(subject: Subject) -> Iterator[Finding]:
    """Look whether the GPUs let processes in."""
    del subject
    for gpu in read_health():
        if gpu.compute_mode == _PROHIBITED:
            yield _mode(gpu, "prohibited: no process may compute on it")
        elif gpu.compute_mode == _EXCLUSIVE and gpu.pids:
            taken = ", ".join(map(str, gpu.pids))
            yield _mode(gpu, f"exclusive, and process {taken} has it")
        elif gpu.compute_mode is not None:
            yield ok("DS-GPU-005", f"GPU {gpu.index} ({gpu.name}) lets ranks in.")


def _mode(gpu: Health, what: str) -> Finding:
    return failed(
        "DS-GPU-005",
        f"The compute mode of GPU {gpu.index} ({gpu.name}) is {what}.",
        cause="an administrator set it, or a scheduler did and left it.",
        fix=to_copy("Set it back:", f"nvidia-smi -i {gpu.index} -c DEFAULT"),
    )


def check_memory(subject: Subject) -> Iterator[Finding]:
    """Look for memory that others hold; torch knows how much, the driver knows who."""
    for gpu in read_health() or _as_torch_sees(subject):
        if gpu.used_bytes is None or gpu.total_bytes is None:
            continue
        if gpu.used_bytes < _MUCH_BYTES:
            shown = f"{gpu.used_bytes / _GIB:.1f} of {gpu.total_bytes / _GIB:.1f} GiB"
            yield ok("DS-GPU-006", f"GPU {gpu.index}: {shown} in use.", used_bytes=gpu.used_bytes)
        else:
            yield _in_use(gpu, gpu.used_bytes, gpu.total_bytes)


def _as_torch_sees(subject: Subject) -> list[Health]:
    results = ask(subject).get("run_kernels") or []
    return [
        Health(
            index=index,
            name="",
            compute_mode=None,
            total_bytes=each["total_bytes"],
            # Only the process that asked uses its context.
            used_bytes=max(0, each["total_bytes"] - each["free_bytes"] - _CONTEXT_BYTES),
            pids=(),
            uncorrected_errors=None,
            remapping=None,
        )
        for index, each in enumerate(results if isinstance(results, list) else [])
        if "free_bytes" in each
    ]


def _in_use(gpu: Health, used_bytes: int, total_bytes: int) -> Finding:
    holders = [text for pid in gpu.pids if (text := _describe(pid))]
    return warning(
        "DS-GPU-006",
        f"GPU {gpu.index}: {used_bytes / _GIB:.1f} of {total_bytes / _GIB:.1f} GiB are in use "
        f"already, by {', '.join(holders) or 'processes that cannot be named from here'}.",
        cause="another job, a notebook, or ranks that an earlier run left behind.",
        fix=to_copy(
            "Take other GPUs, or end what is yours:",
            "nvidia-smi",
            *(f"kill {pid}   # if it is yours" for pid in gpu.pids[:4]),
        ),
        used_bytes=used_bytes,
        pids=list(gpu.pids),
    )


def _describe(pid: int) -> str | None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        mine = ", this one" if pid == os.getpid() else ""
        return f"process {pid} of {process.username()} ({process.name()}{mine})"
    return None


def check_errors(subject: Subject) -> Iterator[Finding]:
    """Look for memory errors that the GPUs have counted."""
    del subject
    for gpu in read_health():
        if not gpu.uncorrected_errors and not gpu.remapping:
            yield ok("DS-GPU-007", f"GPU {gpu.index} counts no memory errors.")
            continue
        what = (
            f"{gpu.uncorrected_errors} memory errors that could not be corrected"
            if gpu.uncorrected_errors
            else "a row of memory that waits to be remapped, or could not be"
        )
        yield failed(
            "DS-GPU-007",
            f"GPU {gpu.index} ({gpu.name}) has {what}.",
            cause="the memory is failing; jobs on it die with `uncorrectable ECC error`, Xid 48 or 63.",
            fix=to_copy(
                "Drain the host, reset the GPU when it is idle, and have it replaced if it returns:",
                f"nvidia-smi -i {gpu.index} -q -d ECC,ROW_REMAPPER",
                f"nvidia-smi -i {gpu.index} --gpu-reset",
            ),
        )


def check_links(subject: Subject) -> Iterator[Finding]:
    """Look whether GPUs reach each other's memory."""
    del subject
    gpus = read_health()
    if len(gpus) < 2:  # noqa: PLR2004 - a pair
        return
    apart = find_unlinked()
    if not apart:
        yield ok("DS-GPU-008", f"All {len(gpus)} GPUs reach each other directly.")
        return
    pairs = ", ".join(f"{a} and {b}" for a, b in apart[:6])
    yield warning(
        "DS-GPU-008",
        f"GPUs {pairs}{' and others' if len(apart) > 6 else ''} do not reach each other directly; "  # noqa: PLR2004 - as shown
        "NCCL goes through the host's memory.",
        cause="consumer cards, GPUs on two sockets, virtual machines, or ACS switched on.",
        fix=to_copy(
            "Slow, not wrong; see how they are connected:",
            "nvidia-smi topo -p2p r",
            "nvidia-smi topo -m",
        ),
    )


CHECKS: Final[tuple[Check, ...]] = (
    check_driver_answers,
    check_compute_mode,
    check_memory,
    check_errors,
    check_links,
)
