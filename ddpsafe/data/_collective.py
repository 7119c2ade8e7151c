"""Gathering rows and texts of different sizes from all ranks, without pickles."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpsafe.data._replica import has_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def group_size(group: ProcessGroup | None) -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size(group) if has_group() else 1


def group_rank(group: ProcessGroup | None) -> int:
    """Return this process's rank in the group; 0 without one."""
    return dist.get_rank(group) if has_group() else 0


def gather_rows(rows: torch.Tensor, group: ProcessGroup | None) -> list[torch.Tensor]:
    """Return the rows of every rank, by rank.

    Args:
        rows: Shape (k, w), uint8; k may differ between ranks and be 0, w may not.
        group: The ranks that take part; all of them call this.

    Returns:
        For each rank shape (k of that rank, w), uint8, on the CPU.
    """
    size = group_size(group)
    if size == 1:
        return [rows.cpu()]
    device = _device_of(group)
    own = torch.tensor([len(rows)], dtype=torch.int64, device=device)
    counts = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(counts, own, group=group)
    lengths = [int(count) for count in counts]
    padded = torch.zeros((max(lengths), rows.shape[1]), dtype=torch.uint8, device=device)
    padded[: len(rows)] = rows.to(device)
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    return [part[:length].cpu() for part, length in zip(parts, lengths, strict=True)]


def gather_json(value: object, group: ProcessGroup | None) -> list[Any]:
    """Return the plain value of every rank, by rank; JSON, so nothing is unpickled from a peer."""
    text = json.dumps(value).encode()
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unsqueeze(1)
    return [json.loads(bytes(part.flatten().tolist())) for part in gather_rows(rows, group)]


def _device_of(group: ProcessGroup | None) -> torch.device:
    # A backend for the CPU needs no copy and no device; NCCL alone has none.
    if "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def as_rows(values: torch.Tensor) -> torch.Tensor:
    """Return (k, ...) of any dtype as the same bytes, (k, w) uint8."""
    width = math.prod(values.shape[1:])
    if values.numel() == 0:
        return torch.empty((len(values), width * values.dtype.itemsize), dtype=torch.uint8)
    # A copy with plain strides: .contiguous() keeps odd ones where a size is 1.
    rows = torch.empty((len(values), width), dtype=values.dtype)
    return rows.copy_(values.detach().reshape(len(values), width)).view(torch.uint8)
