"""Several nodes: one launcher on each, one watch over the ranks of all, one error on every node.

Node 0, the coordinator, serves the endpoint and watches the ranks of all nodes. Each participant
relays what its ranks report, and follows node 0's decisions. Each module imports only those before it::

    node_messages    the messages between nodes, as JSON
    links            a broken link between two nodes, by what their ranks report
    texts            what is said of nodes: errors, warnings, events
    limits           what bounds each wait of one launcher for another
    decisions        what node 0 and the others decide in an attempt: no thread, socket or clock
    lobby            who is there, who cannot take part, and what node 0 decides, outside of attempts
    torchs_rendezvous  TorchElastic's rendezvous over a state that node 0 keeps
    rendezvous       how nodes find each other, and who decides what
    node_zero        node 0: does what is decided there, and shows the ranks of all nodes to the watch
    other_node       every other node: does what is decided there, and relays what its ranks report
    rounds           the attempts of this node: the plan of each, and its ranks

A launch with one node loads none of this.
"""
