"""Evaluation of each sample exactly once: results back in dataset order, in equal steps if needed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

import numpy as np
import torch

from ddpsafe._errors import Explanation
from ddpsafe.data._collective import as_rows, gather_json, gather_rows, group_rank
from ddpsafe.data._loader.sampler_search import batch_geometry, find_epoch_holder
from ddpsafe.data._samplers.base import PositionSampler
from ddpsafe.data.errors import DataConfigError, IncompleteGatherError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch.distributed import ProcessGroup
    from torch.utils.data import DataLoader


T_co = TypeVar("T_co", covariant=True)


def masked_batches(loader: DataLoader[T_co]) -> Iterator[tuple[Any, int]]:
    """Read a padded loader in equally many steps on every rank, telling repeats apart.

    For models that communicate in their forward (FSDP, SyncBatchNorm), where a rank without a
    batch would leave the others waiting. Keep ``outputs[:n_valid]``, and collect them with
    ``gather_exact(torch.cat(kept), sampler.indices(), n=len(dataset))``.

    Args:
        loader: With ``sampler=EvalSampler(dataset, pad=True)``.

    Yields:
        The batch, and how many of its first samples count; 0 if all of them are repeats.

    Raises:
        DataConfigError: The loader's sampler does not pad, so ranks may take unequal steps.
    """
    batches = iter(loader)
    sampler, batch_size = _padded(loader)
    valid = sampler.valid_samples()
    for batch in batches:
        counted = min(batch_size, valid)
        valid -= counted
        yield batch, counted


def _padded(loader: DataLoader[Any]) -> tuple[PositionSampler, int]:
    sampler = find_epoch_holder(loader)
    geometry = batch_geometry(loader, sampler) if isinstance(sampler, PositionSampler) else None
    if geometry is None or not sampler.pad or sampler.drop_last:
        raise DataConfigError(
            Explanation(
                f"masked_batches: {type(loader.sampler).__name__} does not pad with repeats.",
                cause="ranks may then take different numbers of steps.",
                fix="make the loader with sampler=EvalSampler(dataset, pad=True).",
            )
        )
    return sampler, geometry[0]


Values = TypeVar("Values", bound="torch.Tensor | Mapping[str, torch.Tensor] | Sequence[Any]")
_SHOWN: Final = 8


def gather_exact(
    values: Values,
    indices: Iterable[int],
    *,
    n: int | None = None,
    duplicates: Literal["error", "drop"] = "error",
    dst: int | None = None,
    group: ProcessGroup | None = None,
) -> Values | None:
    """Collect per-sample results of all ranks in dataset order, so that metrics are exact.

    Every rank calls it, ranks without a sample too. What one process would have computed
    is returned, bit for bit.

    Args:
        values: Results of this rank's samples: a tensor (k, ...), a dict of them, or a
            sequence of k plain values (numbers, texts, lists).
        indices: The dataset index of each, k of them: the rank's `EvalSampler` itself will do.
        n: The size of the dataset; by default the number of results. With it, a missing
            last sample is noticed too.
        duplicates: ``"error"`` refuses an index that comes twice, ``"drop"`` keeps the first.
        dst: Return the results on this rank of the group only, ``None`` on the others.
        group: The ranks that take part; all by default.

    Returns:
        As `values`, but (n, ...) and in dataset order, on the CPU.

    Raises:
        DataConfigError: On every rank, if one rank's values and indices do not fit.
        IncompleteGatherError: On every rank, if an index is missing or comes twice.
    """
    own = np.fromiter(indices, dtype=np.int64)
    leaves = _to_leaves(values)
    specs = gather_json(_describe(leaves, len(own)), group)
    _refuse_misfits(specs)
    index = np.concatenate(
        [_as_index(part) for part in gather_rows(as_rows(torch.from_numpy(own)), group)]
    )
    order = _check_cover(index, n, duplicates)
    gathered = {
        name: _gather_leaf(leaves.get(name), spec, order, group)
        for name, spec in _merge(specs).items()
    }
    if dst is not None and group_rank(group) != dst:
        return None
    return cast("Values", _from_leaves(values, gathered))


def _to_leaves(values: object) -> dict[str, Any]:
    if isinstance(values, torch.Tensor):
        return {"": values}
    if isinstance(values, Mapping):
        return dict(values)
    return {"": values}


def _from_leaves(values: Any, gathered: dict[str, Any]) -> Any:
    return gathered if isinstance(values, Mapping) else gathered[""]


def _describe(leaves: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Say what this rank has, or what is wrong with it: no rank may raise alone."""
    specs = {}
    for name, leaf in leaves.items():
        if len(leaf) != count:
            label = f"values[{name!r}]" if name else "values"
            return {"error": f"{label} has {len(leaf)} entries for {count} indices", "leaves": {}}
        if not isinstance(leaf, torch.Tensor):
            try:
                json.dumps(list(leaf))
            except (TypeError, ValueError) as error:
                return {"error": f"values are neither tensors nor plain: {error}", "leaves": {}}
            specs[name] = {"dtype": "plain", "shape": [], "rows": count}
            continue
        specs[name] = {
            "dtype": str(leaf.dtype).removeprefix("torch."),
            "shape": list(leaf.shape[1:]),
            "rows": count,
        }
    return {"error": None, "leaves": specs}


