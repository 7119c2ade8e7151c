"""The doctor on a machine with GPUs: what it checks, and that healthy ones give no finding."""

from __future__ import annotations

import pytest
import torch

from ddpsafe import doctor

pytestmark = pytest.mark.gpu


@pytest.mark.gpu("its values")
def test_healthy_gpus_give_no_finding() -> None:
    """Each GPU runs a kernel and a one-rank NCCL all-reduce, and two or more exchange a copy."""
    report = doctor.run(checks={"GPU", "VER"})
    said = {finding.code: finding for finding in report.findings}
    assert report.failed == ()
    expected = {"DS-GPU-001", "DS-GPU-009", "DS-GPU-010", "DS-GPU-012"}
    assert expected <= {code for code, finding in said.items() if finding.severity == "ok"}


@pytest.mark.gpu("its values")
def test_driver_reports_on_every_gpu() -> None:
    """Driver version, compute mode, memory and errors come from NVML."""
    pytest.importorskip("pynvml")
    codes = [finding.code for finding in doctor.run(checks={"GPU"}).findings]
    for code in ("DS-GPU-004", "DS-GPU-005", "DS-GPU-006", "DS-GPU-007", "DS-GPU-013"):
        assert code in codes


def test_more_ranks_than_gpus_are_refused() -> None:
    """NCCL needs one GPU for each rank."""
    ranks = torch.cuda.device_count() + 1
    report = doctor.run(checks={"GPU"}, nproc_per_node=ranks, backend="nccl")
    assert "DS-GPU-003" in {finding.code for finding in report.failed}
