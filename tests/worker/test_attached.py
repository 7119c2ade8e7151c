"""`process_group`, `setup`, `cleanup` and `launch` in ranks that another launcher has started."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import attached_programs as programs
import forked_ranks
import machine
import pytest
import scripts
from forked_ranks import by_hand, free_port, hand_started

import ddpsafe
from ddpsafe._clock import Deadline
from ddpsafe._host import serves_by_libuv
from ddpsafe._job.control import Control
from ddpsafe._worker.join import attached
from ddpsafe._worker.join.store import agree_on_generation
from ddpsafe._worker.join.store_endpoint import StoreEndpoint, find_endpoint
from ddpsafe._world import find_world

SHORT_TIMEOUTS: Final = {"start": 3, "collective": 3, "barrier": 3}
"""Timeouts of ranks that are not meant to find each other, in seconds."""

LOOPBACK: Final = {"127.0.0.1"}

ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}
"""Without it, torchrun and Accelerate write to stderr that they choose a number themselves."""

SLACK_S: Final = machine.hang_limit(20)
"""Allowance on a deadline for a busy machine."""


def slurm(rank: int, *, job: str = "4711", step: str = "0") -> dict[str, str]:
    """Return the variables that ``srun -N1 -n2`` sets."""
    step_of_two = "STEP_NUM_TASKS=2 STEP_NUM_NODES=1 STEP_TASKS_PER_NODE=2 STEP_NODELIST=localhost"
    place = f"JOB_ID={job} STEP_ID={step} PROCID={rank} LOCALID={rank} NODEID=0"
    return dict(f"SLURM_{pair}".split("=") for pair in f"{place} {step_of_two}".split())


def openmpi(rank: int) -> dict[str, str]:
    """Return the variables that OpenMPI's ``mpirun -n 2`` sets."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": f"prterun-{os.getpid()}@1",
    }


def torchrun(folder: Path, script: Path) -> scripts.Run:
    """Run torchrun with two ranks, and set their number of threads; see `ONE_THREAD`."""
    source = f"""
        import os
        from torch.distributed.run import main

        os.environ.update({ONE_THREAD!r})
        main()
    """
    program = scripts.write(folder, "torchrun.py", source)
    command = [str(program), "--standalone", "--nproc-per-node", "2", str(script)]
    return scripts.Script(command, folder=folder).end()


def reports(folder: Path) -> list[Any]:
    """Return the reports that ranks have written, by rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def places(found: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
    """Return the ranks and sizes that each rank has found."""
    return [tuple(each["place"]) for each in found]


PLACES_OF_TWO: Final = [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]
"""The places of two ranks on one node."""


# With every launcher.


@pytest.mark.full
def test_script_runs_under_torchrun(tmp_path: Path) -> None:
    """The context manager, setup() with cleanup(), and launch() join torchrun's ranks in turn."""
    script = scripts.write(
        tmp_path,
        "train.py",
        """
        import json, pathlib
        import attached_programs as programs
        import ddpsafe

        def train(ctx, factor):
            return [ctx.rank, ctx.all_gather(factor * ctx.rank)]

        if __name__ == "__main__":
            found = programs.join()
            found["totals"] = programs.join_again_and_again(2)
            result = ddpsafe.launch(train, args=(10,), timeouts=programs.PATIENT)
            found["launched"] = [list(result.values.items()), result.attempts]
            rank = found["place"][0]
            pathlib.Path(f"rank-{rank}.json").write_text(json.dumps(found))
        """,
    )
    run = torchrun(tmp_path, script)
    assert (run.code, run.err) == (0, "")
    found = reports(tmp_path)
    assert places(found) == PLACES_OF_TWO
    assert [each["started_by"] for each in found] == ["torchrun", "torchrun"]
    assert [each["total"] for each in found] == [3.0, 3.0]
    assert [each["totals"] for each in found] == [[1.0, 3.0]] * 2
    assert [each["launched"] for each in found] == [
        [[[rank, [rank, [0, 10]]]], 1] for rank in range(2)
    ]
    assert all(each["group_is_gone"] for each in found)