def _refuse_misfits(specs: list[dict[str, Any]]) -> None:
    problems = [f"rank {r}: {spec['error']}" for r, spec in enumerate(specs) if spec["error"]]
    kinds: dict[tuple[str, str], int] = {}
    for rank, spec in enumerate(specs):
        for name, leaf in spec["leaves"].items():
            if leaf["rows"]:
                kinds.setdefault((name, f"{leaf['dtype']} {leaf['shape']}"), rank)
    names = {name for name, _ in kinds}
    if len(kinds) > len(names):
        problems += [
            f"rank {rank}: values {name} are {kind}" for (name, kind), rank in kinds.items()
        ]
    if problems:
        raise DataConfigError(
            Explanation(
                f"The results cannot be gathered: {problems[0]}.",
                cause="ranks computed different things, or kept results of some batches only.",
                fix="append results and indices of every batch, the same on every rank.",
                details=problems[1:],
            )
        )


def _merge(specs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Take each leaf's form from a rank that has rows: an empty rank cannot know it."""
    merged: dict[str, dict[str, Any]] = {}
    for spec in specs:
        for name, leaf in spec["leaves"].items():
            if name not in merged or (leaf["rows"] and not merged[name]["rows"]):
                merged[name] = leaf
    return merged


def _as_index(rows: torch.Tensor) -> NDArray[np.int64]:
    return rows.numpy().reshape(-1).view(np.int64)


def _check_cover(
    index: NDArray[np.int64], n: int | None, duplicates: Literal["error", "drop"]
) -> NDArray[np.int64]:
    """Return where in the gathered results each dataset index is: shape (n,), int64."""
    unique, first = np.unique(index, return_index=True)
    size = (len(unique) if duplicates == "drop" else len(index)) if n is None else n
    inside = unique[(unique >= 0) & (unique < size)]
    if len(inside) == size and (duplicates == "drop" or len(index) == size):
        return np.asarray(first[(unique >= 0) & (unique < size)], dtype=np.int64)
    missing = np.setdiff1d(np.arange(size), inside)
    values, counts = np.unique(index, return_counts=True)
    repeated = values[counts > 1]
    outside = unique[(unique < 0) | (unique >= size)]
    raise IncompleteGatherError(
        Explanation(
            f"{len(index)} results do not cover {size} samples once each: {len(missing)} are "
            f"missing, {len(repeated)} come more than once, {len(outside)} lie outside.",
            cause="the sampler pads with repeats, drop_last dropped some, or a batch's results "
            "were not kept.",
            fix="read with EvalSampler and without drop_last; for padded results "
            "duplicates='drop'.",
            details=[
                f"missing: {missing[:_SHOWN].tolist()}",
                f"more than once: {repeated[:_SHOWN].tolist()}",
                f"outside: {outside[:_SHOWN].tolist()}",
            ],
        ),
        missing=missing[:_SHOWN].tolist(),
        duplicated=repeated[:_SHOWN].tolist(),
    )


def _gather_leaf(
    leaf: Any,
    spec: Mapping[str, Any],
    order: NDArray[np.int64],
    group: ProcessGroup | None,
) -> Any:
    if spec["dtype"] == "plain":
        parts = gather_json(list(leaf if leaf is not None else ()), group)
        flat = [value for part in parts for value in part]
        return [flat[place] for place in order.tolist()]
    dtype, shape = getattr(torch, spec["dtype"]), tuple(spec["shape"])
    if leaf is None or len(leaf) == 0:
        leaf = torch.empty((0, *shape), dtype=dtype)
    whole = torch.cat(gather_rows(as_rows(leaf), group))[torch.from_numpy(order)]
    if whole.numel() == 0:
        return torch.empty((len(order), *shape), dtype=dtype)
    return whole.contiguous().view(dtype).reshape(len(order), *shape)
