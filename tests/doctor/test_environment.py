"""Variables: leftovers of launchers, typing errors, and fixes that work when they are copied."""

from __future__ import annotations

import subprocess
from pathlib import Path

import doctor_kit
import pytest
import scripts

from ddpsafe import doctor
from ddpsafe.doctor import Finding, Report

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def worst(report: Report, code: str) -> Finding:
    """Return the worst finding of a code."""
    return next(finding for finding in report.findings if finding.code == code)


@pytest.mark.parametrize(
    ("variables", "code", "severity", "says"),
    [
        ({"RANK": "0"}, "DS-ENV-001", "failed", "WORLD_SIZE is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "DS-ENV-001", "failed", "RANK is 2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "DS-ENV-001", "failed", "not an integer"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "DS-ENV-002", "warning", "starts none"),
        ({"WORLD_SIZE": "2"}, "DS-ENV-002", "warning", "WORLD_SIZE='2'"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, "DS-ENV-002", "warning", "AGENT_STORE"),
        ({"MASTER_ADDR": "gpu-01\n"}, "DS-ENV-003", "failed", "blanks or line breaks"),
        ({"MASTER_ADDR": "[fd00::1]"}, "DS-ENV-003", "warning", "brackets"),
        ({"MASTER_ADDR": "[gpu-01]"}, "DS-ENV-003", "failed", "brackets"),
        ({"MASTER_ADDR": "gpu-01:29500"}, "DS-ENV-003", "failed", "neither a host name"),
        ({"MASTER_ADDR": "6841231"}, "DS-ENV-003", "failed", "0.104.99.143"),
        ({"MASTER_ADDR": "tcp://gpu-01"}, "DS-ENV-003", "failed", "URL"),
        ({"MASTER_ADDR": "169.254.3.4"}, "DS-ENV-003", "failed", "link-local"),
        ({"MASTER_PORT": "80000"}, "DS-ENV-004", "failed", "1024 to 65535"),
        ({"MASTER_PORT": "29500 "}, "DS-ENV-004", "failed", "not a number"),
        ({"OMP_NUM_THREADS": "many"}, "DS-ENV-005", "warning", "not a number"),
        ({"OMP_NUM_THREADS": "4096"}, "DS-ENV-005", "warning", "cores"),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAILS"}, "DS-ENV-006", "failed", "not a level"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "DS-ENV-006", "warning", "waits for the kernel"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, "DS-ENV-006", "warning", "old name"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1 2"}, "DS-ENV-006", "warning", "old name"),
    ],
)
def test_variable_is_reported_and_the_copied_fix_repairs_it(
    variables: dict[str, str], code: str, severity: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finding names the variable; in a shell that ran its lines the check passes."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = worst(doctor.run(checks={"ENV"}), code)
    assert (found.severity, says in found.fact) == (severity, True), found
    lines = [line.strip() for line in found.fix.splitlines() if line.startswith("    ")]
    # Where several lines are alternatives, the last one that runs decides.
    script = "\n".join([*lines, "env -0"])
    shell = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=True)
    after = dict(entry.split("=", 1) for entry in shell.stdout.split("\0") if "=" in entry)
    for name in variables.keys() | NAMES:
        monkeypatch.delenv(name, raising=False)
        if name in after:
            monkeypatch.setenv(name, after[name])
    assert worst(doctor.run(checks={"ENV"}), code).severity == "ok", lines


def test_torch_really_rejects_the_debug_level_that_is_reported(tmp_path: Path) -> None:
    """An unknown TORCH_DISTRIBUTED_DEBUG ends a process that imports torch."""
    script = scripts.write(
        tmp_path,
        "script.py",
        """
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        """,
    )
    run = scripts.Script(
        [str(script)], folder=tmp_path, env={"TORCH_DISTRIBUTED_DEBUG": "DETAILS"}
    ).end()
    assert run.code != 0


def test_loopback_cannot_be_the_master_of_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single node may use loopback as its endpoint; two may not."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    two = {"nnodes": 2, "node_rank": 0, "rendezvous": {"endpoint": "10.0.0.7:29500"}}
    alone = doctor.run(checks={"ENV"})
    together = doctor.run(checks={"ENV"}, mesh=False, **two)  # type: ignore[arg-type]
    assert worst(alone, "DS-ENV-003").severity == "ok"
    assert "would connect to itself" in worst(together, "DS-ENV-003").fact


def test_an_unreadable_configuration_is_a_finding(tmp_path: Path) -> None:
    """The finding names the field, and the doctor continues with the defaults."""
    text = "[tool.ddpsafe]\nnproc_per_node = 0\n"
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    report = doctor.run(checks={"ENV", "PATH"})
    found = worst(report, "DS-ENV-007")
    assert "nproc_per_node" in found.fact
    assert worst(report, "DS-PATH-003").severity == "ok"


def test_variables_of_a_running_launcher_are_not_leftovers() -> None:
    """A rank of torchrun has all its variables, and no finding asks to unset them."""
    env = {
        "TORCHELASTIC_RUN_ID": "7",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    found = doctor_kit.examine("ENV", "PORT", env=env)
    assert found.problems() == []
    assert "Started by torchrun as rank 1" in found.of("DS-ENV-001")["fact"]
