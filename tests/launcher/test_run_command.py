"""``ddpsafe run`` starts the ranks of a script as torchrun does."""

from __future__ import annotations

import json
import shlex
import signal
import socket
from pathlib import Path
from typing import Any, Final, cast

import pytest
import scripts
from texts import read_sections
from torch.distributed.launch import parse_args

from ddpsafe import _gpus
from ddpsafe._commands.run import read_options
from ddpsafe._config import LaunchConfig, RetryPolicy, Timeouts
from ddpsafe._config.parts import DETERMINISTIC
from ddpsafe._errors import FAILURE_KINDS, PreemptedError
from ddpsafe._launcher.plan import make_plan, rank_env
from ddpsafe._wire.spec import CallStyle, LogFiles
from ddpsafe.cli import PARTS, main, make_parser

PLAIN = """
import os, sys
import torch, torch.distributed as dist
from beside import SCALE

if __name__ == "__main__":
    dist.init_process_group("gloo")
    total = torch.ones(1) * SCALE
    dist.all_reduce(total)
    with open(f"said-{os.environ['RANK']}", "w") as file:
        print(total.item(), *sys.argv[1:], os.environ["LOCAL_WORLD_SIZE"], file=file)
    dist.destroy_process_group()
    sys.exit(0)
"""

WITH_DDPSAFE = """
import ddpsafe

def train(ctx):
    return ctx.reduce_mean(float(ctx.rank)), ctx.backend

if __name__ == "__main__":
    print(ddpsafe.launch(train).values)
    print(ddpsafe.launch(train, backend="gloo").values)
    with ddpsafe.process_group() as ctx:
        print(ctx.backend)
"""


UNUSED = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
first = model.module[0]
model.module.forward = lambda x: first(x) if dist.get_rank() == 1 else layers[1](first(x))
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
"""


def run(folder: Path, *arguments: str, fresh: bool = False) -> scripts.Run:
    """Run the command in `folder`; a fresh one starts ranks by the default method."""
    command = ["-m", "ddpsafe", "run", *arguments]
    env = scripts.SPAWNING if fresh else {}
    return scripts.Script(command, folder=folder, env=env, fresh=fresh).end()


def test_the_traceback_of_a_script_is_not_taken_for_an_error_that_it_handled(
    tmp_path: Path,
) -> None:
    """Torch writes the rank before each line of it; the commonest error of DDP then had untrue advice."""
    scripts.write(tmp_path, "train.py", UNUSED)
    done = run(tmp_path, "--nproc-per-node", "2", "--run-dir", "run", "train.py")
    assert done.code == 1, done.err
    assert "rank 1 (world_size 2) raised RuntimeError" in done.err
    assert "see find_unused_parameters=True" in done.err
    assert "and continued" not in done.err


@pytest.mark.full
def test_a_plain_script_forms_a_group_and_receives_its_arguments(tmp_path: Path) -> None:
    """It can import modules beside it, and ``sys.exit(0)`` at its end is success."""
    scripts.write(tmp_path, "sub/train.py", PLAIN)
    look = "import os; LAUNCHER = open(f'/proc/{os.getppid()}/maps').read()"
    note = "open('launcher', 'w').write(str('libtorch' in LAUNCHER))"
    scripts.write(tmp_path, "sub/beside.py", f"SCALE = 3\n{look}\n{note}")
    options = ("--nproc-per-node", "2")
    done = run(tmp_path, *options, "sub/train.py", "--lr", "1", "--help", fresh=True)
    assert done.code == 0, done.err
    said = [(tmp_path / f"said-{rank}").read_text(encoding="utf-8") for rank in range(2)]
    assert said == ["6.0 --lr 1 --help 2\n"] * 2
    asks = not _gpus.sees_none(_gpus.read_build(), None, has_driver=_gpus.may_have_driver())
    assert (tmp_path / "launcher").read_text(encoding="utf-8") == str(asks)


def test_a_console_script_without_a_main_guard_starts_ranks(tmp_path: Path) -> None:
    """Some installers write such scripts; the ranks import only the user's script."""
    scripts.write(tmp_path, "train.py", "import os; print(os.environ['RANK'], flush=True)")
    tool = scripts.write(tmp_path, "tool.py", "from ddpsafe.cli import main; main()")
    command = [str(tool), "run", "--nproc-per-node", "2", "train.py"]
    run = scripts.Script(command, folder=tmp_path).end()
    assert (run.code, sorted(run.lines()), run.err) == (0, ["0", "1"], "")


