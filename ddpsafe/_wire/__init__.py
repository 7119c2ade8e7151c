"""What launcher and rank send each other, and how it is read from an exception. Works without torch.

Each module imports only those before it::

    rank_pipe        the pipe of a rank, which never blocks the launcher, and its progress counters
    payload          functions, arguments and results, pickled; names what cannot be pickled
    foreign_texts    texts of torch, gloo, NCCL and CUDA: origin and kind; the only regexes on errors
    spec             what a rank is given when it starts, and its log files
    exception_facts  which exception of a chain explains a failure, its line, text and exit code
    messages         what ranks report, and the outcome that the launcher makes from it
    log_overflow     where the output of a rank goes if its log has no room
"""
