"""Where a rank is, as read from torch's two flight recorders; NCCL's dumps are synthesised."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import machine
import pytest
import scripts
import torch.distributed

from ddpsafe._wire.messages import MAIN_GROUP, Position
from ddpsafe._worker import torch_hooks
from ddpsafe._worker.torch_hooks import forget_collectives, read_recorders

C10D: Final = "torch._C._distributed_c10d"
MAIN: Final = ("0", "default_pg")


def entry(number: int, **fields: Any) -> dict[str, Any]:
    """Return an entry as FlightRecorder::dump_json of torch 2.13 writes it, queued by default."""
    name = fields.pop("name", "nccl:all_reduce")
    return {
        "record_id": number, "pg_id": 0, "process_group": list(MAIN), "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": name, "time_created_ns": 1_000 + number,
        "input_sizes": [[4, 2]], "input_dtypes": ["Float"], "output_sizes": [[4, 2]],
        "output_dtypes": ["Float"], "state": "scheduled", "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 0, "retired": False, "timeout_ms": 600_000, "is_p2p": False,
        "thread_id": "1", "thread_name": "python", **fields,
    }  # fmt: skip


def done(number: int, **fields: Any) -> dict[str, Any]:
    """Return an entry that the watchdog has retired, i.e. removed as completed."""
    return entry(number, state="completed", retired=True, **fields)


class Recorder:
    """A fake recorder of torch with given content, which records its queries."""

    def __init__(self, entries: list[dict[str, Any]], status: dict[str, tuple[int, int]]) -> None:
        """Set the entries, and the last enqueued and last completed number by group."""
        self.entries = entries
        self.status = status
        self.queries: list[bool] = []
        self.blocks: threading.Event | None = None

    def __call__(self, includeCollectives: bool = True, onlyActive: bool = False) -> str:  # noqa: ARG002, FBT001, FBT002, N803 - as torch has it
        """Return the content as JSON."""
        self.queries.append(includeCollectives)
        if includeCollectives and self.blocks is not None:
            self.blocks.wait(60)
        content: dict[str, Any] = {
            "version": "2.10",
            "pg_config": {
                entry["process_group"][0]: {"name": entry["process_group"][0], "ranks": "[0, 1]"}
                for entry in self.entries
            },
            "pg_status": {
                group: {
                    "last_enqueued_collective": str(queued),
                    "last_started_collective": "-1",
                    "last_completed_collective": str(completed),
                }
                for group, (queued, completed) in self.status.items()
            },
        }
        if includeCollectives and self.entries:
            content["entries"] = self.entries
        return json.dumps(content)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_hooks, "_forgotten", set())
    monkeypatch.setattr(torch_hooks, "_queued", {})
    # The fake has no driver that could hang, so its answer is waited for on any machine.
    monkeypatch.setattr(torch_hooks, "_EVENTS_LIMIT_S", machine.hang_limit(60))


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Recorder, Recorder]]:
    """Replace torch's recorders with fakes that have the given entries."""

    def put(
        nccl: list[dict[str, Any]],
        others: list[dict[str, Any]] = [],  # noqa: B006 - not changed
        *,
        status: dict[str, tuple[int, int]] | None = None,
    ) -> tuple[Recorder, Recorder]:
        if status is None:
            status = {}
            for each in nccl:
                queued, completed = status.get(str(each["pg_id"]), (-1, -1))
                number = each["collective_seq_id"]
                ended = number if each["retired"] else completed
                status[str(each["pg_id"])] = (max(queued, number), max(completed, ended))
        recorders = Recorder(nccl, status), Recorder(others, {"0": (1, 1)} if others else {})
        monkeypatch.setattr(f"{C10D}._dump_nccl_trace_json", recorders[0], raising=False)
        monkeypatch.setattr(f"{C10D}._dump_fr_trace_json", recorders[1], raising=False)
        return recorders

    return put


def position() -> Position:
    """Return where this process is, with the names and shapes of collectives."""
    return Position(collectives=read_recorders(asks_events=True)[0])


def test_nccl_of_torch_2_15_has_a_recorder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entries are read also while the job may be healthy: the hook that writes them has no events.

    Its counters begin with 0, as in the dump of a group whose backend has no recorder (torch 2.15).
    """
    name = "nccl2:all_reduce"
    own = Recorder([done(1, name=name), entry(2, name=name), entry(3, name=name)], {"0": (2, 0)})
    others = Recorder([done(1, name="gloo:barrier")], {"0": (1, 1)})

    def dump(*, backend: str = "gloo", **options: bool) -> str:
        return {"gloo": others, "nccl2": own}[backend](**options)

    monkeypatch.setattr(f"{C10D}._dump_fr_trace_json", dump, raising=False)
    monkeypatch.setattr(f"{C10D}._dump_nccl_trace_json", Recorder([], {}), raising=False)
    for asks_events in (False, True):
        found = Position(collectives=read_recorders(asks_events=asks_events)[0])
        assert numbers(found) == [1, 2, 3]
        assert [each.state for each in found.collectives[:3]] == ["completed", "queued", "queued"]
        assert numbers(found, f"{MAIN_GROUP} (gloo)") == [1]
    forget_collectives()
    assert read_recorders(asks_events=True)[0] == ()


def test_torch_without_a_recorder_of_each_backend_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before 2.15 its function refuses the argument, and every read of a position would raise."""
    asked = []

    def dump(**options: object) -> str:
        asked.append("backend" in options)
        return "{}" if not asked[-1] else broken()

    monkeypatch.setattr(f"{C10D}._dump_fr_trace_json", dump, raising=False)
    for _ in range(3):
        read_recorders(asks_events=False)
    forget_collectives()
    assert asked.count(True) == 1
    assert asked.count(False) == 4