LEAVES_EARLY = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(5):
    if os.environ["RANK"] == "1" and step == 2:
        sys.exit(0)
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.full
@pytest.mark.recorder
def test_a_rank_that_leaves_before_torch_is_imported_is_named_at_once(tmp_path: Path) -> None:
    """It has done nothing that the others wait for, which is known."""
    source = (
        "import os, sys, ddpsafe\nif os.environ['RANK'] == '1':\n    sys.exit(0)\nddpsafe.setup()\n"
    )
    scripts.write(tmp_path, "train.py", source)
    done = run(tmp_path, "--nproc-per-node", "2", "--run-dir", "run", "train.py")
    assert done.code == 1
    assert "RankLeftEarlyError: rank 1 (world_size 2) returned early" in done.err
    assert "this is a deadlock" in done.err


@pytest.mark.full
@pytest.mark.recorder
@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)"])
def test_an_early_exit_with_0_is_reported_with_its_line(tmp_path: Path, end: str) -> None:
    """The other ranks still wait for that rank, so its exit is the failure despite its status."""
    scripts.write(tmp_path, "train.py", LEAVES_EARLY.replace("sys.exit(0)", end))
    done = run(tmp_path, "--nproc-per-node", "2", "--run-dir", "run", "train.py")
    assert done.code == 1
    assert "RankLeftEarlyError: rank 1 (world_size 2) returned early" in done.err
    line = f"sys.exit(0) was called at {tmp_path / 'train.py'}:5 in <module>"
    assert (line in done.err) == (end == "sys.exit(0)")


SAVES_LATE = """
import atexit, pickle, sys, time
from concurrent.futures import ThreadPoolExecutor

class Net:
    weight = 1

def save(name):
    time.sleep(0.5)
    with open(name, "wb") as file:
        pickle.dump(Net(), file)

ThreadPoolExecutor(1).submit(save, "from a thread")
atexit.register(save, "at exit")
print(__name__, __file__, sys.modules["__main__"].__dict__ is globals())
"""


def saves_late(folder: Path, place: str, *arguments: str) -> None:
    """Run the script, and require that what it saves after its last line is complete."""
    scripts.write(folder, place, SAVES_LATE)
    done = run(folder, "--nproc-per-node", "1", *arguments)
    assert (done.code, done.lines()) == (0, [f"__main__ {folder / place} True"]), done.err
    for name in ("from a thread", "at exit"):
        assert b"Net" in (folder / name).read_bytes()


def test_a_script_is_the_main_module_until_the_interpreter_ends(tmp_path: Path) -> None:
    """A thread or an exit function that saves objects of the script's classes can pickle them."""
    saves_late(tmp_path, "train.py", "train.py")


@pytest.mark.full
def test_a_module_is_the_main_module_until_the_interpreter_ends(tmp_path: Path) -> None:
    """The same with ``-m``, for a module and for a package."""
    saves_late(tmp_path, "package/train.py", "-m", "package.train")
    saves_late(tmp_path, "package/__main__.py", "-m", "package")


def test_module_with_launch_inside_attaches(tmp_path: Path) -> None:
    """``launch()`` in a rank starts nothing, and uses the command's backend unless it names one."""
    scripts.write(tmp_path, "package/train.py", WITH_DDPSAFE)
    options = ("--nproc-per-node", "1", "--backend", "cpu:gloo", "-m", "package.train")
    done = run(tmp_path, *options)
    said = ["{0: (0.0, 'cpu:gloo')}", "{0: (0.0, 'gloo')}", "cpu:gloo"]
    assert done.lines() == said, done.err


def test_a_script_that_cannot_be_compiled_is_shown_without_ddpsafes_lines(tmp_path: Path) -> None:
    """None of the script's lines has run, so the traceback has no other line than the one to fix."""
    scripts.write(tmp_path, "train.py", "x = (")
    done = run(tmp_path, "--nproc-per-node", "1", "--run-dir", "run", "train.py")
    assert "raised SyntaxError" in done.err
    assert done.err.count("    x = (\n") == 1, done.err
    assert "entrypoint.py" not in done.err


