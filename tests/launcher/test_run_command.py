"""``ddpsafe run``: a script's ranks, as torchrun would start them."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any, Final, cast

import pytest
import scripts

from ddpsafe import _gpus
from ddpsafe._commands.run import read_options
from ddpsafe._config import LaunchConfig, RetryPolicy, Timeouts
from ddpsafe._config.parts import DETERMINISTIC
from ddpsafe._errors import FAILURE_KINDS, PreemptedError
from ddpsafe._launcher.plan import make_plan, rank_env
from ddpsafe._wire.spec import LogFiles
from ddpsafe.cli import PARTS, main, make_parser

if TYPE_CHECKING:
    from pathlib import Path

    from ddpsafe._wire.spec import CallStyle

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

OURS = """
import ddpsafe

def train(ctx):
    return ctx.reduce_mean(float(ctx.rank)), ctx.backend

if __name__ == "__main__":
    print(ddpsafe.launch(train).values)
    print(ddpsafe.launch(train, backend="gloo").values)
    with ddpsafe.process_group() as ctx:
        print(ctx.backend)
"""


def run(folder: Path, *arguments: str, fresh: bool = False) -> scripts.Run:
    """Run the command in `folder`; a fresh one starts its ranks as it does by default."""
    command = ["-m", "ddpsafe", "run", *arguments]
    env = scripts.SPAWNING if fresh else {}
    return scripts.Script(command, folder=folder, env=env, fresh=fresh).end()


def test_plain_script_meets_its_ranks_and_sees_its_own_arguments(tmp_path: Path) -> None:
    """It imports what lies beside it, and ``sys.exit(0)`` is a good end.

    The launcher has torch only where it had to ask it for GPUs.
    """
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
    """Some installers write such; the ranks import the user's script and nothing else."""
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


@pytest.mark.recorder
def test_a_script_that_exits_with_0_too_early_is_named_with_the_line(tmp_path: Path) -> None:
    """The others still wait for it, so the good exit status is where it goes wrong."""
    scripts.write(tmp_path, "train.py", LEAVES_EARLY)
    done = run(tmp_path, "--nproc-per-node", "2", "--run-dir", "run", "train.py")
    assert done.code == 1
    assert "RankLeftEarlyError: rank 1 (world_size 2) returned early" in done.err
    assert f"sys.exit(0) was called at {tmp_path / 'train.py'}:5 in <module>" in done.err


def test_module_with_launch_inside_attaches(tmp_path: Path) -> None:
    """``launch()`` in a rank starts nothing, and takes the command's backend unless it names one."""
    scripts.write(tmp_path, "package/train.py", OURS)
    options = ("--nproc-per-node", "1", "--backend", "cpu:gloo", "-m", "package.train")
    done = run(tmp_path, *options)
    said = ["{0: (0.0, 'cpu:gloo')}", "{0: (0.0, 'gloo')}", "cpu:gloo"]
    assert done.lines() == said, done.err


def test_exit_code_of_a_rank_is_that_of_the_command(tmp_path: Path) -> None:
    """The rank and the line are named, and no frame of the command line hides them."""
    source = "import sys\nsys.exit(7)\n"
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    kept = str(tmp_path / "kept")
    done = run(tmp_path, "--nproc-per-node", "1", "--run-dir", kept, "train.py")
    assert done.code == 7
    assert "rank 0 (world_size 1) exited with code 7" in done.err
    assert "train.py:2" in done.err
    assert "cli.py" not in done.err


def test_module_that_is_not_there_starts_no_rank(tmp_path: Path) -> None:
    """As with a script that is not there, it is wrong usage."""
    done = run(tmp_path, "--nproc-per-node", "2", "-m", "nosuchmod.train")
    assert (done.code, done.out) == (2, "")
    assert "There is no module 'nosuchmod'" in done.err
    assert "Traceback" not in done.err


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


