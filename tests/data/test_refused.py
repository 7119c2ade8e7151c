"""What the samplers, the loader and their helpers refuse, each with the reason and what to write."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch
from data_programs import Numbers

from ddpsafe._errors import ConfigError
from ddpsafe.data import (
    BalancedBatchSampler,
    DataLoader,
    DistributedSampler,
    EvalSampler,
    PackedList,
    PerProcess,
    ShardedIterable,
    WeightedSampler,
    even_steps,
    gather_exact,
    masked_batches,
)
from ddpsafe.data._loader.loader import build_loader
from ddpsafe.data.errors import DatasetChangedError

ALONE: Final[dict[str, Any]] = {"num_replicas": 1, "rank": 0}
of: Any = functools.partial
loader, build, sampler, balanced = (
    of(of, refuses)
    for refuses in (DataLoader, build_loader, DistributedSampler, BalancedBatchSampler)
)
weighted, stream = of(of, WeightedSampler, **ALONE), of(of, ShardedIterable, range(3), **ALONE)
ITERABLE: Final = ShardedIterable(range(9), even="truncate")

# fmt: off
REFUSED: Final[list[tuple[Callable[[], object], str]]] = [
    (loader(Numbers(8), worker_safety="maybe"), "worker_safety cannot be"),
    (loader(Numbers(8), seed="x"), "seed must be a whole number"),
    (loader(Numbers(0), shuffle=True), "n = 0"),
    (loader(Numbers(0), shuffle=False), "n = 0"),
    (loader(Numbers(10), batch_sampler=BalancedBatchSampler([1, 2, 3], 2)), "made for 3 samples, but the dataset has 10"),
    (loader(Numbers(10), sampler=WeightedSampler([1.0] * 9)), "made for 9 samples, but the dataset has 10"),
    (build(Numbers(40), shuffle=True, train=False), "shuffle=True would have no effect"),
    (build(Numbers(40), shuffle=False, sampler=DistributedSampler(40)), "shuffle=False would have no"),
    (build(Numbers(40), train=False, sampler=DistributedSampler(40)), "train=False would have no effect"),
    (build(Numbers(40), batch_size=8, batch_sampler=[[1, 2]]), "batch_size=8 would have no effect"),
    (build(ITERABLE, shuffle=True), "shuffle=True would have no effect"),
    (build(ITERABLE, train=False), "train=False would have no effect"),
    (stream(shard="rows"), "shard cannot be"),
    (stream(even="pad"), "even cannot be"),
    (stream(shard="files"), "go together"),
    (stream(read=iter), "go together"),
    (stream(shard="sample", even="repeat"), "needs shard='batch'"),
    (sampler(0), "n = 0"),
    (sampler(-3), "is -3, and must be at least 0"),
    (sampler(2.5), "whole number"),
    (sampler(10, 2, 2), "rank 2 is outside"),
    (sampler(10, 2, -1), "rank -1 is outside"),
    (sampler(10, 0, 0), "num_replicas is 0"),
    (sampler(3, 4, 0, drop_last=True), "3 samples are too few"),
    (sampler(1, 4, 0, drop_last=True), "1 sample is too few"),
    (sampler(10, algorithm="feistel-v0"), "algorithm cannot be 'feistel-v0'"),
    (sampler(10, seed="0"), "seed must be a whole number"),
    (sampler(10, seed=True), "seed must be a whole number"),
    *((of(DistributedSampler(10, 1, 0).set_epoch, epoch), "epoch") for epoch in (-1, 1.5, "2", None, True)),
    (balanced([], 2), r"shape \(n,\)"),
    (balanced([1, float("nan")], 2), r"lengths\[1\] = nan"),
    (balanced([1, -1], 2), "negative"),
    (balanced([1, 2, 3], 0), "batch_size is 0"),
    (balanced([1, 2, 3], 2, window=-1), "window is -1"),
    (balanced([1, 2, 3], 4, drop_last=True), "every rank would read nothing"),
    (balanced([1, 2, 3], 2, cost="cube"), "cost cannot be"),
    (balanced([1, 2, 3], 2, max_tokens=2), r"lengths\[2\] = 3 is more than max_tokens"),
    (balanced([1, 2, 3], 2, largest_first=True), "largest_first=True would change"),  # the batches of window=0
    (weighted([1.0, float("nan")]), r"weights\[1\] = nan"),
    (weighted([1.0, -2.0]), r"weights\[1\] = -2"),
    (weighted([1.0, float("inf")]), "not finite"),
    (weighted([0.0, 0.0]), "all weights are zero"),
    (weighted([]), r"shape \(n,\)"),
    (weighted([[1.0, 2.0]]), r"shape \(n,\)"),
    (weighted([1.0, 2.0], 0), "0 samples"),
    (weighted([1.0, 0.0], 2, replacement=False), "without replacement"),
    (weighted([1.0, 2.0], 2.5), "num_samples must be a whole number"),
    (weighted([1.0], mode="once"), "mode cannot be"),
    (weighted([1.0], 5, mode="repeat"), "leave num_samples out"),
    (of(PerProcess, object()), "a function that opens"),
    (of(PerProcess, open, "x", scope="rank"), "scope cannot be 'rank'"),
    (of(even_steps, [1], policy="max"), "policy cannot be 'max'"),
    (of(even_steps, [1], policy="join"), "needs the DDP model"),
    (lambda: next(masked_batches(DataLoader(Numbers(9), 2, sampler=EvalSampler(9, 2, 1)))), "does not pad"),
    (of(gather_exact, [object()], [0]), "builtins.object is not a dense tensor, an array of numbers or a plain value"),
    (of(gather_exact, [sys.version_info], [0]), "version_info is not"),  # a class derived from tuple
    (of(gather_exact, torch.eye(1).to_sparse(), [0]), "cannot be sent as plain rows"),
    (of(gather_exact, np.array([object()]), [0]), "cannot be sent as plain rows"),
    (of(gather_exact, 3, [0]), "not iterable"),
    (of(gather_exact, torch.tensor(3), [0]), "is a single number"),
    (of(gather_exact, [1], torch.tensor([1.5])), r"whole number, not 1\.5"),
    (lambda: PackedList(["a", "b"])["a"], "index"),  # type: ignore[call-overload]
]
# fmt: on


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_a_mistake_is_refused_with_advice(call: Callable[[], object], text: str) -> None:
    """Each error has the mistake, the reason and a fix, and one of the configuration is a `ValueError`, too."""
    with pytest.raises((ConfigError, DatasetChangedError), match=text) as caught:
        call()
    assert "What to do" in str(caught.value)
    assert isinstance(caught.value, ValueError | DatasetChangedError)


@pytest.mark.parametrize("index", [2, -3])
def test_an_index_out_of_range_is_refused(index: int) -> None:
    """The error is that of a list."""
    with pytest.raises(IndexError, match="PackedList of 2"):
        PackedList(["a", "b"])[index]