@pytest.mark.parametrize(("code", "exits_with"), [("7", 7), ("['no data', 3]", 1)])
def test_the_command_exits_with_the_ranks_exit_code(
    tmp_path: Path, code: str, exits_with: int
) -> None:
    """The message names the rank and the line without any frame of the command line.

    Python exits with 1 if the code is another object than a number.
    """
    source = f"import sys\nsys.exit({code})\n"
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    kept = str(tmp_path / "kept")
    done = run(tmp_path, "--nproc-per-node", "1", "--run-dir", kept, "train.py")
    assert done.code == exits_with
    assert f"rank 0 (world_size 1) exited with code {exits_with}" in done.err
    assert "train.py:2" in done.err
    assert "cli.py" not in done.err


# A script that torchrun runs: no main guard, workers with a lambda.
UNGUARDED = """
import multiprocessing, sys
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor(float(index))

method = multiprocessing.get_start_method(allow_none=True)
dist.init_process_group("gloo")
numbers = Numbers()
for _ in range(2):
    sampler = DistributedSampler(numbers, shuffle=False)
    loader = DataLoader(numbers, 2, sampler=sampler, num_workers=2, collate_fn=lambda b: sum(b))
    total = sum(loader)
    dist.all_reduce(total)
if dist.get_rank() == 0:
    print(total.item(), method)
dist.destroy_process_group()
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "start_method", [pytest.param("spawn", marks=pytest.mark.soak), "forkserver"]
)
def test_data_loader_workers_of_a_script_start_as_under_torchrun(
    tmp_path: Path, start_method: str
) -> None:
    """They use Python's default start method, whichever method starts the ranks."""
    scripts.write(tmp_path, "train.py", UNGUARDED)
    done = run(tmp_path, "--nproc-per-node", "2", "--start-method", start_method, "train.py")
    assert done.lines() == ["28.0 None"]


# Arguments of torchrun, as authors publish them.
PUBLIC: list[Any] = [
    ("--standalone --nproc_per_node=4 train.py config/train_gpt2.py", {"nproc_per_node": "4"}, 0),
    ("--standalone --nnodes=1 --nproc-per-node=2 main.py 50 10", {"nproc_per_node": "2"}, 0),
    ("--nproc_per_node 8 main.py --model deit_tiny --batch-size 256", {"nproc_per_node": "8"}, 0),
    ("--nproc_per_node=8 --master_port=29501 main_pretrain.py --epochs 800", {}, 1),
    ("--nnodes=1 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=localhost:0 t.py", {}, 2),
    ("--nnodes 1 --nproc_per_node 4 examples/finetuning.py --use_peft", {}, 0),
    ("--nnodes=1 --node_rank=0 --nproc_per_node=8 --master_addr=127.0.0.1 --master_port=2950 f.py", {}, 2),
    ("--nproc_per_node=gpu -m package.train --fp16", {"nproc_per_node": "gpu"}, 0),
    ("--nproc-per-node auto --no-python bash run.sh --local", {"nproc_per_node": "auto"}, 0),
    ("--standalone --nproc_per_node=1 -m torchtune.run --config x.yaml", {}, 0),
    ("--nnodes=1:1 --nproc_per_node=8 --max_restarts=3 --rdzv_id=7 --rdzv_backend=c10d t.py",
        {"retry": {"attempts": 4, "on": frozenset(FAILURE_KINDS - DETERMINISTIC)},
        "rendezvous": {"id": "7"}}, 1),
    ("--nproc-per-node=8 --local-ranks-filter 0 --role rank --tee 3 -m torchtitan.train",
        {"console": "rank-zero"}, 0),
    ("--nproc=2 --redirect=3 --max-rest 1 t.py --re 1 --n 2", {"nproc_per_node": "2"}, 0),
    ("--nnodes=1:2 --rdzv-id=7 --rdzv-endpoint=localhost:29401 --stand t.py", {"nnodes": 1}, 2),
    ("--nnodes=1:2 --rdzv-id=7 --rdzv-endpoint=localhost:29401 t.py",
        {"nnodes": 2, "rendezvous": {"endpoint": "localhost:29401", "id": "7", "min_nodes": 1}}, 0),
    ("--nproc_per_node=2 --tee 3 --log_dir logs train.py", {"console": "tagged"}, 0),
    ("--nproc_per_node=2 -r 3 -t 0 train.py", {"console": "none"}, 0),
    ("--nproc_per_node=2 --redirects 0:3 train.py", {}, 1),
    ("--start_method=forkserver --nproc_per_node=2 t.py", {"start_method": "forkserver"}, 0),
    ("--monitor_interval=5 --nproc_per_node=4 train.py --lr=1e-3", {"nproc_per_node": "4"}, 1),
    ("--rdzv-conf timeout=600,join_timeout=60 --nproc_per_node=4 train.py", {}, 1),
    ("--run-path --nproc_per_node=2 /abs/train.py", {}, 0),
    ("--seed 5 --backend gloo --timeouts.attempt 12h --retry.attempts 2 --preflight off train.py --seed 6",
        {"seed": "5", "backend": "gloo", "timeouts": {"attempt": "12h"}, "retry": {"attempts": "2"},
        "preflight": "off"}, 0),
    (("--max-restarts 3 --retry.on port,mount --retry.backoff_max=5 --timeouts.progress null "
        "--timeouts.collective 10min train.py"), {"timeouts": {"progress": None, "collective": "10min"},
        "retry": {"attempts": 4, "on": "port,mount", "backoff_max": "5"}}, 0),
    ("--shutdown-timeout=60 --signals-to-handle SIGTERM,SIGUSR1 train.py", {"timeouts": {"grace": 60}}, 1),
    ("--virtual-local-rank --numa-binding node --nproc_per_node=2 train.py", {}, 2),
    ("train.py --nproc_per_node 3 --standalone", {}, 0),
    (("--nnodes=2 --node_rank=1 --nproc_per_node=8 --rdzv_id=7 --rdzv_backend=c10d "
        "--rdzv_endpoint=gpu-01:29400 t.py"), {"nnodes": 2, "node_rank": 1,
        "rendezvous": {"endpoint": "gpu-01:29400", "id": "7"}}, 1),
    ("--nnodes=2:4 --rdzv-endpoint gpu-01 t.py", {"nnodes": 4,
        "rendezvous": {"endpoint": "gpu-01:29400", "min_nodes": 2}}, 0),
    ("--nnodes=2 --rdzv-endpoint fd77::1 t.py", {"nnodes": 2,
        "rendezvous": {"endpoint": "[fd77::1]:29400"}}, 0),
    ("--nnodes=2 --master-addr [fd77::1] t.py", {"nnodes": 2,
        "rendezvous": {"endpoint": "[fd77::1]:29500"}}, 0),
    ("--nnodes 2 --node-rank 0 --master_addr gpu-01 --master_port 2950 t.py",
        {"nnodes": 2, "node_rank": 0, "rendezvous": {"endpoint": "gpu-01:2950"}}, 0),
]  # fmt: skip
"""Arguments of torchrun, the configuration fields that they set, and the number of notes."""


