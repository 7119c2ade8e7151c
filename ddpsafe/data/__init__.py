"""Data that every rank reads once: samplers, loader, per-process resources, exact evaluation.

Importing it imports torch; ``import ddpsafe`` alone does not. Errors are in
`ddpsafe.data.errors`.
"""

from ddpsafe.data._balanced import BalancedBatchSampler
from ddpsafe.data._consistency import check_dataset_consistency
from ddpsafe.data._even_steps import EvenSteps, even_steps
from ddpsafe.data._files import sorted_files
from ddpsafe.data._gather_exact import gather_exact
from ddpsafe.data._iterable import ShardedIterable
from ddpsafe.data._loader import DataLoader
from ddpsafe.data._masked import masked_batches
from ddpsafe.data._packed_list import PackedList
from ddpsafe.data._per_process import PerProcess
from ddpsafe.data._samplers import DistributedSampler, EvalSampler
from ddpsafe.data._seeding import sample_rng, seed_worker
from ddpsafe.data._weighted import WeightedSampler
from ddpsafe.data._worker_safety import WorkerHazard, check_worker_safety

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
