"""What a `LaunchConfig` accepts, where its fields come from, and how it refuses the rest."""

from __future__ import annotations

import operator
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pydantic
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from texts import any_text

from ddpsafe import spawn
from ddpsafe._config import DataPath, LaunchConfig, Rendezvous, RetryPolicy, Timeouts
from ddpsafe._config.durations import show_duration
from ddpsafe._errors import ConfigError


@pytest.fixture(autouse=True)
def _empty_launch_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each test in a directory without a config file, and without ddpsafe's variables."""
    monkeypatch.chdir(tmp_path)
    for name in ("NPROC_PER_NODE", "SEED", "TIMEOUTS__GRACE", "ENV"):
        monkeypatch.delenv(f"DDPSAFE_{name}", raising=False)


def problems_of(**fields: object) -> dict[str, str]:
    """Return the problems of a config, by field."""
    with pytest.raises(ConfigError) as caught:
        LaunchConfig(**fields)
    return {problem.field: str(problem) for problem in caught.value.problems}


def test_defaults_match_the_reference() -> None:
    """Without any source, a config equals the reference page of the configuration."""
    config = LaunchConfig()
    assert config.nproc_per_node == "auto"
    assert (config.nnodes, config.node_rank, config.backend) == (1, None, "auto")
    assert (config.start_method, config.preflight, config.console) == ("spawn", "local", "auto")
    assert config.timeouts.start == timedelta(minutes=5)
    assert config.timeouts.grace == timedelta(seconds=5)
    assert config.retry.on == {"startup-network", "port", "mount"}


def test_all_problems_are_reported_at_once() -> None:
    """One error lists all five wrong fields, each with its value, the reason and a fix."""
    found = problems_of(
        nproc_per_node=0, nnodes=2, backend="ncll", start_method="fork", env={"RANK": "0"}
    )
    assert set(found) == {
        "nproc_per_node", "rendezvous.endpoint", "backend", "start_method", "env.RANK",
    }  # fmt: skip
    assert all("Write " in text or "Did you mean" in text for text in found.values())
    assert "got 0" in found["nproc_per_node"]
    (text,) = problems_of(nnodes=2, rendezvous="gpu-01:29400").values()
    assert 'Write rendezvous={"endpoint": "gpu-01:29400"} or ' in text


def test_config_error_is_a_value_error_and_pickles() -> None:
    """The error crosses process boundaries with its problems."""
    with pytest.raises(ValueError, match="nnodes") as caught:
        LaunchConfig(nnodes=0)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, ConfigError)
    assert copy.problems == caught.value.problems


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda: Timeouts(collective="2 parsecs"), {"collective"}),
        (lambda: Timeouts(colective=5), {"colective"}),
        (lambda: Timeouts(attempt="x", finish="y"), {"attempt", "finish"}),
        (lambda: RetryPolicy(on={"kiled"}, attempts=0), {"on", "attempts"}),
        (lambda: RetryPolicy(backoff_initial="soon"), {"backoff_initial"}),
        (lambda: RetryPolicy(backoff_initial=9, backoff_max=3), {"backoff_max"}),
        (lambda: Rendezvous(endpoint="gpu-01"), {"endpoint"}),
        (lambda: Rendezvous(host="gpu-01"), {"host"}),
        (lambda: DataPath(path="data"), {"path"}),
        (DataPath, {"path"}),
        (lambda: DataPath(path="/data", kind="dir"), {"kind"}),
        (lambda: DataPath.here("~/data"), {"path"}),
        (lambda: DataPath.here(3), {"path"}),
    ],
)  # fmt: skip
def test_parts_made_directly_report_exactly_the_users_problems(
    make: Callable[[], object], fields: set[str]
) -> None:
    """A part raises the same error as the whole config, and does not mention defaults."""
    with pytest.raises(ConfigError) as caught:
        make()
    assert {problem.field for problem in caught.value.problems} == fields
    assert "default factory" not in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


