"""How a rank joins its group when another launcher, or none, has started it.

Each module imports only those before it::

    store_endpoint  where the ranks meet, and whether the store there is this job's
    network         which interface a rank uses, and whether the nodes reach each other
    store           the store at the endpoint: connect in bounded time, or explain why not
    joining         environment, device and group of this rank
    attached        `process_group`, `setup` and `cleanup`
"""
