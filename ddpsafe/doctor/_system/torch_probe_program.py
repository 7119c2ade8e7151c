"""The program of `torch_probe`: it reports on torch and the GPUs, one line of JSON per stage.

A broken library or a hanging driver takes down only this process.
It imports nothing of ddpsafe, so it finds torch exactly where a script in the same directory would.
"""

from __future__ import annotations

import gc
import importlib.machinery
import json
import os
import tempfile
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

COPIED = 1 << 20
"""Elements of the tensor that is copied between GPUs."""


def where_torch_is() -> str | None:
    """Return the file that `import torch` finds, whether or not it can be imported."""
    with suppress(Exception):  # a module named torch may be half imported
        spec = importlib.machinery.PathFinder.find_spec("torch")
        if spec is not None:
            return spec.origin or str(list(spec.submodule_search_locations or []))
    return None


def describe(torch: ModuleType) -> dict[str, Any]:
    """Describe this torch and what it supports."""
    dist = torch.distributed
    nccl = None
    with suppress(Exception):  # the build has no NCCL, or one of its libraries is missing
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "version": str(torch.__version__),
        "file": str(torch.__file__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": nccl,
        "distributed": dist.is_available(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "has_nccl": dist.is_available() and dist.is_nccl_available(),
        # A build without torch.distributed has no Backend.
        "backends": list(getattr(getattr(dist, "Backend", None), "backend_list", ())),
        "num_threads": torch.get_num_threads(),
        "libnccl": loaded_libraries("libnccl"),
    }


def loaded_libraries(start: str) -> list[str]:
    """Return the loaded shared libraries whose names start with `start`."""
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123 - no pathlib: torch may shadow it
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps}
        return sorted(path for path in paths if os.path.basename(path).startswith(start))  # noqa: PTH119 - as above
    return []


def list_devices(torch: ModuleType) -> dict[str, Any]:
    """Describe the GPUs. Reading their properties does not create a context on them."""
    count = torch.cuda.device_count()
    return {
        "count": count,
        "arch_list": list(torch.cuda.get_arch_list()),
        "devices": [
            {
                "name": torch.cuda.get_device_name(index),
                "capability": list(torch.cuda.get_device_capability(index)),
            }
            for index in range(count)
        ],
    }


def run_kernels(torch: ModuleType) -> list[dict[str, Any]]:
    """Run one kernel on every GPU and compare its result."""
    return [attempt(partial(_kernel, torch, index)) for index in range(torch.cuda.device_count())]


def _kernel(torch: ModuleType, index: int) -> dict[str, Any]:
    ones = torch.ones(1024, device=f"cuda:{index}")
    total = float((ones * 2).sum())
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return {"ok": total == 2048.0, "free_bytes": free_bytes, "total_bytes": total_bytes}  # noqa: PLR2004 - twice 1024


def copy_between(torch: ModuleType) -> list[dict[str, Any]]:
    """Copy from every GPU to its neighbour and compare what arrived."""
    count = torch.cuda.device_count()
    pairs = [(source, (source + 1) % count) for source in range(count)] if count > 1 else []
    return [{"source": a, "target": b, **attempt(partial(_copy, torch, a, b))} for a, b in pairs]


def _copy(torch: ModuleType, source: int, target: int) -> dict[str, Any]:
    sent = torch.arange(COPIED, device=f"cuda:{source}")
    arrived = sent.to(f"cuda:{target}")
    direct = torch.cuda.can_device_access_peer(source, target)
    return {"ok": bool((arrived.cpu() == sent.cpu()).all()), "direct": direct}


def reduce_alone(torch: ModuleType) -> list[dict[str, Any]]:
    """Run an all-reduce in an NCCL group of one rank on every GPU."""
    count = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
    return [attempt(partial(_reduce, torch, index)) for index in range(count)]


def _reduce(torch: ModuleType, index: int) -> dict[str, Any]:
    dist = torch.distributed
    torch.cuda.set_device(index)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        try:
            began_s = time.monotonic()
            value = torch.ones(1024, device=f"cuda:{index}")
            dist.all_reduce(value)
            total = float(value.sum())
            return {"ok": total == 1024.0, "took_s": time.monotonic() - began_s}  # noqa: PLR2004 - its length
        finally:
            dist.destroy_process_group()


def attempt(stage: Callable[[], Any]) -> Any:
    """Return the result of a stage, or its error: the next stage may still work."""
    try:
        return stage()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Run the stages, reporting each before it begins and as soon as it is done."""
    began_s = time.monotonic()
    gc.disable()  # collecting garbage while torch is imported and at exit takes a third of the time
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not mix with these lines

    def report(name: str, value: object) -> None:
        out.write(json.dumps({name: value}) + "\n")
        out.flush()

    try:
        import torch
        import torch.distributed
    except BaseException as error:  # noqa: BLE001 - a broken package may raise anything
        report("import_error", f"{type(error).__name__}: {error}")
        report("found", where_torch_is())
        return
    report("import_s", time.monotonic() - began_s)
    stages = (describe, list_devices, run_kernels, copy_between, reduce_alone)
    for stage in stages:
        report("stage", stage.__name__)
        report(stage.__name__, attempt(partial(stage, torch)))
    report("stage", "end")
    gc.freeze()


if __name__ == "__main__":
    main()