def test_problems_of_parts_in_a_users_model_have_their_full_path() -> None:
    """Each problem has its location, in a config as in a user's own model."""

    class Experiment(pydantic.BaseModel):
        waits: Timeouts

    with pytest.raises(pydantic.ValidationError) as caught:
        Experiment(waits={"colective": 1})
    assert [detail["loc"] for detail in caught.value.errors()] == [("waits", "colective")]
    assert set(problems_of(timeouts={"colective": 1}, retry={"on": {"kiled"}})) == {
        "timeouts.colective", "retry.on",
    }  # fmt: skip


def test_problems_are_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program never has to parse the text of a problem."""
    (tmp_path / "pyproject.toml").write_text("[tool.ddpsafe]\nnnodes = 0\n")
    monkeypatch.setenv("DDPSAFE_TIMEOUTS__GRACE", "soon")
    with pytest.raises(ConfigError) as caught:
        LaunchConfig(console="tag")
    found = {problem.field: problem for problem in caught.value.problems}
    assert (found["console"].given, found["console"].write) == ("'tag'", "'tagged'")
    assert found["console"].is_guess
    assert [found[name].source for name in ("console", "timeouts.grace", "nnodes")] == [
        "", "DDPSAFE_TIMEOUTS__GRACE", "pyproject.toml",
    ]  # fmt: skip
    assert all(problem.why in str(caught.value) for problem in found.values())


def test_spawn_suggests_its_own_argument_for_the_number_of_ranks() -> None:
    """It does not suggest launch's field, which spawn would refuse."""
    with pytest.raises(ConfigError) as caught:
        spawn(print, num_processes=2)  # type: ignore[call-arg]
    (problem,) = caught.value.problems
    assert (problem.field, problem.write) == ("num_processes", "nprocs=…")


def test_config_file_that_others_can_write_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that another user could have placed in the current directory is read only if named."""
    folder = tmp_path / "open"
    folder.mkdir()
    file = folder / "pyproject.toml"
    file.write_text("[tool.ddpsafe]\nseed = 4\n")
    monkeypatch.chdir(folder)
    allowed = {(0o755, 0o644): True, (0o1777, 0o644): True, (0o777, 0o644): False,
               (0o755, 0o666): False, (0o1777, 0o666): False, (0o757, 0o644): False}  # fmt: skip
    for (directory_mode, file_mode), is_read in allowed.items():
        folder.chmod(directory_mode)
        file.chmod(file_mode)
        caplog.clear()
        assert (LaunchConfig().seed == 4) is is_read, (oct(directory_mode), oct(file_mode))
        assert ("is not read" in caplog.text) is not is_read
        assert LaunchConfig.from_toml(file).seed == 4


@pytest.mark.root
@pytest.mark.parametrize("given_away", [".", "pyproject.toml"])
def test_config_file_of_another_user_is_not_read(
    tmp_path: Path, given_away: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither another user's file nor a file in their directory is trusted; for a link, the target counts."""
    (tmp_path / "pyproject.toml").write_text("[tool.ddpsafe]\nseed = 4\n")
    os.chown(tmp_path / given_away, 65534, 65534)
    assert LaunchConfig().seed is None
    assert "belongs to another user (uid 65534)" in caplog.text


@pytest.mark.root
def test_config_file_behind_a_link_of_another_user_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The link may point to this user's file when it is checked, and elsewhere when it is read."""
    own, shared = tmp_path / "own.toml", tmp_path / "shared"
    own.write_text("[tool.ddpsafe]\nseed = 4\n")
    shared.mkdir()
    shared.chmod(0o1777)
    link = shared / "pyproject.toml"
    link.symlink_to(own)
    monkeypatch.chdir(shared)
    assert LaunchConfig().seed == 4
    os.chown(link, 65534, 65534, follow_symlinks=False)
    assert LaunchConfig().seed is None
    assert "the link belongs to another user (uid 65534)" in caplog.text


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "PYTHONPATH", "PATH", "NCCL_NET_PLUGIN", "CUDA_INJECTION64_PATH"]
)
def test_implicit_config_file_cannot_choose_which_code_runs(tmp_path: Path, name: str) -> None:
    """In a file that was not named, variables that load code are refused."""
    (tmp_path / "pyproject.toml").write_text(f'[tool.ddpsafe.env]\n{name} = "/x"\n')
    assert "this file was found in the current directory" in problems_of()[f"env.{name}"]
    assert LaunchConfig.from_toml("pyproject.toml").env == {name: "/x"}


