"""The GPUs as torch and the driver see them: how many there are, who uses them, whether they work."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from typing import TYPE_CHECKING, Final

import psutil

from ddpsafe._gpus import count_device_nodes
from ddpsafe.doctor._checks.versions import probe_results
from ddpsafe.doctor._findings import Finding, failed, ok, to_copy, warning
from ddpsafe.doctor._system.nvidia import (
    Health,
    find_driver_error,
    find_unlinked,
    read_driver,
    read_health,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._subject import Subject

_STAGES: Final = {
    "list_devices": ("DS-GPU-001", "counting the GPUs"),
    "run_kernels": ("DS-GPU-009", "running a kernel"),
    "copy_between": ("DS-GPU-011", "copying from GPU to GPU"),
    "reduce_alone": ("DS-GPU-010", "an NCCL all-reduce of one rank"),
}


def check_seen(subject: Subject) -> Iterator[Finding]:
    """Compare the GPUs that torch sees with those that the machine has."""
    probed = probe_results(subject)
    about, device_nodes = probed.get("describe"), count_device_nodes()
    if about is None:
        return
    seen = int(probed.get("list_devices", {}).get("count", 0))
    if seen or (not device_nodes and not subject.wants_gpus):
        yield ok(
            "DS-GPU-001",
            f"torch sees {seen} GPUs." if seen else "This machine has no GPU.",
            count=seen,
        )
        return
    make = failed if subject.wants_gpus else warning
    hidden = subject.env.get("CUDA_VISIBLE_DEVICES")
    if not device_nodes:
        what = "no driver has created a device"
        fix = to_copy(
            "See what the driver reports, start the container with its GPUs, or use gloo:",
            "nvidia-smi",
            "docker run --gpus all …",
            "export DDPSAFE_BACKEND=gloo",
        )
    elif about.get("cuda") is None and about.get("hip") is None:
        what = f"torch {about.get('version')} is built without CUDA"
        index = "https://download.pytorch.org/whl/cu128"
        line = f"{shlex.quote(sys.executable)} -m pip install --force-reinstall torch --index-url {index}"
        fix = to_copy("Install a build with CUDA:", line)
    elif hidden is not None:
        what = f"CUDA_VISIBLE_DEVICES={hidden!r} hides them"
        fix = to_copy("Show them:", "unset CUDA_VISIBLE_DEVICES")
    else:
        what = probed.get("list_devices", {}).get("error") or "the driver does not answer"
        fix = to_copy("See what the driver reports:", "nvidia-smi", "dmesg | grep -i nvrm | tail")
    yield make(
        "DS-GPU-001",
        f"torch sees no GPU, and this machine has {device_nodes or 'none'}: {what}.",
        cause="the build of torch, the driver or a variable hides them from torch.",
        fix=fix,
        device_nodes=device_nodes,
    )


def check_visible(subject: Subject) -> Iterator[Finding]:
    """Check whether CUDA_VISIBLE_DEVICES names GPUs of this host, each once."""
    text = subject.env.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return
    items = [item.strip() for item in text.split(",")]
    device_nodes = count_device_nodes()
    # CUDA ends the list at the first invalid entry, or takes none if one is listed twice, silently.
    repeated = {item for item in items if items.count(item) > 1}
    numbers = [int(item) for item in items if item.isdecimal()]
    malformed = [item for item in items if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", item)]
    absent = [str(number) for number in numbers if device_nodes and number >= device_nodes]
    if text in {"", "-1"} or not (repeated or malformed or absent):
        yield ok("DS-GPU-002", f"CUDA_VISIBLE_DEVICES={text!r} can be read.")
        return
    wrong = ", ".join(sorted({*malformed, *absent, *repeated}))
    usable = [item for item in dict.fromkeys(items) if item not in {*malformed, *absent}]
    # On a host without a GPU there is nothing to hide, so ranks on CPUs work all the same.
    make = failed if device_nodes else warning
    yield make(
        "DS-GPU-002",
        f"CUDA_VISIBLE_DEVICES={text!r}: {wrong!r} is not a GPU of this host or is listed twice; CUDA drops "
        "it and everything after it, without a warning.",
        cause="a value from another machine, spaces or brackets in it, or a GPU that fell off the bus.",
        fix=to_copy(
            "Name GPUs that exist, each once:",
            f"export CUDA_VISIBLE_DEVICES={','.join(usable) or '0'}",
        ),
    )


def check_enough(subject: Subject) -> Iterator[Finding]:
    """Compare the number of GPUs with the ranks: NCCL needs one GPU for each."""
    gpus = probe_results(subject).get("list_devices", {})
    nproc = subject.config.nproc_per_node
    if "count" not in gpus or not isinstance(nproc, int) or "nccl" not in subject.config.backend:
        return
    if nproc <= gpus["count"]:
        yield ok("DS-GPU-003", f"{nproc} ranks have {gpus['count']} GPUs.")
        return
    yield failed(
        "DS-GPU-003",
        f"{nproc} ranks with nccl need {nproc} GPUs, and torch sees {gpus['count']}.",
        cause="nccl refuses two ranks on one GPU; CUDA_VISIBLE_DEVICES may hide others.",
        fix=to_copy(
            "Start one rank per GPU, or use gloo:",
            "export DDPSAFE_NPROC_PER_NODE=gpu",
            "export DDPSAFE_BACKEND=gloo",
        ),
    )


def check_driver(subject: Subject) -> Iterator[Finding]:
    """Compare the CUDA version that the driver supports with the one torch was built for."""
    built = probe_results(subject).get("describe", {}).get("cuda")
    driver = read_driver()
    if not built or driver is None:
        return
    needed, newest = tuple(map(int, built.split(".")[:2])), driver.cuda
    supported = ".".join(map(str, newest))
    if needed <= newest or needed[0] == newest[0]:  # within a major version CUDA is compatible
        yield ok(
            "DS-GPU-004", f"Driver {driver.version} supports CUDA {supported}; torch needs {built}."
        )
        return
    yield failed(
        "DS-GPU-004",
        f"Driver {driver.version} supports CUDA {supported}, but torch was built for CUDA {built}.",
        cause="pip installs the newest build of torch, whichever driver there is.",
        fix=to_copy(
            "Install a build for the driver, or a newer driver:",
            f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu{newest[0]}{newest[1]}",
        ),
    )


def check_kernels(subject: Subject) -> Iterator[Finding]:
    """Check whether a kernel, a copy and an all-reduce worked on the GPUs."""
    probed = probe_results(subject)
    if not probed.get("list_devices", {}).get("count"):
        return
    # The program reports each stage before it begins, so the last one reported did not return.
    if probed["timed_out"] or probed.get("stage") != "end":
        code, what = _STAGES.get(str(probed.get("stage")), ("DS-GPU-009", "using the GPUs"))
        how = (
            f"has not finished after {probed['waited_s']:.0f} s"
            if probed["timed_out"]
            else f"ended the process (exit code {probed['returncode']})"
        )
        yield failed(
            code,
            f"On the GPUs, {what} {how}.",
            cause="a GPU that hangs, peer-to-peer traffic blocked by the IOMMU (ACS), or a driver that "
            "does not match the fabric manager.",
            fix=to_copy(
                "Check the kernel log and the GPUs, then try without peer-to-peer:",
                "dmesg | grep -i -e xid -e nvrm | tail",
                "nvidia-smi",
                "export NCCL_P2P_DISABLE=1",
            ),
        )
    for stage in ("run_kernels", "copy_between", "reduce_alone"):
        code, what = _STAGES[stage]
        results = probed.get(stage, [])
        # A stage that failed as a whole has one error instead of a result for each GPU.
        results = [results] if isinstance(results, dict) else results
        wrong = {index: result for index, result in enumerate(results) if not result.get("ok")}
        for index, result in wrong.items():
            yield failed(
                code,
                f"GPU {index}: {what} fails: {result.get('error', 'the result is wrong')}.",
                cause="a GPU in a bad state, no memory left on it, a driver that does not match, or broken "
                "peer-to-peer traffic.",
                fix=to_copy(
                    "Check it, and leave it out until it is repaired:",
                    "nvidia-smi -q -d ECC,PAGE_RETIREMENT,PERFORMANCE",
                    f"dmesg | grep -i xid | tail   # then CUDA_VISIBLE_DEVICES without {index}",
                ),
                gpu=index,
            )
        if results and not wrong:
            yield ok(code, f"{what.capitalize()} works on {len(results)} GPUs.")


def check_architecture(subject: Subject) -> Iterator[Finding]:
    """Check whether torch was compiled for GPUs of this generation."""
    gpus = probe_results(subject).get("list_devices", {})
    devices, built = gpus.get("devices") or [], gpus.get("arch_list") or []
    numbers = [
        int(match[1]) for arch in built if (match := re.match(r"(?:sm|compute)_(\d+)", arch))
    ]
    for index, device in enumerate(devices):
        major, minor = device["capability"]
        own = 10 * major + minor
        # A binary runs on its own major generation; PTX (compute_) on everything newer.
        same = any(number // 10 == major and number <= own for number in numbers)
        newer = any(
            arch.startswith("compute_") and int(arch[8:].rstrip("a")) <= own for arch in built
        )
        if same or newer or not numbers:
            yield ok("DS-GPU-012", f"GPU {index} is {device['name']} (sm_{own}).")
            continue
        yield failed(
            "DS-GPU-012",
            f"GPU {index}, {device['name']}, is sm_{own}, and torch was compiled for {', '.join(built)}.",
            cause="the GPU is newer or much older than this build of torch.",
            fix=to_copy(
                "Install a build that supports it:",
                "pip install --upgrade torch --index-url https://download.pytorch.org/whl/cu128",
            ),
        )


_GIB: Final = 1 << 30
_PROHIBITED, _EXCLUSIVE = 2, 3  # of nvmlComputeMode_t
_IDLE_BYTES: Final = 2 * _GIB  # less memory in use than this is not worth a warning
_CONTEXT_BYTES: Final = _GIB  # allowance for the CUDA context of the torch probe itself


def check_driver_answers(subject: Subject) -> Iterator[Finding]:
    """Check whether the driver can be queried at all."""
    del subject
    if not count_device_nodes():
        return
    error = find_driver_error()
    if error is None:
        yield ok("DS-GPU-013", "The driver answers.")
        return
    # A package that is not installed says nothing about the GPUs, so it is only a warning.
    is_missing = isinstance(error, ImportError)
    problem = "nvidia-ml-py is not installed" if is_missing else error
    make = warning if is_missing else failed
    yield make(
        "DS-GPU-013",
        f"The driver cannot be queried about the GPUs: {problem}. Compute mode, memory in use, "
        "memory errors and links were not checked.",
        cause="the extra `gpu` is not installed."
        if is_missing
        else "the library and the kernel module of the driver differ (after an upgrade without a "
        "reboot), or the container lacks the driver's library.",
        fix=to_copy(
            "Install it:", f"{shlex.quote(sys.executable)} -m pip install 'nvidia-ml-py>=12.535'"
        )
        if is_missing
        else to_copy("See what the driver reports; after an upgrade, reboot:", "nvidia-smi"),
    )


def check_compute_mode(subject: Subject) -> Iterator[Finding]:
    """Check whether the compute mode of the GPUs admits the ranks."""
    del subject
    for gpu in read_health():
        if gpu.compute_mode == _PROHIBITED:
            yield _mode(gpu, "prohibited: no process may compute on it")
        elif gpu.compute_mode == _EXCLUSIVE and gpu.pids:
            pids = ", ".join(map(str, gpu.pids))
            yield _mode(gpu, f"exclusive, and process {pids} uses it")
        elif gpu.compute_mode is not None:
            yield ok("DS-GPU-005", f"GPU {gpu.index} ({gpu.name}) accepts ranks.")


def _mode(gpu: Health, what: str) -> Finding:
    return failed(
        "DS-GPU-005",
        f"The compute mode of GPU {gpu.index} ({gpu.name}) is {what}.",
        cause="an administrator set it, or a scheduler did and did not reset it.",
        fix=to_copy("Reset it:", f"nvidia-smi -i {gpu.index} -c DEFAULT"),
    )


def check_memory(subject: Subject) -> Iterator[Finding]:
    """Check for memory of the GPUs that other processes use."""
    # Without nvidia-ml-py, torch still knows how much is in use, but not which processes use it.
    for gpu in read_health() or _as_torch_sees(subject):
        if gpu.used_bytes is None or gpu.total_bytes is None:
            continue
        if gpu.used_bytes < _IDLE_BYTES:
            memory = f"{gpu.used_bytes / _GIB:.1f} of {gpu.total_bytes / _GIB:.1f} GiB"
            yield ok("DS-GPU-006", f"GPU {gpu.index}: {memory} in use.", used_bytes=gpu.used_bytes)
        else:
            holders = [text for pid in gpu.pids if (text := _describe(pid))]
            yield warning(
                "DS-GPU-006",
                f"GPU {gpu.index}: {gpu.used_bytes / _GIB:.1f} of {gpu.total_bytes / _GIB:.1f} GiB are already "
                f"in use by {', '.join(holders) or 'processes that are not visible from here'}.",
                cause="another job, a notebook, or ranks that an earlier run left behind.",
                fix=to_copy(
                    "Use other GPUs, or end the processes that are yours:",
                    "nvidia-smi",
                    *(f"kill {pid}   # if it is yours" for pid in gpu.pids[:4]),
                ),
                used_bytes=gpu.used_bytes,
                pids=list(gpu.pids),
            )


def _as_torch_sees(subject: Subject) -> list[Health]:
    results = probe_results(subject).get("run_kernels") or []
    return [
        Health(
            index=index,
            total_bytes=kernel["total_bytes"],
            # The context was the probe's, which has ended.
            used_bytes=max(0, kernel["total_bytes"] - kernel["free_bytes"] - _CONTEXT_BYTES),
        )
        for index, kernel in enumerate(results if isinstance(results, list) else [])
        if "free_bytes" in kernel
    ]


def _describe(pid: int) -> str | None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        mine = ", this one" if pid == os.getpid() else ""
        return f"process {pid} of {process.username()} ({process.name()}{mine})"
    return None


def check_errors(subject: Subject) -> Iterator[Finding]:
    """Check the memory error counters of the GPUs."""
    del subject
    for gpu in read_health():
        if not gpu.uncorrected_errors and not gpu.remapping:
            yield ok("DS-GPU-007", f"GPU {gpu.index} has no memory errors.")
            continue
        what = (
            f"{gpu.uncorrected_errors} uncorrectable memory errors"
            if gpu.uncorrected_errors
            else "a memory row whose remapping is pending or has failed"
        )
        yield failed(
            "DS-GPU-007",
            f"GPU {gpu.index} ({gpu.name}) has {what}.",
            cause="the memory is failing; jobs on it die with `uncorrectable ECC error`, Xid 48 or 63.",
            fix=to_copy(
                "Drain the host, reset the GPU when it is idle, and have it replaced if the error returns:",
                f"nvidia-smi -i {gpu.index} -q -d ECC,ROW_REMAPPER",
                f"nvidia-smi -i {gpu.index} --gpu-reset",
            ),
        )


def check_links(subject: Subject) -> Iterator[Finding]:
    """Check whether the GPUs can access each other's memory."""
    del subject
    gpus = read_health()
    if len(gpus) < 2:  # noqa: PLR2004 - a pair
        return
    unlinked = find_unlinked()
    if not unlinked:
        yield ok("DS-GPU-008", f"All {len(gpus)} GPUs reach each other directly.")
        return
    pairs = ", ".join(f"{a} and {b}" for a, b in unlinked[:6])
    yield warning(
        "DS-GPU-008",
        f"GPUs {pairs}{' and others' if len(unlinked) > 6 else ''} do not reach each other directly; "  # noqa: PLR2004 - as shown
        "NCCL goes through the host's memory.",
        cause="consumer cards, GPUs on two sockets, virtual machines, or ACS switched on.",
        fix=to_copy(
            "This works, but slowly; see how they are connected:",
            "nvidia-smi topo -p2p r",
            "nvidia-smi topo -m",
        ),
    )


CHECKS: Final[tuple[Check, ...]] = (
    check_seen,
    check_visible,
    check_enough,
    check_driver,
    check_kernels,
    check_architecture,
    check_driver_answers,
    check_compute_mode,
    check_memory,
    check_errors,
    check_links,
)
