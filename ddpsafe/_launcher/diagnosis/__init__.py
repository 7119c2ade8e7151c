"""The diagnosis of a failed attempt: which rank broke, what the error says, what the report shows.

Data flows one way, and each module imports only those before it::

    rank_readings  where each rank is, from its answers or from what it wrote at a crash
    stragglers     which ranks make the others wait while a run makes progress
    wait_graph     which ranks wait for which, and whether that can still end
    root_cause     outcomes -> Evidence -> RULES -> the rank that broke, and the kind of failure
    attempt_error  all of it -> one LaunchError: its class, its text, its facts
    report_files   the error -> report.txt and report.json
    report_page    the reports of all attempts -> report.html

Nothing here starts or ends a process.
"""
