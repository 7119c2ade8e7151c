"""Another program holds the port that the environment or the script asks for."""

from __future__ import annotations

import socket
from pathlib import Path

import join_programs as programs
import leftovers
import pytest
from fault_kit import World, require_nothing_left, require_rank
from training_programs import do_nothing_about_it, train_by_hand

import ddpsafe


def test_a_hard_coded_port_that_is_taken_does_not_matter(tmp_path: Path) -> None:
    """The ranks use the launcher's store, whatever port the script names."""
    with socket.socket() as owner:
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        owner.bind(("127.0.0.1", 12355))
        owner.listen()
        before = leftovers.Snapshot.take()
        World(folder=tmp_path).spawn(train_by_hand, do_nothing_about_it)
        require_nothing_left(before)


def test_a_port_that_the_function_itself_opens_is_explained_and_not_retried(tmp_path: Path) -> None:
    """The function has started, so another attempt would run it twice."""
    with socket.create_server(("127.0.0.1", 0)) as owner:
        world = World(folder=tmp_path)
        error = world.launch_fails(
            ddpsafe.RankRaisedError, programs.listen_on, owner.getsockname()[1]
        )
    require_rank(error, 1)
    assert error.attempt == 1
    assert "another program holds the port" in str(error)


@pytest.mark.parametrize(
    "start_method", [pytest.param("spawn", marks=pytest.mark.soak), "forkserver"]
)
def test_two_concurrent_jobs_stay_apart(tmp_path: Path, start_method: str) -> None:
    """Both scripts name the same port, and each job reduces over its own ranks only."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        jobs = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            world = World(folder=tmp_path / name, start_method=start_method)
            jobs.append(pool.submit(world.spawn, programs.count_ranks_by_hand))
        for job in jobs:
            job.result()
    counts = {path.read_text() for path in tmp_path.glob("*/count-*")}
    assert counts == {"2.0"}
