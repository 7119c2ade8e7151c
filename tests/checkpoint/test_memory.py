"""States in memory: two slots of which one is always whole, and restarts that continue from them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import memory_programs as programs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

import ddpsafe
from ddpsafe._errors import Explanation
from ddpsafe._launcher.launch_parts import NodeMemory
from ddpsafe.checkpoint import Checkpointer, PerRank, _checksums, _directory, _memory, _save, _slots
from ddpsafe.checkpoint._format import NAME, RANKS, REPLICATED, STATE
from ddpsafe.checkpoint._memory import StateMemory
from ddpsafe.checkpoint._schedule import Costs, CostShare, TimeInterval, highest, steps_between
from ddpsafe.checkpoint._slots import Held, NodeSlots, candidates
from ddpsafe.checkpoint._state import Snapshot
from ddpsafe.checkpoint.errors import CheckpointWarning, RestoreError, SaveError, SaveTimeoutError

DIRECTORY: Final = Path("/checkpoints")
MAX_GROWTH_BYTES: Final = 20 << 20
COSTS: Final = Costs(0.01, 0.5, 100.0, 0.1)


class KilledError(BaseException):
    """Stands for the end of the writer: nothing is written after it."""


@pytest.fixture
def memory() -> Iterator[NodeMemory]:
    """Return the memory of a node with two ranks."""
    memory = NodeMemory()
    yield memory
    memory.close()


def slots_of(memory: NodeMemory, directory: Path = DIRECTORY) -> NodeSlots:
    """Return the slots as the next attempt's ranks find them."""
    files = [Path(f"/proc/{os.getpid()}/fd/{fd}") for fd in memory.files(2)]
    return NodeSlots(files, directory)


def write(slots: NodeSlots, step: int, *, attempt: int = 1, length: int = 1000) -> None:
    """Write a state as the first rank of a node does."""
    snapshot = Snapshot(
        replicated={"x": torch.full((length,), step)}, own=b"", names={"x": REPLICATED}
    )
    request: Any = _save.SaveRequest(
        ranks=None,  # type: ignore[arg-type]  # for the exchanges only
        publisher=None,
        snapshot=snapshot,
        step=step,
        metrics={},
        metadata=slots.record(attempt, {"note": step}, COSTS, 0.0),
    )
    slot = slots.target()
    slot.clear()
    slots.reserve(8 * length + 2000)
    _save.write_files(slot, request, [b"first", b"second"], {}, {})


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(1, 5_000_000)),
        st.tuples(st.just("kill"), st.integers(0, 12)),
        st.tuples(st.just("flip"), st.sampled_from([NAME, STATE, RANKS])),
    ),
    max_size=8,
)


@given(OPERATIONS)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_newest_state_that_was_written_whole_is_found_after_any_kill(
    monkeypatch: pytest.MonkeyPatch, operations: list[tuple[str, Any]]
) -> None:
    """A model beside it says which: the last one that no kill or changed byte has hit."""
    checksum = _checksums.checksum
    memory = NodeMemory()
    whole: list[int] = []  # the steps of both slots, the older one first
    try:
        for step, (what, detail) in enumerate(operations, 1):
            slots = slots_of(memory)
            if what == "save":
                write(slots, step, length=detail // 8)
                whole = [*whole, step][-2:]
            elif what == "kill":
                calls = iter(range(detail))

                def counted(data: Any, value: int = 0, calls: Iterator[int] = calls) -> int:
                    if next(calls, None) is None:
                        raise KilledError
                    return checksum(data, value)

                with monkeypatch.context() as patch:
                    patch.setattr(_checksums, "checksum", counted)
                    try:
                        write(slots, step)
                        whole = [*whole, step][-2:]
                    except (KilledError, RuntimeError):  # torch may wrap it
                        whole = whole[-1:] if len(whole) == 2 else whole
            elif whole:
                newest, _ = slots.newest()
                assert newest is not None
                flip(slots[newest.slot].path(detail))
                whole.pop()
            held, _ = slots_of(memory).newest()
            assert (held.step if held else None) == (whole[-1] if whole else None)
            if held is not None:
                loaded = torch.load(slots[held.slot].path(STATE), weights_only=True)
                assert torch.all(loaded["x"] == held.step)
    finally:
        memory.close()


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    with path.open("r+b") as file:
        middle = path.stat().st_size // 2
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 1]))


