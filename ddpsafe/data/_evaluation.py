"""Evaluates each sample exactly once: results in dataset order, in equal steps if needed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

import numpy as np
import torch

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe.data._arguments import require_int
from ddpsafe.data._gathering import (
    as_rows,
    decode,
    encode,
    gather_json,
    gather_rows,
    is_plain_array,
    is_plain_tensor,
)
from ddpsafe.data._loader.position import SamplerPosition
from ddpsafe.data._loader.sampler_search import find_epoch_holder
from ddpsafe.data._replica import current_replica
from ddpsafe.data._samplers.base import PositionSampler
from ddpsafe.data.errors import IncompleteGatherError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch.utils.data import DataLoader


T_co = TypeVar("T_co", covariant=True)


def masked_batches(loader: DataLoader[T_co]) -> Iterator[tuple[Any, int]]:
    """Read a padded loader in the same number of steps on every rank, and mark repeats.

    For models that communicate in their forward (FSDP, SyncBatchNorm), where a rank without a
    batch would leave the others waiting. Keep ``outputs[:n_valid]``, and collect them with
    ``gather_exact(torch.cat(kept), sampler.indices(), n=len(dataset))``.

    Args:
        loader: With ``sampler=EvalSampler(dataset, pad=True)``.

    Yields:
        The batch, and how many of its first samples are not repeats.

    Raises:
        ConfigError: The loader's sampler does not pad, so ranks may take unequal steps.
    """
    batches = iter(loader)
    position = SamplerPosition.find(loader, find_epoch_holder(loader))
    sampler = None if position is None else position.sampler
    if (
        position is None
        or not isinstance(sampler, PositionSampler)
        or not sampler.pad
        or sampler.drop_last
    ):
        raise ConfigError(
            Explanation(
                f"masked_batches: {type(loader.sampler).__name__} does not pad with repeats.",
                cause="ranks may take different numbers of steps without it.",
                fix="make the loader with sampler=EvalSampler(dataset, pad=True).",
            )
        )
    batch_size, valid = position.batching().batch_size, sampler.valid_samples()
    for batch in batches:
        counted = min(batch_size, valid)
        valid -= counted
        yield batch, counted


Values = TypeVar("Values", bound="torch.Tensor | NDArray[Any] | Mapping[Any, Any] | Sequence[Any]")
_SHOWN: Final = 8
_WHOLE: Final = ""  # the name of values that are not named


def gather_exact(
    values: Values,
    indices: Iterable[int],
    *,
    n: int | None = None,
    duplicates: Literal["error", "drop"] = "error",
    dst: int | None = None,
) -> Values | None:
    """Collect per-sample results of all ranks in dataset order, so that metrics are exact.

    Every rank calls it, even without a sample. It returns what one process would have computed,
    bit for bit and with the same types.

    Args:
        values: Results of this rank's samples: a tensor or array (k, ...), a list of k values
            (numbers, strings, bytes, tensors of any shape, arrays, and lists, tuples and dicts
            of them), or a dict of these.
        indices: The dataset index of each result; the rank's `EvalSampler` itself works, too.
        n: The size of the dataset; by default the number of results. With it, a missing last
            sample is found, too.
        duplicates: ``"error"`` refuses repeated indices, ``"drop"`` keeps the first result.
        dst: Return the results on this rank only, ``None`` on the others.

    Returns:
        Like `values`, but (n, ...) and in dataset order, on the CPU.

    Raises:
        ConfigError: On every rank, if values and indices of a rank do not fit together, or
            the ranks' values differ in form.
        IncompleteGatherError: On every rank, if an index is missing or repeated.
    """
    own: NDArray[np.int64] = np.empty(0, dtype=np.int64)
    leaves: dict[str, Any] = {}
    try:
        listed = indices.tolist() if isinstance(indices, torch.Tensor | np.ndarray) else indices
        # One by one: NumPy would truncate 1.5.
        own = np.asarray([require_int(index, "an index") for index in listed], dtype=np.int64)
        # By the JSON of their key. Tensors and arrays stay as they are; lists are encoded.
        parts = {_WHOLE: values}
        if isinstance(values, Mapping):
            parts = {json.dumps(encode(key)): part for key, part in values.items()}
        leaves = {
            name: part if isinstance(part, torch.Tensor | np.ndarray) else encode(list(part))
            for name, part in parts.items()
        }
        spec = _describe(leaves, len(own), named=isinstance(values, Mapping))
    except Exception as error:  # noqa: BLE001 - raised below on every rank; raised here, it would leave the others waiting
        # Never empty: that means no error.
        spec = {"error": str(error) or type(error).__name__}
    specs = gather_json(spec)
    problems = [f"rank {rank}: {spec['error']}" for rank, spec in enumerate(specs) if spec["error"]]
    if not problems:
        forms = {
            rank: {
                name: f"{leaf['kind']} {leaf['dtype']} {leaf['shape']}"
                for name, leaf in spec["leaves"].items()
            }
            for rank, spec in enumerate(specs)
            if spec["count"]
        }
        usual = next(iter(forms.values()), {})
        if any(form != usual for form in forms.values()):
            problems = [
                f"rank {rank}: the values are "
                + ", ".join(f"{name} {text}".strip() for name, text in form.items())
                for rank, form in forms.items()
            ]
    if problems:
        raise ConfigError(
            Explanation(
                f"The results cannot be gathered: {problems[0]}.",
                cause="ranks computed different things, or kept the results of only some batches.",
                fix="append results and indices of every batch, in the same form on every rank.",
                details=problems[1:],
            )
        )
    index = np.concatenate(
        [
            part.numpy().reshape(-1).view(np.int64)
            for part in gather_rows(as_rows(torch.from_numpy(own)))
        ]
    )
    order = _check_cover(index, n, duplicates)
    # Take the form from a rank with samples: a rank without any does not have it.
    form = next((spec for spec in specs if spec["count"]), specs[0])
    gathered = {
        name: _gather_leaf(leaves.get(name), leaf, order) for name, leaf in form["leaves"].items()
    }
    if dst is not None and current_replica().rank != dst:
        return None
    if form["named"]:
        return cast("Values", {decode(json.loads(name)): leaf for name, leaf in gathered.items()})
    return cast("Values", gathered[_WHOLE])


def _describe(leaves: Mapping[str, Any], count: int, *, named: bool) -> dict[str, Any]:
    """Describe this rank's values: kind, dtype and shape of a row, for each leaf.

    Raises:
        ValueError: A leaf does not have one entry for each index.
        TypeError: A tensor or array is not described by its rows' bytes (sparse, object, …).
    """
    specs = {}
    for name, leaf in leaves.items():
        label = f"values[{decode(json.loads(name))!r}]" if named else "values"
        is_array = isinstance(leaf, torch.Tensor | np.ndarray)
        if is_array and leaf.ndim == 0:
            raise ValueError(f"{label} is a single number, not one row for each index")
        if len(leaf) != count:
            raise ValueError(f"{label} has {len(leaf)} entries for {count} indices")
        if isinstance(leaf, torch.Tensor) and is_plain_tensor(leaf):
            kind, dtype = "tensor", str(leaf.dtype).removeprefix("torch.")
        elif isinstance(leaf, np.ndarray) and is_plain_array(leaf):
            kind, dtype = "array", leaf.dtype.str
        elif is_array:
            message = (
                f"{label}: a {type(leaf).__name__} of {leaf.dtype} cannot be sent as plain rows"
            )
            raise TypeError(message)
        else:
            kind, dtype = "list", ""
        shape = list(leaf.shape[1:]) if is_array else []
        specs[name] = {"kind": kind, "dtype": dtype, "shape": shape}
    return {"error": None, "leaves": specs, "named": named, "count": count}


def _check_cover(
    index: NDArray[np.int64], n: int | None, duplicates: Literal["error", "drop"]
) -> NDArray[np.int64]:
    """Return where in the gathered results each dataset index is: shape (n,), int64."""
    unique, first, counts = np.unique(index, return_index=True, return_counts=True)
    size = (len(unique) if duplicates == "drop" else len(index)) if n is None else n
    is_inside = (unique >= 0) & (unique < size)
    if is_inside.sum() == size and (duplicates == "drop" or len(index) == size):
        return np.asarray(first[is_inside], dtype=np.int64)
    missing = np.setdiff1d(np.arange(size), unique)
    repeated = unique[counts > 1]
    outside = unique[~is_inside]
    raise IncompleteGatherError(
        Explanation(
            f"{len(index)} results do not cover {size} samples once each: {len(missing)} are "
            f"missing, {len(repeated)} are repeated, {len(outside)} have an index outside 0 to {size - 1}.",
            cause="the sampler pads with repeats, drop_last dropped some, or a batch's results "
            "were not kept.",
            fix="read with EvalSampler and without drop_last; if the sampler pads, pass "
            "duplicates='drop'.",
            details=[
                f"missing: {missing[:_SHOWN].tolist()}",
                f"repeated: {repeated[:_SHOWN].tolist()}",
                f"outside: {outside[:_SHOWN].tolist()}",
            ],
        ),
        missing=tuple(missing[:_SHOWN].tolist()),
        duplicated=tuple(repeated[:_SHOWN].tolist()),
    )


def _gather_leaf(leaf: Any, spec: Mapping[str, Any], order: NDArray[np.int64]) -> Any:
    if spec["kind"] == "list":
        parts = gather_json([] if leaf is None else list(leaf))
        flat = [value for part in parts for value in part]
        return [decode(flat[place]) for place in order.tolist()]
    shape = (len(order), *spec["shape"])
    is_array = spec["kind"] == "array"
    dtype = np.dtype(spec["dtype"]) if is_array else getattr(torch, spec["dtype"])
    # The bytes of each row, (k, w) uint8; the leaf of a rank without samples may have any form.
    width = math.prod(spec["shape"]) * dtype.itemsize
    count = 0 if leaf is None else len(leaf)
    # torch.frombuffer refuses an empty buffer, and warns of one that cannot be written to.
    if count * width == 0:
        rows = torch.empty((count, width), dtype=torch.uint8)
    elif is_array:
        rows = torch.frombuffer(bytearray(leaf.tobytes()), dtype=torch.uint8).reshape(count, width)
    else:
        rows = as_rows(leaf)
    whole = torch.cat(gather_rows(rows))[torch.from_numpy(order)]
    if is_array:
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = whole.numpy().reshape(-1)
        return array
    if whole.numel() == 0:
        return torch.empty(shape, dtype=dtype)
    return whole.contiguous().view(dtype).reshape(shape)