@pytest.mark.parametrize(("line", "fields", "notes"), PUBLIC)
def test_torchruns_command_lines_are_accepted(
    line: str, fields: dict[str, Any], notes: int
) -> None:
    """A note lists options without effect, and the script's own options are not touched."""
    options = make_parser().parse_args(["run", *line.split()])
    read, printed = read_options(options)
    assert {name: read.get(name) for name in fields} == fields
    LaunchConfig(**read)
    assert len(printed) == notes
    assert options.script not in ("1", "3")
    assert line.endswith(" ".join([options.script, *options.arguments]))


@pytest.mark.parametrize(
    ("style", "backend", "passed_on"),
    [
        ("run", {"backend": "gloo"}, "gloo"),
        ("run", {"backend": "auto"}, "auto"),
        ("run", {}, None),
        ("launch", {"backend": "gloo"}, None),
    ],
)
def test_only_ranks_of_the_command_receive_its_backend(
    style: CallStyle, backend: dict[str, Any], passed_on: str | None
) -> None:
    """`launch` in the script reads it; `launch` in other programs changes no variable."""
    plan = make_plan(LaunchConfig(nproc_per_node=1, **backend), style=style)
    logs = LogFiles(stdout="", stderr="", stacks="", nccl="", owner_uid=0, is_shown=True)
    assert rank_env(plan, plan.worlds[0], 1, logs).get("DDPSAFE_BACKEND") == passed_on


