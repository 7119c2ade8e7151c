"""Likely causes and remedies, by what was seen."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ddpsafe._errors import FailureKind
    from ddpsafe._launcher.causes import Sort

Advice = tuple[str, str]
"""Likely cause, what to do."""

BY_KIND: Final[dict[FailureKind, Advice]] = {
    "user-error": (
        "the error above, where its traceback ends.",
        "mend that line; the other ranks were stopped and need no change.",
    ),
    "out-of-memory": (
        "the rank asked for more memory than there was.",
        "lower the batch size, num_workers or prefetch_factor, or raise the memory limit.",
    ),
    "network": (
        "a connection of this rank's own broke; that may pass.",
        'see which address it talked to; RetryPolicy(on={"network"}) tries again.',
    ),
    "startup-network": (
        "the ranks could not be connected.",
        "check the interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and the firewall.",
    ),
    "port": (
        "another program holds the port the script asks for.",
        "drop the hard-coded port: the launcher brings its own; or end that program.",
    ),
    "peer-lost": (
        "a peer vanished, and no rank of this launch reported why.",
        "look at the logs of all ranks, and at dmesg for the out-of-memory killer.",
    ),
    "hang": (
        "a collective timed out: a rank did not take part in it, or took part in another one.",
        "compare where the ranks were; call the same collectives, in the same order, everywhere.",
    ),
    "unpicklable": (
        "the value cannot be sent to another process.",
        "return plain data: numbers, strings, tensors; keep open files and locks in the rank.",
    ),
    "killed": (
        "a worker process of its DataLoader died: killed for memory, a full /dev/shm, or a crash.",
        "lower num_workers or prefetch_factor; num_workers=0 shows an error of the dataset itself.",
    ),
    "hardware": (
        "the device itself reported an error.",
        "take the host out of service and run elsewhere; trying again here will not help.",
    ),
}

BY_SIGNAL: Final[dict[int, Advice]] = {
    int(signal.SIGKILL): (
        "the kernel's out-of-memory killer, a container's memory limit, or somebody's kill -9.",
        "see dmesg on {host}; lower num_workers or the batch size, or raise the memory limit.",
    ),
    int(signal.SIGSEGV): (
        "a bug in native code: an extension, a driver, mixed library versions.",
        "the Python stack at the crash is in the log below; check versions of CUDA and torch.",
    ),
    int(signal.SIGBUS): (
        "shared memory or a mapped file ran out: /dev/shm is 64 MB in most containers.",
        "enlarge it (docker run --shm-size=8g, or an emptyDir of medium Memory).",
    ),
    int(signal.SIGABRT): (
        "native code gave up: a failed assertion, or collectives of different sizes under gloo.",
        "its last words are in the log below; compare the shapes that the ranks pass.",
    ),
}

KILLED_FOR_MEMORY: Final[Advice] = (
    "the kernel's out-of-memory killer: the cgroup counts a kill during this attempt.",
    "lower num_workers or the batch size, or raise the limit; dmesg on {host} names the process.",
)

OTHER_SIGNAL: Final[Advice] = (
    "somebody or something sent it: a scheduler, another user, the script itself.",
    "find the sender on {host}; ranks are ended by their launcher alone.",
)

BY_SORT: Final[dict[Sort, Advice]] = {
    "suspended": (
        "somebody sent SIGSTOP, or a debugger or a container runtime froze the process.",
        "kill -CONT {pid} would have let it go on; find out who stops processes on {host}.",
    ),
    "left": (
        "the ranks had different numbers of batches or took different branches.",
        "give every rank the same number of steps: drop_last, DistributedSampler or torch's Join.",
    ),
    "behind": (
        "the rank hangs or works where it was, or skipped a collective that the others entered.",
        (
            "see its line below; if it is at work, keep such work away from the others' collectives or "
            "raise timeouts.{setting}; else let every rank call the same collectives, in the same order."
        ),
    ),
    "elsewhere": (
        "the rank was busy outside of the collective that the others waited in.",
        (
            "see its line below; keep one rank's long work away from the others' collectives, or raise "
            "timeouts.{setting}."
        ),
    ),
    "mismatch": (
        "other collectives or shapes, or one rank alone in the forward pass of the DDP wrapper.",
        "call the same collectives in the same order; use ctx.unwrap(model) on one rank alone.",
    ),
    "unknown": (
        "every rank only saw another one vanish or hang; none said why.",
        "compare where the ranks were, in the logs.",
    ),
}

IN_KERNEL: Final[Advice] = (
    "a disk, a mount or a device on {host} does not answer; until it does, not even SIGKILL ends it.",
    "look at dmesg and the mount on {host}; keep the data where it answers.",
)
