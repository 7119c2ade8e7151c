"""With a real Slurm: which processes are ranks, what they do on a signal, and how a requeued job continues."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import scripts
from slurm_cluster import Cluster, require_slurm, started_cluster

from ddpsafe._commands.template import read_template

pytestmark = pytest.mark.root

AGAIN: Final = 75
"""Exit code that asks for another start: EX_TEMPFAIL."""

PRINT_PLACE: Final = """
    import os
    from ddpsafe._world import find_world
    world = find_world(os.environ)
    print("place", world and [world.rank, world.world_size, world.local_rank,
          world.local_world_size, world.node_rank, world.nnodes], os.uname().nodename)
"""


@pytest.fixture(scope="module")
def _cluster() -> Iterator[Cluster]:
    """Three nodes with four cores each."""
    require_slurm()
    with started_cluster(3) as cluster:
        yield cluster


@pytest.fixture
def slurm(_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, without any job before and after the test."""
    yield _cluster
    _cluster.clear()


def python(folder: Path, source: str) -> list[str]:
    """Write a script; return the command that runs it."""
    return [sys.executable, str(scripts.write(folder, "script.py", source))]


def train(folder: Path, call: str, fields: str = "") -> list[str]:
    """Write a script that launches one of the stop programs; return the command that runs it."""
    source = f"""
        import atexit
        import gc
        from pathlib import Path
        import ddpsafe
        import stop_programs as programs

        if __name__ == "__main__":
            gc.disable()  # what looks for garbage in torch takes a third of so short a rank's time
            atexit.register(gc.freeze)
            folder = Path({str(folder)!r})
            ddpsafe.launch(programs.{call}, {fields})
            print("the code after launch has run")
    """
    return python(folder, source)


def places(output: str) -> list[tuple[list[int] | None, str]]:
    """Return the place and the host that each process determined, ordered by rank."""
    found = re.findall(r"place (None|\[[^\]]*\]) (\S+)", output)
    return sorted((json.loads(place.replace("None", "null")), node) for place, node in found)


def await_ranks(folder: Path, number: int) -> None:
    """Wait until this many ranks train."""
    scripts.wait_until(lambda: len(list(folder.glob("ready-*"))) == number)


def require_saved(folder: Path, number: int) -> None:
    """Fail unless this many ranks have saved, all at the same step."""
    found = [path.read_text() for path in folder.glob("saved-*")]
    assert len(found) == number
    assert len(set(found)) == 1, f"the ranks stopped at different steps: {found}"


def reports(folder: Path, run: int) -> list[dict[str, Any]]:
    """Return what the ranks of the first (0) or second (1) run have reported."""
    return [json.loads(path.read_text()) for path in folder.glob(f"run-{run}-*.json")]


# Which processes are ranks.


@pytest.mark.full
def test_tasks_of_a_step_know_their_places(slurm: Cluster, tmp_path: Path) -> None:
    """In blocks and in turns; for the latter rank // tasks per node would be wrong."""
    command = python(tmp_path, PRINT_PLACE)
    block = slurm.run("srun", "-N2", "--ntasks-per-node=2", *command)
    assert places(block) == [
        ([0, 4, 0, 2, 0, 2], "n0"),
        ([1, 4, 1, 2, 0, 2], "n0"),
        ([2, 4, 0, 2, 1, 2], "n1"),
        ([3, 4, 1, 2, 1, 2], "n1"),
    ]
    cyclic = slurm.run("srun", "-N3", "-n4", "--distribution=cyclic", *command)
    assert places(cyclic) == [
        ([0, 4, 0, 2, 0, 3], "n0"),
        ([1, 4, 0, 1, 1, 3], "n1"),
        ([2, 4, 0, 1, 2, 3], "n2"),
        ([3, 4, 1, 2, 0, 3], "n0"),
    ]


@pytest.mark.full
def test_tasks_of_a_heterogeneous_job_form_one_world(slurm: Cluster, tmp_path: Path) -> None:
    """One task on one node and two on another, from two components."""
    command = python(tmp_path, PRINT_PLACE)
    output = slurm.run("srun", "-N1", "-n1", *command, ":", "-N1", "-n2", *command)
    assert [place for place, _ in places(output)] == [
        [0, 3, 0, 1, 0, 2],
        [1, 3, 0, 2, 1, 2],
        [2, 3, 1, 2, 1, 2],
    ]


