"""Runs in the caller: plan, start, watch, diagnose, end.

::

    attempt        one attempt, from start to result
    plan           config and call, resolved and checked; nothing has started yet
    retry          whole attempts, again
    handle         what `spawn(join=False)` returns
    run_directory  where logs and reports go
    uncaught       how an error of a launch is shown and what the script exits with
    processes/     the processes of one attempt
    watch/         the wait while they run
    diagnosis/     which rank broke, and the error that says so
"""
