"""What `launch` and `spawn` accept has the same effect with several nodes as with one, or is refused."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from forked_ranks import free_port
from scripts import LIMIT_S, clean_environment
from source_tree import CHECKOUT, parse

import ddpsafe
from ddpsafe._config import DataPath, Rendezvous
from ddpsafe._config.launch_config import LaunchFields, SpawnFields

PROGRAM: Final = Path(__file__).parents[1] / "programs" / "node_effect_programs.py"

HERE: Final = "tests/nodes/test_every_keyword.py"
LAUNCH: Final = f"{HERE}::test_every_keyword_of_launch_takes_effect"
SPAWN: Final = f"{HERE}::test_every_keyword_of_spawn_takes_effect"
LIMITS: Final = f"{HERE}::test_every_timeout_is_the_limit_of_its_phase"
LOSSES: Final = "tests/nodes/test_loss.py::test_a_host_that_vanishes_is_named_within_seconds"
OTHERS: Final = f"{HERE}::test_a_node_of_another_job_is_refused"
PATHS: Final = "tests/nodes/test_launcher_errors.py::test_a_launcher_that_raises_ends_all_launchers"
PROBLEMS: Final = (
    "tests/nodes/test_joining.py::test_problems_with_the_nodes_are_reported_on_each_of_them"
)
FEWER: Final = "tests/nodes/test_replacement.py::test_the_others_continue_without_a_lost_node_and_accept_a_new_one"
PAUSE: Final = (
    "tests/nodes/test_launcher_errors.py::test_a_signal_to_node_0_while_it_waits_ends_all_launchers"
)
ROUNDS: Final = (
    "tests/nodes/test_replacement.py::test_ten_failed_attempts_are_followed_by_a_successful_one"
)
ENDING: Final = (
    "tests/nodes/test_loss.py::test_a_signal_while_ranks_are_ending_takes_effect_on_all_nodes"
)

PROVED_BY: Final[dict[str, str]] = {
    **dict.fromkeys(("launch.fn", "launch.args", "launch.kwargs"), LAUNCH),
    **dict.fromkeys(("launch.config", "launch.on_retry", "launch.fields"), LAUNCH),
    **dict.fromkeys(
        ("spawn.fn", "spawn.args", "spawn.nprocs", "spawn.join", "spawn.daemon"), SPAWN
    ),
    **dict.fromkeys(
        ("spawn.start_method", "spawn.config", "spawn.on_retry", "spawn.fields"), SPAWN
    ),
    "SpawnHandle.join.timeout": SPAWN,
    "SpawnHandle.join.grace_period": f"{HERE}::test_a_grace_period_of_any_node_lets_all_ranks_finish",
    "LaunchConfig.nproc_per_node": LAUNCH,
    "LaunchConfig.nnodes": LAUNCH,
    "LaunchConfig.node_rank": PROBLEMS,
    "LaunchConfig.rendezvous": LAUNCH,
    "LaunchConfig.backend": LAUNCH,
    "LaunchConfig.start_method": LAUNCH,
    "LaunchConfig.timeouts": LIMITS,
    "LaunchConfig.retry": LAUNCH,
    "LaunchConfig.data_paths": PATHS,
    "LaunchConfig.run_dir": LAUNCH,
    "LaunchConfig.env": LAUNCH,
    "LaunchConfig.preflight": (
        "tests/nodes/test_preflight.py::test_a_closed_direction_between_two_other_nodes_is_named"
    ),
    "LaunchConfig.seed": LAUNCH,
    "LaunchConfig.console": LAUNCH,
    **{f"Timeouts.{name}": LIMITS for name in ("attempt", "start", "collective", "barrier")},
    **{f"Timeouts.{name}": LIMITS for name in ("progress", "finish", "stop")},
    "Timeouts.node_loss": LOSSES,
    "Timeouts.grace": ENDING,
    "RetryPolicy.attempts": LAUNCH,
    "RetryPolicy.on": LAUNCH,
    "RetryPolicy.backoff_initial": PAUSE,
    "RetryPolicy.backoff_max": PAUSE,
    "RetryPolicy.jitter": LAUNCH,  # as 0; how it is added is tested in tests/launcher/test_retry.py
    "RetryPolicy.no_progress": ROUNDS,  # more attempts without progress than the default allows
    "Rendezvous.endpoint": LAUNCH,
    "Rendezvous.interface": (
        "tests/nodes/test_joining.py::test_the_name_of_the_endpoint_may_have_several_addresses"
    ),
    "Rendezvous.id": OTHERS,
    "Rendezvous.min_nodes": FEWER,
    "Rendezvous.last_call": FEWER,
    "Rendezvous.join": PROBLEMS,
    "Rendezvous.signal_scope": (
        "tests/nodes/test_replacement.py::test_all_nodes_stop_where_the_signal_is_for_the_job"
    ),
    "Rendezvous.secret_file": OTHERS,
    "Rendezvous.ports": "tests/nodes/test_security.py::test_node_0_listens_only_in_a_range_of_ports",
    **{f"DataPath.{name}": PATHS for name in DataPath.model_fields},
}
"""For each keyword and field, the test on several nodes that fails if it has no effect there."""


def test_every_keyword_and_field_has_a_test_on_several_nodes() -> None:
    """A new one needs a line in the table, and each test in the table exists."""
    keywords = [
        f"{name}.{parameter}"
        for name, function in {
            "launch": ddpsafe.launch,
            "spawn": ddpsafe.spawn,
            "SpawnHandle.join": ddpsafe._launcher.handle.SpawnHandle.join,
        }.items()
        for parameter in inspect.signature(function).parameters
        if parameter != "self"
    ]
    models = (ddpsafe.LaunchConfig, ddpsafe.Timeouts, ddpsafe.RetryPolicy, Rendezvous, DataPath)
    fields = [f"{model.__name__}.{name}" for model in models for name in model.model_fields]
    assert sorted(PROVED_BY) == sorted(keywords + fields)
    taken = LaunchFields.__annotations__.keys() | SpawnFields.__annotations__.keys()
    assert taken >= ddpsafe.LaunchConfig.model_fields.keys()
    for test in set(PROVED_BY.values()):
        file, _, name = test.partition("::")
        names = {
            node.name
            for node in ast.walk(parse(CHECKOUT / file))
            if isinstance(node, ast.FunctionDef)
        }
        assert name in names, test


def run_two(case: str, folder: Path) -> list[tuple[dict[str, Any], str]]:
    """Run two launchers on this host as two nodes; return what each printed, as data and as text."""
    port = str(free_port())
    environment = {**clean_environment(), "DDPSAFE_JOB_SECRET": "0123456789abcdef"}
    launchers = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), case, str(folder), port, str(node)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        printed = [launcher.communicate(timeout=LIMIT_S)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(printed)
    return [(json.loads(text.splitlines()[-1]), text) for text in printed]


@pytest.mark.full
def test_every_keyword_of_launch_takes_effect(tmp_path: Path) -> None:
    """Node 0 has one rank, node 1 has two; the first attempt fails, and `on_retry` changes the argument."""
    for node, (seen, printed) in enumerate(run_two("launch", tmp_path)):
        assert seen["attempts"] == 2
        assert seen["run_dir"] == str(tmp_path / f"run-{node}")
        assert list(seen["values"]) == (["0"] if node == 0 else ["1", "2"])
        for rank, value in seen["values"].items():
            assert f"printed by rank {rank}" in printed
            assert value == {
                "args": "changed",
                "kwargs": "by name",
                "attempt": 2,
                "world_size": 3,
                "local_world_size": node + 1,
                "nnodes": 2,
                "backend": "cpu:gloo",
                "by_server": True,
                "run_dir": str(tmp_path / f"run-{node}"),
                "env": "set",
                "seed": 7,
            }


@pytest.mark.full
def test_every_keyword_of_spawn_takes_effect(tmp_path: Path) -> None:
    """As for `launch`; the handle's own methods work while ranks run on both nodes."""
    for node, (seen, _) in enumerate(run_two("spawn", tmp_path)):
        assert seen["pids"] == node + 1
        assert seen["joined"] == [False, True]
        assert [each["index"] for each in seen["ranks"]] == [0, 0, 1]
        for each in seen["ranks"]:
            del each["index"]
            assert each == {"args": "changed", "daemon": True, "by_server": True}