@pytest.mark.full
def test_shells_of_a_job_are_not_ranks(slurm: Cluster, tmp_path: Path) -> None:
    """Neither the batch script nor a shell of salloc, although both see SLURM_NTASKS=4."""
    command = python(tmp_path, PRINT_PLACE)
    shell = f"echo ntasks $SLURM_NTASKS; {shlex.join(command)}"
    output = slurm.run("salloc", "--quiet", "-N2", "-n4", "sh", "-c", shell)
    assert "ntasks 4" in output
    assert places(output) == [(None, "n0")]
    job = slurm.submit(tmp_path, shell, "-N2", "--ntasks-per-node=2")
    slurm.await_end(job, "COMPLETED")
    output = (tmp_path / "job.out").read_text()
    assert "ntasks 4" in output
    assert [place for place, _ in places(output)] == [None]


# Which processes receive a signal.


@pytest.mark.full
def test_tasks_that_receive_a_warning_save_at_the_same_step(slurm: Cluster, tmp_path: Path) -> None:
    """``scancel --signal=USR1`` reaches every task; srun's exit code asks for another start."""
    command = train(tmp_path, "train_in_step", "(folder,)")
    step = slurm.start_command("srun", "--job-name=warned", "-N2", "-n2", *command)
    await_ranks(tmp_path, 2)
    slurm.run("scancel", "--name=warned", "--signal=USR1")
    code, output = slurm.end(step)
    assert code == AGAIN, output
    require_saved(tmp_path, 2)
    assert "the code after launch has run" not in output
    assert "Traceback" not in output


@pytest.mark.full
def test_a_launcher_in_a_step_receives_the_signal_and_its_ranks_save(
    slurm: Cluster, tmp_path: Path
) -> None:
    """`scancel` sends SIGTERM to the launcher, and again while the ranks save: no second request."""
    fields = "(folder,), nproc_per_node=2, start_method='forkserver'"
    command = train(tmp_path, "train_in_step", fields)
    job = slurm.submit(tmp_path, f"srun {shlex.join(command)}; echo code $?", "-n1")
    await_ranks(tmp_path, 2)
    slurm.run("scancel", str(job))
    slurm.await_end(job, "CANCELLED")
    require_saved(tmp_path, 2)


@pytest.mark.full
def test_a_preempted_job_is_requeued_and_continues(slurm: Cluster, tmp_path: Path) -> None:
    """A job of a higher partition takes the nodes; the first one saves, waits and continues.

    It exits with 75, and ``RequeueExit=75`` in slurm.conf is enough: the job script needs no line for
    it. The final parameter is that of an uninterrupted training.
    """
    command = train(tmp_path, "train_and_resume", "(folder, 10)")
    options = ["-N2", "--ntasks-per-node=1", "--exclusive", "--requeue", "--partition=low"]
    job = slurm.submit(tmp_path, f"exec srun {shlex.join(command)}", *options)
    await_ranks(tmp_path, 2)
    slurm.run("srun", "--partition=high", "-N3", "--exclusive", "true")
    slurm.await_state(job, "PENDING")
    # Slurm itself would wait for two minutes, until all credentials of the first run expire.
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")
    assert slurm.await_end(job, "COMPLETED")["Restarts"] == "1"
    first, second = (reports(tmp_path, run) for run in (0, 1))
    assert len(first) == len(second) == 2
    assert {each["first"] for each in first} == {0}
    stopped = {each["last"] for each in first}
    assert stopped == {each["first"] for each in second}, "not where the first run has saved"
    (last,) = {each["last"] for each in second}
    expected = 0.0
    for number in range(last):
        expected = expected * 0.75 + number + 0.5  # the mean of the two ranks
    (parameter,) = {each["parameter"] for each in second}
    assert parameter == pytest.approx(expected, rel=1e-12)


