"""Samplers that divide one global order over the ranks, and resume in the middle of it.

Each module imports only those before it::

    base         the global order, the rank's share of it, and the saved position
    permutation  shuffles that need no memory
    ordered      `DistributedSampler` and the exact one for evaluation
    weighted     draws by weight
    balanced     `BalancedBatchSampler`, and which samples make up its global batches
"""
