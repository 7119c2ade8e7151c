"""How long a process or a host that says nothing is believed to be there: each limit, with its reason.

What bounds the other waits of one launcher for another is in `_launcher.nodes.limits`, and what users set in
`Timeouts`.
"""

from __future__ import annotations

from typing import Final

LOSS_S: Final = 3.5
"""Another host's kernel, between launchers, without any reply: the connection ends.

The kernel retransmits a packet 0.2, 0.6, 1.4 and 3.0 s after the first time: the last one still
reaches a network that is back by then.
"""

STORE_SILENCE_S: Final = 4
"""The same for a rank's connection to the launcher's store, in the whole seconds that keep-alive counts.

It is opened again then, and the call repeated.
"""

LAUNCHER_SILENCE_S: Final = 15.0
"""Another launcher whose host replies: a warning, since it may be stopped or starved of CPU."""

BEAT_S: Final = 5.0
SILENCE_S: Final = 30.0
"""A rank on another host, under another launcher, or the owner of a directory of checkpoints.

It renews its heartbeat every `BEAT_S`, in a store or on a network file system, which may show that late: six
have to be missing. It counts as dead then.
"""

DYING_S: Final = 5.0
"""A process on this kernel that may be about to end, such as the last job, before the lock of its directory is
refused."""
