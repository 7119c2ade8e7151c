"""Checkpoints of several ranks: they agree on every result, and training survives their deaths."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import checkpoint_programs as programs
import forked_ranks
import pytest
import scripts
import torch
from torch.torch_version import TorchVersion

import ddpsafe
from ddpsafe._job import peers
from ddpsafe._job.control import Control
from ddpsafe.checkpoint import Checkpointer


@pytest.fixture(scope="module")
def disagreement(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Return what each of two ranks saw when one of them failed."""
    base = tmp_path_factory.mktemp("disagreement")
    return programs.run_ranks(programs.everything_two_ranks_disagree_on, base)


@pytest.mark.parametrize(
    ("case", "kind", "message", "blamed"),
    [
        (
            "own directories",
            "DirectoryError",
            "rank 0 wrote to .*, but rank 1 on .* cannot see it",
            1,
        ),
        ("step", "ConfigError", "rank 1 saves step 3, but rank 0 saves 2", 1),
        ("other calls", "ConfigError", r"rank 1 calls save\(\) while rank 0 .* restore", 1),
        ("unsafe on rank 0", "UnsafeStateError", r"state\['code'\]", 0),
        ("locked", "DirectoryLockedError", "Checkpointer of this process", 0),
        ("lock gone", "SaveError", "has lost its lock on", 0),
        ("lock gone, asynchronous", "SaveError", "has lost its lock on", 0),
    ],
)
def test_error_of_one_rank_is_raised_on_every_rank(
    disagreement: dict[int, dict[str, Any]], case: str, kind: str, message: str, blamed: int
) -> None:
    """Every rank gets the same class and facts, with the rank where it happened."""
    for rank in range(2):
        found = disagreement[rank][case]
        assert found["class"] == kind
        assert found["rank"] == blamed
        assert_matches(message, found["text"])
    assert (
        f"(raised on rank {blamed}, seen by rank 1 (world_size 2) on "
        in (disagreement[1][case]["text"])
    )


def assert_matches(pattern: str, text: str) -> None:
    """Fail unless the pattern matches the text."""
    assert re.search(pattern, text), text


def test_ranks_agree_after_a_failed_save(disagreement: dict[int, dict[str, Any]]) -> None:
    """The next save works, and a restore returns its values."""
    for rank in range(2):
        assert disagreement[rank]["backwards"]["class"] == "StepOrderError"
        assert disagreement[rank]["read"] == 2
        assert disagreement[rank]["value"] == 0  # rank 0's value on both
    assert disagreement[0]["left"] == ["latest", "step-000000000001", "step-000000000002"]


def test_absent_rank_is_named_within_the_save_timeout(tmp_path: Path) -> None:
    """Every rank names it, including those that wait for rank 0 while rank 0 waits for it."""
    found = programs.run_ranks(programs.fail_alone, tmp_path, "rank 1 is absent", ranks=3)
    for rank in (0, 2):
        assert found[rank]["class"] == "SaveTimeoutError", found
        assert found[rank]["missing_ranks"] == (1,)
        assert found[rank]["waited_s"] < 10


