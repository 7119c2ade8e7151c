"""All ranks stop at the same call of `stop_requested()`.

Each module imports only those before it::

    agreement   the signals, the count of calls, the agreement
    transports  how the request travels: the launcher's pipe, or the store
"""
