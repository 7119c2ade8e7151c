"""Runs in each rank.

::

    entrypoint         a rank from its first line to its report, and the pipe to its launcher
    environment        variables, streams and device of the rank
    session            the state of the rank that its launcher made
    context            `RankContext`, what the user's function sees
    collectives        reduce, gather and broadcast
    process_group      `init_process_group` under a deadline, and its end
    store_sync         barriers and messages over the store
    torch_hooks        every private name of torch, guarded
    whereabouts        where the rank is, told while it goes on
    pending_exception  exceptions that are being handled when a rank begins to wait
    stop_agreement     all ranks stop at the same call of `stop_requested`
    script             the script, module or program of `ddpsafe run`
    preload            what the fork server loads once
    join/              ranks that another launcher has started
"""
