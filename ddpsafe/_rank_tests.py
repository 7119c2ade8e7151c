"""Run one test of a pytest session in every rank: the half of `ddpsafe.testing` that ranks run.

The fork server of the ranks collects the session's tests once, so that each rank it forks finds the
test, its module with rewritten assertions and all plugins in memory. A rank that was started in
another way collects by itself, which takes longer and gives the same.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pickle
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from ddpsafe._worker import pending_exception
from ddpsafe._worker.entrypoint import set_death_signal

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from ddpsafe._worker.context import RankContext

COLLECTION_VARIABLE: Final = "DDPSAFE_TESTING_COLLECTION"
"""Where the fork server finds the file of its `Collection`."""

# They act on a session or on a terminal, of which the caller has the real one; what they define
# (options, markers) stays known.
_OF_CALLER: Final = (
    "timeout",
    "xdist",
    "_cov",
    "rerunfailures",
    "stepwiseplugin",
    "lfplugin",
    "nfplugin",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What a process needs to collect the tests that its caller has collected.

    Attributes:
        options: The options of the caller's session.
        arguments: Files with the tests.
        rootdir: Where the session was started.
        sys_path: Where the caller's modules come from.
        coverage: Settings of a coverage measurement that the caller is making; empty without.
        caller: Process id of the caller, which is the fork server's parent.
    """

    options: Mapping[str, Any]
    arguments: tuple[str, ...]
    rootdir: str
    sys_path: tuple[str, ...]
    coverage: Mapping[str, Any]
    caller: int

    @classmethod
    def read(cls, file: str) -> Collection:
        """Read what the caller has written."""
        collection: Collection = pickle.loads(Path(file).read_bytes())  # noqa: S301 - the caller's
        return collection


@dataclass(frozen=True, slots=True, kw_only=True)
class TestJob:
    """One test to run.

    Attributes:
        nodeid: Its name in the session.
        collection: The file of the `Collection`.
        reports: Folder into which each rank writes what became of the test.
        tmp_path: The folder that all ranks get as `tmp_path`.
        terminal: Streams for a debugger of rank 0, in and out; empty without ``--pdb``.
    """

    __test__ = False  # not a class of tests

    nodeid: str
    collection: str
    reports: str
    tmp_path: str
    terminal: tuple[str, ...]

    def report_of(self, rank: int) -> Path:
        """Return the file of one rank's reports."""
        return Path(self.reports) / f"rank-{rank}.json"


def run_test(ctx: RankContext, job: TestJob) -> None:
    """Run a test in this rank; raises what the test raised."""
    collected = _collect(job.collection)
    item = next((each for each in collected.session.items if each.nodeid == job.nodeid), None)
    if item is None:
        msg = f"{job.nodeid} is not among the tests that this rank has collected"
        raise pytest.UsageError(msg)
    # Folders that `tmp_path_factory` makes here are removed with the test's.
    os.environ["PYTEST_DEBUG_TEMPROOT"] = job.reports
    for stream in (
        sys.stdout,
        sys.stderr,
    ):  # what is printed before a rank is ended by force is shown
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    run = collected.rank
    run.begin(ctx, job)
    try:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    finally:
        run.write(is_last=True)
        if collected.coverage is not None:
            collected.coverage.stop()
            collected.coverage.save()
    if run.failure is not None:
        raise run.failure.with_traceback(None)


