"""What a host runs in the tests of the mesh; it prints its report as JSON, and imports no torch."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from datetime import timedelta


def examine() -> None:
    """Examine the mesh as the arguments say, all but a few of them with defaults."""
    from ddpsafe.doctor import _mesh

    asked = json.loads(sys.argv[2])
    started_s = time.monotonic()
    findings, matrix = _mesh.examine(
        nnodes=asked["nnodes"],
        node_rank=asked["node_rank"],
        endpoint=asked.get("endpoint", "h0:29500"),
        interface=asked.get("interface"),
        backend=asked.get("backend", "gloo"),
        timeout=timedelta(seconds=asked.get("timeout_s", 3)),
        local=asked.get("local", {}),
        on_progress=lambda text: print(text, file=sys.stderr, flush=True),
        collective=asked.get("collective", "skip"),
    )
    report = {
        "findings": [asdict(finding) for finding in findings],
        "matrix": asdict(matrix),
        "took_s": time.monotonic() - started_s,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