@pytest.mark.full
def test_restart_by_torchrun_is_the_next_attempt(tmp_path: Path) -> None:
    """Rank 1 fails once: torchrun's agent restarts both, and they continue with `ctx.attempt` 2."""
    source = """
        import json, pathlib
        import attached_programs as programs
        import ddpsafe

        def train(ctx):
            if ctx.attempt == 1 and ctx.rank == 1:
                raise ValueError("the first attempt fails")
            found = {"attempt": ctx.attempt, "attempts": ctx.all_gather(ctx.attempt)}
            pathlib.Path(f"rank-{ctx.rank}.json").write_text(json.dumps(found))

        def be_rank():
            ddpsafe.launch(train, timeouts=programs.PATIENT)

        if __name__ == "__main__":
            programs.run_elastically(be_rank, max_restarts=1)
    """
    run = scripts.run(tmp_path, source)
    assert run.code == 0, run.err
    assert "ValueError: the first attempt fails" in run.err
    assert reports(tmp_path) == [{"attempt": 2, "attempts": [2, 2]}] * 2


@pytest.mark.full
def test_ranks_join_despite_different_restart_counters(tmp_path: Path) -> None:
    """Torchrun's counter differs on a host that joined later, but all hosts share one store.

    Three generations use that store: the first completes, in the second only one rank appears,
    and the third finds what both have left behind.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def agent(rank: int, restarts: int) -> dict[str, str]:
        env = by_hand(rank, 2, store.port) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        return env | {"TORCHELASTIC_RESTART_COUNT": str(restarts)}

    first = forked_ranks.run(programs.join, [agent(0, 0), agent(1, 0)], folder=tmp_path)
    assert [each["total"] for each in forked_ranks.values(first)] == [3.0, 3.0]
    for alone in (0, 1):
        (lost,) = forked_ranks.run(
            programs.join, [agent(alone, 1)], SHORT_TIMEOUTS, folder=tmp_path
        )
        assert isinstance(lost.error, ddpsafe.RendezvousTimeoutError)
        assert lost.error.missing_ranks == (1 - alone,)
    third = forked_ranks.run(programs.join, [agent(0, 2), agent(1, 0)], folder=tmp_path)
    assert [each["total"] for each in forked_ranks.values(third)] == [3.0, 3.0]


def test_message_of_a_dead_rank_is_not_taken_for_its_successors() -> None:
    """Rank 0 of the second generation is early, and finds what rank 1 of the first has written."""
    from torch.distributed import HashStore

    store, deadline = HashStore(), Deadline.after(timedelta(seconds=20))

    def start(rank: int) -> Future[tuple[str, list[int]]]:
        world = find_world(by_hand(rank, 2, 1))
        assert world is not None
        return pool.submit(agree_on_generation, store, world, deadline=deadline)

    with ThreadPoolExecutor(4) as pool:
        first, _ = (each.result() for each in [start(0), start(1)])
        greeting = store.get("hello/1").decode()
        early = start(0)
        scripts.wait_until(lambda: store.get(f"welcome/{greeting}").decode() != first[0])
        second, other = (each.result() for each in [early, start(1)])
    assert second == other
    assert second[0] != first[0]
    assert second[1] == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "variables"), [("slurm", slurm), ("openmpi", openmpi)], ids=["slurm", "openmpi"]
)
def test_tasks_of_srun_and_mpirun_find_each_other(
    launcher: str, variables: Callable[[int], dict[str, str]], tmp_path: Path
) -> None:
    """They agree on a port without MASTER_ADDR and MASTER_PORT."""
    envs = [variables(rank) for rank in range(2)]
    found = forked_ranks.values(forked_ranks.run(programs.join, envs, folder=tmp_path))
    assert places(found) == PLACES_OF_TWO
    assert [each["started_by"] for each in found] == [launcher, launcher]
    assert [each["total"] for each in found] == [3.0, 3.0]


def test_variables_set_by_hand_make_a_group(tmp_path: Path) -> None:
    """Two shells with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are two ranks, without output."""
    script = scripts.write(
        tmp_path,
        "train.py",
        """
        import json
        import torch
        import ddpsafe

        with ddpsafe.process_group() as ctx:
            model = ctx.wrap(torch.nn.Linear(4, 2))
            model(torch.ones(1, 4)).sum().backward()
            print(json.dumps([ctx.rank, ctx.world.started_by, ctx.all_gather(ctx.rank)]))
        """,
    )
    port = free_port()
    running = [
        scripts.Script([str(script)], folder=tmp_path, env=by_hand(rank, 2, port))
        for rank in range(2)
    ]
    runs = [script.end() for script in running]
    assert [run.err for run in runs] == ["", ""]
    assert [json.loads(run.lines()[0]) for run in runs] == [
        [rank, "environment", [0, 1]] for rank in range(2)
    ]


@pytest.mark.parametrize(
    "start_method", [pytest.param("spawn", marks=pytest.mark.soak), "forkserver"]
)
def test_setup_and_cleanup_replace_a_scripts_own(tmp_path: Path, start_method: str) -> None:
    """``from ddpsafe import setup, cleanup`` is the only change to a script with mp.spawn."""
    script = scripts.write(
        tmp_path,
        "train.py",
        f"""
        import os
        import torch
        import torch.distributed as dist
        import torch.multiprocessing as mp
        from ddpsafe import setup, cleanup

        def demo(rank, world_size):
            os.environ["MASTER_ADDR"] = "localhost"
            os.environ["MASTER_PORT"] = "{free_port()}"
            setup(rank, world_size)
            total = torch.tensor([rank + 1.0])
            dist.all_reduce(total)
            open(f"rank-{{rank}}.json", "w").write(str(total.item()))
            cleanup()

        if __name__ == "__main__":
            mp.start_processes(demo, args=(2,), nprocs=2, join=True, start_method="{start_method}")
        """,
    )
    run = scripts.Script([str(script)], folder=tmp_path).end()
    assert (run.code, run.err) == (0, "")
    assert reports(tmp_path) == [3.0, 3.0]


def test_single_process_needs_no_port(tmp_path: Path) -> None:
    """Without a launcher, the group has one rank and no other host can connect to it."""
    (found,) = forked_ranks.values(forked_ranks.run(programs.listen_alone, [{}], folder=tmp_path))
    assert found["place"] == (0, 1, 0, 1, 0, 1)
    assert found["total"] == [1.0, 1.0]
    assert set(found["listening"]) <= LOOPBACK


def test_ranks_of_one_node_listen_on_loopback_only(tmp_path: Path) -> None:
    """With MASTER_ADDR=127.0.0.1, neither the store nor gloo is reachable from another host."""
    envs = hand_started(2)
    found = forked_ranks.values(forked_ranks.run(programs.listen_together, envs, folder=tmp_path))
    assert [set(each) for each in found] == [LOOPBACK, LOOPBACK]


# Consecutive and nested groups.


@pytest.mark.full
@pytest.mark.parametrize("cycles", [5, pytest.param(50, marks=pytest.mark.soak)])
def test_setup_and_cleanup_can_be_repeated(cycles: int, tmp_path: Path) -> None:
    """Consecutive groups share one MASTER_PORT, and no rank joins an earlier group."""
    envs = hand_started(2)
    ranks = forked_ranks.run(programs.join_again_and_again, envs, cycles, folder=tmp_path)
    assert forked_ranks.values(ranks) == [[2.0 * cycle + 1 for cycle in range(cycles)]] * 2


def test_cleanup_is_safe_at_any_time(tmp_path: Path) -> None:
    """Before setup, and when called again after the first time, it does nothing."""
    envs = hand_started(2)
    ranks = forked_ranks.run(programs.clean_up_too_often, envs, folder=tmp_path)
    assert forked_ranks.values(ranks) == [[False, False, False]] * 2


def test_nested_setup_returns_the_existing_group(tmp_path: Path) -> None:
    """A second setup returns the first context, and a single cleanup ends the group."""
    (found,) = forked_ranks.values(forked_ranks.run(programs.set_up_twice, [{}], folder=tmp_path))
    assert found == [True, False]


@pytest.mark.full(but=["own"])
@pytest.mark.parametrize(
    "program",
    [programs.adopt_own_group, programs.adopt_group_of_accelerate, programs.adopt_group_of_fabric],
    ids=["own", "accelerate", "fabric"],
)
def test_existing_group_is_used_but_not_destroyed(
    program: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    """The script itself, Accelerate or Fabric may have made it."""
    port = free_port()
    envs = [by_hand(rank, 2, port) | ONE_THREAD for rank in range(2)]
    ranks = forked_ranks.run(program, envs, folder=tmp_path)
    assert [rank.error for rank in ranks] == [None, None]
    assert [rank.value for rank in ranks] == [
        {
            "place": (rank, 2),
            "gathered": [0, 1],
            "left_by_process_group": True,
            "left_by_cleanup": True,
            "still_works": [0, 1],
        }
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("code", "is_failure"),
    [(None, False), (0, False), (False, False), (3, True), ("bad path", True), ([1], True)],
    ids=repr,
)
def test_exit_with_any_code_is_reported_to_the_other_ranks(code: Any, *, is_failure: bool) -> None:
    """``sys.exit()`` takes any object, even an unhashable one; a text is printed and means failure."""
    from torch.distributed import HashStore

    control = Control(HashStore(), rank=1, world_size=2)
    attached.report_departure(control, SystemExit(code))
    departure = control.departure()
    assert departure is not None
    assert departure.is_failure is is_failure


def test_failure_of_rank_zero_reaches_the_ranks_that_wait_for_it(tmp_path: Path) -> None:
    """Rank 0 serves the store and exits, yet the others learn the reason at once."""
    envs = hand_started(3)
    failed, *followers = forked_ranks.run(programs.fail_first, envs, folder=tmp_path)
    assert isinstance(failed.error, ConnectionRefusedError)
    for rank in followers:
        assert isinstance(rank.error, ddpsafe.RankRaisedError)
        assert rank.error.rank == 0
        assert "the mirror is gone" in str(rank.error)
        assert rank.took_s < machine.hang_limit(20)


def on_two_nodes(rank: int, port: int) -> dict[str, str]:
    """Return the variables of a rank of four on two nodes."""
    local = {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)}
    return by_hand(rank, 4, port) | local


def test_a_killed_leader_is_not_waited_for(tmp_path: Path) -> None:
    """No launcher of ddpsafe's ends the ranks that wait for it, and it does not serve the store."""
    port = free_port()
    envs = [on_two_nodes(rank, port) for rank in range(4)]
    *_, waiting = forked_ranks.run(programs.lead_until_killed, envs, str(tmp_path), folder=tmp_path)
    assert waiting.error.setting == "barrier"
    assert waiting.error.missing_ranks == (2,)
    assert "rank 2 is lost: its process" in str(waiting.error)


