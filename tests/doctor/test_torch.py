"""torch: missing, broken, hanging, old; and GPUs that no test machine has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import pytest
from doctor_kit import (
    Found,
    examine,
    lines_to_copy,
    needs_namespaces,
    write_package,
    write_pynvml,
    write_torch,
)


def shadow(folder: Path, source: str) -> dict[str, str]:
    """Write a torch.py that shadows the real one; return the variable that makes Python find it."""
    (folder / "torch.py").write_text(source, encoding="utf-8")
    return {"PYTHONPATH": str(folder)}


# A torch that cannot be imported.


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", "libcudart"),
        ("import no_such_dependency", "no_such_dependency"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("raise SystemExit(3)", "SystemExit"),
    ],
)
def test_doctor_runs_where_torch_is_broken_and_reports_it(
    source: str, says: str, tmp_path: Path
) -> None:
    """Everything else is still checked."""
    found = examine("VER", "GPU", "LIM", env=shadow(tmp_path, source))
    assert found.severity("DS-VER-001") == "failed"
    assert says in found.of("DS-VER-001")["fact"]
    found.of("DS-LIM-002")  # whatever the limits of this user are


def test_torch_file_in_the_current_directory_is_reported(tmp_path: Path) -> None:
    """A training script named torch.py breaks every script beside it."""
    shadow(tmp_path, "raise ImportError('this is my script')")
    found = examine("VER", folder=tmp_path).of("DS-VER-001")
    assert "this is my script" in found["fact"]
    assert lines_to_copy(found) == [f"mv {tmp_path}/torch.py {tmp_path}/my_torch.py"]


def test_import_that_hangs_is_stopped_at_the_deadline(tmp_path: Path) -> None:
    """A driver that does not answer delays nothing else and leaves no process behind."""
    source = "import threading; threading.Event().wait()"
    found = examine("VER", env=shadow(tmp_path, source), timeout_s=1)
    assert found.severity("DS-VER-001") == "warning"
    assert "has not finished after 1 s" in found.of("DS-VER-001")["fact"]
    assert found.report["took_s"] < 5


def test_real_torch_is_imported_and_described() -> None:
    """The reported version is that of the installed torch."""
    from importlib.metadata import version

    found = examine("VER", "GPU")
    assert found.of("DS-VER-001")["details"]["version"].startswith(version("torch").split("+")[0])
    assert found.of("DS-VER-001")["details"]["gloo"] is True


# Versions that do not fit; a stand-in reports them.


def stand_in_torch(folder: Path, **facts: Any) -> dict[str, str]:
    """Write the stand-in; return the variable that makes Python find it."""
    write_torch(folder, **facts)
    return {"PYTHONPATH": str(folder)}


def test_two_packages_of_nccl_are_a_warning(tmp_path: Path) -> None:
    """The line to copy uninstalls both."""
    write_package(tmp_path, "nvidia-nccl-cu12", "2.21.5")
    write_package(tmp_path, "nvidia-nccl-cu13", "2.27.5")
    found = examine("VER", env=stand_in_torch(tmp_path))
    assert found.severity("DS-VER-003") == "warning"
    assert "uninstall -y nvidia-nccl-cu12 nvidia-nccl-cu13" in found.of("DS-VER-003")["fix"]


def test_torchvision_built_for_another_torch_is_a_warning(tmp_path: Path) -> None:
    """Only one of the two was upgraded."""
    write_package(tmp_path, "torchvision", "0.20.0", "numpy", "torch==2.5.0")
    found = examine("VER", env=stand_in_torch(tmp_path, version="2.13.0+cpu"))
    assert "built for torch 2.5.0, and torch 2.13.0" in found.of("DS-VER-004")["fact"]
    write_package(tmp_path / "right", "torchvision", "0.28.0", "torch==2.13.0")
    path = {"PYTHONPATH": f"{tmp_path}/right{os.pathsep}{tmp_path}"}
    assert examine("VER", env=path).severity("DS-VER-004") == "ok"


# GPUs, as a driver would report them.

TWO_GPUS: Final = """
mkdir -p {0} && mount -t tmpfs tmpfs {0}
cp -a /dev/null /dev/zero /dev/urandom /dev/random {0}/
mkdir {0}/shm && mount --bind {0} /dev
touch /dev/nvidia0 /dev/nvidia1 /dev/nvidiactl
"""


def on_two_gpus(
    folder: Path, torch: dict[str, Any], driver: dict[str, Any] | None = None, **fields: Any
) -> Found:
    """Examine a host whose driver has created two devices."""
    env = stand_in_torch(folder, **torch)
    if driver is not None:
        write_pynvml(folder, **driver)
    variables = fields.pop("env", {})
    host = TWO_GPUS.format(folder / "dev")
    return examine("VER", "GPU", host=host, env={**env, **variables}, **fields)


@needs_namespaces
def test_gpus_that_torch_does_not_see_are_a_warning_or_if_requested_a_failure(
    tmp_path: Path,
) -> None:
    """A CPU build trains on the CPU, which is a failure only if GPUs were requested."""
    found = on_two_gpus(tmp_path / "a", {})
    assert found.severity("DS-GPU-001") == "warning"
    assert (
        "this machine has 2: torch 2.13.0 is built without CUDA" in found.of("DS-GPU-001")["fact"]
    )
    meant = on_two_gpus(tmp_path / "b", {}, nproc_per_node="gpu")
    assert "pip install" in meant.of("DS-GPU-001")["fix"]
    assert meant.severity("DS-GPU-001") == "failed"


@pytest.mark.full
@needs_namespaces
@pytest.mark.parametrize("text", ["0,7", "0,0", "0, x"])
def test_visible_devices_that_do_not_exist_fail(text: str, tmp_path: Path) -> None:
    """CUDA drops them silently; the copied line names one that exists."""
    found = on_two_gpus(tmp_path, {"cuda": "12.8"}, env={"CUDA_VISIBLE_DEVICES": text})
    assert found.severity("DS-GPU-002") == "failed"
    assert lines_to_copy(found.of("DS-GPU-002")) == ["export CUDA_VISIBLE_DEVICES=0"]


def test_hanging_kernel_is_stopped_at_the_deadline(tmp_path: Path) -> None:
    """A GPU that does not answer delays nothing, and earlier findings are kept."""
    facts = {"cuda": "12.8", "count": 1, "capability": [9, 0], "kernel": "hangs"}
    found = examine("GPU", env=stand_in_torch(tmp_path, **facts), timeout_s=2)
    assert found.severity("DS-GPU-001") == "ok"
    assert "running a kernel has not finished after 2 s" in found.of("DS-GPU-009")["fact"]
    assert found.report["took_s"] < 6


@needs_namespaces
def test_missing_nvidia_ml_py_is_a_warning(tmp_path: Path) -> None:
    """Without it DS-GPU-004 to DS-GPU-008 cannot be checked."""
    found = on_two_gpus(tmp_path, {"cuda": "12.8"}, {"missing": True})
    assert found.severity("DS-GPU-013") == "warning"
    broken = on_two_gpus(tmp_path / "b", {"cuda": "12.8"}, {"error": "Driver/library mismatch"})
    assert broken.severity("DS-GPU-013") == "failed"


@needs_namespaces
@pytest.mark.parametrize(
    ("driver", "code", "severity", "says"),
    [
        ({"cuda": 12080}, "DS-GPU-004", "ok", "supports CUDA 12.8; torch needs 12.9"),
        ({"cuda": 11040}, "DS-GPU-004", "failed", "torch was built for CUDA 12.9"),
        ({"mode": 2}, "DS-GPU-005", "failed", "no process may compute"),
        ({"mode": 3, "pids": [1]}, "DS-GPU-005", "failed", "process 1 uses it"),
        ({"used": 5 << 30, "pids": [1]}, "DS-GPU-006", "warning", "5.0 of 80.0 GiB are already in use"),
        ({"errors": 3}, "DS-GPU-007", "failed", "3 uncorrectable memory errors"),
        ({"remapped": [0, 0, 1, 0]}, "DS-GPU-007", "failed", "remapping is pending"),
        ({"linked": False}, "DS-GPU-008", "warning", "GPUs 0 and 1 do not reach"),
    ],
)  # fmt: skip
def test_facts_of_the_driver_are_checked(
    driver: dict[str, Any], code: str, severity: str, says: str, tmp_path: Path
) -> None:
    """A stand-in for the driver's library reports GPUs that no test machine has."""
    found = on_two_gpus(tmp_path, {"cuda": "12.9"}, driver)
    assert (found.severity(code), says in found.of(code)["fact"]) == (severity, True), found.of(
        code
    )


