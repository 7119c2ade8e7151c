"""A coordinator connects many nodes and sends them the result quickly, with little CPU time."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from machine import require_in_time

if TYPE_CHECKING:
    from types import ModuleType

    from hosts import Network

BENCHMARK: Final = Path(__file__).parents[2] / "benchmarks" / "nodes.py"


def benchmark() -> ModuleType:
    """Load the benchmark, whose simulated nodes this test uses."""
    spec = importlib.util.spec_from_file_location("nodes_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
@pytest.mark.root
def test_sixteen_nodes_take_little_of_a_core(network: Network) -> None:
    """All connect at once, all have the result within seconds, and waiting costs next to nothing."""
    found = benchmark().measure_stand_ins(network, 16, watched_s=3)
    assert found["results"] == 15
    require_in_time(found["result_s"], 2.0, "all have the result")
    assert found["cpu_share"] < 0.05
    assert found["bytes_per_s"] < 100_000
