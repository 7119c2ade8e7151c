"""The names of what the mesh check finds; each has a page in docs/findings."""

from __future__ import annotations

from typing import Final

MISSING: Final = "DS-MESH-001"
DOUBLED: Final = "DS-MESH-002"
STRANGER: Final = "DS-MESH-003"
ENDPOINT_DROPPED: Final = "DS-MESH-004"
ENDPOINT_REFUSED: Final = "DS-MESH-005"
ENDPOINT_NO_ROUTE: Final = "DS-MESH-006"
ENDPOINT_UNRESOLVED: Final = "DS-MESH-007"
ENDPOINT_LOOPBACK: Final = "DS-MESH-008"
CANNOT_SERVE: Final = "DS-MESH-009"
LOST: Final = "DS-MESH-010"
HUB_LOST: Final = "DS-MESH-011"
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

TITLES: Final = {
    MISSING: "A node has not come",
    DOUBLED: "Two nodes have the same node rank",
    STRANGER: "Something else answers at the endpoint",
    ENDPOINT_DROPPED: "What is sent to the endpoint vanishes",
    ENDPOINT_REFUSED: "The endpoint refuses connections",
    ENDPOINT_NO_ROUTE: "There is no way to the endpoint",
    ENDPOINT_UNRESOLVED: "The endpoint's name does not resolve",
    ENDPOINT_LOOPBACK: "The endpoint's name leads to the node itself",
    CANNOT_SERVE: "Node rank 0 cannot serve the endpoint",
    LOST: "A node was lost during the check",
    HUB_LOST: "Node rank 0 was lost during the check",
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
    ALL_OPEN: "Every host reaches every other",
    DROPPED: "Connections between hosts are dropped",
    REFUSED: "Connections between hosts are refused",
    NO_ROUTE: "There is no route between hosts",
    WRONG_PEER: "Somebody else answers in place of a host",
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
