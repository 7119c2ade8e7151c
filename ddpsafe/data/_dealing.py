"""How the samples of one global batch are dealt to the ranks, and what each costs."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ddpsafe._errors import Explanation
from ddpsafe.data.errors import DataConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Cost = Literal["sum", "padded"] | Callable[[float], float]
"""What a batch costs: the sum of its lengths, its longest times its size, or the sum of a
function of each length (e.g. its square, for attention)."""


def deal(costs: NDArray[np.float64], num_replicas: int, *, padded: bool) -> list[NDArray[np.int64]]:
    """Divide a global batch so that ranks have equal counts and similar costs.

    Longest processing time first (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969),
    with each rank closed when it has its share. Where batches are padded, balance cannot
    shorten the step (the longest sample is somewhere), so neighbours in length stay together.

    Args:
        costs: Shape (g,), float64; g is a multiple of `num_replicas`.
        num_replicas: Over how many ranks.
        padded: Whether a batch costs its longest sample times its size.

    Returns:
        For each rank the places of its samples in the batch, shape (g / num_replicas,), int64.
    """
    share = len(costs) // num_replicas
    order = np.argsort(-costs, kind="stable")
    if padded or num_replicas == 1:
        return [np.sort(order[r * share : (r + 1) * share]) for r in range(num_replicas)]
    hands: list[list[int]] = [[] for _ in range(num_replicas)]
    loads = [(0.0, rank) for rank in range(num_replicas)]
    for place in order.tolist():
        load, rank = heapq.heappop(loads)
        hands[rank].append(place)
        if len(hands[rank]) < share:
            heapq.heappush(loads, (load + float(costs[place]), rank))
    return [np.sort(np.asarray(hand, dtype=np.int64)) for hand in hands]


def check_lengths(lengths: Sequence[float] | NDArray[Any]) -> NDArray[np.float64]:
    """Return the lengths as shape (n,), float64, or raise naming the first bad one."""
    detach = getattr(lengths, "detach", None)
    plain = lengths if detach is None else detach().cpu().numpy()
    values = np.asarray(plain, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise bad_balance(
            f"lengths must have the shape (n,) with n >= 1, not {values.shape}",
            "pass one length for each sample",
        )
    bad = np.flatnonzero(~np.isfinite(values) | (values < 0))
    if len(bad):
        raise bad_balance(
            f"{len(bad)} lengths are negative or not finite, the first is "
            f"lengths[{bad[0]}] = {values[bad[0]]}",
            "pass finite lengths of zero or more",
        )
    return values


def item_costs(lengths: NDArray[np.float64], cost: Cost) -> NDArray[np.float64]:
    """Return what each sample costs: shape (n,), float64."""
    if callable(cost):
        return check_lengths([cost(float(length)) for length in lengths])
    if cost not in {"sum", "padded"}:
        raise bad_balance(f"cost cannot be {cost!r}", "choose 'sum', 'padded' or a function")
    return lengths


def bad_balance(what: str, fix: str) -> DataConfigError:
    """Word a refused argument of `BalancedBatchSampler`."""
    return DataConfigError(
        Explanation(
            f"BalancedBatchSampler: {what}.", cause="the arguments do not fit.", fix=f"{fix}."
        )
    )
