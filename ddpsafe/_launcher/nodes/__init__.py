"""Several nodes: one launcher on each, one watch over the ranks of all, one error on every node.

Node 0, the coordinator, serves the endpoint and watches the ranks of all nodes; each participant
passes on what its ranks report, and does as it is told. Each module imports only those before it::

    node_messages    what the nodes tell each other, as JSON
    control_channel  the control channel: both ends of one TCP connection for each participant
    rendezvous       how nodes find each other: TorchElastic's rendezvous on a sealed store
    node_zero        node 0: the watch over all ranks, and what it concludes
    other_node       every other node: passes on and does as it is told
    rounds           one attempt after the other, on this node: the plan of each, and its ranks

Nothing here is loaded where a launch has one node.
"""