@pytest.mark.full
def test_ranks_end_by_themselves_when_a_task_dies(slurm: Cluster, tmp_path: Path) -> None:
    """Plain srun lets the other tasks run; they notice the loss, name the missing rank, and fail."""
    fields = "(folder,), timeouts={'collective': 4, 'barrier': 30}"
    command = train(tmp_path, "lose_a_rank", fields)
    step = slurm.start_command("srun", "-l", "-N2", "-n3", *command)
    code, output = slurm.end(step)
    assert code == 128 + 9, output
    by_rank = {
        rank: "\n".join(re.findall(rf"^{rank}: (.*)$", output, re.MULTILINE)) for rank in range(2)
    }
    assert "peer" in by_rank[0]
    # Rank 2 was killed, so the first report comes from another rank, which failed because of it.
    assert "rank 0 did not reach it" in by_rank[1]
    assert "at the barrier 'all have evaluated'" in by_rank[1]
    assert "rank 0 failed too, because it lost another rank" in by_rank[1]
    assert "find the rank whose output ends without such an error" in by_rank[1]
    (waited_s,) = re.findall(r"waited (\d+\.\d) s at the barrier", by_rank[1])
    assert float(waited_s) < 20, "it waited for the barrier's timeout"


# The job file that ddpsafe prints.


def write_template(folder: Path) -> Path:
    """Write the template with this ddpsafe and the script of this test."""
    text = read_template("slurm")
    command = f"{shlex.quote(sys.executable)} -m ddpsafe run"
    assert "ddpsafe run" in text
    return scripts.write(folder, "train.sh", text.replace(" ddpsafe run", f" {command}"))


@pytest.mark.full
def test_slurm_accepts_the_template(slurm: Cluster, tmp_path: Path) -> None:
    """``sbatch --test-only``: Slurm knows every option of it and can satisfy it."""
    path = write_template(tmp_path)
    _, output = slurm.end(slurm.start_command("sbatch", "--test-only", str(path), folder=tmp_path))
    assert re.search(r"sbatch: Job \d+ to start at .* on nodes n\[?\d", output), output
    # Each option is refused when it is misspelled, so the check above is meaningful.
    wrong = scripts.write(tmp_path, "wrong.sh", path.read_text().replace("--requeue", "--requeued"))
    code, _ = slurm.end(slurm.start_command("sbatch", "--test-only", str(wrong), folder=tmp_path))
    assert code != 0


