"""The two samplers most scripts need: one for training, one for exact evaluation."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe.data._arguments import require_choice, require_int
from ddpsafe.data._samplers.base import PositionSampler
from ddpsafe.data._samplers.permutation import Algorithm, open_order, torchs_permutation
from ddpsafe.data.errors import DatasetChangedError, DataWarning

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized

    from ddpsafe.data._samplers.base import Batching, Lookup


class _OrderedSampler(PositionSampler):
    """A permutation of the dataset per epoch, or the dataset's own order."""

    dataset: Any  # torch declares a Dataset; a length and any sized object work, too

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,  # noqa: FBT001, FBT002 - torch's signature
        seed: int | None = None,
        drop_last: bool = False,  # noqa: FBT001, FBT002 - torch's signature
        *,
        pad: bool = True,
        algorithm: Algorithm = "torch",
    ) -> None:
        super().__init__(num_replicas, rank, seed)
        require_choice(algorithm, "algorithm", get_args(Algorithm))
        if not hasattr(dataset, "__len__"):
            dataset = range(require_int(dataset, "dataset (or its length)", least=0))
        self.dataset = dataset
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.pad = pad
        self.algorithm: Algorithm = algorithm
        self._n = len(self.dataset)
        if self._n == 0:
            raise ConfigError(
                Explanation(
                    "The dataset is empty (n = 0).",
                    cause="a path or a filter matched nothing.",
                    fix="check where the dataset looks for its samples.",
                )
            )
        if self._n < self.num_replicas:
            self._warn_of_few_samples()

    def _warn_of_few_samples(self) -> None:
        samples = "1 sample" if self._n == 1 else f"{self._n} samples"
        if self.drop_last:
            raise ConfigError(
                Explanation(
                    f"{samples} {'is' if self._n == 1 else 'are'} too few for {self.num_replicas} ranks with "
                    "drop_last=True: every rank would read nothing.",
                    cause="the dataset has fewer samples than there are ranks.",
                    fix="use fewer ranks, or drop_last=False.",
                )
            )
        if self.pad:  # no error, since torch's order is kept
            last = self.num_replicas - 1
            repeating = f"ranks {self._n} to {last} repeat"
            if self._n == last:
                repeating = f"rank {last} repeats"
            warnings.warn(
                f"{samples} for {self.num_replicas} ranks: {repeating} samples of the others. "
                "pad=False (or EvalSampler) leaves them empty.",
                DataWarning,
                stacklevel=4,
            )

    def size(self) -> int:
        return self._n

    def population(self) -> int:
        return self._n

    def identity(self) -> dict[str, object]:
        return {
            "n": self._n,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "algorithm": self.algorithm if self.shuffle else None,
            "fingerprint": self.fingerprint,
        }

    def chunks(self) -> Iterator[list[int]]:
        self._check_dataset()
        yield from super().chunks()

    def _check_dataset(self) -> None:
        now = len(self.dataset)
        if now != self._n:
            raise DatasetChangedError(
                Explanation(
                    f"The dataset has {now} samples, but had {self._n} when the sampler was made.",
                    cause="samples were added or removed while training.",
                    fix="make a new sampler and loader after the dataset changed.",
                )
            )

    def open_epoch(self) -> Lookup:
        if self.shuffle and self.algorithm == "torch":
            # Of the permutation, only this rank's part is kept. numpy copies it: torch would use all
            # cores, whose threads then spin for a few milliseconds beside the training.
            order = torchs_permutation(self._n, seed=self.seed, epoch=int(self.epoch)).numpy()
            part = order[self.start + self.rank :: self.num_replicas][: self.num_samples]
            padding = order[self._positions(len(part), self.num_samples)]
            own = np.concatenate([part, padding])
            return lambda start, stop: own[start:stop].tolist()
        order_at = open_order(
            self._n,
            shuffle=self.shuffle,
            algorithm=self.algorithm,
            seed=self.seed,
            epoch=int(self.epoch),
        )
        return lambda start, stop: order_at(self._positions(start, stop)).tolist()


class DistributedSampler(_OrderedSampler, TorchDistributedSampler[object]):  # type: ignore[override]  # torch sets attributes
    """torch's `DistributedSampler`, bit for bit, in O(n / num_replicas) memory and resumable.

    Differences: it has a state, ``pad=False``, and an opt-in shuffle that needs no memory.
    Without a process group it serves a single rank. It raises if the dataset is empty, if its
    length changes, or if drop_last would drop every sample.

    Args:
        dataset: The dataset, or its length.
        num_replicas: The number of ranks to divide among; the world size by default.
        rank: The rank whose part to read, from 0; this rank by default.
        shuffle: Whether to shuffle; the order is a function of (seed, epoch).
        seed: The same on every rank; by default that of ``launch(seed=)``, else 0 like torch's.
        drop_last: Drop the tail so that all ranks have the same number of samples.
        pad: Repeat samples so that all ranks have the same number, as torch does. ``False``
            repeats none: ranks then differ by at most one sample.
        algorithm: ``"torch"`` for torch's order; ``"feistel-v1"`` for a frozen shuffle whose
            first index takes under a millisecond at any n, without torch's bias beyond 5e7.

    Raises:
        ConfigError: n = 0, a rank outside of the world, too few samples for drop_last.
    """


class EvalSampler(DistributedSampler):
    """Reads every sample exactly once over all ranks, in dataset order, for evaluation.

    No sample is repeated; ranks differ by at most one, and some are empty if n < num_replicas.
    Evaluate the unwrapped model (``ctx.unwrap(model)``): a DDP forward synchronises buffers,
    and a rank without a batch would not take part. Collect with `gather_exact`.

    Args:
        dataset: The dataset, or its length.
        num_replicas: The number of ranks to divide among; the world size by default.
        rank: The rank whose part to read, from 0; this rank by default.
        pad: Repeat samples so that all ranks take the same number of steps, for models that
            communicate in their forward (FSDP, SyncBatchNorm); read with `masked_batches`.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        pad: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=False, pad=pad)

    def indices(self) -> list[int]:
        """Return the dataset indices of this rank's samples, without repeats."""
        return list(self._positions(0, self.valid_samples()).tolist())


class LocalSampler(_OrderedSampler):
    """The loader's default with a single rank."""

    # Deliberately not a `DistributedSampler`: frameworks that add one (Lightning Fabric,
    # Accelerate) still see that the loader has none.

    def __init__(self, dataset: Sized, *, shuffle: bool, seed: int | None) -> None:
        super().__init__(dataset, 1, 0, shuffle, seed)

    # As torch's samplers of a single process, it follows a dataset that grows: no other rank has to agree.
    # A pass under way keeps its order, and so does a position in it.

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._check_dataset()

    def __len__(self) -> int:
        return self.num_samples if self.start else len(self.dataset)

    def steps_of_epoch(self, by: Batching) -> int:
        return by.count(len(self.dataset))

    def _check_dataset(self) -> None:
        if self.start:
            super()._check_dataset()
        else:
            self._n = len(self.dataset)
