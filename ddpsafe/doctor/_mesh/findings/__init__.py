"""Findings from what all nodes reported; every node computes them from the same results.

Each module imports only those before it::

    observations  everything that node rank 0 collected, as it is sent to every node
    fixes         lines to copy: firewall rules, interface variables and MTUs
    differences   what should be the same on every host
    attendance    which nodes are missing, joined twice, or could not reach the endpoint
    addresses     addresses that other hosts cannot reach
    connections   which direction between two hosts is closed, and why
    assemble      all of them, and the matrix
"""
