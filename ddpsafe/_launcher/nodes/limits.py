"""What bounds each wait of one launcher for another, beside the user's `timeouts` and `rendezvous`.

How soon a connection counts as broken, and a node as away or lost, is the channel's: see `ddpsafe._job.channel`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from ddpsafe._job.channel import BEAT_S

# Before an attempt.

DIAL: Final = timedelta(seconds=10)
"""A node that connects to the endpoint, until node 0 has accepted it."""

CONNECT: Final = timedelta(seconds=4)
"""A new node that tries whether it reaches a port of node 0."""

CONNECT_AGAIN: Final = timedelta(seconds=2.5)
"""The same once the connection carries packets: its kernel answers at once then, but one packet may be lost.

Linux repeats it after 1 s.
"""

FILE_APPEARS: Final = timedelta(seconds=5)
"""Network file systems show a new file on another host after some seconds."""

EXAMINATION_READ: Final = timedelta(seconds=10)
"""The findings of an examination, until all nodes have read them."""

READ: Final = timedelta(seconds=3)
"""What a launcher says last, such as why it cannot take part, until another one has read it."""

# In an attempt, and at its end.

EVIDENCE: Final = timedelta(seconds=3)
LATE_EVIDENCE: Final = timedelta(seconds=12)
"""What became of all ranks. Both together are the 15 s after which a silent launcher is named, see `SilenceWatch`."""

OTHER_LOSSES: Final = timedelta(seconds=2 * BEAT_S)
"""A network failure ends connections up to a beat apart: each once its next packet is not acknowledged."""

REDIAL: Final = timedelta(seconds=0.7)
"""A reset connection, as by a firewall, is dialled again at once: so long a rank that fails waits for that."""

AFTER_GRACE: Final = timedelta(seconds=10)
"""After the grace period come SIGKILL and the removal of what the ranks left behind."""

NO_ANSWER: Final = timedelta(seconds=3)
"""A launcher that runs sends something every 2 s: after so long a node may end without node 0."""

STATUS: Final = timedelta(seconds=6)
"""Node 0, which gives the ranks 5 s to answer, for ``ddpsafe status``, which waits for 10 s."""

DECISION: Final = timedelta(minutes=2)
"""Node 0, from the end of all ranks to its decision on another attempt.

Its retry policy decides at once. It may take as long to act on a Ctrl-C, whatever holds it up.
"""
