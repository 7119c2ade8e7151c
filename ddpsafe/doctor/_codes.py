"""The code of every finding with its title, the failure it stands for.

Each code has a page, ``docs/findings/CODE.md``, which is shipped in the wheel. A code is the same
whether the failure was found or not; the finding's severity tells. A number is never reused, even
after its check is removed.
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
PATH_MTU: Final = "DS-MESH-039"
VERSIONS_DIFFER: Final = "DS-MESH-040"
ENVIRONMENT_DIFFERS: Final = "DS-MESH-041"
MTU_DIFFERS: Final = "DS-MESH-042"
CLOCKS_DIFFER: Final = "DS-MESH-043"
DATA_DIFFER: Final = "DS-MESH-044"
FACTS_DIFFER: Final = "DS-MESH-045"
SILENT_RESOLVER: Final = "DS-MESH-046"
INFINIBAND_DIFFERS: Final = "DS-MESH-047"
ALL_REDUCE: Final = "DS-MESH-050"
ALL_REDUCE_SKIPPED: Final = "DS-MESH-051"

MESH: Final = {
    MISSING: "A node did not join",
    DUPLICATE: "Two nodes have the same node rank",
    OTHER_PROGRAM: "Something else answers at the endpoint",
    ENDPOINT_DROPPED: "Packets to the endpoint are lost",
    ENDPOINT_REFUSED: "The endpoint refuses connections",
    ENDPOINT_NO_ROUTE: "There is no route to the endpoint",
    ENDPOINT_UNRESOLVED: "The endpoint's name does not resolve",
    ENDPOINT_LOOPBACK: "The endpoint's name resolves to the node itself",
    CANNOT_SERVE: "Node rank 0 cannot serve the endpoint",
    LOST: "A node was lost during the check",
    COORDINATOR_LOST: "Node rank 0 was lost during the check",
    LATE: "A node joined too late",
    OTHER_JOB: "Another job uses the endpoint",
    GARBLED: "A node sent what no doctor sends",
    WITHOUT_SECRET: "A node does not have the secret of the others",
    ANNOUNCES_LOOPBACK: "A host would announce an address that only it can reach",
    ABSENT_INTERFACE: "A host does not have the configured interface",
    INTERFACE_DOWN: "The interface of a host is down",
    DIFFERENT_NETWORKS: "Hosts announce addresses in networks that cannot reach each other",
    SAME_ADDRESS: "Two hosts have the same address",
    TRANSLATED: "A host is behind address translation",
    VARIABLE_ON_SOME: "An interface variable is set on some hosts only",
    BROKEN_FAMILY: "IPv4 or IPv6 does not work between the hosts",
    ALL_OPEN: "Every host reaches every other",
    DROPPED: "Connections between hosts are dropped",
    REFUSED: "Connections between hosts are refused",
    NO_ROUTE: "There is no route between hosts",
    WRONG_PEER: "Another program answers instead of a host",
    LARGE_LOST: "Large packets are lost between hosts",
    ONLY_ENDPOINT: "Only the endpoint's port is open",
    LOSSY: "Packets are lost between hosts",
    OTHER_ROUTE: "A route leaves by a different interface than the announced one",
    PATH_MTU: "A path carries smaller packets than the interfaces",
    VERSIONS_DIFFER: "Versions differ between hosts",
    ENVIRONMENT_DIFFERS: "Environment variables differ between hosts",
    MTU_DIFFERS: "The MTU differs between hosts",
    CLOCKS_DIFFER: "Clocks differ between hosts",
    DATA_DIFFER: "Data differ between hosts",
    FACTS_DIFFER: "Hosts differ",
    SILENT_RESOLVER: "A name server does not answer",
    INFINIBAND_DIFFERS: "InfiniBand ports differ between hosts",
    ALL_REDUCE: "An all-reduce between all hosts",
    ALL_REDUCE_SKIPPED: "The all-reduce was skipped",
}
"""Titles of the findings between nodes."""

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
    "DS-NAME-001": "This host's name resolves to an address that other hosts cannot reach",
    "DS-NAME-002": "The name of the rendezvous endpoint does not resolve",
    "DS-NAME-003": "The name server is slow or does not answer",
}
PORTS: Final = {
    "DS-PORT-001": "The port of the rendezvous endpoint is taken",
    "DS-PORT-002": "The port of the rendezvous endpoint is an ephemeral port",
    "DS-PORT-003": "There are too few ephemeral ports",
}
NETWORK: Final = {
    "DS-NET-001": "An interface variable names no interface of this host",
    "DS-NET-002": "The chosen interface is down or has no address",
    "DS-NET-003": "The chosen interface does not lead to the rendezvous endpoint",
    "DS-NET-004": "The MTU is unusually small",
    "DS-NET-005": "It is unclear which interface the ranks use",
    "DS-NET-006": "There is no network besides loopback",
    "DS-NET-007": "Loopback does not work",
    "DS-NET-008": "An InfiniBand device has no active port",
}
GPUS: Final = {
    "DS-GPU-001": "torch does not see the GPUs of this machine",
    "DS-GPU-002": "CUDA_VISIBLE_DEVICES names GPUs that do not exist",
    "DS-GPU-003": "There are fewer GPUs than ranks",
    "DS-GPU-004": "The driver is too old for torch",
    "DS-GPU-005": "The compute mode of a GPU keeps ranks out",
    "DS-GPU-006": "The memory of a GPU is in use",
    "DS-GPU-007": "A GPU has memory errors",
    "DS-GPU-008": "GPUs do not reach each other directly",
    "DS-GPU-009": "A kernel fails on a GPU",
    "DS-GPU-010": "An NCCL all-reduce fails on a GPU",
    "DS-GPU-011": "A copy between GPUs fails",
    "DS-GPU-012": "torch has no kernels for these GPUs",
    "DS-GPU-013": "The driver cannot be queried about the GPUs",
}
VERSIONS: Final = {
    "DS-VER-001": "torch cannot be imported",
    "DS-VER-002": "This version of Python or torch is not supported",
    "DS-VER-003": "There is more than one NCCL",
    "DS-VER-004": "Packages do not match the installed torch",
    "DS-VER-005": "torch lacks the requested backend",
    "DS-VER-006": "torch.load of this version can be made to run code",
}
LIMITS: Final = {
    "DS-LIM-001": "Shared memory (/dev/shm) is too small",
    "DS-LIM-002": "The limit of open files is too low",
    "DS-LIM-003": "The limit of locked memory is too low",
    "DS-LIM-004": "The limit of processes is too low",
    "DS-LIM-005": "There is too little memory for the ranks",
    "DS-LIM-006": "The CPU quota is smaller than the number of visible cores",
    "DS-LIM-007": "The container has no init process",
}
PATHS: Final = {
    "DS-PATH-001": "A data path is not ready",
    "DS-PATH-002": "A data path is on a network mount that may fail reads",
    "DS-PATH-003": "The run directory cannot be written",
    "DS-PATH-004": "The run directory has too little free space",
    "DS-PATH-005": "Writing to the run directory is too slow",
    "DS-PATH-006": "The temporary directory cannot be used",
}
PROCESSES: Final = {
    "DS-PROC-001": "A rank's interpreter does not start",
    "DS-PROC-002": "The job ends with this terminal",
    "DS-PROC-003": "The clock is wrong",
    "DS-PROC-004": "A check did not finish",
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
"""Code to title, in the order of the documentation."""


def page_of(code: str) -> str:
    """Return the command that prints the page of a code; it works without network access."""
    return f"ddpsafe doctor --explain {code}"


def read_page(code: str) -> str | None:
    """Return the page of a code, or None if there is none."""
    if code not in CODES:
        return None
    here = Path(__file__)
    # A wheel has the pages beside this file, a checkout in docs/.
    for folder in (here.with_name("pages"), here.parents[2] / "docs" / "findings"):
        with contextlib.suppress(OSError):
            return (folder / f"{code}.md").read_text(encoding="utf-8")
    return None
