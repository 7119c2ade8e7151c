"""A pytest plugin: a test with the marker ``ddp`` runs in every rank of a small world.

::

    import pytest
    import torch.distributed as dist

    @pytest.mark.ddp(nproc=2)
    def test_sum_over_ranks(ddp_context):
        total = ddp_context.all_reduce(ddp_context.rank + 1)
        assert total == 3

The plugin is loaded by its entry point as soon as ddpsafe is installed, or with
``-p ddpsafe.testing``.

Each test gets its own ranks with a process group. They are forked from a server that has imported torch
and the test modules. The test function and its fixtures run in each rank, with the same `tmp_path`. A
failure is shown as pytest shows it, for the rank that failed first. A crash or hang of a rank fails only
its test.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import multiprocessing
import os
import pickle
import sys
import time
import unittest
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from ddpsafe import RankContext

__all__ = ["ddp_context"]

_MARKER: Final = (
    "ddp(nproc=2, *, backend='gloo', timeout=120, **fields): run the test in `nproc` ranks with a "
    "process group. A sequence for `nproc` or `backend` runs the test once for each value. `timeout` is "
    "for the whole test, in seconds; `fields` are fields of ddpsafe.LaunchConfig, such as `env`."
)
_TIMEOUT_S: Final = 120.0
_DAY_S: Final = 86_400.0  # while a debugger waits for input
_PARAMETERS: Final = {"nproc": "ddp_nproc", "backend": "ddp_backend"}
_RANK_PLUGIN: Final = "ddpsafe-rank"  # registered in the sessions of ranks only
_MAX_OUTPUT_CHARS: Final = 100_000

_outcome_key: Final = pytest.StashKey["_Outcome"]()
_server_key: Final = pytest.StashKey["_Server"]()
_start_key: Final = pytest.StashKey[float]()


@pytest.fixture
def ddp_context() -> RankContext:
    """The `ddpsafe.RankContext` of this rank; fails in a test without the marker ``ddp``."""
    # In a rank, another fixture of this name replaces this one.
    pytest.fail(
        "ddp_context needs ranks: mark the test with @pytest.mark.ddp(nproc=2)", pytrace=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """How to run a test, from its marker and parameters."""

    nproc: int
    backend: str
    timeout_s: float
    fields: Mapping[str, Any]


@dataclass(slots=True)
class _Outcome:
    """The outcome of one test in its ranks.

    Attributes:
        report: The rank and the report that stand for the test, see `find_reports`.
        teardown: The rank and its report of a teardown that failed.
        from_ranks: What each rank wrote about the test, by rank.
        output: Title and text of each rank's output.
    """

    world_size: int
    error: BaseException | None = None
    report: tuple[int, pytest.TestReport] | None = None
    teardown: tuple[int, pytest.TestReport] | None = None
    from_ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    output: list[tuple[str, str]] = field(default_factory=list)

    def find_reports(self, config: pytest.Config) -> None:
        """Set the reports that stand for the test: those of the rank that failed first."""
        blamed = getattr(self.error, "rank", None)
        ranks = sorted(self.from_ranks, key=lambda rank: (rank != blamed, rank))
        from_data = config.hook.pytest_report_from_serializable
        reports = [
            # A copy, because pytest converts the data in place.
            (rank, from_data(config=config, data=copy.deepcopy(data)))
            for rank in ranks
            for data in self.from_ranks[rank]["reports"]
        ]
        for _, report in reports:
            if report.skipped and isinstance(report.longrepr, list):
                report.longrepr = tuple(report.longrepr)  # JSON made it a list
        failed = [
            each
            for each in reports
            if (each[1].failed or hasattr(each[1], "wasxfail"))
            # The failure of one rank makes the teardown of others fail.
            and (each[1].when != "teardown" or each[0] == blamed)
        ]
        if failed:
            rank = failed[0][0]
            self.teardown = next(
                (each for each in failed if each[0] == rank and each[1].when == "teardown"), None
            )
            if failed[0] is not self.teardown:
                self.report = failed[0]
                return
            reports = [each for each in reports if each[0] == rank and each[1].when != "teardown"]
        elif self.error is not None:
            return  # a crash or a hang: the launcher's error is shown
        skipped = [each for each in reports if each[1].skipped]
        called = [each for each in reports if each[1].when == "call"]
        self.report = next(iter(skipped + called), None)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once for each value of a sequence in its marker."""
    marker = metafunc.definition.get_closest_marker("ddp")
    if marker is None:
        return
    values = {**dict(zip(_PARAMETERS, marker.args, strict=False)), **marker.kwargs}
    for name, fixture in _PARAMETERS.items():
        if isinstance(values.get(name), (list, tuple)) and values[name]:
            metafunc.fixturenames.append(fixture)
            ids = [f"{name}={value}" for value in values[name]]
            metafunc.parametrize(fixture, values[name], ids=ids)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave all fixtures to the ranks, except the folder that they share."""
    if not _runs_ranks(item):
        return
    item.stash[_start_key] = time.monotonic()
    call = _call_of(item)
    if "nccl" in call.backend:
        import torch

        visible = torch.cuda.device_count()
        if visible < call.nproc:
            pytest.skip(f"{call.backend} needs {call.nproc} GPUs, {visible} visible")
    item.fixturenames = ["tmp_path", "tmp_path_factory"]  # type: ignore[attr-defined]  # of a Function


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the test in ranks instead of here."""
    if not _runs_ranks(pyfuncitem):
        return None
    config = pyfuncitem.config
    server = config.stash.get(_server_key, None)
    if server is None:
        server = _Server(config)
        server.start(pyfuncitem)
        config.stash[_server_key] = server  # only once it has started: the next test uses it
    call = _call_of(pyfuncitem)
    outcome = pyfuncitem.stash[_outcome_key] = _Outcome(world_size=call.nproc)
    server.run(pyfuncitem, call, outcome)
    _record_warnings(pyfuncitem, outcome)
    properties = [
        tuple(each)
        for written in outcome.from_ranks.values()
        for report in written["reports"][-1:]
        for each in report["user_properties"]
    ]
    for each in properties:
        if each not in pyfuncitem.user_properties:
            pyfuncitem.user_properties.append(each)
    outcome.find_reports(config)
    skipped = {
        rank: report["longrepr"][-1]
        for rank, written in outcome.from_ranks.items()
        for report in written["reports"]
        if report["outcome"] == "skipped" and "wasxfail" not in report
    }
    # A rank that skips the test is also one that returned early, if others wait for it.
    no_other_failure = outcome.error is None or getattr(outcome.error, "rank", None) in skipped
    if 0 < len(skipped) < call.nproc and no_other_failure:
        from ddpsafe._text import ranks_text

        names = ranks_text(sorted(skipped))
        text = f"{names} (world_size {call.nproc}) skipped the test, the others ran it"
        text += f"\n{next(iter(skipped.values()))}"
        outcome.error, outcome.report = pytest.fail.Exception(text, pytrace=False), None
    if outcome.error is not None and outcome.report is None:
        raise outcome.error  # a crash, a hang or a skip
    return True