def test_rank_zero_that_misses_a_barrier_is_named_on_every_rank(tmp_path: Path) -> None:
    """It serves the store, and leaves before the others have given up."""
    _, *others = forked_ranks.run(programs.miss_a_barrier, hand_started(3), 2, folder=tmp_path)
    for rank in others:
        assert rank.error.setting == "barrier"
        assert rank.error.missing_ranks == (0,)
        assert "at the barrier 'save the model'" in str(rank.error)
        assert rank.error.waited_s < 2 + SLACK_S


@pytest.mark.full(but=["cyclic"])
@pytest.mark.parametrize(
    ("local_ranks", "nodes", "missing"),
    [
        pytest.param("0101", "0011", [(), (0,), (), (2,)], id="block"),
        pytest.param("0011", "0101", [(), (), (0,), (1,)], id="cyclic"),
    ],
)
def test_rank_that_leads_its_node_is_the_one_reported_missing(
    tmp_path: Path, local_ranks: str, nodes: str, missing: list[tuple[int, ...]]
) -> None:
    """Slurm and mpirun may number ranks in turns, and a rank alone cannot tell who else is on its node."""
    port = free_port()
    envs = [
        on_two_nodes(rank, port) | {"LOCAL_RANK": local_rank, "NODE_RANK": node}
        for rank, (local_rank, node) in enumerate(zip(local_ranks, nodes, strict=True))
    ]
    ranks = forked_ranks.run(programs.follow_on_each_node, envs, folder=tmp_path)
    assert forked_ranks.values(ranks) == missing


