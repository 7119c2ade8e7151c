"""From what the nodes have sent to findings; every node makes them for itself.

Each module imports only those before it::

    results      everything that came in, as it travels to every node
    differences  what should be the same on every host
    fixes        lines to copy: firewall rules, variables, an MTU
    attendance   who has not come, who came twice, who could not reach the endpoint
    addresses    addresses that others cannot reach
    connections  which direction between two hosts is closed, and why
    all          all of them, and the matrix
"""
