"""Batches whose lengths are balanced over the ranks, so that no rank waits for the longest."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Sampler

from ddpsafe._errors import Explanation
from ddpsafe.data._replica import resolve_replica, run_seed
from ddpsafe.data._samplers.base import (
    VERSION,
    AutoEpoch,
    check_epoch,
    compare_identity,
    digest,
    parse_state,
    require_int,
    warn_empty_epoch,
)
from ddpsafe.data._samplers.batch_plans import (
    Cost,
    EpochPosition,
    TokenPlan,
    WindowPlan,
    bad_balance,
    check_lengths,
    deal,
    item_costs,
)
from ddpsafe.data._samplers.ordered import DistributedSampler
from ddpsafe.data.errors import StateMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ddpsafe.data._samplers.ordered import Algorithm

logger = logging.getLogger(__name__)


class BalancedBatchSampler(Sampler[list[int]]):
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
        DataConfigError: Lengths are negative, NaN or not of shape (n,); a sample is longer than
            `max_tokens`; the sizes are below 1.
    """

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
        replica = resolve_replica(num_replicas, rank)
        self.num_replicas = replica.num_replicas
        self.rank = replica.rank
        self.batch_size = _at_least(batch_size, 1, "batch_size")
        self.window = _at_least(window, 0, "window")
        self.lengths = check_lengths(lengths)
        self.drop_last = drop_last
        self.largest_first = largest_first
        self.seed = run_seed() or 0 if seed is None else seed
        self.epoch: int = AutoEpoch(0)
        self.fingerprint: str | None = None
        self.dropped_batches = 0
        self._costs = item_costs(self.lengths, cost)
        self._padded = cost == "padded"
        self._cost_name = cost if isinstance(cost, str) else "callable"
        # The global order, as for a single rank: whole batches of it are dealt to the ranks.
        self._order = DistributedSampler(
            len(self.lengths), 1, 0, shuffle=shuffle, seed=self.seed, algorithm=algorithm
        )
        self._digest = digest(self._costs.tobytes())
        self._place = EpochPosition()
        self._tokens: TokenPlan | None = None
        if max_tokens is not None:
            self._tokens = TokenPlan(
                max_tokens=max_tokens,
                batch_size=self.batch_size,
                window=self.window * self.batch_size * self.num_replicas,
                padded=self._padded,
                largest_first=self.largest_first,
            )
            self._tokens.check(self._costs)
        if largest_first and self.window == 0 and max_tokens is None:
            raise bad_balance(
                "largest_first=True would change the global batches, which window=0 keeps",
                "give a window or max_tokens",
            )
        if self._tokens is None and self._plan().steps(self._place) == 0:
            raise bad_balance(
                f"{len(self.lengths)} samples with drop_last=True are less than one global batch of "
                f"{self._plan().batch}: every rank would read nothing",
                "use smaller batches, fewer ranks, or drop_last=False",
            )
        self._token_list: tuple[int, list[list[int]]] | None = None

    def _plan(self) -> WindowPlan:
        return WindowPlan(
            n=len(self.lengths),
            batch=self.batch_size * self.num_replicas,
            window=self.window,
            drop_last=self.drop_last,
            largest_first=self.largest_first,
        )

    def population(self) -> int:
        """Return the length of the dataset the indices point into."""
        return len(self.lengths)

    def offset(self) -> int:
        """Return how much of the epoch was read before it was resumed."""
        return self._place.consumed()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch: the same epoch keeps a resumed offset, any other starts at 0."""
        check_epoch(epoch)
        if epoch != self.epoch:
            self._place = EpochPosition()
        self.epoch = epoch
        self._order.set_epoch(int(epoch))

    def is_finished(self) -> bool:
        """Return whether a loaded state was saved at the end of this epoch."""
        return self._place.start > 0 and self._steps_left() == 0

    def __len__(self) -> int:
        return self._steps_left()

    def steps_of_epoch(self, *, batch_size: int, drop_last: bool) -> int:  # noqa: ARG002 - it batches itself
        """Return how many batches this rank has in an epoch that is read from its beginning."""
        place, self._place = self._place, EpochPosition()
        steps = self._steps_left()
        self._place = place
        return steps

    def _steps_left(self) -> int:
        if self._tokens is None:
            return self._plan().steps(self._place)
        return (len(self._all_batches()) - self._place.start) // self.num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        if self.is_finished():
            warn_empty_epoch(self.epoch)
            return iter(())
        return self._batches()

    def _warn_of_dropped_batches(self) -> None:
        left = len(self._all_batches()) - self._place.start
        self.dropped_batches = left % self.num_replicas
        if self.dropped_batches:
            logger.warning(
                "epoch %d: %d of %d batches are dropped: they cannot be divided evenly among %d ranks",
                int(self.epoch),
                self.dropped_batches,
                len(self._all_batches()),
                self.num_replicas,
            )

    def _all_batches(self) -> list[list[int]]:
        assert self._tokens is not None, "called only with max_tokens"  # noqa: S101 - our own invariant
        epoch = int(self.epoch)
        if self._token_list is None or self._token_list[0] != epoch:
            order = np.fromiter(self._order, dtype=np.int64, count=len(self.lengths))
            batches = self._tokens.batches(order, self._costs, (self.seed, epoch))
            self._token_list = (epoch, batches)
        return self._token_list[1]

    def _batches(self) -> Iterator[list[int]]:
        if self._tokens is not None:
            batches = self._all_batches()
            self._warn_of_dropped_batches()
            for step in range(self._steps_left()):
                yield batches[self._place.start + self.rank + step * self.num_replicas]
            return
        look_up = self._order.open_epoch()
        words = (self.seed, int(self.epoch))
        for batch in self._plan().read(self._place, self._costs, look_up, words):
            missing = -len(batch) % self.num_replicas
            # Like torch, fill the last batch with samples from the epoch's beginning.
            positions = [place % len(self.lengths) for place in range(missing)]
            extra = [look_up(place, place + 1)[0] for place in positions]
            padded = np.concatenate([batch, np.asarray(extra, dtype=np.int64)])
            shares = deal(self._costs[padded], self.num_replicas, padded=self._padded)
            yield padded[shares[self.rank]].tolist()

    def identity(self) -> dict[str, object]:
        """Return what must be equal for a saved position to mean the same."""
        tokens = self._tokens
        return {
            **self._order.identity(),
            "lengths": self._digest,
            "window": self.window,
            "cost": self._cost_name,
            "largest_first": self.largest_first,
            "fingerprint": self.fingerprint,
            "max_tokens": None if tokens is None else tokens.max_tokens,
            "batch_size": None if tokens is None else self.batch_size,
        }

    def state_after(
        self,
        batches: int,
        *,
        batch_size: int,  # noqa: ARG002 - part of the Cursor protocol
        drop_last: bool,  # noqa: ARG002 - part of the Cursor protocol
        exhausted: bool,
    ) -> dict[str, Any]:
        """Return the state after `batches` batches of each rank; equal on all ranks."""
        if self._tokens is None:
            place = self._plan().advance(self._place, batches)
        else:
            place = EpochPosition(start=self._place.start + batches * self.num_replicas)
        finished = exhausted or batches >= self._steps_left()
        return {
            "version": VERSION,
            "epoch": int(self.epoch),
            "consumed": len(self.lengths) if finished else place.consumed(),
            "finished": finished,
            "world_size": self.num_replicas,
            "place": place.to_json(),
            "token_window": None if self._tokens is None else self._tokens.window,
            "identity": self.identity(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position that this epoch was resumed at; the loader counts from there."""
        return self.state_after(0, batch_size=1, drop_last=False, exhausted=False)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue where `state` was taken; world size and batch size may have changed since.

        Raises:
            StateMismatchError: It is damaged, or belongs to other data.
        """
        parsed = parse_state(state)
        compare_identity(
            parsed["identity"], self.identity(), strict=strict, what=type(self).__name__
        )
        place = EpochPosition.from_json(parsed.get("place"))
        window: Any = parsed.get("token_window")
        is_count = isinstance(window, int) and not isinstance(window, bool) and window >= 0
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
            self._token_list = None
        self.epoch = AutoEpoch(parsed["epoch"])
        self._order.set_epoch(parsed["epoch"])
        end = len(self.lengths) if self._tokens is None else len(self._all_batches())
        self._place = EpochPosition(start=end) if parsed["finished"] else place
        if self._tokens is not None and self.is_finished():
            self._warn_of_dropped_batches()  # too few are left for a step, so no pass will warn


def _at_least(value: int, least: int, name: str) -> int:
    if require_int(value, name) < least:
        raise bad_balance(f"{name} is {value}", f"pass {name} >= {least}")
    return value