def test_states_of_another_directory_and_newer_ones_than_the_restored_do_not_count(
    memory: NodeMemory,
) -> None:
    """A second training does not continue from the first one's, and a rollback stays one."""
    slots = slots_of(memory)
    write(slots, 5)
    write(slots, 6)
    assert slots_of(memory, Path("/other")).newest() == (None, [])
    slots.drop_newer(5)
    held, problems = slots.newest()
    assert held is not None
    assert (held.step, held.attempt, problems) == (5, 1, [])
    slots.drop_newer(4)
    assert slots.newest() == (None, [])


def test_memory_stays_the_same_after_many_states(memory: NodeMemory) -> None:
    """Each slot's pages are used again, also for a shorter state."""
    slots = slots_of(memory)
    for step in range(2):
        write(slots, step, length=100_000)
    before = slots.reserved_bytes()
    for step in range(2, 202):
        write(slots, step, length=100_000 - step % 2)
    assert slots.reserved_bytes() <= before
    assert before < 2.2 * 800_000


@contextlib.contextmanager
def keeping(
    folder: Path, memory: NodeMemory, every: Any = 1000, memory_every: Any = 1, **options: Any
) -> Iterator[Checkpointer]:
    """Make a checkpointer of this process alone that keeps states in memory; it ends as if it were killed."""
    with contextlib.suppress(KilledError), Checkpointer(folder, every=every, **options) as made:
        may_give_up = options.get("on_failure") == "warn"
        made._memory = StateMemory(
            made._ranks, slots_of(memory, folder), memory_every, may_give_up=may_give_up
        )
        yield made
        raise KilledError


def raising(error: BaseException) -> Callable[..., object]:
    """Return a function that raises an error."""

    def fail(*_: object, **__: object) -> object:
        raise error

    return fail


