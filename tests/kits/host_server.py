"""Forks programs into hosts: an interpreter of their own would cost more than what they do there.

Started with the names of modules to import and the number of a socket; see `hosts.ForkServer`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

_NAMESPACES = {"mnt": 0x00020000, "uts": 0x04000000, "net": 0x40000000, "pid": 0x20000000}
"""Files of /proc/PID/ns, and their flags in <linux/sched.h>."""

_libc = ctypes.CDLL(None, use_errno=True)


def enter(pid: int | str, *names: str) -> None:
    """Move into namespaces of a process; into a PID namespace, only children are moved."""
    opened = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in names]
    for name, fd in zip(names, opened, strict=True):
        if _libc.setns(fd, _NAMESPACES[name]) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")
        os.close(fd)


def run(asked: dict[str, Any], out: int, err: int) -> None:
    """Be the fork: run the program and end."""
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.closerange(3, 64)
        enter(asked["host"], "net", "uts", "mnt")
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.argv[:] = asked["argv"]
        module = importlib.import_module(Path(asked["argv"][0]).stem)
        getattr(module, asked["argv"][1])()
        code = 0
    except BaseException:  # noqa: BLE001 - the test that started it shows it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Start programs, and tell how they ended, until the socket closes."""
    for name in sys.argv[2:]:
        importlib.import_module(name)
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    with socket.socket(fileno=int(sys.argv[1])) as asking:
        asking.sendall(b"{}\n")
        while True:
            raw, fds, _, _ = socket.recv_fds(asking, 1 << 20, 2)
            if not raw:
                return
            asked = json.loads(raw)
            if "wait" in asked:
                _, status = os.waitpid(asked["wait"], 0)
                answer = {"code": os.waitstatus_to_exitcode(status)}
            else:
                enter(asked["host"], "pid")
                pid = os.fork()
                if pid == 0:
                    run(asked, *fds)
                if _libc.setns(own, _NAMESPACES["pid"]) != 0:
                    raise OSError(ctypes.get_errno(), "setns pid")
                for fd in fds:
                    os.close(fd)
                answer = {"pid": pid}
            asking.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
