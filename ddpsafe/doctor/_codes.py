"""The code of every finding with its title, the failure it stands for.

Each code has a page, ``docs/findings/CODE.md``, which is shipped in the wheel. A code is the same
whether the failure was found or not; the finding's severity tells. A number is never reused, even
after its check is removed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

CODES: Final = {
    "DS-ENV-001": "Variables of the launcher are incomplete or contradict each other",
    "DS-ENV-002": "Variables are left over from another launcher",
    "DS-ENV-003": "MASTER_ADDR is not a host that the ranks can reach",
    "DS-ENV-004": "MASTER_PORT is not a usable port",
    "DS-ENV-005": "The threads of all ranks exceed the cores",
    "DS-ENV-006": "A debugging variable slows or breaks the job",
    "DS-ENV-007": "The configuration cannot be read",
    "DS-NAME-001": "This host's name resolves to an address that other hosts cannot reach",
    "DS-NAME-002": "The name of the rendezvous endpoint does not resolve",
    "DS-NAME-003": "The name server is slow or does not answer",
    "DS-PORT-001": "The port of the rendezvous endpoint is taken",
    "DS-PORT-002": "The port of the rendezvous endpoint is an ephemeral port",
    "DS-PORT-003": "There are too few ephemeral ports",
    "DS-NET-001": "An interface variable names no interface of this host",
    "DS-NET-002": "The chosen interface is down or has no address",
    "DS-NET-003": "The chosen interface does not lead to the rendezvous endpoint",
    "DS-NET-004": "The MTU is unusually small",
    "DS-NET-005": "It is unclear which interface the ranks use",
    "DS-NET-006": "There is no network besides loopback",
    "DS-NET-007": "Loopback does not work",
    "DS-NET-008": "An InfiniBand device has no active port",
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
    "DS-VER-001": "torch cannot be imported",
    "DS-VER-002": "This version of Python or torch is not supported",
    "DS-VER-003": "There is more than one NCCL",
    "DS-VER-004": "Packages do not match the installed torch",
    "DS-VER-005": "torch lacks the requested backend",
    "DS-VER-006": "torch.load of this version can be made to run code",
    "DS-LIM-001": "Shared memory (/dev/shm) is too small",
    "DS-LIM-002": "The limit of open files is too low",
    "DS-LIM-003": "The limit of locked memory is too low",
    "DS-LIM-004": "The limit of processes is too low",
    "DS-LIM-005": "There is too little memory for the ranks",
    "DS-LIM-006": "The CPU quota is smaller than the number of visible cores",
    "DS-LIM-007": "The container has no init process",
    "DS-PATH-001": "A data path is not ready",
    "DS-PATH-002": "A data path is on a network mount that may fail reads",
    "DS-PATH-003": "The run directory cannot be written",
    "DS-PATH-004": "The run directory has too little free space",
    "DS-PATH-005": "Writing to the run directory is too slow",
    "DS-PATH-006": "The temporary directory cannot be used",
    "DS-PROC-001": "A rank's interpreter does not start",
    "DS-PROC-002": "The job ends with this terminal",
    "DS-PROC-003": "The clock is wrong",
    "DS-PROC-004": "A check did not finish",
    "DS-MESH-001": "A node did not join",
    "DS-MESH-002": "Two nodes have the same node rank",
    "DS-MESH-003": "Something else answers at the endpoint",
    "DS-MESH-004": "Packets to the endpoint are lost",
    "DS-MESH-005": "The endpoint refuses connections",
    "DS-MESH-006": "There is no route to the endpoint",
    "DS-MESH-007": "The endpoint's name does not resolve",
    "DS-MESH-008": "The endpoint's name resolves to the node itself",
    "DS-MESH-009": "Node rank 0 cannot serve the endpoint",
    "DS-MESH-010": "A node was lost during the check",
    "DS-MESH-011": "Node rank 0 was lost during the check",
    "DS-MESH-012": "A node joined too late",
    "DS-MESH-013": "Another job uses the endpoint",
    "DS-MESH-014": "A node sent what no doctor sends",
    "DS-MESH-015": "A node does not have the secret of the others",
    "DS-MESH-020": "A host would announce an address that only it can reach",
    "DS-MESH-021": "A host does not have the configured interface",
    "DS-MESH-022": "The interface of a host is down",
    "DS-MESH-023": "Hosts announce addresses in networks that cannot reach each other",
    "DS-MESH-024": "Two hosts have the same address",
    "DS-MESH-025": "A host is behind address translation",
    "DS-MESH-026": "An interface variable is set on some hosts only",
    "DS-MESH-027": "IPv4 or IPv6 does not work between the hosts",
    "DS-MESH-030": "Every host reaches every other",
    "DS-MESH-031": "Connections between hosts are dropped",
    "DS-MESH-032": "Connections between hosts are refused",
    "DS-MESH-033": "There is no route between hosts",
    "DS-MESH-034": "Another program answers instead of a host",
    "DS-MESH-035": "Large packets are lost between hosts",
    "DS-MESH-036": "Only the endpoint's port is open",
    "DS-MESH-037": "Packets are lost between hosts",
    "DS-MESH-038": "A route leaves by a different interface than the announced one",
    "DS-MESH-039": "A path carries smaller packets than the interfaces",
    "DS-MESH-040": "Versions differ between hosts",
    "DS-MESH-041": "Environment variables differ between hosts",
    "DS-MESH-042": "The MTU differs between hosts",
    "DS-MESH-043": "Clocks differ between hosts",
    "DS-MESH-044": "Data differ between hosts",
    "DS-MESH-045": "Hosts differ",
    "DS-MESH-046": "A name server does not answer",
    "DS-MESH-047": "InfiniBand ports differ between hosts",
    "DS-MESH-050": "An all-reduce between all hosts",
    "DS-MESH-051": "The all-reduce was skipped",
}
"""Code to title, in the order of the documentation."""


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
