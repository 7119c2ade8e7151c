"""While the ranks run: wait for what they report, for deadlines and for signals.

Each module imports only those before it::

    hang_detection  who waits too long, who has left, who makes no step
    status_socket   what a running launch tells another process of its user
    live            whether a job that still runs gets on
    streams         writes to the caller's streams, which never block
    signals         SIGINT, SIGTERM and SIGHUP as events of the wait
    console         what the ranks print, on the caller's console
    preemption      a request to stop, agreed by all ranks
    supervisor      the one wait loop, and why it ended
"""
