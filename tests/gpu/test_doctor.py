"""The doctor on a machine with GPUs: what it says there, and that it raises no alarm."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from ddpsafe import doctor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs at least one CUDA device; torch sees none"
    ),
]


def test_healthy_gpus_compute_reduce_and_raise_no_alarm() -> None:
    """A kernel, a copy where there are two, and an NCCL all-reduce of one on every GPU."""
    report = doctor.run(checks={"GPU", "VER"})
    said = {finding.code: finding for finding in report.findings}
    assert report.failed == ()
    expected = {"DS-GPU-001", "DS-GPU-009", "DS-GPU-010", "DS-GPU-012"}
    assert expected <= {code for code, finding in said.items() if finding.severity == "ok"}


@pytest.mark.skipif(find_spec("pynvml") is None, reason="needs nvidia-ml-py")
def test_driver_is_asked_about_every_gpu() -> None:
    """Driver, compute mode, memory and errors come from NVML."""
    codes = [finding.code for finding in doctor.run(checks={"GPU"}).findings]
    for code in ("DS-GPU-004", "DS-GPU-005", "DS-GPU-006", "DS-GPU-007", "DS-GPU-013"):
        assert code in codes


def test_more_ranks_than_gpus_are_refused() -> None:
    """Nccl wants a GPU for each rank."""
    ranks = torch.cuda.device_count() + 1
    report = doctor.run(checks={"GPU"}, nproc_per_node=ranks, backend="nccl")
    assert "DS-GPU-003" in {finding.code for finding in report.failed}
