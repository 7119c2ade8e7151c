"""From everything that came in to findings and matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpsafe.doctor._mesh.all_reduce import judge_all_reduce
from ddpsafe.doctor._mesh.findings.addresses import excuse_ways, judge_addresses, judge_networks
from ddpsafe.doctor._mesh.findings.attendance import judge_roll
from ddpsafe.doctor._mesh.findings.connections import judge_mesh
from ddpsafe.doctor._mesh.findings.differences import judge_facts
from ddpsafe.doctor._mesh.messages import Dialled
from ddpsafe.doctor._report import Direction, Matrix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe.doctor._mesh.findings.results import Case
    from ddpsafe.doctor._report import Finding


def judge(case: Case) -> list[Finding]:
    """Return all that is to be said: every node makes it from the same data."""
    return [*judge_without_all_reduce(case), judge_all_reduce(case)]


def judge_without_all_reduce(case: Case) -> list[Finding]:
    """Return what is to be said about who came, the connections, and differences between hosts."""
    excused = excuse_ways(case)
    return [
        *judge_roll(case),
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
    return Matrix(
        hostnames=tuple(case.name_of(node) for node in range(case.nnodes)),
        addresses=tuple(
            case.nodes[node].announced.address if node in case.nodes else ""
            for node in range(case.nnodes)
        ),
        directions=tuple(
            each for each in _directions(case) if not case.only_closed or each.verdict != "open"
        ),
    )


def _directions(case: Case) -> Iterator[Direction]:
    verdicts = case.verdicts()
    for source, targets in sorted(case.plan().items()):
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