@pytest.mark.parametrize(
    "start_method", [pytest.param("spawn", marks=pytest.mark.soak), "forkserver"]
)
def test_workers_of_a_script_start_as_under_torchrun(tmp_path: Path, start_method: str) -> None:
    """Its start method is Python's default, whatever starts the ranks themselves."""
    scripts.write(tmp_path, "train.py", UNGUARDED)
    done = run(tmp_path, "--nproc-per-node", "2", "--start-method", start_method, "train.py")
    assert done.lines() == ["28.0 None"]


# As their authors publish them, behind "torchrun".
PUBLIC: list[Any] = [
    ("--standalone --nproc_per_node=4 train.py config/train_gpt2.py", {"nproc_per_node": "4"}, 0),
    ("--standalone --nnodes=1 --nproc-per-node=2 main.py 50 10", {"nproc_per_node": "2"}, 0),
    ("--nproc_per_node 8 main.py --model deit_tiny --batch-size 256", {"nproc_per_node": "8"}, 0),
    ("--nproc_per_node=8 --master_port=29501 main_pretrain.py --epochs 800", {}, 1),
    ("--nnodes=1 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=localhost:0 t.py", {}, 2),
    ("--nnodes 1 --nproc_per_node 4 examples/finetuning.py --use_peft", {}, 0),
    (
        "--nnodes=1 --node_rank=0 --nproc_per_node=8 --master_addr=127.0.0.1 --master_port=2950 f.py",
        {},
        2,
    ),
    ("--nproc_per_node=gpu -m package.train --fp16", {"nproc_per_node": "gpu"}, 0),
    ("--nproc-per-node auto --no-python bash run.sh --local", {"nproc_per_node": "auto"}, 0),
    ("--standalone --nproc_per_node=1 -m torchtune.run --config x.yaml", {}, 0),
    (
        "--nnodes=1:1 --nproc_per_node=8 --max_restarts=3 --rdzv_id=7 --rdzv_backend=c10d t.py",
        {"retry": {"attempts": 4, "on": frozenset(FAILURE_KINDS - DETERMINISTIC)}},
        2,
    ),
    (
        "--nproc-per-node=8 --local-ranks-filter 0 --role rank --tee 3 -m torchtitan.train",
        {"console": "rank-zero"},
        1,
    ),
    ("--nproc_per_node=2 --tee 3 --log_dir logs train.py", {"console": "tagged"}, 0),
    ("--nproc_per_node=2 -r 3 -t 0 train.py", {"console": "none"}, 0),
    ("--nproc_per_node=2 --redirects 0:3 train.py", {}, 1),
    ("--start_method=forkserver --nproc_per_node=2 t.py", {"start_method": "forkserver"}, 0),
    ("--monitor_interval=5 --nproc_per_node=4 train.py --lr=1e-3", {"nproc_per_node": "4"}, 1),
    ("--rdzv-conf timeout=600,join_timeout=60 --nproc_per_node=4 train.py", {}, 1),
    ("--run-path --nproc_per_node=2 /abs/train.py", {}, 0),
    (
        "--seed 5 --backend gloo --timeout 12h --retry 2 --preflight off train.py --seed 6",
        {
            "seed": "5",
            "backend": "gloo",
            "timeouts": {"attempt": "12h"},
            "retry": {"attempts": "2"},
            "preflight": "off",
        },
        0,
    ),
    (
        (
            "--max-restarts 3 --retry.on port,mount --retry.backoff_max=5 --timeouts.progress null "
            "--timeouts.collective 10min train.py"
        ),
        {
            "timeouts": {"progress": None, "collective": "10min"},
            "retry": {"attempts": 4, "on": "port,mount", "backoff_max": "5"},
        },
        0,
    ),
    (
        "--shutdown-timeout=60 --signals-to-handle SIGTERM,SIGUSR1 train.py",
        {"timeouts": {"grace": 60, "shutdown": 120}},
        1,
    ),
    ("--virtual-local-rank --numa-binding node --nproc_per_node=2 train.py", {}, 2),
    ("train.py --nproc_per_node 3 --standalone", {}, 0),
    (
        (
            "--nnodes=2 --node_rank=1 --nproc_per_node=8 --rdzv_id=7 --rdzv_backend=c10d "
            "--rdzv_endpoint=gpu-01:29400 t.py"
        ),
        {"nnodes": 2, "node_rank": 1, "rendezvous": {"endpoint": "gpu-01:29400", "id": "7"}},
        1,
    ),
    (
        "--nnodes=2:4 --rdzv-endpoint gpu-01 t.py",
        {"nnodes": 4, "rendezvous": {"endpoint": "gpu-01:29400", "min_nodes": 2}},
        0,
    ),
    (
        "--nnodes=2 --rdzv-endpoint fd77::1 t.py",
        {"nnodes": 2, "rendezvous": {"endpoint": "[fd77::1]:29400"}},
        0,
    ),
    (
        "--nnodes=2 --master-addr [fd77::1] t.py",
        {"nnodes": 2, "rendezvous": {"endpoint": "[fd77::1]:29500"}},
        0,
    ),
    (
        "--nnodes 2 --node-rank 0 --master_addr gpu-01 --master_port 2950 t.py",
        {"nnodes": 2, "node_rank": 0, "rendezvous": {"endpoint": "gpu-01:2950"}},
        0,
    ),
]
"""What stands behind torchrun, the fields of the configuration that it means, and how many notes."""


