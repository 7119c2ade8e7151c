"""Samplers, loader, per-process resources and exact evaluation: each sample is read by one rank.

Importing it imports torch; ``import ddpsafe`` alone does not. Errors are in
`ddpsafe.data.errors`.
"""

from ddpsafe.data._consistency import check_dataset_consistency, sorted_files
from ddpsafe.data._evaluation import gather_exact, masked_batches
from ddpsafe.data._even_steps import EvenSteps, even_steps
from ddpsafe.data._iterable import ShardedIterable
from ddpsafe.data._loader.loader import DataLoader
from ddpsafe.data._loader.worker_safety import WorkerHazard, check_worker_safety
from ddpsafe.data._packed_list import PackedList
from ddpsafe.data._per_process import PerProcess
from ddpsafe.data._samplers.balanced import BalancedBatchSampler
from ddpsafe.data._samplers.ordered import DistributedSampler, EvalSampler
from ddpsafe.data._samplers.weighted import WeightedSampler
from ddpsafe.data._seeding import sample_rng, seed_worker

__all__ = [
    "BalancedBatchSampler",
    "DataLoader",
    "DistributedSampler",
    "EvalSampler",
    "EvenSteps",
    "PackedList",
    "PerProcess",
    "ShardedIterable",
    "WeightedSampler",
    "WorkerHazard",
    "check_dataset_consistency",
    "check_worker_safety",
    "even_steps",
    "gather_exact",
    "masked_batches",
    "sample_rng",
    "seed_worker",
    "sorted_files",
]
