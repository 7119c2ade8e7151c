"""One rank of the doctor's all-reduce, as a script with one argument, JSON.

Nothing of ddpsafe is imported. It says what it found as lines of JSON on stdout. Whoever started it ends it when it takes too long.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from datetime import timedelta
from typing import Any, Final

_ELEMENTS: Final = 100_000


def main() -> None:
    """Take part, and say how it went."""
    asked = json.loads(sys.argv[1])
    gc.disable()  # to search torch for garbage, at its import and at the end, takes a third of all
    try:
        _say(_reduce(asked))
    except Exception as exc:  # noqa: BLE001 - whatever torch raises is what was asked for
        _say(
            {"error": f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}"[:500]}
        )
        sys.exit(1)
    finally:
        gc.freeze()


def _say(told: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def _reduce(asked: dict[str, Any]) -> dict[str, object]:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=asked["timeout_s"])
    if not asked["serve"]:
        store = TCPStore(asked["address"], asked["port"], is_master=False, timeout=timeout)
    else:
        store = TCPStore(
            asked["address"], 0, is_master=True, timeout=timeout, wait_for_workers=False
        )
        _say({"port": store.port})
    _say({"imported": True})
    started_s = time.monotonic()
    backends = ["gloo"]
    if "nccl" in asked["backend"] and torch.cuda.is_available():
        backends.append("nccl")
    rank, world_size = int(asked["rank"]), int(asked["world_size"])
    for backend in backends:
        device = torch.device("cuda:0" if backend == "nccl" else "cpu")
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(backend, store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        values = torch.full((_ELEMENTS,), float(rank + 1), device=device)
        dist.all_reduce(values)
        expected = world_size * (world_size + 1) / 2
        if not bool((values == expected).all()):
            message = f"{backend}: the sum of 1 to {world_size} came out as {values[0].item()}"
            raise RuntimeError(message)
        dist.destroy_process_group()
    return {"took_s": time.monotonic() - started_s, "backends": backends}


if __name__ == "__main__":
    main()
