"""Gathers rows and JSON values of different sizes from all ranks, without pickle."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddpsafe.data._replica import current_replica


def gather_rows(rows: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows of every rank, by rank; every rank calls it.

    Args:
        rows: Shape (k, w), uint8; k may differ between ranks and be 0, w is the same on all.

    Returns:
        One tensor for each rank, shape (k of that rank, w), uint8, on the CPU.
    """
    size = current_replica().num_replicas
    if size == 1:
        return [rows.cpu()]
    # A CPU backend needs no device and no copy to it; a group with NCCL only has no CPU backend.
    if "cpu:" in str(dist.get_backend_config()):
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", torch.cuda.current_device())
    own = torch.tensor([len(rows)], dtype=torch.int64, device=device)
    counts = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(counts, own)
    lengths = [int(count) for count in counts]
    # all_gather needs equal shapes.
    padded = torch.zeros((max(lengths), rows.shape[1]), dtype=torch.uint8, device=device)
    padded[: len(rows)] = rows.to(device)
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded)
    return [part[:length].cpu() for part, length in zip(parts, lengths, strict=True)]


def gather_json(value: object) -> list[Any]:
    """Return the plain value of every rank, by rank. As JSON, so no peer's pickle is loaded."""
    text = json.dumps(value).encode()
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unsqueeze(1)
    return [json.loads(part.numpy().tobytes()) for part in gather_rows(rows)]


def as_rows(values: torch.Tensor) -> torch.Tensor:
    """Return values of shape (k, ...) and any dtype as their bytes, shape (k, w), uint8."""
    width = math.prod(values.shape[1:])
    if values.numel() == 0:
        return torch.empty((len(values), width * values.dtype.itemsize), dtype=torch.uint8)
    # Copied for default strides: .contiguous() keeps other ones if a size is 1.
    rows = torch.empty((len(values), width), dtype=values.dtype)
    return rows.copy_(values.detach().reshape(len(values), width)).view(torch.uint8)


def encode(value: Any) -> Any:
    """Return JSON that `decode` turns into an equal value of the same types.

    Raises:
        TypeError: A part has a type that would come back as another one.
    """
    # The exact type: a named tuple would come back as a plain one.
    kind = type(value)
    if value is None or kind in {bool, int, float, str}:
        return value
    if kind is list:
        return [encode(part) for part in value]
    if kind is tuple:
        return {"tuple": [encode(part) for part in value]}
    if kind is dict:
        return {"dict": [[encode(key), encode(part)] for key, part in value.items()]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.Tensor) and is_plain_tensor(value):
        rows = as_rows(value.reshape(1, -1)).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(value.shape), base64.b64encode(rows).decode()]}
    if isinstance(value, np.ndarray | np.generic) and is_plain_array(value):
        raw = base64.b64encode(value.tobytes()).decode()
        shape = None if isinstance(value, np.generic) else list(value.shape)
        return {"numpy": [value.dtype.str, shape, raw]}
    message = f"{kind.__module__}.{kind.__qualname__} is not a dense tensor, an array of numbers or a plain value"
    raise TypeError(message)


def decode(form: Any) -> Any:
    """Return a value equal to the one `encode` was given, with tensors on the CPU."""
    if isinstance(form, list):
        return [decode(part) for part in form]
    if not isinstance(form, dict):
        return form
    ((kind, content),) = form.items()
    if kind == "tuple":
        return tuple(decode(part) for part in content)
    if kind == "dict":
        return {decode(key): decode(part) for key, part in content}
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "complex":
        return complex(*content)
    dtype, shape, text = content
    raw = bytearray(base64.b64decode(text))
    if kind == "tensor":
        values = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0)
        target: torch.dtype = getattr(torch, dtype)
        return values.view(target).reshape(shape) if raw else values.to(target).reshape(shape)
    array = np.frombuffer(raw, dtype=dtype)
    return array[0] if shape is None else array.reshape(shape)


def is_plain_tensor(value: torch.Tensor) -> bool:
    """Return whether dtype, shape and the elements' bytes describe a tensor completely."""
    return value.layout is torch.strided and not value.is_quantized and not value.is_nested


def is_plain_array(value: np.ndarray[Any, Any] | np.generic) -> bool:
    """Return whether ``dtype.str``, shape and the elements' bytes describe an array completely."""
    return not value.dtype.hasobject and value.dtype.names is None