# Ranks that do not join, and processes that must not.


@pytest.mark.full(but=["(0, 1)"])
@pytest.mark.parametrize("present", [(0, 1), (0, 2), (1, 2)], ids=str)
def test_missing_rank_is_named_on_every_rank(present: tuple[int, ...], tmp_path: Path) -> None:
    """Only two of three ranks join: both name the third within the deadline, without other output."""
    (missing,) = {0, 1, 2} - set(present)
    port = free_port()
    envs = [by_hand(rank, 3, port) for rank in present]
    # The second one has to come before the first one gives up, on a core that other tests share.
    limit_s = SHORT_TIMEOUTS["start"] * machine.stretch(time.monotonic() - 10)
    limits = dict.fromkeys(SHORT_TIMEOUTS, limit_s)
    ranks = forked_ranks.run(programs.join, envs, limits, folder=tmp_path)
    for number, rank in zip(present, ranks, strict=True):
        assert isinstance(rank.error, ddpsafe.RendezvousTimeoutError)
        assert rank.error.missing_ranks == (missing,)
        assert rank.error.kind == "startup-network"
        assert f"rank {number} (world_size 3)" in str(rank.error)
        assert "What to do:" in str(rank.error)
        assert rank.took_s < limit_s + SLACK_S
        assert rank.stderr == ""


