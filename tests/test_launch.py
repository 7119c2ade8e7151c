"""`launch` on one node: results, the environment of ranks, and the state of the caller."""

from __future__ import annotations

import multiprocessing.util
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import launch_programs as programs
import odd_end_programs
import psutil
import pytest
import scripts
import spawn_programs

import ddpsafe
from ddpsafe._config.backend_names import KNOWN_TO_EVERY_TORCH

TWO: Final[dict[str, Any]] = {"nproc_per_node": 2, "backend": "gloo", "start_method": "forkserver"}
"""Two ranks, started fast; the start method is not the point of most tests."""


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Results.


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_every_rank_runs_the_function_in_one_group_and_returns_its_value(start_method: str) -> None:
    """Values are ordered by rank; each rank knows its ranks, its arguments and the other ranks."""
    result = ddpsafe.launch(
        programs.describe,
        args=("data", 10),
        kwargs={"lr": 0.1},
        nproc_per_node=2,
        backend="gloo",
        start_method=start_method,
    )
    assert list(result.values) == [0, 1]
    assert (result.attempts, result.run_dir) == (1, None)
    for rank, value in result.values.items():
        assert value.pop("pid") != os.getpid()
        assert value == {
            "rank": rank,
            "local_rank": rank,
            "node_rank": 0,
            "world_size": 2,
            "local_world_size": 2,
            "nnodes": 1,
            "mains": (rank == 0, rank == 0),
            "device": "cpu",
            "backend": ("gloo", "gloo"),
            "attempt": 1,
            "sum": 3.0,
            "args": ("data", 10),
            "kwargs": {"lr": 0.1},
            "collects": (True, start_method == "forkserver"),
        }


@pytest.mark.full
@pytest.mark.skipif(_has_gpu(), reason="about machines without a GPU")
def test_without_a_gpu_auto_means_gloo_on_the_cpu_with_one_rank_per_core() -> None:
    """A laptop needs no options."""
    values = ddpsafe.launch(programs.describe, start_method="forkserver").values
    assert len(values) == _cores()
    assert {(value["device"], value["backend"]) for value in values.values()} == {
        ("cpu", ("gloo", "gloo"))
    }


def test_an_unregistered_backend_is_refused_before_any_rank_starts() -> None:
    """This catches a typo or a missing import, and lists the backends that torch knows."""
    with pytest.raises(ddpsafe.ConfigError, match="no backend called 'foo'") as caught:
        ddpsafe.launch(programs.describe, nproc_per_node=1, backend="foo")
    assert "gloo" in str(caught.value)


def test_backends_that_are_accepted_without_torch_are_torchs_own() -> None:
    """A launcher need not import torch for them."""
    from torch.distributed import Backend

    assert set(KNOWN_TO_EVERY_TORCH) <= set(Backend.backend_list)


def test_backends_that_packages_have_registered_are_accepted(tmp_path: Path) -> None:
    """Such a name may be used like torch's own, alone or for one device."""
    code = """
    import torch.distributed as dist
    from ddpsafe import ConfigError
    from ddpsafe._config.backend_names import require_backend
    dist.Backend.register_backend("theirs", lambda *_: None, devices=["cpu"])
    for backend in ("theirs", "cpu:theirs,cuda:nccl", "cpu:gloo,cuda:nccl", "gloo", "nccl"):
        require_backend(backend)
    try:
        require_backend("cpu:theirz")
    except ConfigError as error:
        print(error)
    """
    assert "Write 'cpu:theirs'" in scripts.run(tmp_path, code).out


def test_a_launch_may_have_a_single_rank() -> None:
    """A single rank has a group, a sum and a value, too."""
    (value,) = ddpsafe.launch(programs.describe, **{**TWO, "nproc_per_node": 1}).values.values()
    assert (value["world_size"], value["sum"], value["mains"]) == (1, 1.0, (True, True))


