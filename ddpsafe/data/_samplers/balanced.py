"""Batches whose lengths are balanced over the ranks, so that no rank waits for the longest."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from ddpsafe._errors import Explanation
from ddpsafe.data._arguments import require_amounts, require_choice, require_int
from ddpsafe.data._samplers.base import Batching, DrawnSampler, digest
from ddpsafe.data._samplers.batch_plans import (
    Cost,
    EpochPosition,
    TokenPlan,
    WindowPlan,
    bad_balance,
    deal,
    item_costs,
)
from ddpsafe.data._samplers.permutation import Algorithm, open_order
from ddpsafe.data.errors import StateMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

logger = logging.getLogger(__name__)


class BalancedBatchSampler(DrawnSampler[list[int]]):
    """Deals each global batch so that ranks have equal counts and similar total lengths.

    With ``window=0`` the samples of every global batch are exactly those of
    `DistributedSampler`. Only which rank gets which changes, so training statistics do not (a
    third less step time for packed sequences of lognormal lengths). With ``window=k`` the samples
    of k global batches are sorted by length first, which also saves padding. Use it as
    ``batch_sampler=``.

    Args:
        lengths: Shape (n,), the length of each sample.
        batch_size: Samples per batch of one rank; with `max_tokens`, the maximum.
        window: How many global batches are sorted by length together; 0 for none.
        cost: What a batch costs; see `Cost`.
        max_tokens: Fill batches up to this cost instead of a fixed size.
        num_replicas: The number of ranks to divide among; the world size by default.
        rank: The rank whose part to read, from 0; this rank by default.
        shuffle: Whether to shuffle, as in `DistributedSampler`.
        seed: The same on every rank; by default that of ``launch(seed=)``, else 0.
        drop_last: Drop the last global batch if it is smaller.
        algorithm: The shuffle, as in `DistributedSampler`.
        largest_first: Begin each epoch with a batch of the longest samples, so that a lack of
            memory shows at once: the largest batch of the first window, or with `max_tokens` of
            the whole epoch.

    Attributes:
        dropped_batches: With `max_tokens`: how many batches at the end of the epoch are dropped,
            because they are fewer than the ranks.

    Raises:
        ConfigError: Lengths are negative, NaN or not of shape (n,); a sample is longer than
            `max_tokens`; the sizes are below 1.
    """

    beginning = EpochPosition()

    def __init__(  # noqa: PLR0913 - keyword-only after the subject of the call
        self,
        lengths: Sequence[float] | NDArray[Any],
        batch_size: int,
        *,
        window: int = 0,
        cost: Cost = "sum",
        max_tokens: float | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
        algorithm: Algorithm = "torch",
        largest_first: bool = False,
    ) -> None:
        super().__init__(num_replicas, rank, seed)
        require_choice(algorithm, "algorithm", get_args(Algorithm))
        self.batch_size = require_int(batch_size, "batch_size", least=1)
        self.window = require_int(window, "window", least=0)
        self.lengths = require_amounts(lengths, "lengths", "BalancedBatchSampler")
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.algorithm: Algorithm = algorithm
        self.largest_first = largest_first
        self.dropped_batches = 0
        self._costs = item_costs(self.lengths, cost)
        self._padded = cost == "padded"
        self._cost_name = cost if isinstance(cost, str) else "callable"
        self._digest = digest(self._costs.tobytes())
        self._windows = WindowPlan(
            n=len(self.lengths),
            batch=self.batch_size * self.num_replicas,
            window=self.window,
            drop_last=self.drop_last,
            largest_first=self.largest_first,
        )
        self._tokens: TokenPlan | None = None
        self._token_batches: tuple[int, list[list[int]]] | None = None  # of an epoch
        if max_tokens is not None:
            self._tokens = TokenPlan(
                max_tokens=max_tokens,
                batch_size=self.batch_size,
                window=self.window * self.batch_size * self.num_replicas,
                padded=self._padded,
                largest_first=self.largest_first,
            )
            self._tokens.check(self._costs)
        elif largest_first and self.window == 0:
            raise bad_balance(
                "largest_first=True would change the global batches, which window=0 keeps",
                "give a window or max_tokens",
            )
        elif self._windows.steps(self.beginning) == 0:
            raise bad_balance(
                f"{len(self.lengths)} samples with drop_last=True are less than one global batch of "
                f"{self._windows.batch}: every rank would read nothing",
                "use smaller batches, fewer ranks, or drop_last=False",
            )

    def population(self) -> int:
        return len(self.lengths)

    def __len__(self) -> int:
        return 0 if self.finished else self.steps_from(self.start, Batching())

    def steps_from(self, position: EpochPosition, by: Batching, rank: int = 0) -> int:  # noqa: ARG002 - it batches itself, and all ranks have as many
        if self._tokens is None:
            return self._windows.steps(position)
        return (len(self._all_batches()) - position.start) // self.num_replicas

    def position_after(self, batches: int, by: Batching) -> EpochPosition:  # noqa: ARG002 - as above
        if self._tokens is None:
            return self._windows.advance(self.start, batches)
        return EpochPosition(start=self.start.start + batches * self.num_replicas)

    def _all_batches(self) -> list[list[int]]:
        assert self._tokens is not None, "called only with max_tokens"  # noqa: S101 - our own invariant
        epoch = int(self.epoch)
        if self._token_batches is None or self._token_batches[0] != epoch:
            order = self._open_order()(np.arange(len(self.lengths), dtype=np.int64))
            batches = self._tokens.batches(order, self._costs, (self.seed, epoch))
            self._token_batches = (epoch, batches)
        return self._token_batches[1]

    def _open_order(self) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
        """Return the global order, as for a single rank: whole batches of it are dealt to the ranks."""
        return open_order(
            len(self.lengths),
            shuffle=self.shuffle,
            algorithm=self.algorithm,
            seed=self.seed,
            epoch=int(self.epoch),
        )

    def _warn_of_dropped_batches(self) -> None:
        total = len(self._all_batches())
        self.dropped_batches = (total - self.start.start) % self.num_replicas
        if self.dropped_batches:
            logger.warning(
                "epoch %d: %d of %d batches are dropped: they cannot be divided evenly among %d ranks",
                int(self.epoch),
                self.dropped_batches,
                total,
                self.num_replicas,
            )

    def chunks(self) -> Iterator[list[list[int]]]:
        """Deal each global batch, which is made when it is needed."""
        if not self.has_anything_to_read():
            return
        if self._tokens is not None:
            self._warn_of_dropped_batches()
            last = self.start.start + len(self) * self.num_replicas
            yield self._all_batches()[self.start.start + self.rank : last : self.num_replicas]
            return
        order_at = self._open_order()
        words = (self.seed, int(self.epoch))
        for batch in self._windows.read(self.start, self._costs, order_at, words):
            # Like torch, fill the last batch with samples from the epoch's beginning.
            missing = np.arange(-len(batch) % self.num_replicas, dtype=np.int64)
            padded = np.concatenate([batch, order_at(missing % len(self.lengths))])
            shares = deal(self._costs[padded], self.num_replicas, padded=self._padded)
            yield [padded[shares[self.rank]].tolist()]

    def identity(self) -> dict[str, object]:
        tokens = self._tokens
        return {
            "n": len(self.lengths),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "algorithm": self.algorithm if self.shuffle else None,
            "fingerprint": self.fingerprint,
            "lengths": self._digest,
            "window": self.window,
            "cost": self._cost_name,
            "largest_first": self.largest_first,
            "max_tokens": None if tokens is None else tokens.max_tokens,
            "batch_size": None if tokens is None else self.batch_size,
        }

    def write_position(self, position: EpochPosition, *, finished: bool) -> dict[str, Any]:
        return {
            "consumed": len(self.lengths) if finished else position.consumed(),
            "place": position.to_json(),
            "token_window": None if self._tokens is None else self._tokens.window,
        }

    def read_position(self, state: Mapping[str, Any], *, strict: bool) -> EpochPosition:  # noqa: ARG002 - as above
        position = EpochPosition.from_json(state.get("place"))
        window: Any = state.get("token_window")
        is_count = type(window) is int and window >= 0
        if not is_count if self._tokens is not None else window is not None:
            kind = "without" if self._tokens is None else "with"
            raise StateMismatchError(
                Explanation(
                    f"The state was not saved by a BalancedBatchSampler {kind} max_tokens.",
                    cause=f"its 'token_window' is {window!r}, and a position counts other batches.",
                    fix="load a state of such a sampler, or restart the epoch.",
                )
            )
        if self._tokens is not None:
            # Keep the saved window, whatever the world size is now: it determines the batches.
            self._tokens = replace(self._tokens, window=window)
            self._token_batches = None
        return position

    def restore(self, state: Mapping[str, Any], by: Batching, *, strict: bool) -> None:
        super().restore(state, by, strict=strict)
        if self._tokens is not None and self.finished:
            self._warn_of_dropped_batches()  # too few are left for a step, so no pass will warn
