"""What a host runs in the tests of the mesh; it prints its report as JSON, and imports no torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


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
        on_progress=_progress_of(asked),
        collective=asked.get("collective", "skip"),
    )
    report = {
        "findings": [asdict(finding) for finding in findings],
        "matrix": asdict(matrix),
        "took_s": time.monotonic() - started_s,
    }
    print(json.dumps(report), flush=True)


def _progress_of(asked: dict[str, object]) -> Callable[[str], None]:
    """Say what is waited for; stop for good, or end, at a line that holds a text."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        if asked.get("hang_at") and str(asked["hang_at"]) in text:
            time.sleep(3600)
        if asked.get("die_at") and str(asked["die_at"]) in text:
            os.kill(os.getpid(), signal.SIGKILL)

    return say


def accept_everything() -> None:
    """Be a proxy: accept every connection on a port, and never say a word."""
    listening = socket.create_server(("", int(sys.argv[2])), backlog=128)
    print("listening", file=sys.stderr, flush=True)
    taken = []
    while True:
        taken.append(listening.accept())


def listen_and_close() -> None:
    """Be another service: accept on a port, and hang up."""
    listening = socket.create_server(("", int(sys.argv[2])), backlog=128)
    print("listening", file=sys.stderr, flush=True)
    while True:
        listening.accept()[0].close()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