def test_failed_setup_restores_the_environment(tmp_path: Path) -> None:
    """The next try, with another address, must not take loopback for the user's choice."""
    ranks = forked_ranks.run(programs.fail_to_join, [by_hand(0, 2, free_port())], folder=tmp_path)
    assert forked_ranks.values(ranks) == [{}]


def test_rank_zero_that_cannot_reach_its_own_store_reports_it_and_frees_the_port(
    tmp_path: Path,
) -> None:
    """MASTER_ADDR is another host's: the error has the address, and the next try finds the port free."""
    envs = [by_hand(0, 2, free_port())]
    ranks = forked_ranks.run(programs.fail_to_reach_itself, envs, "192.0.2.1", folder=tmp_path)
    (found,) = [rank.value for rank in ranks]
    # Without libuv, only once torch has timed out.
    assert found.get("port is free") or not serves_by_libuv()
    assert "serves the store on" in found["error"]
    assert "cannot reach it itself at 192.0.2.1:" in found["error"]
    assert ranks[0].took_s < 2 + SLACK_S


def test_a_group_that_torch_does_not_close_ends_in_an_error(tmp_path: Path) -> None:
    """No launcher of ddpsafe would end these ranks, so each reports what it waited for."""
    envs = hand_started(2)
    ranks = forked_ranks.run(programs.close_a_group_that_does_not_end, envs, folder=tmp_path)
    for rank in ranks:
        assert rank.value.startswith("torch.distributed.destroy_process_group() did not return")


