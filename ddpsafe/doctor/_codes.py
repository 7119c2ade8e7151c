"""The code of every finding, with what it asks; each has a page, ``docs/findings/CODE.md``.

A code names a question and stays; the severity of a finding is the answer. Numbers are never
given twice, not even when a check goes.
"""

from __future__ import annotations

from typing import Final

from ddpsafe.doctor._mesh_codes import TITLES as MESH

ENVIRONMENT: Final = {
    "DS-ENV-001": "Variables of the launcher are complete and consistent",
    "DS-ENV-002": "No variables are left over from another launcher",
    "DS-ENV-003": "MASTER_ADDR is a host that the ranks can reach",
    "DS-ENV-004": "MASTER_PORT is a usable port",
    "DS-ENV-005": "Threads of all ranks fit the cores",
    "DS-ENV-006": "Debugging variables are meant",
    "DS-ENV-007": "The configuration can be read",
}
NAMES: Final = {
    "DS-NAME-001": "The name of this host leads to an address that others can reach",
    "DS-NAME-002": "The name of the meeting point resolves",
    "DS-NAME-003": "The name server answers at once",
}
PORTS: Final = {
    "DS-PORT-001": "The port of the meeting point is free",
    "DS-PORT-002": "The port of the meeting point is not one that the system hands out",
    "DS-PORT-003": "Enough ports are left to hand out",
}
NETWORK: Final = {
    "DS-NET-001": "Interface variables name interfaces of this host",
    "DS-NET-002": "The chosen interface is up and has an address",
    "DS-NET-003": "The chosen interface leads to the meeting point",
    "DS-NET-004": "The MTU is a usual one",
    "DS-NET-005": "It is clear which interface the ranks talk on",
    "DS-NET-006": "There is a network besides loopback",
    "DS-NET-007": "Loopback works",
}
GPUS: Final = {
    "DS-GPU-001": "torch sees the GPUs of this machine",
    "DS-GPU-002": "CUDA_VISIBLE_DEVICES names GPUs that exist",
    "DS-GPU-003": "There are as many GPUs as ranks",
    "DS-GPU-004": "The driver is new enough for torch",
    "DS-GPU-005": "The compute mode lets ranks in",
    "DS-GPU-006": "The memory of the GPUs is free",
    "DS-GPU-007": "The GPUs have no memory errors",
    "DS-GPU-008": "GPUs reach each other directly",
    "DS-GPU-009": "A kernel runs on every GPU",
    "DS-GPU-010": "NCCL reduces on every GPU",
    "DS-GPU-011": "A copy from GPU to GPU arrives",
    "DS-GPU-012": "torch has kernels for these GPUs",
    "DS-GPU-013": "The driver's own view of the GPUs can be read",
}
VERSIONS: Final = {
    "DS-VER-001": "torch can be imported",
    "DS-VER-002": "Python and torch are versions that ddpsafe knows",
    "DS-VER-003": "There is one NCCL",
    "DS-VER-004": "Packages fit the torch that is installed",
    "DS-VER-005": "torch can do what the backend needs",
}
LIMITS: Final = {
    "DS-LIM-001": "Shared memory (/dev/shm) has room",
    "DS-LIM-002": "Enough files may be open",
    "DS-LIM-003": "Memory may be locked",
    "DS-LIM-004": "Enough processes may be started",
    "DS-LIM-005": "The memory of the container suffices",
    "DS-LIM-006": "The cores of the container are those that torch counts",
    "DS-LIM-007": "The container shares what ranks need",
}
PATHS: Final = {
    "DS-PATH-001": "The data paths are ready",
    "DS-PATH-002": "The data paths lie on storage that many ranks may read",
    "DS-PATH-003": "The run directory can be written",
    "DS-PATH-004": "The run directory has room",
    "DS-PATH-005": "The run directory takes data fast enough",
    "DS-PATH-006": "The temporary directory can be used",
}
PROCESSES: Final = {
    "DS-PROC-001": "A process starts by the start method",
    "DS-PROC-002": "The job outlives this terminal",
    "DS-PROC-003": "The clock is right",
    "DS-PROC-004": "Every check came to its end",
}

AREAS: Final = (
    ENVIRONMENT,
    NAMES,
    PORTS,
    NETWORK,
    GPUS,
    VERSIONS,
    LIMITS,
    PATHS,
    PROCESSES,
    MESH,
)
CODES: Final = {code: title for area in AREAS for code, title in area.items()}
"""Code to title, in the order in which the documentation lists them."""


def page_of(code: str) -> str:
    """Return the page of the documentation that a code leads to, from the checkout's root."""
    return f"docs/findings/{code}.md"
