"""How the processes of one job trust each other and agree, whoever has started them.

::

    secret      the job's secret, and values that are signed with it
    endpoint    one node serves it, the others reach it, and why they do not
    channel     one connection from each node to the first: its loss, its silence, and its messages
    store_keys  the keys of a store: torch's, a folder's, signed ones
    control     barriers and messages between ranks over a store
    agreement   all report, one decides, all get the answer or raise the same error
    peers       a rank that has ended is noticed while others wait for it
"""
