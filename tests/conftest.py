"""Gives every test its own temporary directory, and checks that it leaves nothing behind."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import re
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Generator, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Final

import hypothesis
import leftovers
import machine
import pytest
import scripts

# Test processes share a few cores, so no thread may spin while it waits. OpenMP's threads took half of
# the time of a training in two ranks; numpy's, a tenth of each `import torch`.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# pytest-timeout's limit, for a test that hangs; a wait of the kits ends before, and says for what.
os.environ.setdefault("PYTEST_TIMEOUT", str(machine.hang_limit(300)))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--installed``, which nox passes."""
    parser.addoption(
        "--installed",
        action="store_true",
        help="refuse to run unless ddpsafe is imported from this environment's site-packages",
    )
    parser.addoption("--quick", action="store_true", help="leave out tests that are marked full")
    parser.addoption(
        "--extra",
        action="append",
        default=[],
        metavar="NAME",
        help="also run the tests that need this extra of ddpsafe, which is installed",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test the checkout with ``--installed``; start the interpreter that workers share.

    Signals are set to their defaults: in the background of a script pytest inherits ignored ones, and
    tests of Ctrl-C would fail.
    """
    for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(signum) == signal.SIG_IGN:
            default = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
            signal.signal(signum, default)
    machine.sample_load()
    # A machine that is slow in making an example has no bug.
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("any machine", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("any machine")
    gc.disable()  # until all tests are collected
    location = _package_folder()
    if config.getoption("--installed") and not location.is_relative_to(sys.prefix):
        msg = f"ddpsafe would be imported from {location}, not from {sys.prefix}"
        raise pytest.UsageError(msg)
    if (config.getoption("numprocesses", None) or 1) > 1 and scripts.MAY_SHARE:
        config.add_cleanup(scripts.share_warm_python().close)


TOGETHER: Final = 5
"""How many tests of several nodes run in a row: they share hosts, and mostly wait."""

WAITING: Final = {
    "test_pasted",
    "test_proved_at_once",
    "test_console_not_read",
    "test_launcher_suspended",
    "test_live_warning",
}
"""Other files whose tests wait for four seconds or more; run last, they would leave cores idle."""


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name signals by their numbers; Python 3.10 would write ``Signals.SIGTERM``."""
    return str(int(val)) if isinstance(val, signal.Signals) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what another session of nox runs; mix waiting and computing tests.

    An ``-m`` in pytest's configuration would be replaced by the user's, such as ``-m "not slow"``.
    """
    runs_soak = "soak" in config.getoption("markexpr")
    extras = config.getoption("--extra")
    kept, left_out = [], []
    for item in items:
        soak = item.get_closest_marker("soak") is not None and not runs_soak
        quick = config.getoption("--quick") and _is_variant(item)
        extra = any(mark.args[0] not in extras for mark in item.iter_markers("extra"))
        (left_out if soak or quick or extra else kept).append(item)
    if config.getoption("--quick") and not any("::" in argument for argument in config.args):
        _require_known_ids(items)
    items[:] = kept
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        items[:] = _mixed(items, workers)


def _is_variant(item: pytest.Item) -> bool:
    """Return whether a test runs in ``nox -s full`` only."""
    mark = item.get_closest_marker("full")
    callspec = getattr(item, "callspec", None)
    return mark is not None and (callspec is None or callspec.id not in mark.kwargs.get("but", ()))


def _require_known_ids(items: list[pytest.Item]) -> None:
    """Fail if a mark names an id that its test does not have: the test would be left out unnoticed."""
    named: dict[str, set[str]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        if (mark := item.get_closest_marker("full")) is not None and callspec is not None:
            test = item.nodeid.partition("[")[0]
            named.setdefault(test, set(mark.kwargs.get("but", ()))).discard(callspec.id)
    if wrong := {test: ids for test, ids in named.items() if ids}:
        msg = f"marks of tests for nox -s full name ids that do not exist: {wrong}"
        raise pytest.UsageError(msg)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, with one reason for all such tests."""
    for name, reason in _missing_here().items():
        if item.get_closest_marker(name) is not None:
            pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give all tests that only root can run one reason, wherever they find out."""
    del item
    report = yield
    is_skip = report.skipped and isinstance(report.longrepr, tuple) and os.geteuid() != 0
    if is_skip and re.search(r"\broot\b|/sys/fs/cgroup|kernel's log|mount", report.longrepr[2]):
        report.longrepr = (str(Path(__file__)), None, f"Skipped: {ONLY_ROOT}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, object, object]:
    """Make what a test prints encodable: a surrogate in the report of a failure would end the session."""
    return _encodable((yield))


def _encodable(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {key: _encodable(item) for key, item in value.items()}
    return type(value)(map(_encodable, value)) if isinstance(value, (list, tuple)) else value


ONLY_ROOT: Final = "needs root: hosts, mounts, other users"


@functools.cache
def _missing_here() -> dict[str, str]:
    """Return why tests with these markers cannot run here."""
    missing = {}
    if tuple(int(part) for part in version("torch").split(".")[:2]) < (2, 8):
        missing["recorder"] = "torch before 2.8 does not record gloo's collectives"
    if "DDPSAFE_REHEARSE_GPU" not in os.environ and not _has_gpu():
        missing["gpu"] = "needs a CUDA device; torch sees none"
    if os.geteuid() == 0:
        missing["unprivileged"] = "root may read and write everything"
    elif os.environ.get("DDPSAFE_REQUIRE_HOSTS") != "1":
        missing["root"] = ONLY_ROOT
    return missing


def _has_gpu() -> bool:
    if not any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg")):
        return False  # without importing torch
    import torch

    return torch.cuda.is_available()


def _mixed(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Give each worker its share of the tests of several nodes, between other files.

    Each worker begins with an equally long part of the list. Slurm's tests share a cluster and take
    minutes, so they come first; then, in each part, the files that wait.
    """
    nodes = [item for item in items if "nodes" in item.path.parts]
    by_file = [[*group] for _, group in itertools.groupby(nodes, key=lambda item: item.path)]
    groups = [
        file[start : start + TOGETHER]
        for file in by_file
        for start in range(0, len(file), TOGETHER)
    ]
    others = sorted(
        (item for item in items if "nodes" not in item.path.parts),
        key=lambda item: "slurm" not in item.path.parts,
    )
    mixed: list[pytest.Item] = []
    for worker in range(workers):
        part = others[len(others) * worker // workers : len(others) * (worker + 1) // workers]
        part.sort(key=lambda item: ("slurm" not in item.path.parts, item.path.stem not in WAITING))
        own = groups[worker::workers]
        every = len(part) / max(1, len(own))
        due = 0.0
        for number, item in enumerate(part):
            is_first_of_file = number == 0 or item.path != part[number - 1].path
            while own and is_first_of_file and number >= due:
                mixed += own.pop(0)
                due += every
            mixed.append(item)
        mixed += itertools.chain.from_iterable(own)
    return mixed


def pytest_collection_finish() -> None:
    """Exclude pytest's permanent objects from garbage collections.

    Collections took a third of the time of collecting the tests, and a quarter of a second each after
    every test that briefly left something.
    """
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """After a failure, show what a reader elsewhere must know about this machine."""
    if terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.write_line(f"machine: {machine.describe()}")


def pytest_report_header() -> str:
    """Report which ddpsafe is tested."""
    return f"ddpsafe: {_package_folder()}"


def _package_folder() -> Path:
    spec = find_spec("ddpsafe")
    if spec is None or not spec.submodule_search_locations:
        msg = "ddpsafe cannot be imported; install it, or run python -m pytest in the checkout"
        raise pytest.UsageError(msg)
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(autouse=True, scope="session")
def _own_temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep ddpsafe's files apart from other runs on this machine.

    The path is short because sockets are created below it, and their paths are limited to 107 bytes.
    """
    tmp_path_factory.getbasetemp()  # stays where pytest keeps it, to be inspected after a failure
    folder = tempfile.mkdtemp(prefix="t-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        patch.setenv(leftovers.MARK, uuid.uuid4().hex)
        yield
    # multiprocessing removes its own folder below this one at exit, with priority -100.
    Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-200)


@pytest.fixture(autouse=True, scope="session")
def _ranks_share_imports() -> Iterator[None]:
    """Let pytest's fork server load the modules that hundreds of ranks import.

    Optimizers and DistributedDataParallel import dynamo, which takes more than a second of a core;
    ddpsafe's functions import pydantic, a fifth of a second, and the rest a tenth each.
    """
    preload = forkserver.set_forkserver_preload
    more = ["torch._dynamo", "ddpsafe._worker.join.attached", "ddpsafe.checkpoint", "ddpsafe.data"]
    # The workers of a DataLoader may start the server first, and they preload nothing.
    preload(["ddpsafe._worker.preload", "torch", *more])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "set_forkserver_preload", lambda names: preload([*names, *more]))
        if scripts.SHARED in os.environ:
            scripts.warm_python().serve_forks()
        yield


@pytest.fixture(autouse=True)
def _nothing_left_behind(_own_temporary_directory: None) -> Iterator[None]:
    """Fail a test after which a process, thread, listening socket or file of this run remains.

    Anything that existed before the test may stay, so a fixture of a wider scope may keep a process.
    """
    machine.note_test()
    before = leftovers.Snapshot.take()
    yield
    remaining = leftovers.wait_until_gone(before, grace_s=leftovers.GRACE_S)
    if remaining:
        pytest.fail("left behind:\n  " + "\n  ".join(remaining), pytrace=False)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run directory for launches that are meant to fail, which keep it for the reader."""
    return tmp_path / "run"
