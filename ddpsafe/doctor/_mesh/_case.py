"""Everything that came in, as the verdict is made from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpsafe.doctor._mesh._dial import SILENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpsafe.doctor._matrix import Verdict
    from ddpsafe.doctor._mesh._board import Json
    from ddpsafe.doctor._mesh._grouping import Way
    from ddpsafe.doctor._mesh._messages import Dialled, Node, Testimony


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What node rank 0 knows when everybody has spoken.

    Attributes:
        nnodes: How many were to come.
        backend: Whose rules the addresses follow.
        host: Of the endpoint, as it was given.
        port: Of the endpoint.
        nodes: Who came, by node rank.
        testimonies: Who came back from the mesh, by node rank.
        names: Names of nodes that did not come, where something tells them.
        plan: Whom each node was to dial, by node rank.
        at_store: Whether ranks of the job have met at its store, and not doctors at the endpoint.
    """

    nnodes: int
    backend: str
    host: str
    port: int
    nodes: Mapping[int, Node]
    testimonies: Mapping[int, Testimony]
    names: Mapping[int, str] = field(default_factory=dict)
    plan: Mapping[int, list[int]] = field(default_factory=dict)
    at_store: bool = False

    def verdicts(self) -> dict[Way, Dialled]:
        """Return every direction between two hosts that both came back."""
        return {
            (source, dialled.target): self._corrected(source, dialled)
            for source, testimony in self.testimonies.items()
            for dialled in testimony.dialled
            if dialled.target in self.testimonies
        }

    def _corrected(self, source: int, dialled: Dialled) -> Dialled:
        """Believe the host that says it was dialled: it was slow, and nobody took its place."""
        slow = dialled.verdict == "wrong-peer" and dialled.said.startswith(SILENT)
        if slow and source in self.testimonies[dialled.target].heard:
            return dialled._replace(verdict="open", said="answered late")
        return dialled

    def hostnames(self, node_ranks: Iterable[int]) -> tuple[str, ...]:
        """Return names of nodes, in order."""
        return tuple(self.name_of(node) for node in sorted(set(node_ranks)))

    def name_of(self, node_rank: int) -> str:
        """Return the name of a node, or its rank in words where it has none."""
        node = self.nodes.get(node_rank)
        if node is not None:
            return node.hostname
        return self.names.get(node_rank) or f"node rank {node_rank}"

    def label(self, node_rank: int) -> str:
        """Name a node with its rank."""
        name = self.name_of(node_rank)
        return name if name.startswith("node rank") else f"{name} (node rank {node_rank})"


def as_details(dialled: Mapping[Way, Dialled]) -> list[dict[str, Json]]:
    """Return directions as the details of a finding."""
    return [
        {"source": source, "target": target, "verdict": each.verdict, "said": each.said}
        for (source, target), each in sorted(dialled.items())
    ]


def is_closed(verdict: Verdict) -> bool:
    """Tell whether a connection never opened."""
    return verdict in ("dropped", "refused", "no-route")