def test_suspended_writer_is_named_and_the_others_do_not_wait(tmp_path: Path) -> None:
    """Rank 0 is suspended inside its save: the launch ends and names it."""
    with pytest.raises(ddpsafe.LaunchError) as caught:
        programs.run_ranks(
            programs.fail_alone, tmp_path, "rank 0 stops", ranks=3, run_dir=tmp_path / "run"
        )
    assert "rank 0 (world_size 3)" in str(caught.value).splitlines()[0], str(caught.value)
    assert "'missing_ranks': (0,)" in (tmp_path / "found-1").read_text()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder in which ``source`` has the checkpoints of steps 1 to 3."""
    with Checkpointer(tmp_path / "source") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save({"x": step}, step)
    return tmp_path


def test_ranks_that_see_different_checkpoints_agree_on_one_or_name_the_rank_that_lacks_it(
    source: Path,
) -> None:
    """They use the newest that all see, with a warning; having none in common is an error."""
    found = programs.run_ranks(programs.see_different_directories, source)
    for rank in range(2):
        assert found[rank]["older"]["class"] == "nothing"
        assert found[rank]["older"]["x"] == 2
        for case, lacking in (("lacks", "rank 1 on .* sees no step"), ("apart", "sees step 2")):
            assert found[rank][case]["class"] == "MissingCheckpointError"
            assert_matches(lacking, found[rank][case]["text"])
            assert found[rank][case]["x"] == 0
    (warning,) = found[0]["older"]["warnings"]
    assert_matches(
        "not every rank sees step 3 .*; using step 2, .*rank 1 on .* sees steps 1 and 2", warning
    )
    assert found[1]["older"]["warnings"] == []


def test_damage_that_one_rank_finds_counts_for_all(source: Path) -> None:
    """No rank continues from another step than the others."""
    shutil.copytree(source / "source", source / "copy", symlinks=True)
    file = source / "copy" / "step-000000000003" / "state.pt"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    found = programs.run_ranks(programs.find_damage_on_one_rank, source)
    assert [found[rank][:2] for rank in range(2)] == [(2, 2), (2, 2)]
    assert_matches("step 3: state.pt: .*found by rank 1 on ", found[0][2][0])


@pytest.mark.full
def test_each_rank_restores_its_own_generators(tmp_path: Path) -> None:
    """With a larger world size, the additional ranks keep their generators."""
    before = programs.run_ranks(programs.draw, tmp_path, kwargs={"save": True})
    after = programs.run_ranks(programs.draw, tmp_path, ranks=3, kwargs={"save": False})
    assert [after[rank] for rank in range(2)] == [before[rank] for rank in range(2)]
    assert before[0][0] != before[1][0]
    assert after[2][1] == 102


@pytest.mark.full
def test_other_number_of_ranks_reads_every_sample_once(tmp_path: Path) -> None:
    """Two ranks, then three, match one process; parameters differ only by the order of summation."""
    alike = {"dropout": 0.0}  # dropout draws differ between ranks
    whole = programs.run_ranks(programs.train, tmp_path / "whole", ranks=1, kwargs=alike)[0]
    with pytest.raises(ddpsafe.RankKilledError):
        programs.run_ranks(
            programs.train,
            tmp_path / "parts",
            kwargs={**alike, "kill": (1, 0, 3)},
            run_dir=tmp_path / "run",
        )
    ended = programs.run_ranks(programs.train, tmp_path / "parts", ranks=3, kwargs=alike)[0]
    assert ended["begun"] == 3
    for epoch in range(3):
        read = [i for e, ranks in ended["seen"] if e == epoch for rank in ranks for i in rank]
        assert Counter(read) == Counter(range(24))
    for ours, theirs in zip(ended["parameters"], whole["parameters"], strict=True):
        assert_close(ours, theirs)


def test_rank_without_heartbeat_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on another host is checked by its heartbeat, and only while this rank reads it."""
    monkeypatch.setattr(peers, "SILENCE_S", 0.2)
    monkeypatch.setattr(peers, "_CHECK_S", 0.0)
    monkeypatch.setattr(peers, "_SEARCH_S", 0.0)
    control = Control(torch.distributed.HashStore(), rank=0, world_size=3)
    watch = peers.PeerWatch(control, 0, beats="here")
    there = {"host": "gpu-07", "kernel": "another", "pid": 1, "started": 5}
    control.put("process/1", json.dumps(there).encode())

    def look(limit_s: float) -> tuple[int, str] | None:
        ends = time.monotonic() + limit_s
        while time.monotonic() < ends:
            lost = watch.find_lost([1, 2], lambda _: False)
            if lost is not None:
                return lost
        return None

    assert look(0.5) is None  # no heartbeat yet
    for number in range(20):
        control.put("here/beat/1", str(number).encode())
        assert look(0.02) is None
    assert look(10) == (1, "it has sent no heartbeat from gpu-07 for 0.2 s.")
    assert watch.find_lost([1], lambda _: True) is None  # it has sent its message
    watch.stop()


def test_ranks_agree_when_a_save_is_due(disagreement: dict[int, dict[str, Any]]) -> None:
    """The clock of rank 0 decides, at steps that rank 0 chooses."""
    assert disagreement[0]["due"] == disagreement[1]["due"]
    assert any(disagreement[0]["due"])
    assert not all(disagreement[0]["due"])


def assert_close(ours: Any, theirs: Any) -> None:
    """Compare nested lists of numbers."""
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-5, rtol=1e-4)


NEEDS_FSDP2_ON_CPUS: Final = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.7", reason="torch 2.6 has no streams of CPUs for FSDP2"
)


@pytest.fixture(
    scope="module", params=[pytest.param("sharded", marks=NEEDS_FSDP2_ON_CPUS), "whole"]
)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """Return the directory of a model trained on two ranks, and the state it ended with."""
    directory = tmp_path_factory.mktemp(request.param)
    how = {"save": True, "sharded": request.param == "sharded"}
    return directory, programs.run_ranks(programs.save_and_restore_shards, directory, kwargs=how)[0]