# Not `tryfirst`: the wrappers of a conftest are outside this one, and see what it returns.
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Replace the reports of the call and the teardown by those of the rank that failed first."""
    report = yield
    outcome = item.stash.get(_outcome_key, None)
    if call.when == "setup" or outcome is None:
        return report
    found = outcome.report if call.when == "call" else outcome.teardown
    if found is None and call.when == "teardown":
        return report
    if found is None:
        if outcome.error is not None and call.excinfo is not None and report.failed:
            report.longrepr = str(outcome.error)
            # The message names another option.
            if getattr(outcome.error, "setting", "") == "attempt":
                report.longrepr += (
                    "\n  timeouts.attempt is the limit of this test: set it with "
                    "@pytest.mark.ddp(timeout=…), or with pytest-timeout."
                )
        report.sections += outcome.output
        return report
    rank, rank_report = found
    rank_report.duration, rank_report.user_properties = report.duration, report.user_properties
    rank_report.sections = [(f"{name} of rank {rank}", text) for name, text in rank_report.sections]
    rank_report.sections += outcome.output
    # With --pdb, the rank has had its debugger, and an exception would open another one here.
    debugs = item.config.getoption("usepdb", default=False)
    if outcome.error is not None and not rank_report.passed and not debugs:
        call.excinfo = pytest.ExceptionInfo.from_exception(outcome.error)
    if rank_report.failed:
        # Add to pytest's report which rank it is from, and the outcomes of the other ranks.
        title = f"rank {rank} (world_size {outcome.world_size})"
        failure: Any = rank_report.longrepr
        crash = getattr(failure, "reprcrash", None)
        if crash is not None:
            crash.message = f"{title}: {crash.message}"
        notes = [title]
        for other, written in sorted(outcome.from_ranks.items()):
            states = [
                report_data["outcome"]
                for report_data in written["reports"]
                if report_data["outcome"] != "passed"
            ]
            if other != rank:
                notes.append(f"rank {other}: {states[0] if states else 'ended with the first one'}")
        if hasattr(failure, "addsection"):
            failure.addsection(f"{title} failed first", "\n".join(notes[1:]) or title)
        else:
            rank_report.longrepr = f"{title}: {failure}"
    return rank_report


def _record_warnings(item: pytest.Item, outcome: _Outcome) -> None:
    """Add the warnings of the ranks to pytest's own, each once however many ranks have it."""
    found = [tuple(each) for written in outcome.from_ranks.values() for each in written["warnings"]]
    for module, name, text, file, line in dict.fromkeys(found):
        # Only what is imported already: a warning must not run a module's code here.
        kind = getattr(sys.modules.get(module), "__dict__", {}).get(name)
        category = kind if isinstance(kind, type) and issubclass(kind, Warning) else Warning
        message = warnings.WarningMessage(text, category, file, line)
        item.ihook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": message,
                "nodeid": item.nodeid,
                "when": "runtest",
                "location": None,
            }
        )