@pytest.mark.full
def test_results_keep_types_that_the_script_itself_defines(tmp_path: Path) -> None:
    """A result or an exception of a class in the script's `__main__` has that class in the caller.

    Each rank imports the script, with a lock that cannot be pickled and with torch, before it knows
    its number of threads.
    """
    source = """
        import dataclasses, sys, threading, torch, ddpsafe

        lock = threading.Lock()

        @dataclasses.dataclass
        class Report:
            rank: int
            threads: int

        class BadBatch(Exception):
            def __init__(self, index):
                super().__init__(f"batch {index}")
                self.index = index

        def train(ctx, fails):
            if fails and ctx.rank == 1:
                raise BadBatch(17)
            with lock:
                return Report(ctx.rank, torch.get_num_threads())

        if __name__ == "__main__":
            for method, ranks in (("spawn", 1), ("forkserver", 2)):
                options = {"nproc_per_node": ranks, "start_method": method, "run_dir": sys.argv[1]}
                values = ddpsafe.launch(train, (False,), env={"OMP_NUM_THREADS": 3}, **options).values
                print(values == {rank: Report(rank, 3) for rank in range(ranks)})
            try:
                ddpsafe.launch(train, (True,), **options)
            except ddpsafe.RankRaisedError as error:
                print(error.rank, type(error.__cause__) is BadBatch, error.__cause__.index)
    """
    run = scripts.run(tmp_path, source, str(tmp_path / "run"))
    assert run.lines() == ["True", "True", "1 True 17"]


# What may go wrong in a rank.


def test_an_exception_keeps_its_facts_and_may_refuse_to_be_shown(run_dir: Path) -> None:
    """Its attributes and notes are those that it had in the rank; a text that cannot be made is said."""
    with pytest.raises(ddpsafe.RankRaisedError) as plain:
        ddpsafe.launch(programs.fail_on_rank_one, (programs.raise_plain,), run_dir=run_dir, **TWO)
    cause = plain.value.__cause__
    assert isinstance(cause, programs.PlainError)
    assert cause.fact == 42
    if sys.version_info >= (3, 11):
        assert cause.__notes__ == ["a note from the rank"]
    with pytest.raises(ddpsafe.RankRaisedError) as silent:
        ddpsafe.launch(programs.fail_on_rank_one, (programs.raise_silent,), run_dir=run_dir, **TWO)
    assert isinstance(silent.value.__cause__, programs.SilentError)
    first_line = str(silent.value).splitlines()[0]
    assert "SilentError" in first_line
    assert "__str__ raised" in first_line


@pytest.mark.full
def test_a_result_that_cannot_be_pickled_is_named_by_its_path_and_not_retried(
    run_dir: Path, tmp_path: Path
) -> None:
    """The kind is "unpicklable", and the message has the path inside the value."""
    journal = tmp_path / "journal"
    with pytest.raises(ddpsafe.RankRaisedError) as caught:
        ddpsafe.launch(programs.give_a_lock, (journal,), run_dir=run_dir, **TWO)
    error = caught.value
    assert (error.kind, error.attempt) == ("unpicklable", 1)
    assert "the returned value['model']['lock']" in str(error)
    assert "What to do: return plain data" in str(error)
    assert journal.read_text() == "tried\n" * 2


@pytest.mark.full
def test_a_result_that_exits_where_it_is_loaded_does_not_end_the_launcher(run_dir: Path) -> None:
    """A `SystemExit` from a `__setstate__` is caught as an error of that value."""
    with pytest.raises(
        ddpsafe.RankFailedError, match=r"loading it raised SystemExit\(3\)"
    ) as caught:
        ddpsafe.launch(odd_end_programs.return_exiting, run_dir=run_dir, **TWO)
    assert (caught.value.rank, caught.value.kind) == (0, "unpicklable")


@pytest.mark.full
def test_a_result_that_cannot_be_loaded_is_a_failure_of_its_rank() -> None:
    """Although each rank has returned, the error names the rank, the place and the logs."""
    with pytest.raises(ddpsafe.RankFailedError) as caught:
        ddpsafe.launch(programs.give_what_only_the_rank_can_load, **TWO)
    error = caught.value
    assert (error.rank, error.local_rank, error.hostname) == (1, 1, socket.gethostname())
    assert (error.kind, error.attempt, list(error.outcomes)) == ("unpicklable", 1, [0, 1])
    assert isinstance(error.__cause__, LookupError)
    what, *_, logs = str(error).splitlines()
    assert what.startswith(
        f"what rank 1 (world_size 2) returned on {error.hostname}, attempt 1, after"
    )
    assert what.endswith("cannot be loaded here: LookupError: only in its rank")
    assert error.run_dir is not None
    assert logs == f"  Logs: {error.run_dir}"
    assert (error.run_dir / "attempt-1" / "report.json").exists()
    shutil.rmtree(error.run_dir)


