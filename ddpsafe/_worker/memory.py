"""What a rank that ran out of memory held."""

from __future__ import annotations

import resource
import sys

from ddpsafe._wire.peer_errors import find_kind

_GIB = 1 << 30


def is_out_of_memory(exc: BaseException) -> bool:
    """Tell whether the exception says that memory ran out, on the host or on a GPU."""
    if isinstance(exc, MemoryError) or type(exc).__name__ == "OutOfMemoryError":
        return True
    # torch's allocator of host memory, CUDA's own errors and NCCL's have no class for it.
    line = f"{type(exc).__name__}: {exc}"
    return isinstance(exc, RuntimeError) and find_kind(line) == "out-of-memory"


def describe_memory() -> str:
    """Say what this process holds, on the host and on its GPU if it uses one."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    parts = [f"{peak / _GIB:.2f} GiB of host memory at its peak"]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        held = f"{allocated / _GIB:.2f} GiB in tensors of {reserved / _GIB:.2f} GiB reserved"
        parts.append(f"{held} on the GPU")
    return "; ".join(parts)