@pytest.mark.skipif(
    "backend (str"
    not in str(getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None).__doc__),
    reason="torch before 2.15 has no recorder for each backend",
)
def test_recorder_of_a_backend_is_found_by_its_name(tmp_path: Path) -> None:
    """A group without a recorder of its own gets torch's hook, as NCCL's has since 2.15."""
    run = scripts.run(tmp_path, HOOKED)
    assert run.err == ""
    assert run.lines() == ["[] [('all_reduce', 1), ('all_reduce', 2)]"]


HOOKED: Final = """
import torch, torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from ddpsafe._worker import torch_hooks

def make(store, rank, size, timeout):
    return FakeProcessGroup._create_internal(rank, size)

dist.Backend.register_backend("other", make, devices=["cpu"])
dist.init_process_group("cpu:other", rank=0, world_size=2, store=dist.HashStore())
for _ in range(2):
    dist.all_reduce(torch.ones(4))
before = torch_hooks.read_recorders(asks_events=False)[0]
dump = torch_hooks._RECORDERS[torch_hooks._NCCL2]
dump.keywords["backend"] = dist.group.WORLD._get_backend(torch.device("cpu")).name()
found = torch_hooks.read_recorders(asks_events=False)[0]
print(list(before), [(each.name.partition(":")[2], each.number) for each in found])
"""


def numbers(found: Position, group: str = MAIN_GROUP) -> list[int]:
    """Return the known numbers of a group."""
    return [each.number for each in found.collectives if each.group == group]


def test_nccl_is_read_from_its_own_recorder(record: Any) -> None:
    """The generic recorder exists in every build, but has nothing about NCCL."""
    record([done(1), done(2), done(3, name="nccl:broadcast")])
    found = position()
    assert numbers(found) == [1, 2, 3]
    last = found.in_group(MAIN_GROUP)
    assert last is not None
    assert (last.name, last.state, last.sizes) == ("nccl:broadcast", "completed", "[[4, 2]]")


@pytest.mark.parametrize(
    ("nccl", "first", "last", "known"),
    [
        ([done(1), entry(2)], 2, 2, {1, 2}),
        ([done(1), entry(2), entry(3)], 2, 3, {1, 2, 3}),
        ([*map(done, range(1, 118)), *map(entry, range(118, 161))], 118, 160, {102, 117, 118, 160}),
        ([*map(done, range(1, 118)), *map(entry, range(118, 900))], 118, 899, {117, 118, 245, 899}),
        ([*map(done, range(1, 301))], None, 300, {285, 300}),
        # A side stream is behind: number 5 has not completed, although 6 has.
        ([done(4), entry(5), done(6), entry(7)], 5, 7, {4, 5, 6, 7}),
        # The query sees it as completed, but the watchdog has not yet retired it.
        ([done(1), entry(2, state="completed")], None, 2, {1, 2}),
        # A coalesced call: its members never complete, only the whole does.
        ([entry(1), entry(1), done(1, name="nccl:ALLREDUCE_coalesced")], None, 1, {1}),
        ([entry(1), entry(1), entry(1, name="nccl:ALLREDUCE_coalesced")], 1, 1, {1}),
        # A collective captured in a graph is never retired; later ones are.
        ([entry(1, name="nccl:allreduce_coalesced"), done(2), entry(3)], 3, 3, {1, 2, 3}),
        ([done(1), entry(9, is_p2p=True, name="nccl:send 0->1")], None, 1, {1}),
    ],
    ids=[
        "waits",
        "queued two",
        "42 ahead",
        "782 ahead",
        "all done",
        "side stream",
        "completed",
        "coalesced done",
        "coalesced waits",
        "captured",
        "p2p",
    ],
)  # fmt: skip
def test_first_incomplete_and_last_queued_are_distinguished(
    record: Any, nccl: list[dict[str, Any]], first: int | None, last: int, known: set[int]
) -> None:
    """The GPU is at the first, the CPU at the last; differences between ranks are kept."""
    record(nccl)
    found = position()
    incomplete, newest = found.first_incomplete(MAIN_GROUP), found.in_group(MAIN_GROUP)
    assert (incomplete.number if incomplete else None) == first
    assert newest is not None
    assert newest.number == last
    assert known <= set(numbers(found))
    assert len(numbers(found)) <= 200


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "queued"),
        ({"state": "started"}, "started"),  # only with TORCH_NCCL_ENABLE_TIMING=1
        ({"state": "completed"}, "completed"),
        ({"retired": True}, "completed"),
    ],
)
def test_queued_started_and_completed_are_distinguished(
    record: Any, fields: dict[str, Any], state: str
) -> None:
    """NCCL's queued calls may wait behind others; gloo's have started when they are recorded."""
    record([entry(1, **fields)])
    (found,) = position().collectives
    assert found.state == state


