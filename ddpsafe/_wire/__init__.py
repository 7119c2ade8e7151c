"""What crosses between launcher and rank. Knows no torch.

Each module imports only those before it::

    rank_pipe        the pipe of a rank, which never blocks the launcher, and its counters
    payload          functions, arguments and results, pickled; what cannot travel is named
    foreign_texts    texts of torch, gloo, NCCL and CUDA: origin and kind; the only regexes on errors
    spec             what one rank needs to know to start
    exception_chain  an exception and its chain, as facts
    messages         what ranks report, and what the launcher concludes: outcomes, positions
"""
