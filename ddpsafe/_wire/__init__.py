"""What crosses between launcher and rank, and how it is read off an exception. Knows no torch.

Each module imports only those before it::

    rank_pipe        the pipe of a rank, which never blocks the launcher, and its counters
    payload          functions, arguments and results, pickled; what cannot travel is named
    foreign_texts    texts of torch, gloo, NCCL and CUDA: origin and kind; the only regexes on errors
    spec             what one rank needs to know to start
    exception_facts  which exception of a chain says why a rank failed, its line, text and exit code
    messages         what ranks report, and what the launcher concludes: outcomes, positions
"""