@needs_namespaces
def test_healthy_driver_has_no_findings(tmp_path: Path) -> None:
    """Two healthy GPUs pass every check."""
    found = on_two_gpus(tmp_path, {"cuda": "12.9", "count": 2, "capability": [9, 0]}, {})
    codes = {line.split()[1].rstrip(":") for line in found.problems()}
    assert codes <= {"DS-GPU-009", "DS-GPU-011"}  # the stand-in for torch computes nothing


ONE: Final = {"cuda": "12.8", "count": 1, "capability": [9, 0]}
NEW: Final = {"cuda": "12.4", "count": 1, "capability": [12, 0]}
# fmt: off
STAND_INS: Final[dict[str, tuple[dict[str, Any], dict[str, Any], str, str, str]]] = {
    # the facts of torch, the fields of the launch, a code, its severity, and a part of its text
    "older than the minimum": ({"version": "2.5.1"}, {}, "DS-VER-002", "failed", "torch 2.5.1 is older than 2.6"),
    # weights_only=True is reliable from 2.10 on
    "its load may run code": ({"version": "2.9.1"}, {}, "DS-VER-006", "warning", ""),
    "its load runs none": ({"version": "2.10.0"}, {}, "DS-VER-006", "ok", ""),
    "nor in a newer one": ({"version": "2.13.0+cpu"}, {}, "DS-VER-006", "ok", ""),
    "built without NCCL": ({}, {"backend": "nccl"}, "DS-VER-005", "failed", "was built without nccl"),
    # a package that the script imports may register it, so the doctor cannot be sure
    "an unknown backend": ({}, {"backend": "foo"}, "DS-VER-005", "warning", "no backend called 'foo'"),
    "a backend of a device": ({}, {"backend": "cpu:gloo"}, "DS-VER-005", "ok", ""),
    "two ranks on one GPU": (ONE, {"nproc_per_node": 2, "backend": "nccl"},
        "DS-GPU-003", "failed", "2 ranks with nccl need 2 GPUs"),
    "a kernel fails": ({**ONE, "count": 2, "kernel": "CUDA error: uncorrectable"}, {},
        "DS-GPU-009", "failed", "GPU 0: running a kernel fails: RuntimeError: CUDA error"),
    "copies between two GPUs fail": ({**ONE, "count": 2, "kernel": "CUDA error: uncorrectable"}, {},
        "DS-GPU-011", "failed", ""),
    "a kernel runs": ({**ONE, "kernel": "works"}, {}, "DS-GPU-009", "ok", ""),
    "memory is in use": ({**ONE, "kernel": "works"}, {}, "DS-GPU-006", "warning", "69.0 of 80.0 GiB are already in use"),
    "no image for the GPU": ({**NEW, "arch_list": ["sm_80", "sm_90"]}, {},
        "DS-GPU-012", "failed", "is sm_120, and torch was compiled for sm_80, sm_90"),
    "an image that can be compiled": ({**NEW, "arch_list": ["sm_80", "compute_90"]}, {}, "DS-GPU-012", "ok", ""),
}
# fmt: on


@pytest.mark.parametrize("what", STAND_INS)
def test_facts_of_torch_are_checked(what: str, tmp_path: Path) -> None:
    """A stand-in for torch reports versions, builds and GPUs that no test machine has."""
    torch, fields, code, severity, says = STAND_INS[what]
    found = examine("VER", "GPU", env=stand_in_torch(tmp_path, **torch), **fields)
    assert (found.severity(code), says in found.of(code)["fact"]) == (severity, True), found.of(
        code
    )