def test_program_that_holds_the_port_is_named(tmp_path: Path) -> None:
    """If MASTER_PORT is taken, each rank raises a `PreflightError` of kind "port" with the program."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        envs = [by_hand(rank, 2, port) for rank in range(2)]
        ranks = forked_ranks.run(programs.join, envs, SHORT_TIMEOUTS, folder=tmp_path)
    for rank in ranks:
        assert isinstance(rank.error, ddpsafe.PreflightError)
        assert rank.error.kind == "port"
        assert f"127.0.0.1:{port}" in str(rank.error)
        assert f"(pid {os.getpid()})" in str(rank.error)
        assert rank.took_s < SHORT_TIMEOUTS["start"] + SLACK_S
    assert "the port is taken" in str(ranks[0].error)


def test_name_that_does_not_resolve_is_refused_within_seconds(tmp_path: Path) -> None:
    """A misspelt MASTER_ADDR is reported long before the default timeout of five minutes."""
    port = free_port()
    envs = [by_hand(rank, 2, port, host="no-such-host.invalid") for rank in range(2)]
    ranks = forked_ranks.run(programs.join, envs, {}, folder=tmp_path)
    for rank in ranks:
        assert isinstance(rank.error, ddpsafe.PreflightError)
        assert rank.error.kind == "startup-network"
        assert "cannot resolve no-such-host.invalid" in str(rank.error)
        assert "MASTER_ADDR" in str(rank.error)
        assert rank.took_s < 10 + SLACK_S
        assert rank.stderr == ""


def test_rank_claimed_by_two_processes_is_refused_to_one(tmp_path: Path) -> None:
    """Rank 1 starts twice: one process joins, the other learns why it cannot."""
    port = free_port()
    envs = [by_hand(0, 2, port), by_hand(1, 2, port), by_hand(1, 2, port)]
    program = programs.join_until_another_is_refused
    first, *claimants = forked_ranks.run(program, envs, tmp_path, folder=tmp_path)
    assert first.value == 0
    (refused,) = [rank.error for rank in claimants if rank.error is not None]
    assert isinstance(refused, ddpsafe.ConfigError)
    assert "rank 1 has joined there already" in str(refused)


@pytest.mark.full
def test_tasks_of_another_step_on_the_same_port_are_refused(tmp_path: Path) -> None:
    """Two Slurm steps use one MASTER_PORT: the second's rank learns that the store is not its own."""
    port = free_port()
    ours = [slurm(rank) | by_hand(rank, 2, port) for rank in range(2)]
    theirs = slurm(1, step="1") | by_hand(1, 2, port)
    for env in (*ours, theirs):
        del env["RANK"], env["WORLD_SIZE"]
    program = programs.join_until_another_is_refused
    *joined, refused = forked_ranks.run(program, [*ours, theirs], tmp_path, folder=tmp_path)
    assert forked_ranks.values(joined) == [0, 1]
    assert isinstance(refused.error, ddpsafe.ConfigError)
    assert "another job" in str(refused.error)
    assert "SLURM_STEP_ID" in str(refused.error)


@pytest.mark.parametrize(
    ("name", "value"),
    [("nproc_per_node", 4), ("nnodes", 2), ("node_rank", 0), ("retry", {"attempts": 2}),
     ("console", "all"), ("start_method", "spawn")],
)  # fmt: skip
def test_options_for_starting_ranks_are_refused_inside_a_rank(name: str, value: object) -> None:
    """`process_group` and `setup` start nothing, so an option without effect is an error."""
    for join in (ddpsafe.setup, lambda **fields: ddpsafe.process_group(**fields).__enter__()):
        with pytest.raises(ddpsafe.ConfigError, match=f"{name}: got .*started already") as caught:
            join(**{name: value})
        assert [problem.field for problem in caught.value.problems] == [name]
    with pytest.raises(ddpsafe.ConfigError, match="Did you mean 'timeouts'"):
        ddpsafe.setup(timeuots={})  # type: ignore[call-arg]  # type: ignore[call-arg]  # a user's mistake


WRONG: Final[list[tuple[Callable[..., object], dict[str, Any], type[Exception], str]]] = [
    (ddpsafe.setup, {"rank": 1}, ddpsafe.ConfigError, "has only one of the two"),
    # as a launch does before it starts
    (ddpsafe.setup, {"data_paths": {"train": "/no/such/place"}}, ddpsafe.PreflightError, "/no/such/place"),
    # `nprocs` has torch's default and wins, so a second number would be ignored
    (ddpsafe.spawn, {"fn": print, "nproc_per_node": 4}, ddpsafe.ConfigError, r"(?s)nproc_per_node: got 4.*nprocs"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "fields", "error", "text"), WRONG)
def test_a_wrong_call_is_refused_before_a_rank_joins(
    call: Callable[..., object], fields: dict[str, Any], error: type[Exception], text: str
) -> None:
    """The error names what is missing, or has no effect."""
    with pytest.raises(error, match=text):
        call(**fields)


