"""The processes of one attempt: started all or none, known again after their end, ended for sure.

Each module imports only those before it::

    descendants     which processes belong to a launch, by identity and never by pid alone
    launcher_store  the private folder in which the ranks meet
    rank_process    one rank: its process, its pipe, what is said about stopping
    shutdown        SIGTERM, grace, SIGKILL, and what ranks leave behind
    reaper_program  what the process does that cleans up after a killed launcher
    reaper          starts that process, tells it of the ranks, and ends it
    start           all ranks or none

Nothing here knows why a rank has failed.
"""