class _Rank:
    """The plugin of the rank in which one test runs."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._reports: list[object] = []
        self.failure: BaseException | None = None

    def begin(self, ctx: RankContext, job: TestJob) -> None:
        """Say which rank it is, and which test."""
        self._ctx = ctx
        self._job = job

    @pytest.fixture
    def ddp_context(self) -> RankContext:
        return self._ctx

    @pytest.fixture
    def tmp_path(self) -> Path:
        return Path(self._job.tmp_path)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.excinfo is not None and self.failure is None:
            is_skip = call.excinfo.errisinstance(pytest.skip.Exception)
            if report.failed or not is_skip:  # also what is expected to fail ends the others' waits
                self._fail(call.excinfo.value)
        elif report.failed and self.failure is None:  # passed, and was expected to fail
            self._fail(AssertionError(str(report.longrepr)))
        return report

    def _fail(self, exc: BaseException) -> None:
        """Keep the failure, and report it before fixtures are torn down, which may wait for others."""
        self.failure = exc
        self.write(is_last=True)
        try:
            raise exc  # noqa: TRY301 - what is being handled is what is reported
        except BaseException:  # noqa: BLE001 - raised again at the end of the test
            pending_exception.leaving_group()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(
            self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        )
        self.write()

    def pytest_exception_interact(self, call: pytest.CallInfo[None]) -> None:
        """Open a debugger at the failure in rank 0, on the caller's terminal."""
        if self._ctx.rank != 0 or not self._job.terminal or call.excinfo is None:
            return
        import pdb  # noqa: T100 - the user asked for it with --pdb

        source, sink = self._job.terminal
        with open(source) as stdin, open(sink, "w") as stdout:  # noqa: PTH123 - streams
            stdout.write(f"\nrank 0 of {self._ctx.world_size}: {call.excinfo.exconly()}\n")
            debugger = pdb.Pdb(stdin=stdin, stdout=stdout)
            debugger.reset()
            debugger.interaction(None, call.excinfo.tb)

    def write(self, *, is_last: bool = False) -> None:
        """Write down what became of the test up to here, whole or not at all."""
        path = self._job.report_of(self._ctx.rank)
        part = path.with_suffix(".part")
        told: dict[str, object] = {"reports": self._reports}
        if is_last:
            sys.stdout.flush()
            sys.stderr.flush()
            # What the rank writes later is its launcher's account of the same failure.
            told |= {"out": os.fstat(1).st_size, "err": os.fstat(2).st_size}
        part.write_text(json.dumps(told, default=str), encoding="utf-8")
        part.replace(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Collected:
    session: pytest.Session
    rank: _Rank
    coverage: Any


@functools.cache
def _collect(file: str) -> _Collected:
    """Collect the tests as the caller has, once in this process."""
    collection = Collection.read(file)
    os.chdir(collection.rootdir)
    sys.path[:] = collection.sys_path
    coverage = _measure(collection.coverage)
    from _pytest.config import Config  # the constructor "usable for subprocesses", as xdist uses it

    config = Config.fromdictargs(dict(collection.options), list(collection.arguments))
    config.args = list(collection.arguments)
    config._do_configure()  # noqa: SLF001 - there is no public way to a session that stays
    for name in _OF_CALLER:
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    # Late: pytest rewrites assertions of a plugin that it is the first to import.
    from ddpsafe.testing import _RANK_PLUGIN

    rank = _Rank(config)
    config.pluginmanager.register(rank, _RANK_PLUGIN)
    session = pytest.Session.from_config(config)
    config.hook.pytest_sessionstart(session=session)
    config.hook.pytest_collection(session=session)
    return _Collected(session=session, rank=rank, coverage=coverage)


def _measure(settings: Mapping[str, Any]) -> Any:
    """Measure coverage as the caller does, into a file beside the caller's."""
    if not settings:
        return None
    import coverage  # type: ignore[import-not-found, unused-ignore]  # where the user measures with it

    running = coverage.Coverage.current()
    if running is not None:  # coverage's own start-up hook has begun
        return running
    measured = coverage.Coverage(config_file=False, data_suffix=True)
    for name, value in settings.items():
        measured.set_option(name, value)
    measured.start()
    return measured


if COLLECTION_VARIABLE in os.environ:  # in the fork server: what is loaded here, ranks find loaded
    # The server sees only when it has loaded everything that its pytest was killed.
    set_death_signal(signal.SIGKILL)
    if os.getppid() != Collection.read(os.environ[COLLECTION_VARIABLE]).caller:
        os._exit(1)
    # A test module that cannot be collected is reported in the rank, whose output is read.
    with contextlib.suppress(Exception, pytest.skip.Exception, SystemExit):
        _collect(os.environ[COLLECTION_VARIABLE])
    # The signal is of a thread, which may end before the next test; from here on a pipe tells.
    set_death_signal(0)
    if threading.active_count() > 1:
        names = [each.name for each in threading.enumerate()]
        sys.stderr.write(
            f"ddpsafe.testing: importing the tests starts threads, which ranks lack: {names}\n"
        )
