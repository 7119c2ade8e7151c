"""GPUs as torch sees them: how many, which driver, and whether they compute and reduce."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, Final

from ddpsafe.doctor._checks.versions import ask
from ddpsafe.doctor._report import Finding, failed, ok, to_copy, warning
from ddpsafe.doctor._system.nvidia import count_device_nodes, read_driver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._context import Subject

_STAGES: Final = {
    "list_devices": ("DS-GPU-001", "counting the GPUs"),
    "run_kernels": ("DS-GPU-009", "running a kernel"),
    "copy_between": ("DS-GPU-011", "copying from GPU to GPU"),
    "reduce_alone": ("DS-GPU-010", "an NCCL all-reduce of one rank"),
}


def check_seen(subject: Subject) -> Iterator[Finding]:
    """Compare the GPUs that torch sees with those that the machine has."""
    said = ask(subject)
    about, there = said.get("describe"), count_device_nodes()
    if about is None:
        return
    seen = int(said.get("list_devices", {}).get("count", 0))
    if seen or (not there and not subject.wants_gpus):
        yield ok(
            "DS-GPU-001",
            f"torch sees {seen} GPUs." if seen else "This machine has no GPU.",
            count=seen,
        )
        return
    make = failed if subject.wants_gpus else warning
    what, fix = _why_unseen(subject, said, there)
    yield make(
        "DS-GPU-001",
        f"torch sees no GPU, and this machine has {there or 'none'}: {what}.",
        cause="the build of torch, the driver, or a variable keeps them from torch.",
        fix=fix,
        device_nodes=there,
    )


def _why_unseen(subject: Subject, said: dict[str, Any], there: int) -> tuple[str, str]:
    about, hidden = said["describe"], subject.env.get("CUDA_VISIBLE_DEVICES")
    if not there:
        what = "no driver has made a device"
        lines = ("nvidia-smi", "docker run --gpus all …", "export DDPSAFE_BACKEND=gloo")
        return what, to_copy(
            "See what the driver says, start the container with its GPUs, or take gloo:", *lines
        )
    if about.get("cuda") is None and about.get("hip") is None:
        index = "https://download.pytorch.org/whl/cu128"
        line = f"{sys.executable} -m pip install --force-reinstall torch --index-url {index}"
        what = f"torch {about.get('version')} is built without CUDA"
        return what, to_copy("Install a build with CUDA:", line)
    if hidden is not None:
        what = f"CUDA_VISIBLE_DEVICES={hidden!r} hides them"
        return what, to_copy("Show them:", "unset CUDA_VISIBLE_DEVICES")
    what = said.get("list_devices", {}).get("error") or "the driver does not answer"
    return what, to_copy("See what the driver says:", "nvidia-smi", "dmesg | grep -i nvrm | tail")


def check_visible(subject: Subject) -> Iterator[Finding]:
    """Judge CUDA_VISIBLE_DEVICES: the first entry that is wrong ends the list without a word."""
    text = subject.env.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return
    items = [item.strip() for item in text.split(",")]
    there = count_device_nodes()
    twice = {item for item in items if items.count(item) > 1}
    numbers = [int(item) for item in items if item.isdecimal()]
    odd = [item for item in items if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", item)]
    absent = [str(number) for number in numbers if there and number >= there]
    if text in {"", "-1"} or not (twice or odd or absent):
        yield ok("DS-GPU-002", f"CUDA_VISIBLE_DEVICES={text!r} can be read.")
        return
    wrong = ", ".join(sorted({*odd, *absent, *twice}))
    good = [item for item in dict.fromkeys(items) if item not in {*odd, *absent}]
    make = failed if there else warning
    yield make(
        "DS-GPU-002",
        f"CUDA_VISIBLE_DEVICES={text!r}: {wrong!r} is not a GPU of this host or is listed twice; CUDA drops "
        "it and everything behind it without a word.",
        cause="a value from another machine, blanks or brackets in it, or a GPU that fell off the bus.",
        fix=to_copy(
            "Name GPUs that exist, each once:",
            f"export CUDA_VISIBLE_DEVICES={','.join(good) or '0'}",
        ),
    )


def check_enough(subject: Subject) -> Iterator[Finding]:
    """Compare the GPUs with the ranks, which NCCL wants to have one each."""
    listed = ask(subject).get("list_devices", {})
    asked = subject.config.nproc_per_node
    if "count" not in listed or not isinstance(asked, int) or "nccl" not in subject.config.backend:
        return
    if asked <= listed["count"]:
        yield ok("DS-GPU-003", f"{asked} ranks have {listed['count']} GPUs.")
        return
    yield failed(
        "DS-GPU-003",
        f"{asked} ranks with nccl need {asked} GPUs, and torch sees {listed['count']}.",
        cause="nccl refuses two ranks on one GPU; CUDA_VISIBLE_DEVICES may hide others.",
        fix=to_copy(
            "Start one rank for each, or take gloo:",
            "export DDPSAFE_NPROC_PER_NODE=gpu",
            "export DDPSAFE_BACKEND=gloo",
        ),
    )


def check_driver(subject: Subject) -> Iterator[Finding]:
    """Compare the CUDA that the driver can do with the one torch was built for."""
    built = ask(subject).get("describe", {}).get("cuda")
    driver = read_driver()
    if not built or driver is None:
        return
    wanted, most = tuple(map(int, built.split(".")[:2])), driver.cuda
    shown = ".".join(map(str, most))
    if wanted <= most or wanted[0] == most[0]:  # within a major version CUDA is compatible
        yield ok("DS-GPU-004", f"Driver {driver.version} can do CUDA {shown}; torch needs {built}.")
        return
    yield failed(
        "DS-GPU-004",
        f"Driver {driver.version} can do CUDA {shown}, and torch was built for CUDA {built}.",
        cause="pip installs the newest build of torch, whatever the driver is.",
        fix=to_copy(
            "Install a build for the driver, or a newer driver:",
            f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu{most[0]}{most[1]}",
        ),
    )


def check_kernels(subject: Subject) -> Iterator[Finding]:
    """Say what became of a kernel, a copy and an all-reduce on the GPUs."""
    said = ask(subject)
    if not said.get("list_devices", {}).get("count"):
        return
    if said["timed_out"] or said.get("stage") != "end":
        yield _stuck(said)
    for stage in ("run_kernels", "copy_between", "reduce_alone"):
        code, what = _STAGES[stage]
        results = said.get(stage, [])
        results = [results] if isinstance(results, dict) else results
        wrong = {index: each for index, each in enumerate(results) if not each.get("ok")}
        for index, each in wrong.items():
            yield _broken(code, what, index, each)
        if results and not wrong:
            yield ok(code, f"{what.capitalize()} works on {len(results)} GPUs.")


def _stuck(said: dict[str, Any]) -> Finding:
    code, what = _STAGES.get(str(said.get("stage")), ("DS-GPU-009", "using the GPUs"))
    how = (
        f"has not ended after {said['waited_s']:.0f} s"
        if said["timed_out"]
        else f"ended the process (exit code {said['returncode']})"
    )
    return failed(
        code,
        f"On the GPUs, {what} {how}.",
        cause="a GPU that hangs, peer-to-peer traffic held up by the IOMMU (ACS), or a driver that "
        "does not fit the fabric manager.",
        fix=to_copy(
            "Look at the kernel's log and the GPUs, then try without peer-to-peer:",
            "dmesg | grep -i -e xid -e nvrm | tail",
            "nvidia-smi",
            "export NCCL_P2P_DISABLE=1",
        ),
    )


def _broken(code: str, what: str, index: int, result: dict[str, Any]) -> Finding:
    return failed(
        code,
        f"GPU {index}: {what} fails: {result.get('error', 'the result is wrong')}.",
        cause="a GPU in a bad state, no memory left on it, a driver that does not fit, or broken "
        "peer-to-peer traffic.",
        fix=to_copy(
            "Look at it, and leave it out until it is repaired:",
            "nvidia-smi -q -d ECC,PAGE_RETIREMENT,PERFORMANCE",
            f"dmesg | grep -i xid | tail   # then CUDA_VISIBLE_DEVICES without {index}",
        ),
        gpu=index,
    )


def check_architecture(subject: Subject) -> Iterator[Finding]:
    """Look whether torch was compiled for GPUs of this generation."""
    listed = ask(subject).get("list_devices", {})
    devices, built = listed.get("devices") or [], listed.get("arch_list") or []
    numbers = [
        int(found[1]) for arch in built if (found := re.match(r"(?:sm|compute)_(\d+)", arch))
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
                "Install a build for it:",
                "pip install --upgrade torch --index-url https://download.pytorch.org/whl/cu128",
            ),
        )


CHECKS: Final[tuple[Check, ...]] = (
    check_seen,
    check_visible,
    check_enough,
    check_driver,
    check_kernels,
    check_architecture,
)
