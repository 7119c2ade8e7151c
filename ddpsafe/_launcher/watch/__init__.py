"""While the ranks run: wait for what they report, for deadlines and for signals.

Each module imports only those before it::

    hang_detection  ranks that wait too long, have returned too early, or make no step
    idleness        whether ranks do nothing at all, or have connections without a reply
    status_socket   the status of a running launch, for other processes of the same user
    deadlock_watch  proofs of a deadlock, warnings of a long wait, answers to `ddpsafe status`
    streams         writes to the caller's streams, which never block
    screen          what a rank's output looks like on a terminal, and which lines are finished
    signals         SIGINT, SIGTERM, SIGHUP and SIGQUIT as events of the wait
    console         the output of the ranks, on the caller's console
    preemption      a request to stop, agreed by all ranks
    supervisor      the one wait loop, and why it ended
"""
