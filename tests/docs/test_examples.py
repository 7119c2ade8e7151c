"""The examples run as their readers run them, and the pages about them show the current code."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest
import scripts

CHECKOUT: Final = Path(__file__).parents[2]
DIGITS: Final = CHECKOUT / "examples" / "digits"
PORTS: Final = sorted(path.parent for path in CHECKOUT.glob("examples/ports/*/before.py"))
TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

pytestmark = pytest.mark.skipif(
    find_spec("sklearn") is None,  # importing it costs each worker a second
    reason="the examples need the extra: pip install 'ddpsafe[examples]'",
)


def run_python(*arguments: object, cwd: Path, fresh: bool = False) -> str:
    """Run the interpreter in a folder and return its stdout."""
    command = [*map(str, arguments)]
    run = start_python(command, cwd=cwd, env={}, fresh=fresh).end()
    assert run.code == 0, f"{command}\n{run.out}\n{run.err}"
    return run.out


def start_python(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], fresh: bool = False
) -> scripts.Script:
    """Start the interpreter; its ranks are forked unless `fresh` is set."""
    starting = scripts.SPAWNING if fresh else {}
    return scripts.Script(arguments, folder=cwd, env={**starting, **env}, fresh=fresh)


def port(name: str) -> Path:
    """Return the final script of a port."""
    return CHECKOUT / "examples" / "ports" / name / "after.py"


def diff_of(before: Path, after: Path) -> list[str]:
    """Return the unified diff with one line of context, without the file names."""
    texts = [path.read_text(encoding="utf-8").splitlines() for path in (before, after)]
    return list(difflib.unified_diff(*texts, lineterm="", n=1))[2:]


def assert_page_shows(diff: list[str], page: Path) -> None:
    """Fail with the block to paste if the diff on the page is not the diff of the files."""
    block = "\n".join(["```diff", *diff, "```"])
    shown = block in page.read_text(encoding="utf-8")
    assert shown, f"{page} has to show:\n{block}"


@pytest.mark.parametrize("folder", PORTS, ids=lambda folder: folder.name)
def test_port_changes_at_most_ten_lines(folder: Path) -> None:
    """Added and removed lines together, without blank ones."""
    diff = diff_of(folder / "before.py", folder / "after.py")
    changed = [line for line in diff if line[0] in "+-" and line[1:].strip()]
    assert 0 < len(changed) <= 10, "\n".join(changed)


@pytest.mark.parametrize("folder", PORTS, ids=lambda folder: folder.name)
def test_porting_page_shows_the_diff_of_the_files(folder: Path) -> None:
    """The page always shows the code that runs."""
    diff = diff_of(folder / "before.py", folder / "after.py")
    assert_page_shows(diff, CHECKOUT / "docs" / "how-to" / "porting.md")


def test_digits_readme_shows_the_diff_of_the_files() -> None:
    """The readme always shows the code that runs."""
    assert_page_shows(
        diff_of(DIGITS / "train_by_hand.py", DIGITS / "train.py"), DIGITS / "README.md"
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "method", [pytest.param("spawn", marks=pytest.mark.soak), "forkserver"]
)  # torch's default for mp.spawn starts a new interpreter for each rank
def test_two_simultaneous_jobs_of_the_ported_mp_spawn_script_find_the_line(
    method: str, tmp_path: Path
) -> None:
    """The points lie on y = 3 x + 2. The original scripts would both use port 12355."""
    text = port("mp_spawn").read_text(encoding="utf-8")
    assert text.count("nprocs=world_size") == 1
    started = text.replace("nprocs=world_size", f"nprocs=world_size, start_method={method!r}")
    script = scripts.write(tmp_path, "train.py", started)
    jobs = [start_python([str(script)], cwd=tmp_path, env={}) for _ in range(2)]
    runs = [job.end() for job in jobs]
    assert [run.code for run in runs] == [0, 0], runs
    for run in runs:
        found = re.search(r"^y = (\S+) x \+ (\S+)$", run.out, re.MULTILINE)
        assert found, run
        assert [float(number) for number in found.groups()] == pytest.approx([3, 2], abs=0.2)


@pytest.mark.full
def test_ported_torchrun_script_resumes_from_its_snapshot_without_torchrun(tmp_path: Path) -> None:
    """Two ranks under torchrun train three epochs; `python` alone trains the other two."""
    options = (port("torchrun_snapshot"), "--snapshot", tmp_path / "run.pt")
    forking = ("--run-path", "--start-method", "fork")  # torchrun without new interpreters
    first = run_python(*TORCHRUN, *forking, *options, "--epochs", 3, cwd=tmp_path)
    assert re.findall(r"^epoch (\d)", first, re.MULTILINE) == ["0", "1", "2"]
    second = run_python(*options, cwd=tmp_path)
    assert re.findall(r"^epoch (\d) \(started with 3\)", second, re.MULTILINE) == ["3", "4"]


def test_ported_slurm_script_evaluates_only_on_rank_0(tmp_path: Path) -> None:
    """Two tasks of a Slurm step form one world, and one of them reports."""
    tasks = [start_slurm_task(rank, cwd=tmp_path) for rank in range(2)]
    runs = [task.end() for task in tasks]
    assert [run.code for run in runs] == [0, 0], runs
    assert last_accuracy(runs[0].out) > 0.9
    assert runs[1].out == ""


def test_ported_slurm_script_runs_without_slurm(tmp_path: Path) -> None:
    """Alone it is a world of one, for trials on a laptop."""
    assert last_accuracy(run_python(port("slurm_evaluation"), cwd=tmp_path)) > 0.9


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher",
    [pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.soak), pytest.param((), id="python")],
)
def test_ported_gradient_accumulation_learns(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """Batch norm stays unchanged on CPUs, which have no SyncBatchNorm."""
    output = run_python(*launcher, port("gradient_accumulation"), cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss (\S+),", output, re.MULTILINE)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher",
    [pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.soak), pytest.param((), id="python")],
)
def test_digits_are_recognised_and_pictures_drawn(
    launcher: tuple[str, ...], tmp_path: Path
) -> None:
    """More than 97 percent of the test images, with the same pictures under either launcher."""
    options = (
        *("--out", tmp_path / "out", "--data", tmp_path / "data", "--nproc-per-node", 2),
        *("--epochs", 6),
    )
    output = run_python(*launcher, DIGITS / "train.py", *options, cwd=tmp_path)
    found = re.search(r"^test accuracy (\S+) \(world_size 2\)$", output, re.MULTILINE)
    assert found, output
    assert float(found[1]) > 0.97
    assert len(list(tmp_path.glob("data/*/*/*.png"))) == 1797
    for picture in ("curves.png", "misread.png"):
        assert_drawn(tmp_path / "out" / picture)


def last_accuracy(output: str) -> float:
    """Return the accuracy after the last of five epochs."""
    accuracies = re.findall(r"^epoch \d: accuracy (\S+)$", output, re.MULTILINE)
    assert len(accuracies) == 5, output
    return float(accuracies[-1])


def assert_drawn(picture: Path) -> None:
    """Fail unless the file is a picture of some size that contains black and white."""
    from PIL import Image

    with Image.open(picture) as image:
        darkest, brightest = image.convert("L").getextrema()
        assert image.format == "PNG"
        assert min(image.size) > 150
        assert brightest - darkest > 200


def start_slurm_task(rank: int, *, cwd: Path) -> scripts.Script:
    """Start the Slurm port as srun starts one of two tasks on one node."""
    place = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0, "SLURM_NTASKS": 2}
    step = {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": 2}
    # The port derives from the job, so no other test run on this machine may use this job id.
    job = {"SLURM_JOB_ID": os.getpid(), "SLURM_STEP_NODELIST": "localhost"}
    variables = {name: str(value) for name, value in (place | step | job).items()}
    return start_python([str(port("slurm_evaluation"))], cwd=cwd, env=variables)