# The environment of ranks.


@pytest.mark.full
def test_ranks_share_the_cores_unless_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """OMP_NUM_THREADS and torch agree on cores divided by ranks, or on the user's number."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share = max(1, _cores() // 2)
    value = ddpsafe.launch(programs.surroundings, ("OMP_NUM_THREADS",), **TWO).values[1]
    assert (value["threads"], value["env"]) == (share, {"OMP_NUM_THREADS": str(share)})
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    value = ddpsafe.launch(programs.surroundings, ("OMP_NUM_THREADS",), **TWO).values[1]
    assert (value["threads"], value["env"]) == (3, {"OMP_NUM_THREADS": "3"})


def test_ranks_have_the_callers_current_directory_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server may have been started with others; the port alone is the launch's own."""
    monkeypatch.setenv("FROM_CALLER", "old")
    monkeypatch.setenv("GONE", "old")
    ddpsafe.launch(programs.surroundings, **TWO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FROM_CALLER", "new")
    monkeypatch.delenv("GONE")
    monkeypatch.setenv("MASTER_PORT", "1024")
    names = ("FROM_CALLER", "GONE", "MASTER_PORT")
    values = ddpsafe.launch(programs.surroundings, names, **TWO).values
    assert len(ports := {value["env"].pop("MASTER_PORT") for value in values.values()}) == 1
    assert ports != {"1024"}
    for value in values.values():
        assert value["cwd"] == str(tmp_path.resolve())
        assert value["env"] == {"FROM_CALLER": "new", "GONE": None}


# The state of the caller.


def _everything_of_the_caller() -> dict[str, object]:
    descriptors = Path("/proc/self/fd") if Path("/proc/self/fd").exists() else Path("/dev/fd")
    return {
        "environment": dict(os.environ),
        "directory": Path.cwd(),
        "handlers": {signum: signal.getsignal(signum) for signum in signal.valid_signals()},
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "threads": set(threading.enumerate()),
        "descriptors": len(list(descriptors.iterdir())),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "children": {child.pid for child in psutil.Process().children()},
        "search path": list(sys.path),
        "temporary": sorted(Path(tempfile.gettempdir()).iterdir()),
    }


@pytest.mark.parametrize(
    "start_method", [pytest.param("spawn", marks=pytest.mark.soak), "forkserver"]
)
def test_a_launch_leaves_the_caller_as_it_found_it(run_dir: Path, start_method: str) -> None:
    """Environment, directory, handlers, threads, descriptors and start method are unchanged.

    After a failure the exception is still held; its traceback must not keep a socket open.
    """
    options = {**TWO, "start_method": start_method}
    at_first = _everything_of_the_caller()
    ddpsafe.launch(programs.pid_of, **TWO)  # Python's own helper processes start here
    before = _everything_of_the_caller()
    for name in ("environment", "directory", "handlers", "mask", "threads", "start method"):
        assert before[name] == at_first[name]
    ddpsafe.launch(programs.describe, **options)
    assert _everything_of_the_caller() == before
    try:
        ddpsafe.launch(
            programs.fail_on_rank_one, (programs.raise_plain,), run_dir=run_dir, **options
        )
    except ddpsafe.RankRaisedError:
        assert _everything_of_the_caller() == before
    else:
        pytest.fail("the rank did not fail")


@pytest.mark.full
def test_a_launch_from_a_helper_thread_works_and_touches_no_handler() -> None:
    """The kernel ties a rank to the thread that started it, so that thread has to wait for it."""
    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:
        options = {**TWO, "nproc_per_node": 1, "start_method": "spawn"}
        values = pool.submit(ddpsafe.launch, programs.add_up, (1,), **options).result().values
    assert values == {0: 1.0}
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.full
def test_two_launches_at_once_do_not_mix(tmp_path: Path) -> None:
    """The ranks of both launches run at the same time, and each sums over its own launch."""
    with ThreadPoolExecutor(2) as pool:
        first, second = (
            pool.submit(ddpsafe.launch, programs.meet_another_launch, (tmp_path, *names), **TWO)
            for names in (("first", "second"), ("second", "first"))
        )
        assert first.result().values == {0: 200.0, 1: 201.0}
        assert second.result().values == {0: 2.0, 1: 3.0}


@pytest.mark.full
@pytest.mark.parametrize(
    "start_method", [pytest.param("spawn", marks=pytest.mark.soak), "forkserver"]
)
def test_data_loader_workers_of_a_rank_start_as_those_of_a_script(
    tmp_path: Path, start_method: str
) -> None:
    """They use Python's default, which accepts lambdas and notebook classes, or the caller's choice."""
    source = """
        import multiprocessing, sys
        import ddpsafe

        def train(ctx):
            import torch
            from torch.utils.data import DataLoader, Dataset

            class Cell(Dataset):
                def __len__(self):
                    return 4
                def __getitem__(self, index):
                    return index

            method = multiprocessing.get_start_method(allow_none=True)
            if method == "spawn":
                return method
            return method, list(DataLoader(Cell(), 2, num_workers=1, collate_fn=lambda b: sum(b)))

        if __name__ == "__main__":
            options = {"nproc_per_node": 1, "backend": "gloo", "start_method": sys.argv[1]}
            options["run_dir"] = sys.argv[2]
            print(ddpsafe.launch(train, **options).values[0])
            multiprocessing.set_start_method("spawn", force=True)
            print(ddpsafe.launch(train, **options).values[0])
    """
    run = scripts.run(tmp_path, source, start_method, str(tmp_path / "logs"))
    if sys.version_info >= (3, 14):  # its default takes neither, and torch says so
        assert "changed the multiprocessing start method" in run.err
        return
    assert run.lines() == ["(None, [1, 5])", "spawn"]


def test_a_launch_inside_a_rank_runs_in_that_rank() -> None:
    """It uses the rank's group, which remains; a warning reports that the call asked for other ranks."""
    values = ddpsafe.launch(programs.launch_again, **TWO).values
    for rank, (pid, inner, total, warned) in values.items():
        assert warned.startswith(
            "launch(nproc_per_node=7) runs in a rank of a job with nproc_per_node=2"
        )
        assert inner == {rank: pid}
        assert total == 2.0 + rank


# Wrong calls, which start nothing.


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"nproc_per_node": 0}, ["nproc_per_node", "zero ranks", "device_count() is 0"]),
        ({"nproc_per_node": -1}, ["nproc_per_node", "smallest number of ranks is 1"]),
        ({"start_method": "fork"}, ["start_method", "inherits CUDA", '"forkserver"']),
        ({"nproc_per_nod": 2}, ["nproc_per_nod", "nproc_per_node"]),
        ({"nnodes": 2}, ["nnodes=2", "an endpoint to connect to", "gpu-01:29400"]),
        ({"env": {"RANK": "0"}}, ["env", "RANK", "the launcher sets it"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_config_is_explained_before_anything_starts(
    run_dir: Path, fields: dict[str, object], texts: list[str]
) -> None:
    """The message has the mistake, the reason and the fix; not even the run directory is made."""
    with pytest.raises(ddpsafe.ConfigError) as caught:
        ddpsafe.launch(programs.pid_of, run_dir=run_dir, **fields)  # type: ignore[arg-type]
    assert [text for text in texts if text not in str(caught.value)] == []
    assert not run_dir.exists()


@pytest.mark.skipif(_has_gpu(), reason="about machines without a GPU")
@pytest.mark.parametrize("fields", [{"backend": "nccl"}, {"nproc_per_node": "gpu"}])
def test_asking_for_gpus_where_there_are_none_is_refused(
    run_dir: Path, fields: dict[str, Any]
) -> None:
    """The message explains why there is none, and what works without."""
    with pytest.raises(ddpsafe.ConfigError, match="needs a GPU, but torch sees none") as caught:
        ddpsafe.launch(programs.pid_of, run_dir=run_dir, **fields)
    assert re.search(r'What to do: write .*backend="gloo"', str(caught.value))
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("fn", "args", "text"),
    [(None, (), "not callable"), (programs.give, 5, "args=(value,)")],
    ids=["fn", "args"],
)
def test_a_wrong_call_is_a_config_error(run_dir: Path, fn: Any, args: Any, text: str) -> None:
    """The error for ``launch(train())`` or ``args=5`` shows what to write."""
    with pytest.raises(ddpsafe.ConfigError, match=re.escape(text)):
        ddpsafe.launch(fn, args, run_dir=run_dir, **TWO)
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda: ddpsafe.launch(spawn_programs.total), "call ddpsafe.spawn, or take the context first"),
        (lambda: ddpsafe.launch(lambda rank, n: rank == n, (2,)),
            "call ddpsafe.spawn, or take the context first"),
        (lambda: ddpsafe.spawn(programs.pid_of), "call ddpsafe.launch, or take the rank first"),
    ],
)  # fmt: skip
def test_a_function_for_the_other_call_is_refused(call: Callable[[], object], advice: str) -> None:
    """`if rank == 0:` would be False on every rank if `rank` were a context."""
    with pytest.raises(ddpsafe.ConfigError, match=advice):
        call()