@pytest.mark.full(but=["sharded-1-False"])
@pytest.mark.parametrize(
    ("ranks", "sharded"), [pytest.param(3, True, marks=NEEDS_FSDP2_ON_CPUS), (1, False)]
)
def test_model_continues_sharded_or_whole_on_any_number_of_ranks(
    trained: tuple[Path, dict[str, Any]],
    ranks: int,
    sharded: bool,  # noqa: FBT001 - a parameter of a test
) -> None:
    """Parameters and AdamW's moments match after a restore with or without FSDP2."""
    directory, before = trained
    how = {"save": False, "sharded": sharded}
    found = programs.run_ranks(programs.save_and_restore_shards, directory, ranks=ranks, kwargs=how)
    for after in found.values():
        assert after["step"] == 2
        assert after["epoch"] == 7
        for ours, theirs in zip(after["parameters"], before["parameters"], strict=True):
            assert_close(ours, theirs)


@pytest.mark.full
def test_tensors_on_subsets_of_the_ranks_are_restored(tmp_path: Path) -> None:
    """Sub-meshes with equal parts, replicas, meshes without rank 0, also with asynchronous saves."""
    found = programs.run_ranks(programs.distribute_over_parts_of_the_ranks, tmp_path, ranks=4)
    for rank, cases in found.items():
        for name, right in cases.items():
            assert right == [True] * 4, (rank, name)


@pytest.mark.full(but=["whole"])
def test_other_shape_is_refused_before_anything_changes(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    """Sharded or whole, the same error class is raised on every rank; nor does strict=False fill a part."""
    found = programs.run_ranks(programs.refuse_shards, trained[0])
    assert list(found.values()) == [("CheckpointMismatchError", [0, 0], [True] * 3)] * 2


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("unfrozen after wrapping", "'model' on rank 1: 0.weight"),
        ("loaded on one rank", "'model' on rank 1: 2.weight, 2.bias"),
        ("not", None),  # the buffers of the batch norm differ after each step
        pytest.param("half precision", None, marks=pytest.mark.full),
    ],
)
def test_copies_of_a_model_that_differ_are_named_by_parameter(
    tmp_path: Path, how: str, named: str | None
) -> None:
    """Once, on rank 0, by the first save; a model as DDP trains it is never accused."""
    seen = programs.run_ranks(programs.drift, tmp_path / "own", how)
    assert seen[1] == []
    assert len(seen[0]) == (named is not None), seen
    if named is not None:
        assert named in seen[0][0]
        assert "the checkpoint of step 0 has rank 0's" in seen[0][0]


@pytest.mark.parametrize(
    "to",
    [[0], pytest.param([], marks=pytest.mark.full), pytest.param([1, 0], marks=pytest.mark.full)],
)
def test_an_optimizer_with_parts_on_all_ranks_is_saved_whole(tmp_path: Path, to: list[int]) -> None:
    """ZeroRedundancyOptimizer, whether and when the script has consolidated its state or not."""
    for went_on, resumed in programs.run_ranks(programs.resume_zero, tmp_path / "own", to).values():
        assert went_on == resumed


def test_a_default_device_without_values_changes_no_checkpoint(tmp_path: Path) -> None:
    """What ddpsafe saves itself, such as the generators, does not follow ``torch.set_default_device``."""
    assert set(
        programs.run_ranks(programs.save_with_default_device_meta, tmp_path / "own").values()
    ) == {1}


@pytest.mark.full(but=["raises"])
@pytest.mark.parametrize(
    ("victim", "how", "kind", "message"),
    [
        (1, "killed", "SaveError", r"its process \d+ on \S+ has ended"),
        (0, "killed", "SaveError", "has ended|the store.* no longer reachable"),
        (1, "out of luck", "SaveError", "it has failed: .*out of luck|has ended"),
    ],
    ids=["rank 1", "rank 0, which serves the store", "raises"],
)
def test_dead_rank_ends_the_save_at_once_without_a_launcher(
    tmp_path: Path, victim: int, how: str, kind: str, message: str
) -> None:
    """The others do not wait for the timeout of 30 minutes; the message names the dead rank."""
    context = forked_ranks.server()
    ready = context.Barrier(2)
    arguments = (tmp_path / "c", forked_ranks.free_port(), tmp_path / "told", victim, how, ready)
    ranks = [
        context.Process(target=programs.die_before_the_save, args=(rank, *arguments))
        for rank in range(2)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(scripts.LIMIT_S)
        assert each.exitcode is not None
    told = json.loads((tmp_path / "told").read_text())
    assert (told["class"], told["rank"], told["origin"]) == (kind, victim, "peer-lost")
    assert f"rank {victim} is lost" in told["text"]
    assert_matches(message, told["text"])
    assert told["waited_s"] < 5
