"""What is concluded from a failed attempt: who broke, what the error says, what the report shows.

Data flows one way, and each module imports only those before it::

    readings       what each rank tells when it is asked where it is, or wrote as it crashed
    stragglers     who makes the others wait as long as a run makes progress
    wait_graph     who waits for whom, and whether that can still end
    root_cause     outcomes -> Evidence -> RULES -> the rank that broke, and the kind of failure
    attempt_error  all of it -> one LaunchError: its class, its text, its facts
    report_files   the error -> report.txt and report.json
    report_page    the reports of all attempts -> report.html

Nothing here starts or ends a process.
"""