# Two jobs at the same time.


def run_two_jobs(rounds: int, folder: Path) -> list[dict[int, list[Any]]]:
    """Start two jobs on one port at the same moment, and repeat it; return the results by the job's value."""
    port = free_port()
    source = "import attached_programs, sys\nif __name__ == '__main__':\n"
    script = scripts.write(folder, "train.py", source + f"    {RUN_JOBS}\n")
    running = [
        scripts.Script([str(script), *names, str(rounds), str(port)], folder=folder)
        for names in (("1", "100"), ("100", "1"))
    ]
    for ended in [job.end() for job in running]:
        # torch's store logs a traceback for connections that were slow or ended early.
        assert (ended.code, ended.err.count("Traceback")) == (0, 0), ended.err
    return [
        {
            value: [
                json.loads((folder / f"rank-{value}-{number}-{rank}.json").read_text())
                for rank in range(2)
            ]
            for value in (1, 100)
        }
        for number in range(rounds)
    ]


RUN_JOBS: Final = (
    "attached_programs.run_jobs(*sys.argv[1:3], int(sys.argv[3]), port=int(sys.argv[4]))"
)


REFUSED: Final = {"PreflightError", "ConfigError"}


@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=pytest.mark.soak)])
def test_two_jobs_on_one_port_never_join_each_other(rounds: int, tmp_path: Path) -> None:
    """Their sums never mix: one works, the other is refused unless it started after the first had ended."""
    refused = 0
    for found in run_two_jobs(rounds, tmp_path):
        works = [value for value, results in found.items() if results == [2.0 * value] * 2]
        assert works
        for value in set(found) - set(works):
            refused += 1
            # Once one rank is refused, the first job may end before the other rank connects.
            told = {error for error, _ in found[value]}
            assert told <= {*REFUSED, "RendezvousTimeoutError"}
            assert all("MASTER_PORT" in text for error, text in found[value] if error in REFUSED)
    assert refused


# The endpoint.


def test_ranks_of_slurm_use_the_first_node() -> None:
    """The step's node list is expanded as by ``scontrol show hostnames``."""
    for nodelist, first in (("n[01-03,7],m5", "n01"), ("m5,n[1-2]", "m5")):
        assert require_endpoint(slurm(0) | {"SLURM_STEP_NODELIST": nodelist}).host == first


@pytest.mark.parametrize("host", ["[::1]", "::1"])
def test_master_addr_may_be_an_ipv6_address_in_brackets(host: str) -> None:
    """Scripts that append the port write brackets; the sockets get the address alone."""
    endpoint = require_endpoint(by_hand(0, 2, 29500) | {"MASTER_ADDR": host})
    assert (endpoint.host, endpoint.is_on_this_host) == ("::1", True)
    assert str(endpoint) == "[::1]:29500"


def test_steps_of_slurm_get_different_ports() -> None:
    """All tasks of a step agree on the port; other steps and other jobs get other ports."""
    ports = [require_endpoint(env).port for env in (slurm(0), slurm(1))]
    assert ports[0] == ports[1]
    assert require_endpoint(slurm(0, step="1")).port != ports[0]
    assert require_endpoint(slurm(0, job="4712")).port != ports[0]


@pytest.mark.parametrize("port", ["0", "-1", "65536", "80000", "http", None])
def test_invalid_master_port_is_refused(port: str | None) -> None:
    """MASTER_PORT=80000, found in a public script, is reported as not being a port."""
    env = by_hand(1, 2, 1)
    del env["MASTER_PORT"]
    text = "MASTER_PORT is not set" if port is None else "MASTER_PORT="
    with pytest.raises(ddpsafe.ConfigError, match=text):
        require_endpoint(env if port is None else env | {"MASTER_PORT": port})


def require_endpoint(env: dict[str, str]) -> StoreEndpoint:
    """Return the endpoint of ranks with that environment."""
    world = find_world(env)
    assert world is not None
    return find_endpoint(world, env)
