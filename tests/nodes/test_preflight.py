"""``preflight="full"``: the launchers examine the ways between them before any rank is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import scripts
from nodes_kit import Case, finish_job, require_in_time, start_job

if TYPE_CHECKING:
    from pathlib import Path

    from hosts import Network

pytestmark = pytest.mark.root


@pytest.mark.parametrize("closed", [0, 1])
def test_a_closed_port_range_is_named_on_both_nodes_with_the_lines_to_paste(
    network: Network, tmp_path: Path, closed: int
) -> None:
    """In seconds, with the direction, and before any rank has started; an open one starts them."""
    fields = {"preflight": "full"}
    cases = [
        Case(name="open", fields=fields),
        Case(name="closed", fields=fields, after=dict.fromkeys((0, 1), "is-closed")),
        Case(
            name="not examined",
            after=dict.fromkeys((0, 1), "is-closed"),
            fields={"timeouts": {"rendezvous": 5}},
        ),
    ]
    port = 28800
    launchers = start_job(network, cases, tmp_path, nproc=(1, 1), port=port)
    scripts.wait_until(
        lambda: all("open" in str(each.lines) for each in launchers),
        otherwise=lambda: [each.err for each in launchers],
        within_s=120,
    )
    endpoint = [port + number for number in range(len(cases))]
    network[closed].open_only(*endpoint, otherwise="drop")
    try:
        (tmp_path / "is-closed").touch()
        said = finish_job(network, cases, launchers)
    finally:
        network[closed].run("nft", "flush", "ruleset")
    for node, results in enumerate(said):
        assert results["open"]["values"] == {str(node): node}, results["open"]
        found = results["closed"]
        assert (found["error"], found["code"]) == ("PreflightError", 78), found
        closed_way = f"h{1 - closed} (node rank {1 - closed}) cannot open a connection to h{closed}"
        assert closed_way in found["whole"], found["whole"]
        assert "nft" in found["whole"], found["whole"]
        require_in_time(found["at"] - found["began"], 15.0, "the closed ports are named")
