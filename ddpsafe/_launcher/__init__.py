"""Runs in the caller: plan, start, watch, diagnose, end.

::

    launch_parts   what a launch hands unchanged to its attempts
    attempt        one attempt, from start to result
    plan           config and call, resolved and checked before anything starts
    retry          whether and when another attempt begins
    handle         what `spawn(join=False)` returns
    run_directory  where logs and reports go
    uncaught       how an error is shown, and the exit code of the script
    processes/     the processes of one attempt
    watch/         the wait while they run
    diagnosis/     which rank broke, and the error that says so
    nodes/         launches on several nodes, each with a launcher of its own
"""
