"""One rank of the doctor's all-reduce, as a script with one JSON argument.

It imports nothing of ddpsafe and reports in lines of JSON on stdout. The doctor kills it if it takes too long.
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
    """Take part, and report the outcome."""
    arguments = json.loads(sys.argv[1])
    gc.disable()  # collecting garbage while torch is imported and at exit takes a third of the time
    try:
        _report(_reduce(arguments))
    except Exception as exc:  # noqa: BLE001 - whatever torch raises is the result
        _report(
            {"error": f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}"[:500]}
        )
        sys.exit(1)
    finally:
        gc.freeze()


def _report(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _reduce(arguments: dict[str, Any]) -> dict[str, object]:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=arguments["timeout_s"])
    if not arguments["serve"]:
        store = TCPStore(arguments["address"], arguments["port"], is_master=False, timeout=timeout)
    else:
        store = TCPStore(
            arguments["address"], 0, is_master=True, timeout=timeout, wait_for_workers=False
        )
        _report({"port": store.port})
    _report({"imported": True})
    started_s = time.monotonic()
    backends = ["gloo"]
    if "nccl" in arguments["backend"] and torch.cuda.is_available():
        backends.append("nccl")
    rank, world_size = int(arguments["rank"]), int(arguments["world_size"])
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
