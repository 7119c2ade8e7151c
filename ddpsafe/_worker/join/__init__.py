"""How a rank joins a group that another launcher, or none, has started.

Each module imports only those before it::

    launcher_address  where the ranks meet, and whether it is the same job there
    network           which interface a rank talks on, and whether the nodes reach each other
    store             the store at the endpoint: reached in bounded time, or explained
    joining           environment, device and group of this rank
    attached          `process_group`, `setup` and `cleanup`
"""