REFUSED: list[Any] = [
    ("--nnodes=2 --nproc_per_node=8 train.py", "nnodes=2 nodes need an endpoint to connect to"),
    ("--nnodes=1:4 train.py", "nnodes=4 nodes need an endpoint to connect to"),
    ("--nnodes=2 --rdzv-endpoint localhost:0 train.py", "port 0 means a different free port"),
    ("--rdzv=5 train.py", "there is no option --rdzv; did you mean --rdzv-"),
    ("--nnodes=two train.py", "--nnodes=two is not a number of nodes"),
    ("--nnodes=4:2 --rdzv-endpoint a:29400 train.py", "--nnodes=4:2 is not a number of nodes"),
    ("--nnodes=2:1 --rdzv-endpoint a:29400 train.py", "--nnodes=2:1 is not a number of nodes"),
    ("--nnodes=2: --rdzv-endpoint a:29400 train.py", "--nnodes=2: is not a number of nodes"),
    ("--node_rank=1 train.py", "--node-rank=1 is not possible"),
    ("--max-restarts=often train.py", "--max-restarts=often is not a whole number"),
    ("--start-method fork train.py", "inherits CUDA"),
    ("--nproc_per_node=many train.py", "nproc_per_node"),
    ("--timeouts.attempt 3x train.py", "got '3x': it is not a duration"),
    ("--timeout 3 train.py", "there is no option --timeout; did you mean --timeouts.attempt?"),
    ("--retry 3 train.py", "there is no option --retry; did you mean --retry.attempts?"),
    ("trian.py", "did you mean train.py?"),
    ("--nproc-per-node 2 -m nosuchmod.train", "There is no module 'nosuchmod'"),
    ("python train.py", "leave that word out"),
    (".", "nor a directory with a __main__.py"),
    ("--no-python -m train", "exclude each other"),
    ("--no-python ./no-such-program", "There is no program './no-such-program'"),
]
"""Command lines, and the error that they cause."""


