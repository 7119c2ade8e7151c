"""All findings between nodes, and the matrix, from the collected results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpsafe.doctor._findings import Direction, Matrix
from ddpsafe.doctor._mesh.all_reduce import check_all_reduce
from ddpsafe.doctor._mesh.findings.addresses import (
    check_addresses,
    check_family,
    check_networks,
    find_explained,
)
from ddpsafe.doctor._mesh.findings.attendance import check_attendance
from ddpsafe.doctor._mesh.findings.connections import check_connections
from ddpsafe.doctor._mesh.findings.differences import check_facts
from ddpsafe.doctor._mesh.protocol import Dialled

if TYPE_CHECKING:
    from ddpsafe.doctor._findings import Finding
    from ddpsafe.doctor._mesh.findings.observations import Results


def make_findings(results: Results) -> list[Finding]:
    """Return all findings between nodes."""
    return [*make_findings_before_all_reduce(results), check_all_reduce(results)]


def make_findings_before_all_reduce(results: Results) -> list[Finding]:
    """Return the findings about missing nodes, connections, and differences between hosts."""
    explained = find_explained(results)
    return [
        *check_attendance(results),
        *check_addresses(results),
        *check_family(results, explained),
        *check_networks(results, explained),
        *check_connections(results, explained),
        *check_facts(results),
    ]


def make_matrix(results: Results) -> Matrix:
    """Return which node reaches which. Nodes that did not join or did not report are absent.

    If there are too many nodes to try every pair, it has only the directions that are not open, as
    the reports do.
    """
    connections = results.connections()
    directions = []
    for source, targets in sorted(results.plan().items()):
        for target in targets:
            outcome = connections.get((source, target), Dialled(target=target, result="absent"))
            if results.only_closed and outcome.result == "open":
                continue
            directions.append(
                Direction(
                    source=source,
                    target=target,
                    result=outcome.result,
                    latency_s=outcome.latency_s,
                    bandwidth_bytes_per_s=outcome.bandwidth_bytes_per_s,
                    said=outcome.said,
                )
            )
    return Matrix(
        hostnames=tuple(results.name_of(node) for node in range(results.nnodes)),
        addresses=tuple(
            results.nodes[node].announced.address if node in results.nodes else ""
            for node in range(results.nnodes)
        ),
        directions=tuple(directions),
    )