@pytest.mark.parametrize("door", [ddpsafe.launch, ddpsafe.spawn])
def test_a_launch_from_a_removed_directory_is_refused(
    door: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks would start in it; Python's error names no file."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ddpsafe.ConfigError, match="change to a directory that exists"):
        door(programs.pid_of)


@pytest.mark.full
def test_a_launch_from_a_daemonic_process_is_refused(tmp_path: Path) -> None:
    """Python forbids it to have children, with an AssertionError that suggests no fix."""
    source = """
        import multiprocessing, ddpsafe

        def train(_):
            raise SystemExit("a rank was started")

        def nested(door):
            try:
                door(train)
            except ddpsafe.ConfigError as error:
                return str(error)

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                for text in pool.map(nested, [ddpsafe.launch, ddpsafe.spawn]):
                    print(text)
    """
    lines = scripts.run(tmp_path, source).lines()
    assert len(lines) == 6
    assert lines[:3] == lines[3:]
    what, cause, fix = lines[:3]
    assert "is a daemonic process, which may not have children" in what
    assert "multiprocessing.Pool" in cause
    assert "concurrent.futures.ProcessPoolExecutor" in fix
    assert "distributed.worker.daemon: False" in fix


@pytest.mark.full
def test_a_start_method_of_another_library_is_refused_and_the_suggested_fix_works(
    tmp_path: Path,
) -> None:
    """Ranks started in a joblib worker would fail with "cannot find context for 'loky'"."""
    source = """
        import multiprocessing, ddpsafe
        from joblib import Parallel, delayed

        def train(ctx):
            return ctx.rank

        def launch(goes_on):
            if goes_on:
                multiprocessing.set_start_method("spawn", force=True)
            try:
                return ddpsafe.launch(train, nproc_per_node=1, start_method="spawn").values
            except ddpsafe.ConfigError as error:
                return error.explanation.what, error.explanation.fix

        if __name__ == "__main__":
            for goes_on in (False, True):
                print(Parallel(n_jobs=2, backend="loky")([delayed(launch)(goes_on)])[0])
    """
    pytest.importorskip("joblib")
    refused, launched = scripts.run(tmp_path, source).lines()
    assert "is 'loky', which a new process does not know" in refused
    assert "multiprocessing.set_start_method('spawn', force=True)" in refused
    assert launched == "{0: 0}"


@pytest.mark.full
def test_a_process_of_a_pool_of_futures_may_launch(tmp_path: Path) -> None:
    """The message for daemonic processes recommends it."""
    source = """
        import multiprocessing, ddpsafe
        from concurrent.futures import ProcessPoolExecutor

        def train(ctx):
            return ctx.rank + 1

        def nested():
            return ddpsafe.launch(train, nproc_per_node=1, backend="gloo").values

        if __name__ == "__main__":
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                print(pool.submit(nested).result())
    """
    assert scripts.run(tmp_path, source).lines() == ["{0: 1}"]


# The run directory.


def test_a_given_run_directory_keeps_the_output_of_every_rank_from_every_level(
    run_dir: Path,
) -> None:
    """Output of Python, the system and libc is in the rank's files, one for each stream."""
    result = ddpsafe.launch(programs.write_everywhere, ("one",), run_dir=run_dir / "deep", **TWO)
    assert result.run_dir == run_dir / "deep"
    for rank in (0, 1):
        stem = run_dir / "deep" / "attempt-1" / f"rank-{rank}"
        out = stem.with_suffix(".out").read_text().splitlines()
        assert sorted(out) == [f"libc one {rank}", f"python one {rank}", f"system one {rank}"]
        err = stem.with_suffix(".err").read_text().splitlines()
        assert err == [f"python error one {rank}", f"system error one {rank}"]


@pytest.mark.full
def test_a_second_launch_sets_the_logs_of_the_first_aside(run_dir: Path) -> None:
    """An earlier crash may be the reason for this launch, so its logs are kept apart."""
    for word in ("one", "two", "three"):
        ddpsafe.launch(programs.write_everywhere, (word,), run_dir=str(run_dir), **TWO)
    latest = (run_dir / "attempt-1" / "rank-1.out").read_text()
    assert "python three 1" in latest
    assert "python one 1" not in latest
    earlier = sorted((run_dir / "earlier").glob("*/attempt-1/rank-1.out"))
    assert [re.findall(r"python (\w+) 1", path.read_text()) for path in earlier] == [
        ["one"],
        ["two"],
    ]


def test_a_temporary_run_directory_is_removed_after_success_and_named_after_failure() -> None:
    """The logs that an error names exist."""
    (path,) = set(ddpsafe.launch(programs.where_it_runs, **TWO).values.values())
    assert path is not None
    assert path.parent == Path(tempfile.gettempdir())
    assert not path.exists()
    with pytest.raises(ddpsafe.RankRaisedError) as caught:
        ddpsafe.launch(programs.fail_on_rank_one, (programs.raise_plain,), **TWO)
    error = caught.value
    assert error.run_dir is not None
    assert error.log_path == error.run_dir / "attempt-1" / "rank-1.err"
    assert "PlainError" in error.log_path.read_text()
    assert f"Logs: {error.log_path}" in str(error)
    assert error.run_dir.stat().st_mode & 0o077 == 0
    shutil.rmtree(error.run_dir)


def test_no_temporary_directory_is_left_if_nothing_started(tmp_path: Path) -> None:
    """Without logs, only an empty directory would be left."""
    before = sorted(Path(tempfile.gettempdir()).iterdir())
    with pytest.raises(ddpsafe.PreflightError, match="data path 'train' is not ready"):
        ddpsafe.launch(
            programs.pid_of,
            data_paths={"train": tmp_path / "missing"},
            retry={"attempts": 1},
            **TWO,
        )
    assert sorted(Path(tempfile.gettempdir()).iterdir()) == before


@pytest.mark.parametrize("below", ["", "deep"])
def test_an_impossible_run_directory_is_named(tmp_path: Path, below: str) -> None:
    """The path, or a parent of it, is a file."""
    wanted = tmp_path / "file" / below if below else tmp_path / "file"
    (tmp_path / "file").touch()
    with pytest.raises(ddpsafe.PreflightError) as caught:
        ddpsafe.launch(programs.pid_of, run_dir=wanted, **TWO)
    assert f"the run directory {wanted} cannot be used" in str(caught.value)
    assert "What to do: pass run_dir=" in str(caught.value)


@pytest.mark.unprivileged
def test_a_run_directory_without_write_permission_is_named(tmp_path: Path) -> None:
    """The error is the same as for a file."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(ddpsafe.PreflightError, match="Permission denied"):
        ddpsafe.launch(programs.pid_of, run_dir=closed, **TWO)


def test_a_temporary_directory_too_long_for_the_fork_server_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python reports "AF_UNIX path too long" without the path."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    source = """
        import ddpsafe
        def train(ctx):
            return ctx.rank
        if __name__ == "__main__":
            options = {"start_method": "forkserver", "preflight": "off"}
            ddpsafe.launch(train, nproc_per_node=2, backend="gloo", **options)
    """
    monkeypatch.setenv("TMPDIR", str(folder))
    run = scripts.run(tmp_path, source)
    if hasattr(multiprocessing.util, "_get_base_temp_dir"):  # Python 3.14.10 uses /tmp then
        assert run.code == 0, run.err
        return
    assert run.code == 78  # another attempt cannot help
    assert f"the fork server's socket in {folder} has too long a path" in run.err
    assert "set TMPDIR to a short path" in run.err
