"""Runs one test of a pytest session in a rank: the part of `ddpsafe.testing` that ranks run.

The fork server of the ranks collects the session's tests once. A rank that it forks then has the test,
its module with rewritten assertions and all plugins in memory. A rank that is started in another way
collects the tests itself, which takes longer.
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
from ddpsafe._worker.stop_signals import set_death_signal

if TYPE_CHECKING:
    import warnings
    from collections.abc import Generator, Mapping

    from ddpsafe._worker.context import RankContext

COLLECTION_VARIABLE: Final = "DDPSAFE_TESTING_COLLECTION"
"""The variable with the path of the fork server's `Collection` file."""

# Plugins that act on a session or a terminal, which only the caller really has. Ranks unregister them;
# their options and markers stay known.
_CALLER_PLUGINS: Final = (
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
    """What a process needs to collect the same tests as its caller.

    Attributes:
        options: The options of the caller's session.
        arguments: Files with the tests.
        coverage: Settings of the caller's coverage measurement; empty without one.
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
        """Read the file that the caller wrote."""
        collection: Collection = pickle.loads(Path(file).read_bytes())  # noqa: S301 - the caller's
        return collection


@dataclass(frozen=True, slots=True, kw_only=True)
class TestJob:
    """One test to run.

    Attributes:
        collection: The file of the `Collection`.
        reports: Folder to which each rank writes its reports of the test.
        terminal: Input and output of a debugger in rank 0; empty without ``--pdb``.
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
    """Run a test in this rank; raise what the test raised."""
    collected = _collect(job.collection)
    item = next((item for item in collected.session.items if item.nodeid == job.nodeid), None)
    if item is None:
        raise pytest.UsageError(f"{job.nodeid} is not among the tests that this rank has collected")
    # Folders of `tmp_path_factory` are made here, to be removed with the test's own.
    os.environ["PYTEST_DEBUG_TEMPROOT"] = job.reports
    # Line-buffered, so that the output of a rank that is killed is not lost.
    for stream in (sys.stdout, sys.stderr):
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
        self._warnings: list[tuple[str, str, str, str, int]] = []
        self.failure: BaseException | None = None

    def begin(self, ctx: RankContext, job: TestJob) -> None:
        """Set the rank and the test."""
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
            # An expected failure too must end the waits of the other ranks.
            if report.failed or not is_skip:
                self._fail(call.excinfo.value)
        elif report.failed and self.failure is None:  # it passed, but was expected to fail
            self._fail(AssertionError(str(report.longrepr)))
        return report

    def _fail(self, exc: BaseException) -> None:
        """Keep the failure, and report it."""
        # Before fixtures are torn down: they may wait for other ranks.
        self.failure = exc
        self.write(is_last=True)
        try:
            raise exc  # noqa: TRY301 - `leaving_group` reports the exception that is being handled
        except BaseException:  # noqa: BLE001 - raised again at the end of the test
            pending_exception.leaving_group()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(
            self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        )
        self.write()

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        """Keep a warning of the test for the caller's summary: the end of the test writes it."""
        if when == "runtest":
            kind, text = warning_message.category, str(warning_message.message)
            place = warning_message.filename, warning_message.lineno
            self._warnings.append((kind.__module__, kind.__name__, text, *place))

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
        """Write the reports and warnings so far, atomically."""
        path = self._job.report_of(self._ctx.rank)
        part = path.with_suffix(".part")
        content: dict[str, object] = {"reports": self._reports, "warnings": self._warnings}
        if is_last:
            sys.stdout.flush()
            sys.stderr.flush()
            # Later output of the rank only repeats the failure: it is not shown.
            content |= {"out": os.fstat(1).st_size, "err": os.fstat(2).st_size}
        part.write_text(json.dumps(content, default=str), encoding="utf-8")
        part.replace(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Collected:
    session: pytest.Session
    rank: _Rank
    coverage: Any


@functools.cache
def _collect(file: str) -> _Collected:
    """Collect the same tests as the caller, once in this process."""
    collection = Collection.read(file)
    os.chdir(collection.rootdir)
    sys.path[:] = collection.sys_path
    coverage = _measure(collection.coverage)
    from _pytest.config import Config  # the constructor "usable for subprocesses", as xdist uses it

    config = Config.fromdictargs(dict(collection.options), list(collection.arguments))
    config.args = list(collection.arguments)
    config._do_configure()  # noqa: SLF001 - there is no public way to keep a session open
    for name in _CALLER_PLUGINS:
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    # Imported late: pytest rewrites assertions only in plugins that it is the first to import.
    from ddpsafe.testing import _RANK_PLUGIN

    rank = _Rank(config)
    config.pluginmanager.register(rank, _RANK_PLUGIN)
    session = pytest.Session.from_config(config)
    config.hook.pytest_sessionstart(session=session)
    config.hook.pytest_collection(session=session)
    return _Collected(session=session, rank=rank, coverage=coverage)


def _measure(settings: Mapping[str, Any]) -> Any:
    """Measure coverage as the caller does, into a data file next to the caller's."""
    if not settings:
        return None
    import coverage  # type: ignore[import-not-found, unused-ignore]  # only if the user measures with it

    running = coverage.Coverage.current()
    if running is not None:  # started by coverage's own start-up hook
        return running
    measured = coverage.Coverage(config_file=False, data_suffix=True)
    for name, value in settings.items():
        measured.set_option(name, value)
    measured.start()
    return measured


if COLLECTION_VARIABLE in os.environ:  # this is the fork server: collect for all ranks
    # Until all imports are done, the server itself would not notice that its pytest was killed.
    set_death_signal(signal.SIGKILL)
    if os.getppid() != Collection.read(os.environ[COLLECTION_VARIABLE]).caller:
        os._exit(1)
    # A rank collects again and reports the error: its output is shown, the server's is not.
    with contextlib.suppress(Exception, pytest.skip.Exception, SystemExit):
        _collect(os.environ[COLLECTION_VARIABLE])
    # The signal is bound to the thread that started the server, which may end before the next test.
    # From here on, the server notices its pytest's end by a pipe.
    set_death_signal(0)
    if threading.active_count() > 1:
        names = [thread.name for thread in threading.enumerate()]
        sys.stderr.write(
            f"ddpsafe.testing: importing the tests started threads, which forked ranks lack: {names}\n"
        )