def keep(checkpointer: Checkpointer, state: dict[str, Any], *steps: int, **facts: Any) -> None:
    """Save steps, each of which has to be due."""
    for step in steps:
        assert checkpointer.is_due(step)
        checkpointer.save(state, step, **facts)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("can't allocate memory"),
        SaveError(Explanation("The manifest could not be read back."), step=2),
    ],
)
def test_a_write_to_memory_that_fails_leaves_the_rank_with_the_others(
    tmp_path: Path, memory: NodeMemory, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """They have gone on, so this one neither ends nor saves to the directory alone; all do so at the next save."""
    with keeping(tmp_path, memory, on_failure="warn") as checkpointer:
        keep(checkpointer, {"step": 1}, 1)
        with monkeypatch.context() as patch:
            patch.setattr(_save, "write_files", raising(error))
            with pytest.warns(CheckpointWarning, match="step 2 was not kept in memory"):
                keep(checkpointer, {"step": 2}, 2)
        assert checkpointer.steps() == []
        slots = slots_of(memory, tmp_path)
        with pytest.warns(CheckpointWarning, match="to the directory only, not to memory"):
            keep(checkpointer, {"step": 3}, 3)
        assert checkpointer.steps() == [3]
        assert slots.reserved_bytes() == 0  # the training may need it


def test_a_write_to_memory_that_fails_raises_at_the_next_save(
    tmp_path: Path, memory: NodeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all ranks: if only this one raised, and the script went on, it would save at other steps than they."""
    with keeping(tmp_path, memory, memory_every=5) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(_save, "write_files", raising(OSError(28, "No space left")))
            with pytest.warns(CheckpointWarning, match="step 10 was not kept in memory"):
                keep(checkpointer, {"step": 10}, 10)
        assert not checkpointer.is_due(11)
        with pytest.raises(SaveError, match="The state of step 15 cannot be kept in memory"):
            keep(checkpointer, {"step": 15}, 15)


def test_memory_that_was_given_up_is_kept_until_the_directory_has_the_state(
    tmp_path: Path, memory: NodeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, too, and a rank is killed: the next attempt continues from what memory has."""
    with keeping(tmp_path, memory, on_failure="warn") as checkpointer:
        keep(checkpointer, {"step": 1}, 1)
        lack = {"text": "two states need 5 MB more", "needed": 5, "free": 1}
        monkeypatch.setattr(StateMemory, "_find_lack", lambda *_: lack)
        monkeypatch.setattr(_save, "write_files", raising(OSError(28, "No space left")))
        with pytest.warns(CheckpointWarning):
            keep(checkpointer, {"step": 2}, 2)
    held, _ = slots_of(memory, tmp_path).newest()
    assert held is not None
    assert held.step == 1


def test_a_save_to_the_directory_that_a_kill_prevented_is_made_up_for(
    tmp_path: Path, memory: NodeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step was in memory already, from which the next attempt continues."""
    for step in (100, 200):
        with keeping(tmp_path, memory, every=100) as checkpointer, monkeypatch.context() as patch:
            checkpointer.restore({"step": 0})
            patch.setattr(checkpointer, "_begin", raising(KilledError()))
            keep(checkpointer, {"step": step}, step)
        with keeping(tmp_path, memory, every=100) as checkpointer:
            assert checkpointer.restore({"step": 0}) == step
            keep(checkpointer, {"step": step + 1}, step + 1, step + 2)
            assert checkpointer.steps()[0] == step + 1


def test_the_end_of_a_training_waits_only_so_long_for_a_disk(
    tmp_path: Path, memory: NodeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in memory only is put into the directory then; storage that does not respond fails that."""
    responds, new_file = threading.Event(), _memory.new_file

    def new_file_at_last(*arguments: Any) -> Any:
        responds.wait()
        return new_file(*arguments)

    monkeypatch.setattr(_memory, "new_file", new_file_at_last)
    with keeping(tmp_path, memory, timeout=timedelta(seconds=1)) as checkpointer:
        keep(checkpointer, {"step": 1}, 1)
        with pytest.raises(SaveTimeoutError, match="could not write the checkpoint of step 1"):
            checkpointer.close()
        (thread,) = [each for each in threading.enumerate() if each.name == "ddpsafe-save-1"]
        responds.set()
        thread.join()
    assert checkpointer.steps() == []


@pytest.mark.parametrize("on_failure", ["raise", "warn"])
def test_a_last_step_that_memory_did_not_take_is_no_good_end(
    tmp_path: Path, memory: NodeMemory, monkeypatch: pytest.MonkeyPatch, on_failure: str
) -> None:
    """The directory gets the step before it, and the error says so."""
    with keeping(tmp_path, memory, on_failure=on_failure) as checkpointer:
        keep(checkpointer, {"step": 1}, 1)
        monkeypatch.setattr(_save, "write_files", raising(OSError(28, "No space left")))
        with pytest.warns(CheckpointWarning, match="step 2 was not kept"):
            keep(checkpointer, {"step": 2}, 2)
        monkeypatch.undo()
        said = "Step 2 was not saved.*\n.*\n.*the directory has step 1"
        with (
            pytest.warns(CheckpointWarning, match=said)
            if on_failure == "warn"
            else pytest.raises(SaveError, match=said)
        ):
            checkpointer.close()
    assert checkpointer.steps() == [1]


def test_a_directory_that_cannot_be_listed_at_the_end_fails_the_save_alone(
    tmp_path: Path, memory: NodeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a stale mount: a training that has ended well must not fail by it."""
    with keeping(tmp_path, memory, on_failure="warn") as checkpointer:
        keep(checkpointer, {"step": 1}, 1)
        monkeypatch.setattr(_directory, "complete_steps", raising(OSError(5, "Input/output error")))
        with pytest.warns(CheckpointWarning, match="Input/output error"):
            checkpointer.close()


@pytest.mark.parametrize("damaged", [NAME, STATE])
def test_a_job_whose_states_are_all_damaged_does_not_begin_at_step_0_silently(
    tmp_path: Path, memory: NodeMemory, damaged: str
) -> None:
    """Nothing is in the directory yet. The same in each further attempt."""
    with keeping(tmp_path, memory) as checkpointer:
        keep(checkpointer, {"x": torch.arange(100)}, 1, 2)
    for slot in slots_of(memory, tmp_path)._slots:
        data = bytearray(slot.path(damaged).read_bytes())
        data[len(data) // 2] ^= 1
        slot.path(damaged).write_bytes(data)
    for _ in range(2):
        with (
            keeping(tmp_path, memory) as checkpointer,
            pytest.warns(CheckpointWarning, match="damaged"),
            pytest.raises(RestoreError, match="No state in memory can be restored"),
        ):
            checkpointer.restore({"x": torch.arange(100)})


def test_a_memory_that_was_given_up_is_not_tried_again(
    tmp_path: Path, memory: NodeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the directory at each step, when it is full, too."""
    tried: list[int] = []

    def fail(_: object, __: object, step: int) -> None:
        tried.append(step)
        raise OSError(28, "No space left")

    with keeping(tmp_path, memory, every=100, on_failure="warn") as checkpointer:
        keep(checkpointer, {"x": 0}, 1)
        lack = {"text": "too little", "needed": 2, "free": 1}
        monkeypatch.setattr(StateMemory, "_find_lack", lambda *_: lack)
        monkeypatch.setattr(_save.Writing, "publish", fail)
        with pytest.warns(CheckpointWarning):
            keep(checkpointer, {"x": 0}, 2)
        assert [step for step in range(3, 100) if checkpointer.is_due(step)] == []
        monkeypatch.undo()
    assert tried == [2]


def test_what_each_rank_keeps_for_itself_counts_when_memory_is_asked_for(
    tmp_path: Path, memory: NodeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node has the parts of all ranks."""
    asked: list[int] = []
    monkeypatch.setattr(StateMemory, "_find_lack", lambda _, length, *__: asked.append(length))
    with keeping(tmp_path, memory) as checkpointer:
        for step, world_size in ((1, 1), (2, 3)):
            monkeypatch.setattr(checkpointer._ranks, "world_size", world_size)
            keep(checkpointer, {"x": PerRank(torch.nn.Linear(1000, 1000))}, step)
    assert asked[0] > 4 * 10**6
    assert asked[1] - asked[0] > 8 * 10**6


@pytest.mark.parametrize("every", ["auto", timedelta(microseconds=1)])
def test_after_a_return_to_an_earlier_step_states_are_kept_as_before(
    tmp_path: Path, memory: NodeMemory, every: object
) -> None:
    """The steps that the schedule has chosen are those of the training that was given up."""
    with keeping(tmp_path, memory, memory_every=every) as checkpointer:
        checkpointer.save({"x": 1}, 10)
        keep(checkpointer, {"x": 2}, 1000, 1010)
        assert checkpointer.restore({"x": 0}, step=10) == 10
        keep(checkpointer, {"x": 3}, 11)


def test_the_time_until_the_next_save_to_the_directory_goes_on_over_restarts(
    tmp_path: Path, memory: NodeMemory
) -> None:
    """Else a job that fails more often than `every` would never save there."""
    for attempt in range(1, 4):
        with keeping(tmp_path, memory, every=timedelta(hours=1)) as checkpointer:
            assert checkpointer.restore({"x": 0}) == (attempt - 1 or None)
            schedule = checkpointer._schedule
            assert isinstance(schedule, TimeInterval)
            schedule._saved_s -= 1300
            checkpointer._written_s -= 1300
            keep(checkpointer, {"x": 0}, attempt)
            assert checkpointer.steps() == ([3] if attempt == 3 else [])


def test_memory_is_taken_before_a_state_is_written_and_signals_do_not_prevent_it(
    tmp_path: Path, memory: NodeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the states grow later, in both slots; a profiler's signals come every few milliseconds."""
    taken: list[bool] = []
    write_files = _save.write_files

    def look(slot: _slots.Slot, request: _save.SaveRequest, *rest: Any) -> None:
        held = slot.path(STATE).stat().st_blocks * 512
        taken.append(held >= request.snapshot.replicated["x"].nbytes)
        write_files(slot, request, *rest)

    monkeypatch.setattr(_save, "write_files", look)
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        with keeping(tmp_path, memory) as checkpointer:
            keep(checkpointer, {"x": torch.zeros(10)}, 1, 2)
            keep(checkpointer, {"x": torch.zeros(25_000_000)}, 3, 4)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert taken == [True] * 4


def test_a_tensor_that_consists_of_others_stays_as_it_was_restored(
    tmp_path: Path, memory: NodeMemory
) -> None:
    """As the states of 8-bit optimizers do. Its slot is written again, so none of it may be mapped from there."""

    def pair(step: int) -> TwoTensor:
        return TwoTensor(torch.full((50_000,), step), torch.full((50_000,), -step))

    with torch.serialization.safe_globals([TwoTensor]):
        with keeping(tmp_path, memory) as checkpointer:
            keep(checkpointer, {"pair": [pair(1)]}, 1)
        state: dict[str, Any] = {"pair": []}
        with keeping(tmp_path, memory) as checkpointer:
            assert checkpointer.restore(state) == 1
            for step in (2, 3):
                keep(checkpointer, {"pair": [pair(step)]}, step)
    (kept,) = state["pair"]
    assert (kept.a.unique().tolist(), kept.b.unique().tolist()) == ([1], [-1])


def test_each_node_keeps_the_metrics_and_metadata_of_rank_0(
    tmp_path: Path, memory: NodeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 may be lost, and the other ranks need not pass any."""
    said = {"metrics": {"loss": 0.5}, "metadata": {"commit": "a"}}
    with keeping(tmp_path, memory) as checkpointer:
        assert checkpointer._memory is not None
        exchange = checkpointer._memory._exchange
        monkeypatch.setattr(
            checkpointer._memory,
            "_exchange",
            lambda own: exchange(replace(own, facts={**own.facts, **said})),
        )
        keep(checkpointer, {"x": 0}, 1)
        checkpointer.restore({"x": 0})
        assert checkpointer.restored is not None
        found = {
            "metrics": checkpointer.restored.metrics,
            "metadata": checkpointer.restored.metadata,
        }
    assert found == said


def held(step: int, *, attempt: int = 1, token: int = 7, slot: int = 0) -> Held:
    """Return a state of a node."""
    return Held(step=step, attempt=attempt, token=token, files={NAME: 1}, slot=slot)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        pytest.param({0: None, 2: None}, [], id="none has one"),
        pytest.param({0: held(5), 2: held(5, slot=1)}, [(5, 0, [])], id="both have the same"),
        pytest.param({0: held(5), 2: None}, [(5, 0, [2])], id="a replacement"),
        pytest.param({0: None, 2: held(5)}, [(5, 2, [0])], id="node 0 is the replacement"),
        pytest.param(
            {0: held(4), 2: held(5)}, [(5, 2, [0]), (4, 0, [2])], id="killed between two commits"
        ),
        pytest.param(
            {0: held(5, token=1), 2: held(5, token=2)},
            [(5, 0, [2])],
            id="buffers differ: those of the lowest rank count",
        ),
        pytest.param(
            {0: held(5, attempt=1), 2: held(5, attempt=2), 4: held(5, attempt=2)},
            [(5, 2, [0]), (5, 0, [2, 4])],
            id="the later attempt first",
        ),
    ],
)
def test_the_nodes_agree_on_the_newest_state_and_who_sends_it(
    nodes: dict[int, Held | None], expected: list[tuple[int, int, list[int]]]
) -> None:
    """Rows of what each node has, and what follows."""
    found = candidates(nodes)
    assert [(each.held.step, each.source, each.lacking) for each in found] == expected


@pytest.mark.parametrize(
    ("costs", "steps"),
    [
        ([], 1),
        # 10 ms are 0.8 % of 1.25 s, which is 12.5 steps of 0.1 s; the rank that pays most decides.
        ([(0.01, 1.0, 1000.0, 0.1)], 13),
        ([(0.01, 1.0, 1000.0, 0.1), (0.021, 1.0, 1000.0, 0.1)], 27),
        # The first two took 1 s within 2 s: the next one has to wait for what they were too much.
        ([(0.5, 0.5, 2.0, 0.1)], 1230),
        ([(1e-6, 1e-6, 1.0, 1.0)], 1),
    ],
)
def test_auto_takes_at_most_one_percent_of_the_time(
    costs: list[tuple[float, float, float, float]], steps: int
) -> None:
    """Rows of what was measured, and the steps to the next save."""
    assert steps_between([Costs(*each) for each in costs]) == steps


def test_what_auto_measures_adds_up() -> None:
    """The first save has nothing to report, the second one the first."""
    schedule = CostShare()
    assert schedule.begin(3, 100.0) is None
    schedule.end(102.0, None)
    assert schedule.begin(5, 108.0) == Costs(last_s=2.0, spent_s=2.0, passed_s=8.0, step_s=3.0)


def test_auto_knows_its_interval_after_a_restart() -> None:
    """Else each attempt would begin with two saves to measure, and wait for what these were too much."""
    cheap, dear = Costs(0.01, 0.5, 100.0, 0.1), Costs(0.02, 0.8, 100.0, 0.1)
    assert highest([cheap, dear, cheap]) == dear
    assert highest([]) is None
    schedule = CostShare()
    schedule.resume(40, dear, 1000.0)
    due = 40 + steps_between([dear])
    assert [schedule.is_due(step, None) for step in (41, due - 1, due)] == [False, False, True]
    costs = schedule.begin(due, 1010.0)
    assert costs == pytest.approx(Costs(0.02, 0.8, 110.0, 10 / (due - 40)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_every": 1}, "without every="),
        ({"memory_every": 0, "every": 5}, "memory_every=0"),
        ({"memory_every": "always", "every": 5}, "memory_every='always'"),
        ({"memory_every": 1, "every": 5, "access": "read"}, "with access=read"),
    ],
)
def test_a_wrong_memory_every_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    """Each error says what to write."""
    with pytest.raises(ddpsafe.ConfigError, match=message):
        Checkpointer(tmp_path, **options)


def test_without_ddpsafes_launcher_one_warning_says_that_only_the_disk_is_used(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    """The training saves and restores as without `memory_every`."""
    with pytest.warns(CheckpointWarning, match="the launcher is not ddpsafe's") as warned:
        checkpointer = Checkpointer(tmp_path, every=2, memory_every=1)
    with checkpointer:
        due = [step for step in range(1, 6) if checkpointer.is_due(step)]
        checkpointer.save(state, 6)
        assert checkpointer.restore(state) == 6
        assert checkpointer.restored is not None
        assert checkpointer.restored.source == "disk"
    assert len(warned) == 1
    assert due == [2, 4]


def launch(folder: Path, plan: dict[str, Any], ranks: int = 2) -> dict[int, Any]:
    """Train in ranks that are started again when one is killed; return what each of them returned."""
    folder.mkdir()
    retry = ddpsafe.RetryPolicy(
        on={"killed"}, attempts=8, backoff_initial=0, jitter=0, no_progress=None
    )
    result = ddpsafe.launch(
        programs.train,
        args=(folder, plan),
        nproc_per_node=ranks,
        backend="gloo",
        start_method="forkserver",
        seed=1,
        retry=retry,
    )
    return dict(result.values)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Return the results of two ranks of which none was killed."""
    return launch(tmp_path_factory.mktemp("undisturbed") / "job", {})


def test_killed_ranks_continue_from_memory_with_the_same_result(
    tmp_path: Path, undisturbed: dict[int, Any]
) -> None:
    """One rank, the other, and both: no step is repeated, and every bit is as without a kill."""
    kills = {"1/5": [1], "2/8": [0], "3/9": [0, 1]}
    assert launch(tmp_path / "job", {"kill": kills}) == undisturbed
    for rank in range(2):
        notes = programs.notes_of(tmp_path / "job", rank)
        assert [(note["began"], note["source"]) for note in notes] == [
            (0, None),
            (5, "memory"),
            (8, "memory"),
            (9, "memory"),
        ]
    # The last state gets into the directory when the training ends.
    assert Checkpointer(tmp_path / "job" / "checkpoints", access="read").latest() == programs.STEPS


def test_a_rank_killed_while_it_writes_leaves_the_state_before(
    tmp_path: Path, undisturbed: dict[int, Any]
) -> None:
    """Rank 0 dies inside a save to memory, one to the directory, and a restore."""
    inside = {"1": [6, "memory"], "2": [8, "disk"], "3": [-1, "restore"], "4": [9, "memory"]}
    plan = {"every": 4, "kill_inside": inside}
    assert launch(tmp_path / "job", plan) == undisturbed
    notes = programs.notes_of(tmp_path / "job", 1)
    assert [(note["began"], note["source"]) for note in notes] == [
        (0, None),
        (5, "memory"),
        # None of the attempt that died in its restore.
        (8, "memory"),
        (8, "memory"),
    ]


@pytest.mark.full
def test_sharded_models_continue_from_memory_on_one_node(tmp_path: Path) -> None:
    """Each rank keeps its own part, and finds it again."""
    whole = launch(tmp_path / "whole", {"sharded": True})
    kills = {"1/5": [1], "2/8": [0, 1]}
    assert launch(tmp_path / "killed", {"sharded": True, "kill": kills}) == whole
    notes = programs.notes_of(tmp_path / "killed", 0)
    assert [note["began"] for note in notes] == [0, 5, 8]


def test_too_little_memory_is_one_error_or_one_warning(tmp_path: Path) -> None:
    """Nothing is taken; with a warning, the training saves to the directory only."""
    found = {
        how: ddpsafe.launch(
            programs.lack_memory, args=(tmp_path, how), nproc_per_node=2, backend="gloo"
        ).values
        for how in ("raise", "warn")
    }
    for rank in range(2):
        raised, warned = found["raise"][rank], found["warn"][rank]
        assert "The state of step 1 cannot be kept in memory" in raised["error"], raised
        assert raised["steps"] == []
        assert warned["error"] is None
        # The state that memory did not take, and those that were due.
        assert warned["steps"] == [6, 3, 1]
    (said,) = found["warn"][0]["said"]
    assert "states are saved to the directory only" in said
    assert found["warn"][1]["said"] == []


@pytest.mark.parametrize(
    ("on_failure", "on_disk", "restored", "said"),
    [
        ("raise", True, "NoSpaceError: The state of step 2 cannot be kept in memory", ""),
        ("warn", True, 1, "step 2 is in memory, and a node lacks it: two states need 5 MB more"),
        ("warn", False, "RestoreError: No state in memory can be restored", "a node lacks it"),
    ],
)
def test_a_replacement_with_too_little_memory_is_one_error_or_one_warning(
    tmp_path: Path, on_failure: str, on_disk: object, restored: object, said: str
) -> None:
    """It is the same on all ranks, and none calls the state damaged."""
    plan = {"on_failure": on_failure, "on_disk": on_disk}
    result = ddpsafe.launch(
        programs.replace_a_node, args=(tmp_path, plan), nproc_per_node=2, backend="gloo"
    )
    for rank, (found, step, warned) in result.values.items():
        assert str(found).startswith(str(restored))
        assert step == (restored if restored == 1 else 2)
        assert [said in each for each in warned] == [True] * bool(said and rank == 0)


@pytest.mark.full
@pytest.mark.parametrize(("program", "value"), [("keep_a_table", True), ("begin_again", 1)])
def test_a_slot_that_is_written_again_changes_nothing_else(
    tmp_path: Path, program: str, value: object
) -> None:
    """Not what a module keeps of the state that it was given, nor what a training from the beginning saves."""
    result = ddpsafe.launch(
        getattr(programs, program),
        args=(tmp_path,),
        nproc_per_node=2,
        backend="gloo",
        retry={"attempts": 2, "on": {"killed"}, "no_progress": None},
    )
    assert result.values == {0: value, 1: value}


def test_what_saves_cost_is_known_after_a_restore_from_the_directory(tmp_path: Path) -> None:
    """Step 12 is on disk, and what was saved to measure it in memory: the next attempt does not measure again."""
    result = ddpsafe.launch(
        programs.measure_once,
        args=(tmp_path,),
        nproc_per_node=2,
        backend="gloo",
        retry={"attempts": 2, "on": {"killed"}, "no_progress": None},
    )
    assert result.values == {0: [12], 1: [12]}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("restarts", [8, pytest.param(200, marks=pytest.mark.soak)])
def test_restarts_leak_neither_descriptors_nor_memory(tmp_path: Path, restarts: int) -> None:
    """The launcher holds after the last one what it held after the third: both slots are in use by then."""
    ddpsafe.launch(
        programs.be_killed_often,
        args=(tmp_path, restarts),
        nproc_per_node=2,
        backend="gloo",
        start_method="forkserver",
        retry=ddpsafe.RetryPolicy(
            on={"killed"}, attempts=restarts + 1, backoff_initial=0, jitter=0, no_progress=None
        ),
    )
    notes = programs.notes_of(tmp_path, 0)
    assert len(notes) == restarts + 1
    third, last = notes[2], notes[-1]
    assert last["fds"] == third["fds"]
    assert last["threads"] == third["threads"]
    assert third["held"] <= last["held"] < third["held"] + 2**14  # the manifest has longer numbers
    assert last["rss"] - third["rss"] < MAX_GROWTH_BYTES