def _runs_ranks(item: pytest.Item) -> bool:
    """Return whether this process runs the test in ranks: it has the marker, and this is not a rank."""
    if item.get_closest_marker("ddp") is None:
        return False
    return not item.config.pluginmanager.has_plugin(_RANK_PLUGIN)


def _call_of(item: pytest.Item) -> _Call:
    """Read the marker and the parameters of a test; fail the test if it cannot run in ranks."""

    def refuse(why: str) -> NoReturn:
        pytest.fail(f"{item.nodeid}{why}", pytrace=False)

    marker = item.get_closest_marker("ddp")
    if marker is None:
        refuse(" is not marked with ddp")
    if not isinstance(item, pytest.Function) or issubclass(item.cls or object, unittest.TestCase):
        refuse(
            ": ddp marks functions and methods of plain classes, not of a TestCase; remove "
            "the base class, as the page 'Turn a distributed TestCase into @pytest.mark.ddp' shows"
        )
    values: dict[str, Any] = {"nproc": 2, "backend": "gloo", "timeout": None}
    if len(marker.args) > 1:
        refuse(": ddp takes nproc by position, the rest by name: ddp(2, backend='gloo')")
    values |= dict(zip(("nproc",), marker.args, strict=False)) | dict(marker.kwargs)
    params = item.callspec.params if hasattr(item, "callspec") else {}
    for name, fixture in _PARAMETERS.items():
        values[name] = params.get(fixture, params.get(name, values[name]))
    wrong = {"nprocs", "nproc_per_node", "np", "world_size", "num_processes"} & values.keys()
    if wrong:
        refuse(f": ddp has no {wrong.pop()}; write ddp(nproc=2)")
    near = difflib.get_close_matches("timeout", values.keys() - {"timeout", "timeouts"}, n=1)
    if near:
        refuse(f": ddp has no {near[0]}; write ddp(timeout=30)")
    nproc = values.pop("nproc")
    if not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1:
        refuse(f": nproc must be an integer >= 1, not {nproc!r}")
    backend, timeout = values.pop("backend"), values.pop("timeout")
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        refuse(f": timeout must be a number of seconds > 0, not {timeout!r}")
    seconds = _timeout_of(item) if timeout is None else float(timeout)
    return _Call(nproc=nproc, backend=backend, timeout_s=seconds, fields=values)


