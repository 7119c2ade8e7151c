"""Samplers that divide one global order over the ranks, and resume in the middle of it.

Each module imports only those before it::

    base         the global order, the rank's share of it, and the saved position
    permutation  shuffles that need no memory
    ordered      `DistributedSampler` and the exact one for evaluation
    batch_plans  which samples make up a global batch of balanced length
    weighted     draws by weight
    balanced     `BalancedBatchSampler`
"""
