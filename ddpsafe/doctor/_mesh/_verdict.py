"""From everything that came in to findings and matrix, and both as they travel to every node."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from ddpsafe.doctor._finding import Finding
from ddpsafe.doctor._matrix import Direction, Matrix
from ddpsafe.doctor._mesh._address_findings import excuse_ways, judge_addresses, judge_networks
from ddpsafe.doctor._mesh._compare import judge_facts
from ddpsafe.doctor._mesh._mesh_findings import judge_mesh

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe.doctor._mesh._board import Json
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
    """Return who reaches whom; who did not come or come back is absent."""
    return Matrix(
        hostnames=tuple(case.name_of(node) for node in range(case.nnodes)),
        addresses=tuple(
            case.nodes[node].announced.address if node in case.nodes else ""
            for node in range(case.nnodes)
        ),
        directions=tuple(_directions(case)),
    )


def _directions(case: Case) -> Iterator[Direction]:
    verdicts = case.verdicts()
    for source, targets in sorted(case.plan.items()):
        for target in targets:
            found = verdicts.get((source, target))
            if found is None:
                yield Direction(source=source, target=target, verdict="absent")
            else:
                yield Direction(
                    source=source,
                    target=target,
                    verdict=found.verdict,
                    latency_s=found.latency_s,
                    bandwidth_bytes_per_s=found.bandwidth_bytes_per_s,
                    said=found.said,
                )


def pack(findings: list[Finding], matrix: Matrix) -> Json:
    """Return the verdict as a message: rows, not tables, for the many directions."""
    return {
        "findings": [asdict(finding) for finding in findings],
        "hostnames": list(matrix.hostnames),
        "addresses": list(matrix.addresses),
        "directions": [
            [each.source, each.target, each.verdict, each.latency_s, each.bandwidth_bytes_per_s, each.said]
            for each in matrix.directions
        ],
    }


def unpack(value: Json) -> tuple[list[Finding], Matrix]:
    """Read the verdict that node rank 0 has come to.

    Raises:
        ValueError: It is none.
    """
    try:
        assert isinstance(value, dict)  # noqa: S101 - judged below with everything else
        findings = [
            Finding(**{**each, "hosts": tuple(each["hosts"])})  # type: ignore
            for each in value["findings"]  # type: ignore
        ]
        directions = tuple(
            Direction(
                source=source,
                target=target,
                verdict=verdict,
                latency_s=latency_s,
                bandwidth_bytes_per_s=rate,
                said=said,
            )
            for source, target, verdict, latency_s, rate, said in value["directions"]  # type: ignore
        )
        matrix = Matrix(
            hostnames=tuple(value["hostnames"]),  # type: ignore
            addresses=tuple(value["addresses"]),  # type: ignore
            directions=directions,
        )
    except (AssertionError, KeyError, TypeError, ValueError) as exc:
        raise ValueError(f"no verdict: {exc}") from exc
    return findings, matrix
