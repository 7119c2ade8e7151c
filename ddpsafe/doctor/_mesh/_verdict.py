"""From everything that came in to findings and matrix, and both as they travel to every node."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from ddpsafe.doctor._finding import Finding
from ddpsafe.doctor._matrix import Direction, Matrix
from ddpsafe.doctor._mesh._address_findings import excuse_ways, judge_addresses, judge_networks
from ddpsafe.doctor._mesh._compare import judge_facts
from ddpsafe.doctor._mesh._mesh_findings import judge_mesh
from ddpsafe.doctor._mesh._messages import Dialled, Report, Way
from ddpsafe.doctor._mesh._plan import EVERY_PAIR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe.doctor._mesh._case import Case


def judge(case: Case) -> list[Finding]:
    """Return what is to be said about the connections and the differences between hosts."""
    excused = excuse_ways(case)
    return [
        *judge_addresses(case),
        *judge_networks(case, excused),
        *judge_mesh(case, excused),
        *judge_facts(case),
    ]


def make_matrix(case: Case) -> Matrix:
    """Return who reaches whom; who did not come or come back is absent.

    Of more nodes than all pairs are tried of, it holds only what is not open: it goes to every
    node, and there would be too much of it.
    """
    all_of_them = case.nnodes <= EVERY_PAIR
    return Matrix(
        hostnames=tuple(case.name_of(node) for node in range(case.nnodes)),
        addresses=tuple(
            case.nodes[node].announced.address if node in case.nodes else ""
            for node in range(case.nnodes)
        ),
        directions=tuple(
            each for each in _directions(case) if all_of_them or each.verdict != "open"
        ),
    )


def _directions(case: Case) -> Iterator[Direction]:
    verdicts = case.verdicts()
    for source, targets in sorted(case.plan.items()):
        for target in targets:
            found = verdicts.get((source, target), Dialled(target=target, verdict="absent"))
            yield Direction(
                source=source,
                target=target,
                verdict=found.verdict,
                latency_s=found.latency_s,
                bandwidth_bytes_per_s=found.bandwidth_bytes_per_s,
                said=found.said,
            )


def pack(findings: list[Finding], matrix: Matrix) -> Report:
    """Return the verdict as a message."""
    return Report(
        findings=tuple(asdict(finding) for finding in findings),
        hostnames=matrix.hostnames,
        addresses=matrix.addresses,
        directions=tuple(
            Way(
                each.source,
                each.target,
                each.verdict,
                each.latency_s,
                each.bandwidth_bytes_per_s,
                each.said,
            )
            for each in matrix.directions
        ),
    )


def unpack(report: Report) -> tuple[list[Finding], Matrix]:
    """Read the verdict that node rank 0 has come to.

    Raises:
        TypeError: A finding lacks something.
    """
    findings = [
        Finding(**{**each, "hosts": tuple(each.get("hosts", ()))}) for each in report.findings
    ]
    matrix = Matrix(
        hostnames=report.hostnames,
        addresses=report.addresses,
        directions=tuple(Direction(**way._asdict()) for way in report.directions),
    )
    return findings, matrix