def test_argument_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The closer source wins, field by field, also inside a part."""
    (tmp_path / "pyproject.toml").write_text(
        "[tool.ddpsafe]\nseed = 1\nnnodes = 1\n[tool.ddpsafe.timeouts]\ngrace=1\nfinish=7\nbarrier=9\n"
    )
    assert LaunchConfig().seed == 1
    monkeypatch.setenv("DDPSAFE_SEED", "2")
    monkeypatch.setenv("DDPSAFE_TIMEOUTS__GRACE", "2")
    monkeypatch.setenv("DDPSAFE_TIMEOUTS__BARRIER", "1min")
    config = LaunchConfig(seed=3, timeouts=Timeouts(grace=3))
    assert LaunchConfig().seed == 2
    assert config.seed == 3
    waits = config.timeouts
    assert [t.total_seconds() for t in (waits.grace, waits.barrier, waits.finish)] == [3, 60, 7]


@pytest.mark.parametrize(
    "text",
    [
        "seed = 4\n",
        "[tool.ddpsafe]\nseed = 4\n",
        "seed = 4\n[tool.black]\nx = 1\n",
        "[tool.ddpsafe]\nseed = 4\n[model]\nlayers = 2\n",
    ],
)
def test_toml_file_is_read_from_its_top_level_or_from_its_table(tmp_path: Path, text: str) -> None:
    """Both kinds of file work, and arguments still override them."""
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert LaunchConfig.from_toml(path).seed == 4
    assert LaunchConfig.from_toml(path, seed=5).seed == 5
    assert LaunchConfig().seed is None


@pytest.mark.parametrize(
    "text", [b"seed = ", b"\xff", b"tool = 'x'\n", b"[tool]\nddpsafe = 3\n", b"sed = 1\n"]
)
def test_broken_toml_file_is_a_config_error(tmp_path: Path, text: bytes) -> None:
    """Invalid TOML, a missing table or an unknown field is refused with the reason."""
    path = tmp_path / "run.toml"
    path.write_bytes(text)
    with pytest.raises(
        ConfigError, match=r"not valid TOML|'(tool' is a str|ddpsafe' is a int), |Did"
    ):
        LaunchConfig.from_toml(path)


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("", "has no table"),
        ("[tool.ruff]\nseed = 4\n", "has no table"),
        ("seed = 4\nmodel = 'a'\n[env]\nA = '1'\n[tool.ddpsafe]\n", "not read: env, seed."),
    ],
)
def test_a_warning_names_what_is_not_read_of_a_named_file(
    tmp_path: Path, text: str, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of another program may have fields of its own, and a pyproject.toml nothing for ddpsafe."""
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert LaunchConfig.from_toml(path) == LaunchConfig()
    (line,) = caplog.messages
    assert warning in line
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert LaunchConfig.from_toml("pyproject.toml") == LaunchConfig()
    assert len(caplog.messages) == 1