@pytest.mark.parametrize(("line", "said"), REFUSED)
def test_an_unsupported_command_line_is_refused_with_the_reason(
    tmp_path: Path, line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """It is a usage error, and nothing starts."""
    monkeypatch.chdir(tmp_path)
    scripts.write(tmp_path, "train.py", "raise SystemExit(9)")
    try:
        code = main(["run", *line.split()])
    except SystemExit as end:
        code = cast("int", end.code)
    assert code == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "check this host"),
        ("docter", "there is no command 'docter'; did you mean doctor?"),
        ("version", "there is no command 'version'; choose from doctor, "),
    ],
)
def test_an_unknown_command_is_answered_with_a_suggestion(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a command, all commands are listed."""
    assert main(line.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--nproc-per-node=2"], ["-m"], ["--tee", "3"]])
def test_a_missing_script_is_reported_in_one_line_with_an_example(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The usage text of argparse would list forty options instead."""
    assert main(["run", *options]) == 2
    out, err = capsys.readouterr()
    example = "ddpsafe run --nproc-per-node 2 train.py"
    assert (out, err) == ("", f"ddpsafe run needs a script, for example:  {example}\n")


@pytest.mark.parametrize(
    ("variables", "line", "field", "value"),
    [
        ({"PET_NPROC_PER_NODE": "3"}, "t.py", "nproc_per_node", "3"),
        ({"PET_NPROC_PER_NODE": "3"}, "--nproc-per-node 2 t.py", "nproc_per_node", "2"),
        ({"PET_NPROC_PER_NODE": "3", "DDPSAFE_NPROC_PER_NODE": "4"}, "t.py", "nproc_per_node", None),
        ({"PET_TEE": "3"}, "t.py", "console", "tagged"),
        ({"PET_LOG_DIR": "/logs"}, "t.py", "run_dir", Path("/logs")),
        ({"PET_STANDALONE": "0"}, "t.py", "nnodes", None),
        ({"PET_STANDALONE": "1"}, "t.py", "nnodes", 1),
    ],
)  # fmt: skip
def test_torchruns_variables_are_defaults_of_options(
    variables: dict[str, str], line: str, field: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``PET_<OPTION>`` counts if neither the option nor ddpsafe's own variable is given."""
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    read, _ = read_options(make_parser().parse_args(["run", *line.split()]))
    assert read.get(field) == value


@pytest.mark.full
def test_two_launchers_on_one_host_meet_on_loopback(tmp_path: Path) -> None:
    """Torchrun's examples start two agents with ``--rdzv-endpoint=localhost:PORT``; so does one of 1:2."""
    scripts.write(tmp_path, "train.py", PLAIN)
    scripts.write(tmp_path, "beside.py", "SCALE = 3")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    endpoint = ("--nproc-per-node=1", "--rdzv-id=9", f"--rdzv-endpoint=localhost:{port}")
    command = ["-m", "ddpsafe", "run", "--nnodes=2", *endpoint, "train.py"]
    first = scripts.Script(command, folder=tmp_path)
    second = scripts.Script(command, folder=tmp_path)
    for each in (first.end(), second.end()):
        assert each.code == 0, each.err
    assert (tmp_path / "said-1").read_text(encoding="utf-8") == "6.0 1\n"


def test_the_command_exits_with_the_exit_status_of_a_program(tmp_path: Path) -> None:
    """That holds for an exit code and for a signal."""
    for command, code, cause in (
        ("exit 7", 7, "the program ended with that code."),
        ("kill -9 $$", 137, "was killed by SIGKILL"),
        ("sh -c 'kill -11 $$'; exit $?", 139, "when SIGSEGV has ended what it runs."),
    ):
        kept = str(tmp_path / command.split()[0])
        options = ("--nproc-per-node", "1", "--run-dir", kept, "--no-python")
        done = run(tmp_path, *options, "sh", "-c", command)
        assert done.code == code
        assert cause in done.err


def test_every_field_of_timeouts_and_retry_has_an_option() -> None:
    """It is spelled as in the configuration, so that a field named in an error can be typed."""
    assert {part: set(names) for part, names in PARTS.items()} == {
        "timeouts": set(Timeouts.model_fields),
        "retry": set(RetryPolicy.model_fields),
    }


INTERRUPTED: Final = """
    import os, pathlib, runpy, signal, sys
    # torch's import takes a second or two, and Ctrl-C arrives in the middle of it. The command
    # imports torch to count GPUs if it cannot find out how torch was built.
    class Interrupts:
        is_first = True
        def find_spec(self, name, *_):
            if name == "torch" and self.is_first:
                self.is_first = False
                raise ImportError
            if name == "torch._C" and os.environ.get("INTERRUPT") == "torch":
                pathlib.Path("interrupted").touch()
                signal.raise_signal(signal.SIGINT)
            if name == "ddpsafe._launch" and os.environ.get("INTERRUPT") == "ddpsafe":
                pathlib.Path("interrupted").touch()
                signal.raise_signal(signal.SIGINT)
    sys.meta_path.insert(0, Interrupts())
    sys.argv = ["ddpsafe", "run", "--nproc-per-node", "2", "train.py"]
    runpy.run_module("ddpsafe", run_name="__main__")
"""


@pytest.mark.full
@pytest.mark.parametrize("moment", ["torch", "ddpsafe"])
def test_ctrl_c_while_it_loads_ends_the_command_without_a_traceback(
    tmp_path: Path, moment: str
) -> None:
    """It ends by the signal itself, as a program without Python would."""
    scripts.write(tmp_path, "train.py", "open('ran', 'w')")
    path = scripts.write(tmp_path, "command.py", INTERRUPTED)
    script = scripts.Script([str(path)], folder=tmp_path, env={"INTERRUPT": moment}, fresh=True)
    run = script.end()
    assert (tmp_path / "interrupted").exists()
    assert run.code == -signal.SIGINT, run.err
    assert "Traceback" not in run.err
    assert run.err.count("\n") <= 1
    assert not (tmp_path / "ran").exists()


STOPS: Final = """
import os, signal, sys
import ddpsafe, psutil


def train(ctx):
    ctx.barrier()
    if ctx.rank == 0:
        server = psutil.Process().parent()
        os.kill(server.ppid(), signal.SIGUSR1)  # the launcher
    while not ctx.stop_requested():
        pass


if __name__ == "__main__":
    ddpsafe.launch(train)
    print("the code after launch has run")
"""


@pytest.mark.full
def test_a_script_that_was_asked_to_stop_ends_the_command_with_75(tmp_path: Path) -> None:
    """It is not reported as a rank's failure, although `launch` ends each rank by an exception."""
    scripts.write(tmp_path, "train.py", STOPS)
    options = ("--nproc-per-node", "2", "--run-dir", str(tmp_path / "run"))
    done = run(tmp_path, *options, "train.py")
    assert done.code == PreemptedError.exit_code, done.err
    assert "ranks 0 and 1 (world_size 2) stopped on SIGUSR1 to the launcher" in done.err
    assert "RankRaisedError" not in done.err
    assert done.out == ""


# Command lines of public repositories.


PUBLIC_COMMANDS: Final = {
    source: " ".join(lines)
    for source, lines in read_sections(Path(__file__).with_name("public_commands.txt")).items()
}
"""The arguments of torchrun for one node, by where they were published."""


@pytest.mark.parametrize(("source", "line"), PUBLIC_COMMANDS.items())
@pytest.mark.filterwarnings("ignore::FutureWarning")  # the old name is deprecated
def test_public_command_lines_are_parsed_as_by_torchrun(source: str, line: str) -> None:
    """The result is the same script or module, arguments and number of ranks."""
    arguments = shlex.split(line)
    options = make_parser().parse_args(["run", *arguments])
    fields, _ = read_options(options)
    theirs = parse_args(arguments)
    assert (options.script, options.arguments) == (
        theirs.training_script,
        theirs.training_script_args,
    ), source
    assert (options.module, fields["nproc_per_node"]) == (theirs.module, theirs.nproc_per_node)


RUN: Final[list[Any]] = [
    "karpathy/nanochat README.md",
    "pytorch/torchtitan run_train.sh",
    "pytorch/examples distributed/ddp/run_example.sh",
    "facebookresearch/detr README.md",
]
"""Command lines with different kinds of options, run with two ranks instead of eight."""

SCRIPT: Final = """
import os, pathlib, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
ranks = torch.tensor(float(dist.get_rank()))
dist.all_reduce(ranks)
said = [int(ranks), *sys.argv[1:]]
pathlib.Path(f"said-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}").write_text(repr(said))
dist.destroy_process_group()
os._exit(0)  # its exit code counts, also where a rank leaves Python
"""


@pytest.mark.full(but=["pytorch/torchtitan run_train.sh"])
@pytest.mark.parametrize("source", RUN)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_public_command_lines_run_unchanged(source: str, tmp_path: Path) -> None:
    """Their ranks form a group, and the script receives its arguments."""
    arguments = shlex.split(PUBLIC_COMMANDS[source].replace("nproc_per_node=8", "nproc_per_node=2"))
    theirs = parse_args(arguments)
    name = theirs.training_script
    path = f"{name.replace('.', '/')}.py" if theirs.module else name
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).parent.joinpath("__init__.py").touch()  # before the kit of that name
    (tmp_path / path).write_text(SCRIPT)
    command = ["-m", "ddpsafe", "run", *arguments]
    done = scripts.Script(command, folder=tmp_path).end()
    assert done.code == 0, done.err
    said = repr([1, *theirs.training_script_args])
    found = {file.name: file.read_text() for file in tmp_path.glob("said-*")}
    assert found == {"said-0-of-2": said, "said-1-of-2": said}


# Idioms of scripts.


IDIOMS: Final = """
import sys
early = [name for name in ("torch", "numpy") if name in sys.modules]
import argparse, atexit, gc, inspect, json, locale, logging, multiprocessing, os, pickle, resource
import signal, subprocess, threading, warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
os.environ["OMP_NUM_THREADS"] = "1"
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
import sibling

rank = os.environ["RANK"]

@dataclass
class Config:
    lr: float = 0.1

def square(x):
    return x * x

def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-rank", type=int, default=int(os.environ["LOCAL_RANK"]))
    parser.add_argument("--lr", type=float)
    return parser.prog, vars(parser.parse_args())

def saved():
    torch.save(Config(), f"{rank}.pt")
    return torch.load(f"{rank}.pt", weights_only=False)

def reduced():
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item()

def gathered():
    found = [None, None]
    dist.all_gather_object(found, Config(float(rank)), group=dist.new_group([0, 1]))
    return found

def config_of(x):
    return Config(x)

def in_a_pool(method, function):
    with multiprocessing.get_context(method).Pool(2) as pool:
        return pool.map(function, [1, 2])

def trained():
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    return model.module.weight.grad.tolist()

def handled():
    received = []
    signal.signal(signal.SIGUSR2, lambda *_: received.append(1))
    os.kill(os.getpid(), signal.SIGUSR2)
    return received

def variables(names):
    return {name: os.environ.get(name) for name in names.split()}

SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD, signal.SIGPIPE)
idioms = {
    "what is imported": lambda: early,
    "main module": lambda: (__name__, sys.modules["__main__"].__dict__ is globals(), __spec__),
    "arguments": arguments,
    "files": lambda: (os.path.basename(__file__), os.path.isabs(__file__), sys.argv[0]),
    "path": lambda: (os.path.basename(sys.path[0]), sibling.WORD, os.getcwd() in sys.path[1:]),
    "threads of torch": torch.get_num_threads,
    "place": lambda: variables("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"),
    "role": lambda: variables("ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE PYTHONPATH CUDA_VISIBLE_DEVICES"),
    "restarts": lambda: variables("TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS"),
    "torchrun is recognized": dist.is_torchelastic_launched,
    "pickle": lambda: (pickle.loads(pickle.dumps(Config(0.5))), Config.__module__),
    "source": lambda: inspect.getsource(square),
    "save": saved,
    "group": lambda: (dist.init_process_group("gloo"), dist.get_backend(), dist.get_world_size()),
    "all_reduce": reduced,
    "all_gather_object": gathered,
    "DDP": trained,
    "loader": lambda: [batch.tolist() for batch in DataLoader(range(4), 2, num_workers=1)],
    "loader with a lambda": lambda: [*DataLoader(range(4), 2, num_workers=1, collate_fn=lambda x: x)],
    "threads": lambda: list(ThreadPoolExecutor(2).map(square, [1, 2])),
    "pool": lambda: in_a_pool("fork", square),
    "classes of the script from a pool": lambda: in_a_pool("forkserver", config_of),
    "start method": multiprocessing.get_start_method,
    "process": lambda: (multiprocessing.current_process().name, multiprocessing.parent_process()),
    "thread": lambda: threading.current_thread().name,
    "program": lambda: subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout,
    "signals": lambda: [getattr(signal.getsignal(each), "__name__", each) for each in SIGNALS],
    "blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []),
    "handler": handled,
    "logging": lambda: (logging.getLogger().handlers, logging.getLogger().level),
    "warnings": lambda: (warnings.filters[:2], sys.warnoptions),
    "streams": lambda: (sys.stdout.encoding, sys.stdout.fileno(), sys.stderr.fileno()),
    "interpreter": lambda: (sys.flags, sys.getrecursionlimit(), sys.excepthook is sys.__excepthook__),
    "garbage": lambda: (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
    "limits": lambda: (resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)),
    "locale": locale.getlocale,
    "defaults": lambda: (torch.get_default_dtype(), torch.is_grad_enabled()),
    "stdin": lambda: sys.stdin.readline() if rank == "0" else None,
    "end": lambda: (dist.barrier(), dist.destroy_process_group(), dist.is_initialized()),
}
if __name__ != "__main__":
    idioms = {}  # a worker of the pool imports the script
seen = {}
for name, idiom in idioms.items():
    try:
        seen[name] = repr(idiom())
    except Exception as error:
        seen[name] = repr(error)

@atexit.register
def write():
    if __name__ != "__main__":
        return
    seen["exit function"] = repr((__name__, Config is sys.modules["__main__"].Config))
    with open(f"{os.environ['SEEN']}-{rank}.json", "w") as file:
        json.dump(seen, file)
"""


@pytest.mark.full
def test_the_idioms_of_scripts_are_as_under_torchrun(tmp_path: Path) -> None:
    """Each shows the same, one after the other in one process."""
    scripts.write(tmp_path, "sub/idioms.py", IDIOMS)
    scripts.write(tmp_path, "sub/sibling.py", "WORD = 'sibling'")
    found: dict[str, list[dict[str, str]]] = {}
    for launcher in (["torch.distributed.run"], ["ddpsafe", "run"]):
        options = ["--nproc-per-node", "2", "sub/idioms.py", "--lr", "0.1"]
        command, env = ["-m", *launcher, *options], {**scripts.SPAWNING, "SEEN": launcher[-1]}
        done = scripts.Script(command, folder=tmp_path, text="hello\n", env=env).end()
        assert done.code == 0, done.err
        found[launcher[-1]] = [
            json.loads((tmp_path / f"{launcher[-1]}-{rank}.json").read_text()) for rank in (0, 1)
        ]
    assert len(found["run"][0]) > 22
    assert not any("Error(" in shown for shown in found["run"][0].values()), found["run"]
    for ours, torchruns in zip(found["run"], found["torch.distributed.run"], strict=True):
        differ = {name: (shown, torchruns[name]) for name, shown in ours.items()}
        assert {name: pair for name, pair in differ.items() if len({*pair}) > 1} == {}
