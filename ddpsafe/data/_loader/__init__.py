"""torch's DataLoader for ranks, its workers, and what they may not share.

Each module imports only those before it::

    limits          limits of the machine that workers would run into
    reachable       what a worker would receive with a dataset
    replay          positions of samplers and datasets that are not ddpsafe's
    sampler_search  which sampler divides the data, and which knows the position
    epochs          how workers that outlive an epoch learn of the next one
    worker_safety   handles that must not cross into a worker
    worker_death    a dead or hanging worker, by name, line and reason
    iteration       one pass over a loader, which of its batches count as read, and its state
    loader          `DataLoader`: its epochs, its workers, its state
    build           `ctx.loader`: sampler, seeds, workers and check in one call
"""
