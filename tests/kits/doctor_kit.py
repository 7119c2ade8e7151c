"""Examines hosts that tests have broken by variables, limits, mounts, networks or packages."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import machine
import pytest
import scripts

LIMIT_S: Final = machine.hang_limit(60)


@dataclass(frozen=True, slots=True)
class Found:
    """The findings of a doctor in another process."""

    report: dict[str, Any]

    def of(self, code: str) -> dict[str, Any]:
        """Return the worst finding with a code; one must exist."""
        found = [each for each in self.report["findings"] if each["code"] == code]
        assert found, f"{code} is not among {[each['code'] for each in self.report['findings']]}"
        return found[0]

    def severity(self, code: str) -> str:
        """Return the severity of the worst finding with a code."""
        return str(self.of(code)["severity"])

    def problems(self) -> list[str]:
        """Return all findings that are not ok."""
        found = [each for each in self.report["findings"] if each["severity"] != "ok"]
        return [f"{each['severity']} {each['code']}: {each['fact']}" for each in found]


def lines_to_copy(finding: Mapping[str, Any]) -> list[str]:
    """Return the lines of a fix that can be copied as they are."""
    return [line.strip() for line in finding["fix"].splitlines() if line.startswith("    ")]


class Server:
    """The process that forks a host for each examination."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("doctor_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=scripts.clean_environment(),
            text=True,
        )
        self._read()

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Request one examination; return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        assert "error" not in answer, answer["error"]
        return dict(answer["report"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], LIMIT_S)
        assert ready, f"no answer within {LIMIT_S} s"
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


_servers: list[Server] = []


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Keep the server while the context is open."""
    _servers.append(Server())
    try:
        yield
    finally:
        _servers.pop().close()


def examine(
    *checks: str,
    host: str | None = None,
    before: str = "",
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    timeout_s: float = 30,
    **fields: Any,
) -> Found:
    """Run the doctor in a new process, with variables on top of this one's and fields of the configuration.

    `host` is shell that makes a host of new namespaces, in which only loopback is up; without it, this host
    is examined. `before` is Python that the process runs first.
    """
    asked = {
        "checks": list(checks) or "all",
        "host": host,
        "before": before,
        "env": {**scripts.clean_environment(), **(env or {})},
        "path": (env or {}).get("PYTHONPATH", "").split(os.pathsep),
        "folder": None if folder is None else str(folder),
        "timeout_s": timeout_s,
        "fields": fields,
    }
    return Found(_servers[-1].ask(asked))


def _may_unshare() -> bool:
    shell = "ip link add name here0 type veth peer name there0"
    try:
        run = subprocess.run(
            ["unshare", "--mount", "--uts", "--net", "sh", "-c", shell],
            check=False,
            capture_output=True,
            timeout=LIMIT_S,
        )
    except OSError:
        return False
    return run.returncode == 0


needs_namespaces: Final = pytest.mark.skipif(
    os.environ.get("DDPSAFE_REQUIRE_HOSTS") != "1" and not _may_unshare(),
    reason="needs root, to make network and mount namespaces, and ip",
)


def write_package(folder: Path, name: str, version: str, *requires: str) -> None:
    """Write the metadata of a package that pip would have installed."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_torch(folder: Path, **facts: Any) -> None:
    """Write a package named torch that reports `facts` of another machine.

    It stands for GPUs and builds that no test machine has; it computes nothing.
    """
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "distributed.py").write_text(
        "from torch import FACTS\n"
        "is_available = lambda: True\n"
        "is_gloo_available = lambda: FACTS.get('gloo', True)\n"
        "is_nccl_available = lambda: False\n"
        "class Backend: backend_list = ['undefined', 'gloo', 'nccl', 'ucc', 'mpi']\n",
        encoding="utf-8",
    )
    (folder / "torch" / "__init__.py").write_text(
        f"""
FACTS = {facts!r}
__version__ = FACTS.get("version", "2.13.0")
class version: cuda, hip = FACTS.get("cuda"), None
class cuda:
    device_count = staticmethod(lambda: FACTS.get("count", 0))
    get_arch_list = staticmethod(lambda: FACTS.get("arch_list", []))
    get_device_name = staticmethod(lambda index: "a GPU")
    get_device_capability = staticmethod(lambda index: FACTS["capability"])
    mem_get_info = staticmethod(lambda index: (10 << 30, 80 << 30))
    can_device_access_peer = staticmethod(lambda a, b: True)
get_num_threads = lambda: 1
class Ones:
    def __mul__(self, other): return self
    def sum(self): return 2048.0
def ones(*args, **kwargs):
    if FACTS.get("kernel") == "hangs": __import__("threading").Event().wait()
    if FACTS.get("kernel") == "works": return Ones()
    raise RuntimeError(FACTS.get("kernel", "no GPU"))
arange = ones
""",
        encoding="utf-8",
    )


def write_pynvml(folder: Path, **facts: Any) -> None:
    """Write a module named pynvml that reports `facts` of two identical GPUs."""
    if facts.get("missing"):
        (folder / "pynvml.py").write_text("raise ImportError('pynvml')\n", encoding="utf-8")
        return
    (folder / "pynvml.py").write_text(
        f"""
from types import SimpleNamespace as Facts
FACTS = {facts!r}
NVML_P2P_CAPS_INDEX_READ = NVML_P2P_STATUS_OK = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
def nvmlInit():
    if "error" in FACTS: raise RuntimeError(FACTS["error"])
def nvmlShutdown(): pass
nvmlSystemGetDriverVersion = lambda: b"570.1"
nvmlSystemGetCudaDriverVersion = lambda: FACTS.get("cuda", 12090)
nvmlDeviceGetCount = lambda: 2
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetName = lambda handle: "a GPU"
nvmlDeviceGetComputeMode = lambda handle: FACTS.get("mode", 0)
nvmlDeviceGetMemoryInfo = lambda handle: Facts(total=80 << 30, used=FACTS.get("used", 1 << 20))
nvmlDeviceGetComputeRunningProcesses = lambda handle: [Facts(pid=p) for p in FACTS.get("pids", [])]
nvmlDeviceGetTotalEccErrors = lambda handle, kind, counter: FACTS.get("errors", 0)
nvmlDeviceGetRemappedRows = lambda handle: FACTS.get("remapped", [0, 0, 0, 0])
nvmlDeviceGetP2PStatus = lambda a, b, kind: 0 if FACTS.get("linked", True) else 4
""",
        encoding="utf-8",
    )