def test_wrong_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The problem names the variable that the value came from."""
    monkeypatch.setenv("DDPSAFE_TIMEOUTS__GRACE", "soon")
    monkeypatch.setenv("DDPSAFE_ENV", "{not json")
    found = problems_of()
    assert "DDPSAFE_TIMEOUTS__GRACE" in found["timeouts.grace"]
    assert "DDPSAFE_ENV" in found["env"]


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("DDPSAFE_ENV", '{"HF_TOKEN": "hunter2secret"'),
        ("DDPSAFE_ENV", '{"HF_TOKEN": ["hunter2secret"]}'),
        ("DDPSAFE_ENV", '{"HF_TOKEN=hunter2secret": "1"}'),
        ("DDPSAFE_ENVV", '{"HF_TOKEN": "hunter2secret"}'),
        ("DDPSAFE_ENVS__HF_TOKEN", "hunter2secret"),
    ],
)
def test_secrets_are_not_shown_in_problems(
    variable: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This covers values meant for `env`, and variables with a secret name."""
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=variable) as caught:
        LaunchConfig()
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError) as refused:
        LaunchConfig.resolve({"env": {"HF_TOKEN": "hunter2secret"}})  # type: ignore[arg-type] # type: ignore[arg-type] # a user's mistake
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("DDPSAFE_TIMEOUT__GRACE", "DDPSAFE_TIMEOUTS__GRACE"),
        ("DDPSAFE_TIMEOUTS_GRACE", "DDPSAFE_TIMEOUTS__GRACE"),
        ("ddpsafe_timeouts_grace", "DDPSAFE_TIMEOUTS__GRACE"),
        ("DDPSAFE_TIMEOUT_GRACE", "DDPSAFE_TIMEOUTS__GRACE"),
        ("DDPSAFE_TIMEOUTS_GRAC", "DDPSAFE_TIMEOUTS__GRACE"),
        ("DDPSAFE_TIMEOUTS_COLLECTIVE", "DDPSAFE_TIMEOUTS__COLLECTIVE"),
        ("DDPSAFE_RETRY_ATTEMPTS", "DDPSAFE_RETRY__ATTEMPTS"),
        ("DDPSAFE_RENDEZVOUS_MIN_NODES", "DDPSAFE_RENDEZVOUS__MIN_NODES"),
        ("DDPSAFE_ENV_NCCL_DEBUG", "DDPSAFE_ENV__NCCL_DEBUG"),
        ("DDPSAFE_DATA_PATHS_train", "DDPSAFE_DATA_PATHS__train"),
        ("DDPSAFE_DATA_PATHS_TRAIN__PATH", "DDPSAFE_DATA_PATHS__TRAIN__PATH"),
        ("DDPSAFE__SEED", "DDPSAFE_SEED"),
        ("DDPSAFE_SEEDS", "DDPSAFE_SEED"),
        ("DDPSAFE_DATA_PATH__train", "DDPSAFE_DATA_PATHS__train"),
        ("DDPSAFE_NPROCS", "DDPSAFE_NPROC_PER_NODE"),
        ("DDPSAFE_WORLD_SIZE", "DDPSAFE_NPROC_PER_NODE"),
        ("DDPSAFE_MAX_RESTARTS", "DDPSAFE_RETRY__ATTEMPTS"),
        ("DDPSAFE_TIMEOUT", "DDPSAFE_TIMEOUTS"),
    ],
)
def test_misspelt_environment_variable_is_reported(
    variable: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of other programs, and those that ddpsafe sets itself, are left alone."""
    monkeypatch.setenv(variable, "9" * 5_000)
    others = (
        "SOMETHING_ELSE LAUNCH_ID JOB_SECRET ENV_FILE ENV_NAME ENVIRONMENT OUTPUT_DIR VERBOSE QUIET RUN_DIR_2 "
        "RETRY_COUNT SERVICE_HOST PORT PORT_80_TCP_PORT RENDEZVOUS_PORT RENDEZVOUS_SERVICE_PORT_HTTP"
    )
    for other in others.split():
        monkeypatch.setenv(f"DDPSAFE_{other}", "3")
    monkeypatch.setenv("DDPSAFE_TIMEOUTS_FINISH", "")
    with pytest.raises(ConfigError) as caught:
        LaunchConfig()
    assert [(problem.source, problem.write) for problem in caught.value.problems] == [
        (variable, meant)
    ]


def test_variables_of_ranks_keep_their_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDPSAFE_ENV__NAME sets NAME, not name."""
    monkeypatch.setenv("DDPSAFE_ENV__OMP_NUM_THREADS", "2")
    monkeypatch.setenv("DDPSAFE_RETRY__ON", "network, ConnectionError")
    config = LaunchConfig(env={"NCCL_DEBUG": "INFO"})
    assert config.env == {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "INFO"}
    assert config.retry.on == {"network", ConnectionError}


def test_every_kind_of_field_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts, words, nulls, empty values, and paths with their requirements are parsed."""
    variables = {
        "NPROC_PER_NODE": "2", "SEED": "null", "RENDEZVOUS__INTERFACE": "eth0",
        "RUN_DIR": "/scratch/run", "DATA_PATHS__TRAIN__PATH": "/data/train",
        "DATA_PATHS__TRAIN__WAIT": "2min", "DATA_PATHS__VAL": "/data/val", "RETRY__ATTEMPTS": "5",
        "CONSOLE": "none", "TIMEOUTS__ATTEMPT": "",
    }  # fmt: skip
    for name, text in variables.items():
        monkeypatch.setenv(f"DDPSAFE_{name}", text)
    config = LaunchConfig()
    assert (config.nproc_per_node, config.seed, config.console) == (2, None, "none")
    assert config.rendezvous.interface == "eth0"
    assert str(config.run_dir) == "/scratch/run"
    assert config.data_paths["train"].wait == timedelta(minutes=2)
    assert str(config.data_paths["val"].path) == "/data/val"
    assert (config.retry.attempts, config.timeouts.attempt) == (5, None)


def test_resolve_applies_fields_on_top_of_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing config is not changed by the environment later."""
    config = LaunchConfig(seed=1, timeouts={"finish": 20}, env={"A": "1", "C": "1"})
    monkeypatch.setenv("DDPSAFE_SEED", "9")
    monkeypatch.setenv("DDPSAFE_TIMEOUTS__FINISH", "90")
    resolved = LaunchConfig.resolve(config, timeouts={"grace": 2}, env={"B": "2", "C": "2"})
    assert resolved.seed == 1
    assert resolved.timeouts.finish == timedelta(seconds=20)
    assert resolved.timeouts.grace == timedelta(seconds=2)
    assert resolved.env == {"A": "1", "B": "2", "C": "2"}
    assert LaunchConfig.resolve(None).seed == 9


def test_config_can_be_a_field_of_a_users_model() -> None:
    """Its errors are then errors of that model."""

    class Experiment(pydantic.BaseModel):
        launch: LaunchConfig
        waits: Timeouts = Timeouts()

    assert Experiment(launch={"seed": 3}).launch.seed == 3
    with pytest.raises(pydantic.ValidationError, match="nproc_per_node"):
        Experiment(launch={"nproc_per_node": 0})


def test_config_pickles_and_is_frozen() -> None:
    """A config can be sent to other processes, and cannot be changed on the way."""
    config = LaunchConfig(nproc_per_node=2, retry={"on": {OSError}})
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(pydantic.ValidationError):
        config.seed = 3  # type: ignore[misc] # type: ignore[misc] # frozen is under test


def test_importing_the_config_imports_no_torch() -> None:
    """The configuration works even if torch is broken."""
    program = "import sys, ddpsafe._config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


GARBAGE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(20, 5000).map(lambda digits: 10**digits)  # Hypothesis prints what it draws
    | st.floats()
    | any_text()
    | st.binary(max_size=8)
    | st.sampled_from([timedelta.max, object(), int, OSError, 1j, ..., range(3)]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(any_text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)
PARTS = {"timeouts": Timeouts, "retry": RetryPolicy, "start": Rendezvous}
TABLES = [
    st.dictionaries(st.sampled_from(sorted(part.model_fields)), GARBAGE, max_size=4).map(
        lambda table, name=name: {name: table}
    )
    for name, part in PARTS.items()
]
FIELDS = st.dictionaries(
    st.sampled_from(sorted(LaunchConfig.model_fields)) | any_text(max_size=12), GARBAGE, max_size=5
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(fields={"_\ud800": None})
@example(fields={"rendezvous": {"endpoint": "\ud800:1"}})
@given(fields=FIELDS | st.one_of(TABLES))
def test_arbitrary_input_gives_a_config_or_a_config_error(fields: dict[str, object]) -> None:
    """The error can always be printed."""
    try:
        LaunchConfig(**fields)
    except ConfigError as error:
        str(error).encode()


def test_arbitrary_input_is_refused_in_milliseconds() -> None:
    """A validation takes a few milliseconds of CPU time, and does not resolve the host name."""
    wrong = {"nnodes": 2, "rendezvous": {"endpoint": "no.such.host.invalid:99999"}, "seed": "x"}
    began_s = time.process_time()
    for _ in range(100):
        problems_of(**wrong)
    assert (time.process_time() - began_s) / 100 < 0.05


AT: Final = {"endpoint": "gpu-01:29400"}
# fmt: off
REFUSED: Final[list[tuple[dict[str, Any], str, str]]] = [
    # fields, the field of the problem, and a part of its text
    *(({name: value}, name, f"Did you mean {write}") for name, value, write in (
        ("nprocs", 2, "nproc_per_node=2"), ("nproc", 2, "nproc_per_node=2"), ("num_processes", 4, "nproc_per_node=4"),
        ("devices", "auto", "nproc_per_node='auto'"), ("world_size", 8, "nproc_per_node=8"), ("num_nodes", 2, "nnodes=2"),
        ("max_restarts", 2, 'retry={"attempts": 3}'), ("timeout", 60, 'timeouts={"collective": 60}'),
        ("timeout", {"colective": 3}, "'timeouts'"), ("timeuots", {}, "'timeouts'"),
        ("rdzv_endpoint", "a:1", 'rendezvous={"endpoint":'), ("log_dir", "/x", "run_dir='/x'"),
        ("mp_context", "spawn", "start_method='spawn'"))),
    ({"_env_file": "x"}, "_env_file", "nproc_per_node"),
    ({"timeouts": {"colective": 3}}, "timeouts.colective", "Did you mean 'collective'"),
    ({"retry": {"max_restarts": 1}}, "retry.max_restarts", "Did you mean attempts=2"),
    ({"timeouts": {"join": 5}}, "timeouts.join", "Did you mean start=5"),
    ({"data_paths": {"train": {"path": "/x", "type": "file"}}}, "data_paths.train.type", "Did you mean kind='file'"),
    ({"data_paths": {"train": {"path": "/x", "markr": "a"}}}, "data_paths.train.markr", "Did you mean 'marker'"),
    *(({"timeouts": {"barrier": value}}, "timeouts.barrier", "") for value in (
        0, -1, 0.0001, float("nan"), float("inf"), 10**400, "soon", "PT0S", "-PT5S", True, None, [],
        timedelta.max, "1" * 5000)),
    ({"timeouts": {"attempt": 60, "collective": 61, "barrier": 59}}, "timeouts.collective", ""),
    ({"retry": {"on": {"peer-lots"}}}, "retry.on", "'peer-lost'"),
    ({"retry": {"on": {"user-error"}}}, "retry.on", "happens again"),
    ({"retry": {"on": {KeyboardInterrupt}}}, "retry.on", "requests to stop"),
    ({"retry": {"on": {3}}}, "retry.on", "neither"),
    ({"retry": {"on": 7}}, "retry.on", "set of kinds"),
    ({"retry": {"backoff_initial": 9, "backoff_max": 3}}, "retry.backoff_max", ""),
    ({"retry": {"attempts": 0}}, "retry.attempts", ""),
    *(({"nproc_per_node": value}, "nproc_per_node", hint) for value, hint in (
        (0, "zero ranks"), (-1, "smallest number of ranks is 1"), (True, "bool"), (1.5, "expected an integer"),
        (None, "expected an integer"), ("gpus", "'gpu'"), (10**30, "no node"), ([], "expected an integer"))),
    *(({"backend": value}, "backend", hint) for value, hint in (
        ("ncll", "'nccl'"), ("goo", "'gloo'"), ("cpu:gloo,cuda:ncll", "'cpu:gloo,cuda:nccl'"), ("", "neither"),
        ("cpu:gloo,nccl", "every device"), ("cpu:gloo,cpu:mpi", "every device"), ("cuda:", "neither"),
        (3, "expected a name"), ("cpu:auto,cuda:nccl", "part of a list"))),
    *(({"start_method": "fork"}, "start_method", word) for word in ("CUDA", "locks", "forkserver")),
    ({"nnodes": 2}, "rendezvous.endpoint", ""),
    ({"nnodes": 2, "rendezvous": {"endpoint": "localhost:0"}}, "rendezvous.endpoint", ""),
    ({"nnodes": 2, "rendezvous": {"endpoint": "gpu-01:0"}}, "rendezvous.endpoint", ""),
    ({"node_rank": 1}, "node_rank", ""),
    ({"nnodes": 1, "node_rank": 1, "rendezvous": AT}, "node_rank", "rite node_rank=0, or a larger nnodes"),
    ({"nnodes": 3, "node_rank": 3, "rendezvous": AT}, "node_rank", "rite a node_rank from 0 to 2, or a larger nnodes"),
    ({"nnodes": 0}, "nnodes", ""),
    ({"nnodes": True}, "nnodes", ""),
    ({"rendezvous": {"interface": "^eth0"}}, "rendezvous.interface", ""),
    ({"rendezvous": {"interface": "eth0,eth1"}}, "rendezvous.interface", ""),
    ({"seed": -1}, "seed", ""),
    ({"run_dir": "runs"}, "run_dir", ""),
    ({"data_paths": {"train": "data"}}, "data_paths.train.path", ""),
    ({"data_paths": {"train": None}}, "data_paths.train", ""),
    ({"data_paths": {"train": {"kind": "any"}}}, "data_paths.train.path", ""),
]
READ: Final[list[tuple[dict[str, Any], str, object]]] = [
    # fields, a field, and its value
    *(({"timeouts": {"barrier": written}}, "timeouts.barrier", timedelta(seconds=seconds)) for written, seconds in (
        (30, 30), (0.5, 0.5), ("30", 30), ("30s", 30), ("5min", 300), ("1h", 3600), ("2 days", 172800),
        ("PT5M", 300), ("00:05:00", 300), (timedelta(minutes=1), 60), ("250ms", 0.25))),
    *(({"timeouts": {"attempt": 60}}, f"timeouts.{name}", timedelta(seconds=60)) for name in (
        "start", "collective", "barrier")),
    *(({"retry": {"on": on}}, "retry.on", {"network"}) for on in ("network", {"network"}, ["network"], ("network",))),
    ({"retry": {"backoff_initial": 60}}, "retry.backoff_max", timedelta(seconds=60)),
    *(({"nproc_per_node": written}, "nproc_per_node", count) for written, count in (
        (4, 4), ("4", 4), (2.0, 2), ("GPU", "gpu"))),
    *(({"backend": name}, "backend", name.lower()) for name in (
        "auto", "nccl", "GLOO", "mpi", "ucc", "xccl", "hccl", "cncl", "smddp", "fake", "flagcx", "cpu:gloo,cuda:nccl",
        "cuda:nccl")),
    ({"env": {"OMP_NUM_THREADS": 4}}, "env", {"OMP_NUM_THREADS": "4"}),
    ({"nnodes": 2, "rendezvous": Rendezvous(endpoint="10.0.0.7:29400")}, "nnodes", 2),
]
NO_VARIABLES: Final = [
    ("LOCAL_RANK", "0"), ("MASTER_PORT", "29500"), ("TORCHELASTIC_USE_AGENT_STORE", "1"), ("", "x"), ("A=B", "x"),
    ("A", "x\0y"), ("A", True), ("A", None), ("A", "\ud800"), ("\ud800", "x"), (3, "x"),
]
# fmt: on


@pytest.mark.parametrize(("fields", "field", "text"), REFUSED)
def test_a_field_is_refused_with_what_to_write(
    fields: dict[str, Any], field: str, text: str
) -> None:
    """Each problem names the field; names of other launchers and typos get the right one."""
    assert text in problems_of(**fields)[field]


@pytest.mark.parametrize(("fields", "field", "value"), READ)
def test_a_field_is_read(fields: dict[str, Any], field: str, value: object) -> None:
    """Durations in common notations, one kind or several, backends of other packages."""
    assert operator.attrgetter(field)(LaunchConfig(**fields)) == value


@pytest.mark.parametrize(("name", "text"), NO_VARIABLES)
def test_variables_that_cannot_be_set_are_refused(name: object, text: object) -> None:
    """The launcher's own variables stay intact, and nothing invalid reaches the kernel."""
    (problem,) = problems_of(env={name: text}).values()
    assert problem.startswith("env.")


def test_retry_kinds_are_serialized_by_name() -> None:
    """A policy can be written to a report."""
    assert '"on":["OSError","port"]' in RetryPolicy(on={"port", OSError}).model_dump_json()


def test_a_wrong_way_to_pass_fields_is_answered_with_the_right_one() -> None:
    """A file that is missing is an error, not an empty config; a dict is a set of keyword arguments."""
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        LaunchConfig.from_toml("absent.toml")
    for call in (LaunchConfig.from_toml, LaunchConfig.resolve):
        with pytest.raises(ConfigError, match=r"expected a path|keyword arguments"):
            call({"seed": 1})  # type: ignore[arg-type, operator]  # a user's mistake


# The reference page.


PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "config.md"
MODELS: Final[list[tuple[type[BaseModel], str]]] = [
    (LaunchConfig, ""),
    (Timeouts, "TIMEOUTS__"),
    (RetryPolicy, "RETRY__"),
    (Rendezvous, "RENDEZVOUS__"),
    (DataPath, "DATA_PATHS__<NAME>__"),
]


def show_default(model: type[BaseModel], name: str) -> str:
    """Return a field's default in the page's notation."""
    if model.model_fields[name].is_required():
        return "required"
    value = getattr(model(path="/x") if model is DataPath else model.model_construct(), name)
    if isinstance(value, timedelta):
        return show_duration(value)
    if isinstance(value, BaseModel):
        return f"`{type(value).__name__}()`"
    return f"`{sorted(value)}`" if isinstance(value, frozenset) else f"`{value!r}`"


def show_row(model: type[BaseModel], prefix: str, name: str) -> str:
    """Return the row of the page's table for one field."""
    text = re.sub(r"\s+", " ", model.model_fields[name].description or "").replace("`", "")
    return f"| `{name}` | {show_default(model, name)} | `DDPSAFE_{prefix}{name.upper()}` | {text} |"


@pytest.mark.parametrize(("model", "prefix"), MODELS)
def test_reference_has_a_row_for_every_field(model: type[BaseModel], prefix: str) -> None:
    """Name, default, variable and description match the model; paste a missing row from the failure."""
    page = PAGE.read_text(encoding="utf-8")
    rows = [show_row(model, prefix, name) for name in model.model_fields]
    assert [row for row in rows if row not in page] == []


def test_toml_example_of_the_reference_sets_every_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example is valid as printed, and omits no field."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```toml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    path = tmp_path / "pyproject.toml"
    path.write_text(blocks[0], encoding="utf-8")
    config = LaunchConfig.from_toml(path)
    # A file that all nodes share cannot set one node's rank.
    assert set(LaunchConfig.model_fields) - config.model_fields_set == {"node_rank"}
    assert set(Timeouts.model_fields) == config.timeouts.model_fields_set
    assert set(RetryPolicy.model_fields) == config.retry.model_fields_set
