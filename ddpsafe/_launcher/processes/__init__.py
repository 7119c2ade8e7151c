"""The processes of one attempt: started all or none, identified by more than their pid, always ended.

Each module imports only those before it::

    descendants     which processes belong to a launch, by identity and never by pid alone
    store_folder    the private folder for the store of the ranks
    rank_process    one rank: its process, its pipe, its agreement to stop
    shutdown        SIGTERM, grace, SIGKILL, and what ranks leave behind
    reaper_program  the program of the process that cleans up after a killed launcher
    reaper          starts that process, tells it about the ranks, and ends it
    start           starts all ranks or none

Nothing here knows why a rank has failed.
"""