def _timeout_of(item: pytest.Item) -> float:
    """Return the seconds that a test has left: a little less than pytest-timeout gives it."""
    # So the launch ends first, and its error shows where each rank was.
    marker = item.get_closest_marker("timeout")
    limit: Any = None
    if marker is not None:
        limit = marker.args[0] if marker.args else marker.kwargs.get("timeout")
    if limit is None:
        limit = getattr(item.config.option, "timeout", None)
    if limit is None and item.config.pluginmanager.has_plugin("timeout"):
        with contextlib.suppress(ValueError, KeyError):
            limit = item.config.getini("timeout")
    seconds = float(limit) if limit else 0.0
    if seconds <= 0:
        return _TIMEOUT_S
    # pytest-timeout's time began with the fixtures; for the first test, it includes the import of
    # torch.
    now_s = time.monotonic()
    spent_s = now_s - item.stash.get(_start_key, now_s)
    # The margin is for what a launch does before its clock starts, and for the stacks at its end.
    return max(1.0, seconds - min(5.0, seconds / 4) - spent_s)


class _Server:
    """The fork server of this session's ranks, which ends with this process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._collection = ""

    def run(self, item: pytest.Function, call: _Call, outcome: _Outcome) -> None:
        """Run a test in ranks, and read their reports and output."""
        from ddpsafe import DDPSafeError, launch
        from ddpsafe._rank_tests import TestJob, run_test

        debugs = bool(self._config.getoption("usepdb", default=False))
        capture = self._config.pluginmanager.getplugin("capturemanager")
        with contextlib.ExitStack() as stack:
            if debugs and capture is not None:  # else nothing could be typed into the debugger
                capture.suspend_global_capture(in_=True)
                stack.callback(capture.resume_global_capture)
            # Next to the test's own folder, so that pytest keeps the logs as long as that one.
            shared = cast("Path", item.funcargs["tmp_path"])
            files = shared.with_name(f"{shared.name}-ranks")
            files.mkdir()
            job = TestJob(
                nodeid=item.nodeid,
                collection=self._collection,
                reports=str(files),
                tmp_path=str(shared),
                terminal=(f"/proc/{os.getpid()}/fd/0", f"/proc/{os.getpid()}/fd/1")
                if debugs
                else (),
            )
            shows_output = self._config.getoption("capture", default="fd") == "no"
            limits = dict.fromkeys(("attempt", "collective", "barrier"), _DAY_S) if debugs else {}
            fields: dict[str, Any] = {
                "timeouts": limits or {"attempt": call.timeout_s},
                "console": "tagged" if shows_output else "none",
                "run_dir": files / "run",
                "retry": {"attempts": 1},
                "start_method": "forkserver",
                "backend": call.backend,
                **call.fields,
            }
            if isinstance(call.fields.get("timeouts"), dict):
                fields["timeouts"] = {"attempt": call.timeout_s, **call.fields["timeouts"]}
            # The launch ends by itself in time. Its report may take longer than that on a busy machine, and an
            # alarm while pytest writes a report ends the whole session.
            cancel = getattr(self._config.hook, "pytest_timeout_cancel_timer", None)
            has_limit = (
                isinstance(fields["timeouts"], dict) or fields["timeouts"].attempt is not None
            )
            if cancel is not None and has_limit:
                cancel(item=item)
            try:
                launch(run_test, (job,), nproc_per_node=call.nproc, **fields)
            except DDPSafeError as error:
                outcome.error = error
            run_dir = Path(str(fields["run_dir"]))
            # Only ranks that wrote a file: if none could be started, there are none.
            written = (*files.glob("rank-*.json"), *run_dir.glob("*/rank-*.out"))
            numbers = {path.stem.removeprefix("rank-") for path in written}
            started = sorted(int(n) for n in numbers if n.isdecimal() and int(n) < call.nproc)
            for rank in started:
                with contextlib.suppress(FileNotFoundError):
                    outcome.from_ranks[rank] = json.loads(job.report_of(rank).read_text("utf-8"))
            # The output of each rank in the test becomes sections of the report.
            for rank in started:
                for suffix, name in (("out", "stdout"), ("err", "stderr")):
                    for path in run_dir.glob(f"*/rank-{rank}.{suffix}"):
                        output = path.read_bytes()[: outcome.from_ranks.get(rank, {}).get(suffix)]
                        text = output.decode("utf-8", "replace")[-_MAX_OUTPUT_CHARS:]
                        if text.strip():
                            outcome.output.append((f"Captured {name} of rank {rank}", text))

    def start(self, item: pytest.Function) -> None:
        """Start the fork server, and wait until it has collected the files with tests for ranks."""
        from multiprocessing import forkserver

        from ddpsafe._rank_tests import COLLECTION_VARIABLE, Collection

        factory = cast("pytest.TempPathFactory", item.funcargs["tmp_path_factory"])
        files = dict.fromkeys(str(other.path) for other in item.session.items if _runs_ranks(other))
        options = {
            **vars(self._config.option),
            **_PLAIN_OPTIONS,
            "plugins": [*self._config.option.plugins, "no:terminal", "no:faulthandler"],
        }
        options.pop("file_or_dir", None)  # passed as arguments; argparse warns of an empty option
        # ddpsafe is imported before the ranks' session, for which pytest warns. A user's
        # `filterwarnings = error` would end the session.
        options["pythonwarnings"] = [
            *(self._config.option.pythonwarnings or ()),
            "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
        ]
        if "ddpsafe.testing" not in options["plugins"]:
            options["plugins"].append("ddpsafe.testing")
        collection = Collection(
            options={name: value for name, value in options.items() if _travels(value)},
            arguments=tuple(files),
            rootdir=str(self._config.invocation_params.dir),
            sys_path=tuple(sys.path),
            coverage=_find_coverage(),
            caller=os.getpid(),
        )
        # In pytest's own folder, which a later session removes even if this one is killed.
        path = factory.getbasetemp() / "ddpsafe-collection"
        path.write_bytes(pickle.dumps(collection))
        self._collection = str(path)
        os.environ[COLLECTION_VARIABLE] = self._collection
        try:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(
                ["ddpsafe._worker.preload", "torch", "ddpsafe._rank_tests"]
            )
            forkserver.ensure_running()
            with contextlib.suppress(OSError, EOFError):  # the launch will report what is wrong
                first = context.Process(target=int)  # forked only once all is imported
                first.start()
                first.join()
        finally:
            del os.environ[COLLECTION_VARIABLE]


# A rank runs one test, so options that select, order, repeat or debug tests are only for the caller.
_PLAIN_OPTIONS: Final[Mapping[str, Any]] = {
    "basetemp": None,
    "capture": "no",
    "collectonly": False,
    "deselect": None,
    "dist": "no",
    "distload": False,
    "keyword": "",
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "markexpr": "",
    "maxfail": 0,
    "numprocesses": None,
    "maxprocesses": None,
    "stepwise": False,
    "stepwise_skip": False,
    "trace": False,
    "tx": [],
    "usepdb": False,
    "xmlpath": None,
    "cov_source": [],
}


def _travels(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 - an option of a plugin may be any object
        return False
    return True


def _find_coverage() -> dict[str, Any]:
    """Return the settings of this process's coverage measurement; empty without one."""
    coverage: Any = sys.modules.get("coverage")
    running = None if coverage is None else coverage.Coverage.current()
    if running is None:
        return {}
    names = ("run:branch", "run:data_file", "run:source", "run:include", "run:omit", "run:context")
    settings = {name: running.get_option(name) for name in names}
    data_file = Path(settings["run:data_file"] or ".coverage")
    settings["run:data_file"] = str(data_file.absolute())
    return {name: value for name, value in settings.items() if value is not None}
