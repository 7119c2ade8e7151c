"""The code of every finding, titled by the failure it stands for; each has a page.

The pages are ``docs/findings/CODE.md``, and go into the wheel. A code stays; the severity of a
finding says whether the failure is there. Numbers are never given twice, not even when a check goes.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

MISSING: Final = "DS-MESH-001"
DUPLICATE: Final = "DS-MESH-002"
OTHER_PROGRAM: Final = "DS-MESH-003"
ENDPOINT_DROPPED: Final = "DS-MESH-004"
ENDPOINT_REFUSED: Final = "DS-MESH-005"
ENDPOINT_NO_ROUTE: Final = "DS-MESH-006"
ENDPOINT_UNRESOLVED: Final = "DS-MESH-007"
ENDPOINT_LOOPBACK: Final = "DS-MESH-008"
CANNOT_SERVE: Final = "DS-MESH-009"
LOST: Final = "DS-MESH-010"
COORDINATOR_LOST: Final = "DS-MESH-011"
LATE: Final = "DS-MESH-012"
OTHER_JOB: Final = "DS-MESH-013"
GARBLED: Final = "DS-MESH-014"
WITHOUT_SECRET: Final = "DS-MESH-015"  # noqa: S105 - a code
ANNOUNCES_LOOPBACK: Final = "DS-MESH-020"
ABSENT_INTERFACE: Final = "DS-MESH-021"
INTERFACE_DOWN: Final = "DS-MESH-022"
DIFFERENT_NETWORKS: Final = "DS-MESH-023"
SAME_ADDRESS: Final = "DS-MESH-024"
TRANSLATED: Final = "DS-MESH-025"
VARIABLE_ON_SOME: Final = "DS-MESH-026"
BROKEN_FAMILY: Final = "DS-MESH-027"
ALL_OPEN: Final = "DS-MESH-030"
DROPPED: Final = "DS-MESH-031"
REFUSED: Final = "DS-MESH-032"
NO_ROUTE: Final = "DS-MESH-033"
WRONG_PEER: Final = "DS-MESH-034"
LARGE_LOST: Final = "DS-MESH-035"
ONLY_ENDPOINT: Final = "DS-MESH-036"
LOSSY: Final = "DS-MESH-037"
OTHER_ROUTE: Final = "DS-MESH-038"
VERSIONS_DIFFER: Final = "DS-MESH-040"
ENVIRONMENT_DIFFERS: Final = "DS-MESH-041"
MTU_DIFFERS: Final = "DS-MESH-042"
CLOCKS_DIFFER: Final = "DS-MESH-043"
DATA_DIFFER: Final = "DS-MESH-044"
FACTS_DIFFER: Final = "DS-MESH-045"
SILENT_RESOLVER: Final = "DS-MESH-046"
ALL_REDUCE: Final = "DS-MESH-050"
ALL_REDUCE_SKIPPED: Final = "DS-MESH-051"

MESH: Final = {
    MISSING: "A node has not come",
    DUPLICATE: "Two nodes have the same node rank",
    OTHER_PROGRAM: "Something else answers at the endpoint",
    ENDPOINT_DROPPED: "What is sent to the endpoint vanishes",
    ENDPOINT_REFUSED: "The endpoint refuses connections",
    ENDPOINT_NO_ROUTE: "There is no way to the endpoint",
    ENDPOINT_UNRESOLVED: "The endpoint's name does not resolve",
    ENDPOINT_LOOPBACK: "The endpoint's name leads to the node itself",
    CANNOT_SERVE: "Node rank 0 cannot serve the endpoint",
    LOST: "A node was lost during the check",
    COORDINATOR_LOST: "Node rank 0 was lost during the check",
    LATE: "A node came too late",
    OTHER_JOB: "Another job is at the endpoint",
    GARBLED: "A node says what no doctor says",
    WITHOUT_SECRET: "A node does not have the secret of the others",
    ANNOUNCES_LOOPBACK: "A host would announce an address that only it can reach",
    ABSENT_INTERFACE: "A host lacks the interface it was told to use",
    INTERFACE_DOWN: "The interface of a host is down",
    DIFFERENT_NETWORKS: "Hosts announce addresses of networks that do not meet",
    SAME_ADDRESS: "Two hosts have the same address",
    TRANSLATED: "A host is behind address translation",
    VARIABLE_ON_SOME: "An interface variable is set on some hosts only",
    BROKEN_FAMILY: "One version of IP does not work between the hosts",
    ALL_OPEN: "Every host reaches every other",
    DROPPED: "Connections between hosts are dropped",
    REFUSED: "Connections between hosts are refused",
    NO_ROUTE: "There is no route between hosts",
    WRONG_PEER: "Another program answers in place of a host",
    LARGE_LOST: "Large packets are lost between hosts",
    ONLY_ENDPOINT: "Only the endpoint's port is open",
    LOSSY: "Packets are lost between hosts",
    OTHER_ROUTE: "A route leaves by another interface than the one announced",
    VERSIONS_DIFFER: "Versions differ between hosts",
    ENVIRONMENT_DIFFERS: "Environment variables differ between hosts",
    MTU_DIFFERS: "The largest packet differs between hosts",
    CLOCKS_DIFFER: "Clocks differ between hosts",
    DATA_DIFFER: "Data differ between hosts",
    FACTS_DIFFER: "Hosts differ",
    SILENT_RESOLVER: "A name server does not answer",
    ALL_REDUCE: "An all-reduce between all hosts",
    ALL_REDUCE_SKIPPED: "The all-reduce was skipped",
}
"""What each finding is called."""

ENVIRONMENT: Final = {
    "DS-ENV-001": "Variables of the launcher are incomplete or contradict each other",
    "DS-ENV-002": "Variables are left over from another launcher",
    "DS-ENV-003": "MASTER_ADDR is not a host that the ranks can reach",
    "DS-ENV-004": "MASTER_PORT is not a usable port",
    "DS-ENV-005": "The threads of all ranks exceed the cores",
    "DS-ENV-006": "A debugging variable slows or breaks the job",
    "DS-ENV-007": "The configuration cannot be read",
}
NAMES: Final = {
    "DS-NAME-001": "The name of this host leads to an address that others cannot reach",
    "DS-NAME-002": "The name of the rendezvous endpoint does not resolve",
    "DS-NAME-003": "The name server answers late or not at all",
}
PORTS: Final = {
    "DS-PORT-001": "The port of the rendezvous endpoint is taken",
    "DS-PORT-002": "The port of the rendezvous endpoint is one that the system hands out",
    "DS-PORT-003": "Hardly any port is left to hand out",
}
NETWORK: Final = {
    "DS-NET-001": "An interface variable names no interface of this host",
    "DS-NET-002": "The chosen interface is down or has no address",
    "DS-NET-003": "The chosen interface does not lead to the rendezvous endpoint",
    "DS-NET-004": "The MTU is unusually small",
    "DS-NET-005": "It is not clear which interface the ranks talk on",
    "DS-NET-006": "There is no network besides loopback",
    "DS-NET-007": "Loopback does not work",
}
GPUS: Final = {
    "DS-GPU-001": "torch does not see the GPUs of this machine",
    "DS-GPU-002": "CUDA_VISIBLE_DEVICES names GPUs that do not exist",
    "DS-GPU-003": "There are fewer GPUs than ranks",
    "DS-GPU-004": "The driver is too old for torch",
    "DS-GPU-005": "The compute mode keeps ranks out",
    "DS-GPU-006": "The memory of a GPU is in use",
    "DS-GPU-007": "A GPU has memory errors",
    "DS-GPU-008": "GPUs do not reach each other directly",
    "DS-GPU-009": "A kernel fails on a GPU",
    "DS-GPU-010": "NCCL does not reduce on a GPU",
    "DS-GPU-011": "A copy from GPU to GPU does not arrive",
    "DS-GPU-012": "torch has no kernels for these GPUs",
    "DS-GPU-013": "The driver's own view of the GPUs cannot be read",
}
VERSIONS: Final = {
    "DS-VER-001": "torch cannot be imported",
    "DS-VER-002": "Python or torch is a version that ddpsafe does not know",
    "DS-VER-003": "There is more than one NCCL",
    "DS-VER-004": "Packages do not fit the torch that is installed",
    "DS-VER-005": "torch cannot do what the backend needs",
    "DS-VER-006": "torch.load of this torch can be made to run code",
}
LIMITS: Final = {
    "DS-LIM-001": "Shared memory (/dev/shm) has too little room",
    "DS-LIM-002": "Too few files may be open",
    "DS-LIM-003": "Too little memory may be locked",
    "DS-LIM-004": "Too few processes may be started",
    "DS-LIM-005": "The memory of the container is too small",
    "DS-LIM-006": "The container has fewer cores than torch counts",
    "DS-LIM-007": "The container does not share what ranks need",
}
PATHS: Final = {
    "DS-PATH-001": "A data path is not ready",
    "DS-PATH-002": "A data path lies on storage that many ranks overload",
    "DS-PATH-003": "The run directory cannot be written",
    "DS-PATH-004": "The run directory has too little room",
    "DS-PATH-005": "The run directory takes data too slowly",
    "DS-PATH-006": "The temporary directory cannot be used",
}
PROCESSES: Final = {
    "DS-PROC-001": "A process does not start by the start method",
    "DS-PROC-002": "The job ends with this terminal",
    "DS-PROC-003": "The clock is wrong",
    "DS-PROC-004": "A check did not come to its end",
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
    """Return where to read on about a code: a command that works wherever ddpsafe does."""
    return f"ddpsafe doctor --explain {code}"


def read_page(code: str) -> str | None:
    """Return the page about a code; None where there is none.

    A wheel has the pages beside this file, a checkout in its documentation.
    """
    if code not in CODES:
        return None
    here = Path(__file__)
    for folder in (here.with_name("pages"), here.parents[2] / "docs" / "findings"):
        with contextlib.suppress(OSError):
            return (folder / f"{code}.md").read_text(encoding="utf-8")
    return None