@pytest.mark.parametrize(("line", "fields", "notes"), PUBLIC)
def test_torchruns_command_lines_are_taken(line: str, fields: dict[str, Any], notes: int) -> None:
    """With what has no effect said in a note, and the script's own options left alone."""
    options = make_parser().parse_args(["run", *line.split()])
    read, said = read_options(options)
    assert {name: read.get(name) for name in fields} == fields
    LaunchConfig(**read)
    assert len(said) == notes
    assert options.script not in ("1", "3")
    assert line.endswith(" ".join([options.script, *options.arguments]))


@pytest.mark.parametrize(
    ("style", "backend", "told"),
    [
        ("run", {"backend": "gloo"}, "gloo"),
        ("run", {"backend": "auto"}, "auto"),
        ("run", {}, None),
        ("launch", {"backend": "gloo"}, None),
    ],
)
def test_the_backend_of_the_command_is_told_to_its_ranks_alone(
    style: CallStyle, backend: dict[str, Any], told: str | None
) -> None:
    """`launch` in the script reads it; a program that calls the command line keeps its variables."""
    plan = make_plan(LaunchConfig(nproc_per_node=1, **backend), style=style)
    logs = LogFiles(stdout="", stderr="", stacks="", nccl="", owner_uid=0)
    assert rank_env(plan, plan.worlds[0], 1, logs).get("DDPSAFE_BACKEND") == told


REFUSED: list[Any] = [
    ("--nnodes=2 --nproc_per_node=8 train.py", "nnodes=2 nodes need an endpoint to connect to"),
    ("--nnodes=1:4 train.py", "nnodes=4 nodes need an endpoint to connect to"),
    ("--nnodes=2 --rdzv-endpoint localhost:29400 train.py", "localhost is each node itself"),
    ("--nnodes=two train.py", "--nnodes=two is not a number of nodes"),
    ("--nnodes=4:2 --rdzv-endpoint a:29400 train.py", "--nnodes=4:2 is not a number of nodes"),
    ("--nnodes=2:1 --rdzv-endpoint a:29400 train.py", "--nnodes=2:1 is not a number of nodes"),
    ("--nnodes=2: --rdzv-endpoint a:29400 train.py", "--nnodes=2: is not a number of nodes"),
    ("--node_rank=1 train.py", "--node-rank=1 is not possible"),
    ("--max-restarts=often train.py", "--max-restarts=often is not a whole number"),
    ("--start-method fork train.py", "inherits CUDA"),
    ("--nproc_per_node=many train.py", "nproc_per_node"),
    (
        "--nproc-per-nod 2 train.py",
        "there is no option --nproc-per-nod; did you mean --nproc-per-node?",
    ),
    ("--nproc 2 train.py", "there is no option --nproc; did you mean --nproc-per-node?"),
    ("--timeout 3x train.py", "got '3x': it is not a duration"),
    ("trian.py", "did you mean train.py?"),
    ("python train.py", "leave that word out"),
    ("--no-python -m train", "exclude each other"),
    ("--no-python ./no-such-program", "There is no program './no-such-program'"),
]
"""Command lines, and what is said of them."""