@pytest.mark.full
@pytest.mark.parametrize(
    ("asking", "finishes"), [("01", True), ("0", True), ("1", True), ("none", False)]
)
def test_a_grace_period_of_any_node_lets_all_ranks_finish(
    tmp_path: Path, asking: str, *, finishes: bool
) -> None:
    """``join(grace_period=…)`` has the effect it has on one node; the longest of all nodes counts."""
    for seen, printed in run_two(f"grace:{asking}", tmp_path):
        assert seen["rank"] == 0, printed
        statuses = {status for rank, status in seen["statuses"].items() if rank != "0"}
        assert statuses == {"returned" if finishes else "stopped"}, printed
    assert [(tmp_path / f"finished-{rank}").exists() for rank in (1, 2, 3)] == [finishes] * 3


@pytest.mark.full
def test_a_limit_learned_in_one_attempt_holds_in_the_next(tmp_path: Path) -> None:
    """``progress="auto"``: the first step of the second attempt may take as long as in the first one."""
    for seen, printed in run_two("learn", tmp_path):
        assert (seen["error"], seen["attempt"]) == ("LaunchTimeoutError", 2), printed


@pytest.mark.full
@pytest.mark.parametrize(
    ("limit", "error"),
    [
        ("attempt", "LaunchTimeoutError"),
        ("start", "RendezvousTimeoutError"),
        ("collective", "LaunchTimeoutError"),
        ("barrier", "LaunchTimeoutError"),
        ("progress", "LaunchTimeoutError"),
        ("finish", "LaunchTimeoutError"),
        ("stop", "PreemptedError"),
    ],
)
def test_every_timeout_is_the_limit_of_its_phase(tmp_path: Path, limit: str, error: str) -> None:
    """On both nodes, although the rank that exceeds it is on one."""
    for seen, printed in run_two(f"limit:{limit}", tmp_path):
        assert seen["error"] == error, printed
        if limit == "stop":
            assert seen["unfinished"], printed
        else:
            assert seen["setting"] == limit, printed


@pytest.mark.full
@pytest.mark.parametrize("field", ["id", "secret_file"])
def test_a_node_of_another_job_is_refused(tmp_path: Path, field: str) -> None:
    """Nodes with another id or another secret never run together."""
    for seen, printed in run_two(f"refuse:{field}", tmp_path):
        assert seen["error"] in ("PreflightError", "RendezvousTimeoutError"), printed
