"""What the processes of one job need to trust each other, whoever started them.

Launchers of several nodes, ranks under another launcher and the doctors of several hosts use the same
parts: `secret`.
"""
