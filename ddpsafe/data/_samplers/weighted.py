"""Draws samples by weight: one global stream, however many ranks share it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np

from ddpsafe.data._arguments import bad_arguments, require_amounts, require_choice, require_int
from ddpsafe.data._samplers.base import PositionSampler, digest
from ddpsafe.data._samplers.permutation import derive_keys, open_permutation, uniform_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from ddpsafe.data._samplers.base import Lookup

WeightMode = Literal["iid", "repeat"]


class WeightedSampler(PositionSampler):
    """Draws indices by weight; the stream is the same for any world size, and can be resumed.

    torch's `WeightedRandomSampler` does not divide among ranks and refuses more than 2**24
    weights. Here position p of the stream depends only on (seed, epoch, p), so each rank draws
    its own positions and nothing is broadcast.

    Args:
        weights: Shape (n,), not negative, not all zero; they need not sum to 1.
        num_samples: How many to draw per epoch over all ranks; n by default.
        replacement: Whether a sample can be drawn twice in an epoch.
        mode: ``"iid"`` draws independently. ``"repeat"`` uses weights as repeat factors: sample
            i appears floor(w) or ceil(w) times per epoch, w times on average, in shuffled order
            (detectron2's RepeatFactorTrainingSampler); the epoch's length then varies.
        num_replicas: The number of ranks to divide among; the world size by default.
        rank: The rank whose part to read, from 0; this rank by default.
        seed: The same on every rank; by default that of ``launch(seed=)``, else 0.
        drop_last: Drop the tail so that all ranks have the same number of samples.
        pad: Repeat the first draws so that all ranks have the same number of samples.

    Raises:
        ConfigError: Weights are negative, NaN, infinite, all zero or not of shape (n,);
            more samples are requested than can be drawn.
    """

    def __init__(  # noqa: PLR0913 - keyword-only after the subject of the call
        self,
        weights: Sequence[float] | torch.Tensor | NDArray[Any],
        num_samples: int | None = None,
        replacement: bool = True,  # noqa: FBT001, FBT002 - torch's signature
        *,
        mode: WeightMode = "iid",
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int | None = None,
        drop_last: bool = False,
        pad: bool = True,
    ) -> None:
        super().__init__(num_replicas, rank, seed)
        self.drop_last = drop_last
        self.pad = pad
        self.weights = require_amounts(weights, "weights", "WeightedSampler")
        if not self.weights.any():
            raise _bad("all weights are zero", "give at least one sample a weight")
        self.replacement = replacement
        self.mode: WeightMode = mode
        require_choice(mode, "mode", get_args(WeightMode))
        if self.mode == "repeat" and num_samples is not None:
            raise _bad(
                "with mode='repeat' the weights decide how many samples an epoch has",
                "leave num_samples out, or scale the weights",
            )
        draws = (
            len(self.weights) if num_samples is None else require_int(num_samples, "num_samples")
        )
        possible = int(np.count_nonzero(self.weights))
        if draws < 1 or (not self.replacement and self.mode == "iid" and draws > possible):
            raise _bad(
                f"{draws} samples cannot be drawn from {possible} with a weight above zero"
                f"{'' if self.replacement else ' without replacement'}",
                "request fewer samples, or use replacement=True",
            )
        self._draws = draws
        self._digest = digest(self.weights.tobytes())
        self._repeats: tuple[int, NDArray[np.int64]] | None = None

    def size(self) -> int:
        return int(self._repeat_ends()[-1]) if self.mode == "repeat" else self._draws

    def population(self) -> int:
        return len(self.weights)

    def identity(self) -> dict[str, object]:
        return {
            "n": len(self.weights),
            "weights": self._digest,
            "draws": self._draws,
            "replacement": self.replacement,
            "mode": self.mode,
            "seed": self.seed,
            "fingerprint": self.fingerprint,
        }

    def open_epoch(self) -> Lookup:
        if self.mode == "repeat":
            ends = self._repeat_ends()
            permute = open_permutation(int(ends[-1]), seed=self.seed, epoch=int(self.epoch))

            def look_up(start: int, stop: int) -> list[int]:
                places = permute(self._positions(start, stop))
                return list(np.searchsorted(ends, places, side="right").tolist())

            return look_up
        key = derive_keys(self.seed, int(self.epoch), count=1)[0]
        if self.replacement:
            sums = np.cumsum(self.weights)
            last = int(np.flatnonzero(self.weights)[-1])

            def draw(start: int, stop: int) -> list[int]:
                targets = uniform_at(self._positions(start, stop), key) * sums[-1]
                places = np.searchsorted(sums, targets, side="right")
                # Rounding may give the whole sum, which lies beyond the last weight above zero.
                return list(np.minimum(places, last).tolist())

            return draw
        # Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006: the samples
        # with the smallest exponential arrival times are a draw without replacement.
        uniform = uniform_at(np.arange(len(self.weights), dtype=np.int64), key)
        with np.errstate(divide="ignore"):
            arrivals = -np.log1p(-uniform) / self.weights
        arrivals[self.weights == 0] = np.inf
        order = np.argsort(arrivals, kind="stable")[: self._draws]
        return lambda start, stop: order[self._positions(start, stop)].tolist()

    def _repeat_ends(self) -> NDArray[np.int64]:
        """Return where the repeats of each sample end in this epoch: shape (n,), int64."""
        epoch = int(self.epoch)
        if self._repeats is None or self._repeats[0] != epoch:
            key = derive_keys(self.seed, epoch, count=2)[1]
            uniform = uniform_at(np.arange(len(self.weights), dtype=np.int64), key)
            whole = np.floor(self.weights)
            counts = whole + (uniform < self.weights - whole)
            self._repeats = (epoch, np.cumsum(counts.astype(np.int64)))
        return self._repeats[1]


_bad: Final = functools.partial(bad_arguments, "WeightedSampler")
