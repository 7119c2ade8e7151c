"""torch's DataLoader for ranks, its workers, and what they must not share.

Each module imports only those before it::

    machine_limits  warnings of the machine's limits that workers would run into
    torchs_loader   torch's loader, with names of ddpsafe's for what is private there
    equal_readers   two ranks or workers that read the same samples of a stream
    position        where a loader is: its sampler's position, saved states, or replayed reads
    sampler_search  which sampler divides the data, and which tracks the position
    reading         how samples are read: failures are named, workers follow the epoch
    worker_safety   handles that must not cross into a worker
    worker_death    which worker died or hangs, at which index, and why
    cell            which epoch a pass reads, who set it, and how far the newest pass is
    loader          `DataLoader`: its epochs, its workers, its passes, its state; and `ctx.loader`
"""
