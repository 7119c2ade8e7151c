"""Causes and advice that several parts of ddpsafe give: each stands here once.

The key is the code of the failure in the catalogue of ``ddpsafe explain``. It is Python and not a file
of data because it must be there when no file can be opened any more, which some of it is about.
"""

from __future__ import annotations

from typing import Final

ADVICE: Final[dict[str, tuple[str, str]]] = {
    "DS-MEM-shm": (
        "/dev/shm is full: containers get 64 MB, and killed jobs leave files there.",  # noqa: S108 - the mount that is full
        "enlarge it (docker run --shm-size=8g, or an emptyDir of medium Memory), or lower num_workers.",
    ),
    "DS-MEM-host-oom": (
        "the kernel's out-of-memory killer: the host or the container has too little memory.",
        "lower num_workers or the batch size, or raise the limit; dmesg on {host} names the process.",
    ),
    "DS-MEM-descriptors": (
        "a low limit of open files (ulimit -n), or files and sockets that this process keeps open.",
        "raise it with  ulimit -n {files}  or close some of them.",
    ),
    "DS-DATA-worker-timeout": (
        "a DataLoader worker delivered no batch within timeout=: a read hangs, or the worker is deadlocked.",
        "look at the storage; num_workers=0 shows the line; raise timeout= if the work is only slow.",
    ),
    "DS-DISK-read-only": (
        "a mount that went read-only after a disk error, or a path on a read-only volume of a container.",
        "write elsewhere;  mount | grep '(ro'  shows what is read-only, dmesg why the kernel made it so.",
    ),
    "DS-END-sigkill": (
        "the kernel's out-of-memory killer, a container's memory limit, or a kill -9 by hand.",
        "see dmesg on {host}; lower num_workers or the batch size, or raise the memory limit.",
    ),
    "DS-DDP-debug-crash": (
        "probably TORCH_DISTRIBUTED_DEBUG=DETAIL, with which torch's gloo crashes when DDP is built.",
        "set it to INFO, which names unused parameters too; ddpsafe itself names calls that differ.",
    ),
    "DS-NAME-unresolved": (
        "{given} is misspelled, or this host's DNS and /etc/hosts do not know it.",
        "check with  getent hosts {name}  on {here}; an IP address works too.",
    ),
    "DS-RDZV-loopback": (
        "/etc/hosts gives {given} a loopback address, as the installers of Debian and Ubuntu do.",
        "correct that line, or use the address in the cluster's network; check with  getent hosts {name}.",
    ),
    "DS-PORT-taken": (
        "another program holds the port: another job, or an earlier one that still runs.",
        "choose another port for this job (MASTER_PORT, or that of the endpoint), or stop that program.",
    ),
}
"""The cause and what to do, as clauses; facts stand in braces, with the words of `GENERAL` if unknown."""

COMMANDS: Final = {
    "DS-MEM-shm": (
        "docker run --shm-size=8g …   # or --ipc=host",
        "mount -o remount,size=8G /dev/shm",
    ),
    "DS-MEM-descriptors": ("ulimit -n {files}", "docker run --ulimit nofile=65536:65536 …"),
    "DS-NAME-unresolved": ("getent hosts {name}",),
    "DS-RDZV-loopback": ("getent hosts {name}",),
    "DS-PORT-taken": ("ss -ltnp 'sport = :{port}'",),
}
"""Lines to copy that do it, or show more. What comes from outside is quoted for a shell before it is put in."""

GENERAL: Final = {
    "files": "65536",
    "given": "the name",
    "here": "every host",
    "host": "its host",
    "name": "NAME",
    "port": "29500",
}
"""What stands for a fact where it is not known."""


def general_advice(code: str) -> tuple[str, str]:
    """Return the cause and what to do where no fact is known."""
    cause, fix = ADVICE[code]
    return cause.format_map(GENERAL), fix.format_map(GENERAL)
