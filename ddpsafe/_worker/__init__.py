"""The code that runs in each rank.

::

    entrypoint         a rank from start to exit, its reports, and the pipe from its launcher
    environment        variables, streams and device of the rank
    terminal           the launcher's terminal, as the rank's streams show it
    session            the rank's membership in its launch
    context            `RankContext`, which the user's function receives
    collectives        reduce, gather and broadcast
    model_check        compares the model over the ranks before DDP copies it
    process_group      `init_process_group` under a deadline, and its end
    torch_hooks        every private name of torch, guarded
    whereabouts        where the rank is, read while it keeps running
    pending_exception  exceptions that a rank is handling when it begins to wait
    stop_agreement     all ranks stop at the same call of `stop_requested`
    stop_signals       how ranks and their helper processes receive the signals that ask for it
    inherited_place    keeps new interpreters of a rank from joining in its place
    rank               the one state of the rank
    script             the script, module or program of `ddpsafe run`
    preload            what the fork server imports once for all ranks
    join/              joining a group in ranks that another launcher started
"""