@pytest.mark.full
def test_the_template_requeues_a_job_that_was_asked_to_stop(slurm: Cluster, tmp_path: Path) -> None:
    """The warning before the time limit: both nodes save, and the next run continues from there."""
    source = f"""
        from pathlib import Path
        import ddpsafe
        import stop_programs as programs

        if __name__ == "__main__":
            ddpsafe.launch(programs.train_and_resume, (Path({str(tmp_path)!r}), 10))
    """
    scripts.write(tmp_path, "train.py", source)
    options = ["--export=ALL,DDPSAFE_NPROC_PER_NODE=1", "--output=job.out"]
    found = slurm.run(
        "sbatch", "--parsable", *options, str(write_template(tmp_path)), folder=tmp_path
    )
    job = int(found.strip())
    await_ranks(tmp_path, 2)
    slurm.run("scancel", "--signal=USR1", str(job))  # as --signal=USR1@600 does
    slurm.await_state(job, "PENDING")
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")
    slurm.await_end(job, "COMPLETED")
    first, second = (reports(tmp_path, run) for run in (0, 1))
    assert len(first) == len(second) == 2
    assert {each["last"] for each in first} == {each["first"] for each in second}
    logs = tmp_path / "runs" / str(job)
    assert sorted(path.name.rpartition("-")[2] for path in logs.glob("node-*")) == ["n0", "n1"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "state"),
    [("launcher", "PENDING"), ("power", "PENDING"), ("rank", "FAILED"), ("raise", "FAILED")],
)
def test_the_template_requeues_a_job_that_has_lost_a_node(
    tmp_path: Path, fault: str, state: str
) -> None:
    """Srun's own code would be 137 for a killed launcher, and it would wait for a node without power.

    A rank that is killed ends all launchers with 137 as well, and that job is not started again.
    """
    require_slurm()
    raises = "if os.path.exists(__file__ + '.raise') and rank == 1: raise ValueError('bad batch')"
    source = f"""
        import os, time, ddpsafe
        from pathlib import Path

        def train(ctx):
            rank = ctx.rank
            Path({str(tmp_path)!r}, f"running-{{rank}}").write_text(f"{{os.getppid()}} {{os.getpid()}}")
            while True:
                time.sleep(0.1)
                {raises}
                ctx.barrier()

        if __name__ == "__main__":
            ddpsafe.launch(train)
    """
    script = scripts.write(tmp_path, "train.py", source)
    with started_cluster(2) as cluster:
        options = ["--export=ALL,DDPSAFE_NPROC_PER_NODE=1", "--output=job.out", "--mem=0"]
        path = write_template(tmp_path)
        job = int(cluster.run("sbatch", "--parsable", *options, str(path), folder=tmp_path))
        scripts.wait_until(
            lambda: len([file for file in tmp_path.glob("running-*") if file.read_text()]) == 2,
            otherwise=(tmp_path / "job.out").read_text,
            within_s=180,
        )
        launcher, rank = map(int, (tmp_path / "running-1").read_text().split())
        if fault == "power":
            cluster.power_off(1)
        elif fault == "raise":
            Path(f"{script}.raise").touch()
        else:
            cluster.kill(1, launcher if fault == "launcher" else rank)
        if fault == "power":  # the job is requeued, and begins once Slurm has given the node up
            cluster.await_state(job, "COMPLETING", "PENDING")
            cluster.run("scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=power")
        found = cluster.await_state(job, state)
        if state == "PENDING":
            assert found["Restarts"] == "1", found
    for left in Path(tempfile.gettempdir()).glob("ddpsafe-*"):
        shutil.rmtree(left)  # left by the node without power; its disk is this machine's


STEP: Final = ("srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=0")


@pytest.mark.full
def test_two_jobs_on_the_same_nodes_are_independent(slurm: Cluster, tmp_path: Path) -> None:
    """Each has its own endpoint, derived by ``ddpsafe run``, world and exit code while both train."""
    jobs: dict[str, int] = {}
    for name in ("good", "bad"):
        folder = tmp_path / name
        folder.mkdir()
        source = f"""
            import time
            from pathlib import Path
            import torch
            import torch.distributed as dist

            dist.init_process_group("gloo")
            name, both = {name!r}, Path({str(tmp_path)!r})
            (both / f"training-{{name}}-{{dist.get_rank()}}").touch()
            while len(list(both.glob("training-*"))) < 4:
                time.sleep(0.02)
            total = torch.ones(1)
            dist.all_reduce(total)
            if name == "bad" and dist.get_rank() == 1:
                raise ValueError("bad batch")
            print("rank", dist.get_rank(), "of", int(total.item()), flush=True)
            dist.destroy_process_group()
        """
        script = scripts.write(folder, "script.py", source)
        run = [sys.executable, "-m", "ddpsafe", "run", "--console=all", "--nproc-per-node=1"]
        command = [*STEP, *run, f"--run-dir={folder}/run", str(script)]
        nodes = ["--nodelist=n0,n1", "-N2", "--ntasks-per-node=1"]
        jobs[name] = slurm.submit(folder, f"exec {shlex.join(command)}", *nodes)
    assert slurm.await_end(jobs["good"], "COMPLETED")["ExitCode"] == "0:0"
    assert slurm.await_end(jobs["bad"], "FAILED")["ExitCode"] == "1:0"
    output = (tmp_path / "good" / "job.out").read_text()
    assert sorted(re.findall(r"rank (\d) of 2", output)) == ["0", "1"]
    output = (tmp_path / "bad" / "job.out").read_text()
    assert "Slurm says: this is node 1 of 2" in output
    told = re.findall(
        r"rank 1 \(node 1 'n1', local rank 0, world_size 2\) raised ValueError", output
    )
    assert len(told) == 2
