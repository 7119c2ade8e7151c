"""What torch writes on its own does not stand between a user and the message."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from hosts import Network
from nodes_kit import Case, await_files, require_nothing_left, start_job

from ddpsafe._host import without_cpp_warnings

pytestmark = pytest.mark.root

TWO_CLIENTS = """
import socket
from ddpsafe._host import open_tcp_store
listening = socket.create_server(("127.0.0.1", 0))
port = listening.getsockname()[1]
server = open_tcp_store("127.0.0.1", port, listening=listening)
open_tcp_store("127.0.0.1", port).set("key", "value")
print(server.get("key"))
"""


@pytest.mark.full
def test_a_lost_store_is_not_shown_as_cpp_frames_and_heartbeats(
    own_network: Network, tmp_path: Path
) -> None:
    """While the ranks of the other node take long to end, torch cannot renew its heartbeat."""
    fields = {"timeouts": {"collective": 60, "grace": 9}}
    case = Case(name="job", what="stubborn", fields=fields)
    first, other = start_job(own_network, [case], tmp_path, nproc=[1, 1])
    await_files([first, other], tmp_path, "running-job-1-*", 2)
    os.kill(first.pid, signal.SIGKILL)
    first.wait_for_end()
    other.end()
    assert other.results()["job"]["error"] == "NodeLostError"
    for noise in ("frame #", "[c10d]", "keep-alive"):
        assert noise not in other.err, other.err
    require_nothing_left(own_network)


@pytest.mark.full
def test_a_client_whose_address_has_no_name_is_not_mentioned(network: Network) -> None:
    """Without a name server torch writes a line for each client of a store."""
    quoted, python = TWO_CLIENTS.replace('"', "'"), shlex.quote(sys.executable)
    command = f'unshare -m sh -c "mount --bind /dev/null /etc/hosts; {python} -"'
    said = network[0].shell(f"{command} 2>&1 <<END\n{quoted}\nEND")
    assert said.strip() == "b'value'"


def test_the_level_of_the_cpp_log_is_restored_after_the_last_of_several_calls() -> None:
    """The installed torch has the variable; calls of several threads overlap."""
    from ddpsafe._host import _find_cpp_log_level

    level = _find_cpp_log_level()
    assert level is not None
    before = level.value
    first, second = without_cpp_warnings(), without_cpp_warnings()
    first.__enter__()
    second.__enter__()
    assert level.value == 2
    first.__exit__(None, None, None)
    assert level.value == 2
    second.__exit__(None, None, None)
    assert level.value == before