def test_gloo_collectives_have_started_when_they_are_recorded(record: Any) -> None:
    """Gloo's recorder leaves them "scheduled" forever."""
    record([], [entry(1, name="gloo:all_reduce")])
    (found,) = position().collectives
    assert (found.group, found.state) == (MAIN_GROUP, "started")


def test_both_recorders_are_combined(record: Any) -> None:
    """A gloo subgroup, as made by even_steps, exists beside NCCL's group of all ranks."""
    record(
        [done(1), entry(2)], [entry(7, name="gloo:all_reduce", process_group=["1", "undefined"])]
    )
    found = position()
    assert (numbers(found), numbers(found, "1")) == ([1, 2], [7])


def test_two_backends_of_one_group_keep_separate_numbers(record: Any) -> None:
    """With ``cpu:gloo,cuda:nccl`` each backend counts; NCCL's numbers are the group's."""
    record([entry(5)], [done(90, name="gloo:broadcast")])
    found = position()
    assert (numbers(found), numbers(found, "default_pg (gloo)")) == ([5], [90])


def broken(**_: object) -> str:
    """Fail, as a private function of a later torch version may."""
    msg = "unexpected keyword"
    raise TypeError(msg)


@pytest.mark.parametrize(
    ("name", "expected"), [("_dump_nccl_trace_json", [3]), ("_dump_fr_trace_json", [1])]
)
def test_failure_of_one_recorder_does_not_affect_the_other(
    record: Any, monkeypatch: pytest.MonkeyPatch, name: str, expected: list[int]
) -> None:
    """Each is read separately."""
    record([entry(1)], [entry(3, name="gloo:barrier", process_group=["1", ""])])
    monkeypatch.setattr(f"{C10D}.{name}", broken)
    assert [each.number for each in position().collectives] == expected


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"0": (160, 117)}, [(117, "completed"), (118, "queued"), (160, "queued")]),
        ({"0": (118, 117)}, [(117, "completed"), (118, "queued")]),
        ({"0": (117, 117)}, [(117, "completed")]),
        ({"0": (1, -1)}, [(1, "queued")]),
        ({"0": (3, -1)}, [(1, "queued"), (3, "queued")]),
        ({"0": (-1, -1)}, []),
        ({"0": (5, 4), "1": (900, 3)}, [(4, "completed"), (5, "queued")]),
        ({}, []),
    ],
)
def test_only_counters_of_a_healthy_job_are_read(
    record: Any, status: dict[str, tuple[int, int]], expected: list[tuple[int, str]]
) -> None:
    """A query of a CUDA event would break a graph that another thread is capturing."""
    # Torch's counters begin at -1; if the first collective is waiting, none has completed.
    nccl, _ = record([entry(1)], status=status)
    found = read_recorders(asks_events=False)[0]
    assert [(each.number, each.state) for each in found] == expected
    assert set(nccl.queries) == {False}


def test_an_unresponsive_driver_hides_names_but_not_numbers(
    record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CudaEventQuery can block on another thread's cudaDeviceSynchronize; the counters still work."""
    monkeypatch.setattr(torch_hooks, "_EVENTS_LIMIT_S", 0.1)
    nccl, _ = record([done(1), entry(2)], status={"0": (2, 1)})
    nccl.blocks = threading.Event()
    try:
        assert numbers(position()) == [1, 2]
    finally:
        nccl.blocks.set()


def test_destroyed_groups_are_forgotten_in_both_recorders(record: Any) -> None:
    """The next group has the same name and counts from 1 again."""
    nccl, others = record([done(7)], [done(9, name="gloo:barrier")])
    forget_collectives()
    assert position().collectives == ()
    assert set(nccl.queries) == set(others.queries) == {False, True}
    nccl.entries.append(entry(1, pg_id=1))
    nccl.status["1"] = (1, 0)
    assert numbers(position()) == [1]
    assert [each.number for each in read_recorders(asks_events=False)[0]] == [1]


def test_collectives_without_a_name_match_any() -> None:
    """Counters do not name the collective, so it cannot be said to differ from another."""
    queued = read_one({"0": (5, 4)})
    assert not torch.distributed.is_initialized()
    assert queued.may_pair_with(queued)


def read_one(status: dict[str, tuple[int, int]]) -> Any:
    """Return the last collective that the counters show."""
    content = json.loads(Recorder([], status)(includeCollectives=False))
    return torch_hooks._from_counters(content)[-1]