@pytest.mark.parametrize(("line", "said"), REFUSED)
def test_what_this_command_cannot_do_is_refused_with_the_reason(
    tmp_path: Path, line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """It is wrong usage, and nothing is started."""
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
def test_what_is_no_command_leads_to_one(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without one, all are listed."""
    assert main(line.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--nproc-per-node=2"], ["-m"], ["--tee", "3"]])
def test_a_missing_script_is_said_in_one_line_with_an_example(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """In place of argparse's usage of forty options."""
    assert main(["run", *options]) == 2
    out, err = capsys.readouterr()
    example = "ddpsafe run --nproc-per-node 2 train.py"
    assert (out, err) == ("", f"ddpsafe run needs a script, for example:  {example}\n")


REAL: list[Any] = [
    ["--standalone", "--nnodes=1", "--nproc_per_node=2", "--max_restarts=0", "train.py"],
    ["--nproc-per-node=2", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "-m", "train"],
    ["--nproc_per_node", "2", "--master_port=29500", "--no-python", sys.executable, "train.py"],
]


@pytest.mark.parametrize("line", REAL, ids=["script", "module", "program"])
def test_torchruns_command_lines_start_ranks(tmp_path: Path, line: list[str]) -> None:
    """The ranks of a script, a module and any other program meet."""
    scripts.write(tmp_path, "train.py", PLAIN)
    scripts.write(tmp_path, "beside.py", "SCALE = 3")
    done = run(tmp_path, *line, "--lr", "1")
    assert done.code == 0, done.err
    said = [(tmp_path / f"said-{rank}").read_text(encoding="utf-8") for rank in range(2)]
    assert said == ["6.0 --lr 1 2\n"] * 2


def test_the_end_of_a_program_is_that_of_its_rank(tmp_path: Path) -> None:
    """Its exit code, or its signal."""
    for command, code in (("exit 7", 7), ("kill -9 $$", 137)):
        kept = str(tmp_path / command.split()[0])
        options = ("--nproc-per-node", "1", "--run-dir", kept, "--no-python")
        assert run(tmp_path, *options, "sh", "-c", command).code == code


def test_every_field_of_timeouts_and_retry_has_an_option() -> None:
    """Spelled as in the configuration, so that what an error message names can be typed."""
    assert {part: set(names) for part, names in PARTS.items()} == {
        "timeouts": set(Timeouts.model_fields),
        "retry": set(RetryPolicy.model_fields),
    }


INTERRUPTED: Final = """
    import os, pathlib, runpy, signal, sys
    # torch's import takes a second or two; this is what a Ctrl-C in the middle of it meets. It is
    # imported for its GPUs where it cannot be found out how it was built.
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


@pytest.mark.parametrize("moment", ["torch", "ddpsafe"])
def test_ctrl_c_while_it_loads_ends_the_command_without_a_traceback(
    tmp_path: Path, moment: str
) -> None:
    """By the signal itself, as a program without Python would end."""
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


def test_a_script_that_was_asked_to_stop_ends_the_command_with_75(tmp_path: Path) -> None:
    """Not as a failure of a rank, though `launch` ends the script of each by an exception."""
    scripts.write(tmp_path, "train.py", STOPS)
    options = ("--nproc-per-node", "2", "--run-dir", str(tmp_path / "run"))
    done = run(tmp_path, *options, "train.py")
    assert done.code == PreemptedError.exit_code, done.err
    assert "ranks 0 and 1 (world_size 2) stopped on SIGUSR1 to the launcher" in done.err
    assert "RankRaisedError" not in done.err
    assert done.out == ""
