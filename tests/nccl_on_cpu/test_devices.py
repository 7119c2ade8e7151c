"""Which rank gets which GPU, and that no launch starts with fewer: tested without a GPU."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

import forked_ranks
import nccl_programs as programs
import pytest
import scripts
import torch
from forked_ranks import by_hand, free_port

import ddpsafe
from ddpsafe import _gpus
from ddpsafe._config import LaunchConfig
from ddpsafe._gpus import VisibleGpus
from ddpsafe._launcher.plan import make_plan
from ddpsafe.checkpoint._trees import HostCopies

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")

A, B = "a", "b"
"""UUIDs of two GPUs."""


def ranks(*seen: str, backend: str = "auto", hosts: str = "") -> list[VisibleGpus]:
    """Return ranks that see GPUs (``"ab"`` is two), on one host or on the hosts that the letters name."""
    at = hosts or "n" * len(seen)
    return [
        VisibleGpus(
            rank=rank,
            node_rank=0,
            host=f"node-{at[rank]}",
            local_rank=at[:rank].count(at[rank]),
            local_world_size=at.count(at[rank]),
            backend=backend,
            uuids=tuple(f"GPU-{letter}" for letter in gpus),
        )
        for rank, gpus in enumerate(seen)
    ]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (ranks("", ""), ("gloo", ())),
        (ranks("ab", "ab"), ("nccl", (0, 1))),
        (ranks("abcd", "abcd"), ("nccl", (0, 1))),
        (ranks("a", "b"), ("nccl", (0, 0))),  # srun --gpus-per-task=1
        (ranks("ab", "cd", "ef", "gh"), ("nccl", (0, 0, 0, 0))),  # two each
        (ranks("ab", "ba"), None),  # different order: index 1 of rank 1 is the GPU of rank 0
        (ranks("ab", "ab", "cd", "cd", hosts="xxyy"), ("nccl", (0, 1, 0, 1))),
        (ranks("ab", "ab", "c", "d", hosts="xxyy"), ("nccl", (0, 1, 0, 0))),
        (ranks("a", "a", backend="gloo"), ("gloo", ())),
        (ranks("a", "b", backend="cpu:gloo,cuda:nccl"), ("cpu:gloo,cuda:nccl", (0, 0))),
        (ranks("a"), ("nccl", (0,))),
        (ranks("", backend="mpi"), ("mpi", ())),
    ],
)
def test_every_rank_gets_its_own_gpu(
    seen: list[VisibleGpus], expected: tuple[str, tuple[int, ...]] | None
) -> None:
    """Ranks that see the same GPUs follow torchrun's convention; a rank that sees only its own takes the first."""
    if expected is None:
        with pytest.raises(ddpsafe.ConfigError, match="ranks 0 and 1 would share GPU-a"):
            _gpus.assign(seen)
        return
    agreed = _gpus.assign(seen)
    assert (agreed.backend, agreed.indexes) == expected


@pytest.mark.parametrize(
    ("seen", "texts"),
    [
        (ranks("a", "a"), ["2 ranks on node-n need 2 GPUs, but see 1", "ranks 0 and 1"]),
        (ranks("ab", "ab", "ab"), ["3 ranks on node-n need 3 GPUs, but see 2"]),
        (ranks("a", "a", "b"), ["3 ranks on node-n need 3 GPUs, but see 2", "ranks 0 and 1"]),
        (ranks("ab", "ab", "c", "c", hosts="xxyy"), ["2 ranks on node-y need 2 GPUs, but see 1",
            "ranks 2 and 3 would share GPU-c"]),
        (ranks("ab", "ab", "", "", hosts="xxyy"), ["ranks 2 and 3 on node-y", "ranks 0 and 1 can"]),
        (ranks("a", ""), ["rank 1 on node-n", "rank 0 can"]),
        (ranks("", backend="nccl"), ["'nccl'", "rank 0 on node-n", "see none"]),
        ([*ranks("a", backend="nccl"), *ranks("a", "b", backend="gloo")[1:]],
            ["rank 0 with 'nccl'", "rank 1 with 'gloo'"]),
    ],
)  # fmt: skip
def test_ranks_without_a_gpu_of_their_own_are_refused(
    seen: list[VisibleGpus], texts: list[str]
) -> None:
    """The error has the ranks, their host and the number of GPUs."""
    with pytest.raises(ddpsafe.ConfigError) as caught:
        _gpus.assign(seen)
    assert [text for text in texts if text not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("text", "present", "count"),
    [
        ("0,1", 8, 2),
        ("4,5", 8, 2),
        ("4, 5", 8, 2),
        ("4,5", None, 2),
        ("4,9,5", 8, 1),
        ("-1", 8, 0),
        ("", 8, 0),
        ("0,0", 8, 0),
        ("1,x,2", 8, 1),
        ("GPU-8f3a,GPU-91c2", 8, 2),
        ("GPU-8f3a,GPU-8f3a", 8, 0),
        ("MIG-1/2/0", 1, 1),
        ("NoDevFiles", 8, 0),
        ("0,00", 8, 0),
        ("4,9,9", 8, 0),
        ("0abc,1", 8, 2),
        ("+0", 8, 1),
        (" 0 , 1 ,", 8, 2),
        ("GPU-8f3a,1", 8, 1),
        ("0,GPU-8f3a", 8, 1),
    ],
)
def test_visible_devices_are_counted_as_torch_counts_them(
    monkeypatch: pytest.MonkeyPatch, text: str, present: int | None, count: int
) -> None:
    """The first invalid entry ends the list; a duplicate empties it."""
    assert _gpus.count_named(text, present=present) == count
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    parsed: list[object] = torch.cuda._parse_visible_devices()
    beyond = [isinstance(entry, int) and entry >= (present or 64) for entry in parsed]
    assert [*beyond, True].index(True) == count


def test_visible_gpus_are_counted_with_and_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build sees none without a driver; on WSL, which has no device files, torch is asked."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_gpus, "count_present", lambda: None)
    for has_driver, seen, count in ((False, 0, 0), (True, 1, 1), (True, 4, 2)):
        monkeypatch.setattr(_gpus, "may_have_driver", lambda has_driver=has_driver: has_driver)
        monkeypatch.setattr(torch.cuda, "device_count", lambda seen=seen: seen)
        assert _gpus.count_visible({"CUDA_VISIBLE_DEVICES": "0,1"}) == count


CPU = {"__version__": "2.13.0+cpu", "cuda": None, "hip": None, "rocm": None, "xpu": None}
NVIDIA = {**CPU, "__version__": "2.13.0+cu130", "cuda": "13.0"}
AMD = {**CPU, "__version__": "2.13.0+rocm7.2", "hip": "7.2.26015", "rocm": "7.2.0"}


@pytest.mark.parametrize(
    ("build", "visible", "has_driver", "expected"),
    [
        (CPU, None, True, True),
        (CPU, "0,1", True, True),
        ({"__version__": "2.6.0", "cuda": None, "hip": None}, None, True, True),  # conda, macOS
        (NVIDIA, None, False, True),
        (NVIDIA, "0,1", False, True),
        (NVIDIA, None, True, False),
        (NVIDIA, "0", True, False),
        (NVIDIA, "", True, True),
        (NVIDIA, " -1", True, True),
        (NVIDIA, "NoDevFiles", True, True),
        (NVIDIA, "-0", True, False),  # torch reads it as 0
        (NVIDIA, "0,0", True, False),  # none, which torch finds out
        (NVIDIA, "MIG-1/2/0", True, False),
        ({**NVIDIA, "__version__": "2.13.0"}, None, False, False),  # conda, from source
        ({**NVIDIA, "__version__": "2.6.0+metax3.2"}, None, False, False),
        ({**NVIDIA, "__version__": "2.6.0+metax3.2"}, "", True, False),
        (AMD, None, False, False),
        (AMD, "", True, False),  # HIP_VISIBLE_DEVICES wins
        ({**CPU, "hip": None, "rocm": "8.0.0"}, None, False, False),
        ({**CPU, "xpu": "20250301"}, None, False, False),
        ({"__version__": "2.13.0+cpu"}, None, False, False),
        ({}, "", False, False),
    ],
)  # fmt: skip
def test_torch_is_asked_unless_it_cannot_see_a_gpu(
    build: dict[str, str | None], visible: str | None, *, has_driver: bool, expected: bool
) -> None:
    """It cannot with a CPU build, without a driver, or if a variable hides all NVIDIA GPUs."""
    assert _gpus.sees_none(build, visible, has_driver=has_driver) is expected


def test_build_is_read_as_torch_reports_it() -> None:
    """The build is read without importing torch."""
    build = _gpus.read_build()
    assert (build["__version__"], build["cuda"]) == (torch.__version__, torch.version.cuda)
    assert build["hip"] == torch.version.hip


WITHOUT_TORCH = """
import sys
from ddpsafe._config import LaunchConfig
from ddpsafe._launcher.plan import make_plan

for style in ("launch", "spawn", "run"):
    print(make_plan(LaunchConfig(), style=style).backend, "torch" in sys.modules)
"""


@pytest.mark.skipif(
    not _gpus.sees_none(_gpus.read_build(), None, has_driver=_gpus.may_have_driver()),
    reason="this build of torch has to be asked",
)
def test_ranks_on_the_cpu_are_planned_without_torch(tmp_path: Path) -> None:
    """The import of torch would take longer than everything else before the ranks start."""
    assert scripts.run(tmp_path, WITHOUT_TORCH, fresh=True).lines() == ["gloo False"] * 3


def plan(monkeypatch: pytest.MonkeyPatch, gpus: int, style: Any = "launch", **fields: Any) -> Any:
    """Plan a launch on a machine with that many GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    made = make_plan(LaunchConfig.resolve(None, **fields), style=style)
    return made.nproc, made.backend, made.devices


@pytest.mark.parametrize(
    ("gpus", "fields", "expected"),
    [
        (8, {"nproc_per_node": "auto"}, (8, "nccl", tuple(f"cuda:{r}" for r in range(8)))),
        (2, {"nproc_per_node": 1}, (1, "nccl", ("cuda:0",))),
        (0, {"nproc_per_node": 2}, (2, "gloo", ("cpu",) * 2)),
        (1, {"nproc_per_node": 2, "backend": "gloo"}, (2, "gloo", ("cpu",) * 2)),
        (2, {"nproc_per_node": 2, "style": "spawn"}, (2, "nccl", ("cuda:0", "cuda:1"))),
        (1, {"nproc_per_node": 2, "style": "spawn"}, (2, "nccl", ("cpu",) * 2)),
        (0, {"nproc_per_node": 2, "style": "spawn"}, (2, "gloo", ("cpu",) * 2)),
        (2, {"nproc_per_node": 3, "backend": "cuda:gloo"}, (3, "cuda:gloo", ("cuda:0", "cuda:1", "cuda:0"))),
    ],
)  # fmt: skip
def test_launch_plans_a_gpu_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, gpus: int, fields: dict[str, Any], expected: Any
) -> None:
    """The backend is NCCL if there are GPUs, and gloo if there are none or on request."""
    assert plan(monkeypatch, gpus, **fields) == expected


def test_switch_of_the_gpu_tests_lets_two_ranks_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch is only for ddpsafe's tests: `launch` runs two ranks on a machine with one GPU."""
    monkeypatch.setenv(_gpus.SHARING, "1")
    assert plan(monkeypatch, 1, nproc_per_node=2, backend="nccl") == (2, "nccl", ("cuda:0",) * 2)
    agreed = _gpus.assign(ranks("a", "a"))
    assert (agreed.backend, agreed.indexes) == ("nccl", (0, 0))


@pytest.mark.parametrize("backend", ["auto", "nccl"])
@pytest.mark.parametrize(("gpus", "asked"), [(7, 8), (1, 2)])
def test_fewer_gpus_than_ranks_is_an_error_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch, gpus: int, asked: int, backend: str
) -> None:
    """If a GPU fails, a job must not train on the CPU, a hundred times slower."""
    with pytest.raises(
        ddpsafe.ConfigError, match=f"{asked} ranks with nccl need {asked} GPUs"
    ) as e:
        plan(monkeypatch, gpus, nproc_per_node=asked, backend=backend)
    assert f"this machine shows {gpus}" in str(e.value)
    assert 'backend="gloo" to train on the CPU' in str(e.value)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("4,5", 2), ("GPU-8f3a,GPU-91c2,GPU-17aa", 3), ("MIG-8f3a,MIG-91c2", 1)],
)
def test_gpus_selected_in_env_are_counted(
    monkeypatch: pytest.MonkeyPatch, visible: str, expected: int
) -> None:
    """``env={"CUDA_VISIBLE_DEVICES": "4,5"}`` starts two ranks on a machine with eight GPUs."""
    world_size, _, devices = plan(monkeypatch, 8, env={"CUDA_VISIBLE_DEVICES": visible})
    assert (world_size, len(devices)) == (expected, expected)
    with pytest.raises(ddpsafe.ConfigError, match=f"this machine shows {expected}"):
        plan(monkeypatch, 8, env={"CUDA_VISIBLE_DEVICES": visible}, nproc_per_node=8)


def test_gpu_that_torch_does_not_see_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """``nproc_per_node="auto"`` with 7 of 8 GPUs starts 7 ranks and warns."""
    monkeypatch.setattr(_gpus, "find_lost", lambda: 1)
    with pytest.warns(RuntimeWarning, match="starts 7 ranks: torch sees 7 of 8 GPUs"):
        assert plan(monkeypatch, 7, nproc_per_node="auto")[0] == 7


@pytest.mark.parametrize(
    ("version", "given", "expected", "absent"),
    [
        ("2.13.0+cu128", {}, {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000", "TORCH_FR_DUMP_TEMP_FILE": "/run/nccl_trace_rank_", "NCCL_DEBUG_FILE": "/run/rank-1.nccl"}, {"TORCH_NCCL_USE_COMM_NONBLOCKING", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}),
        ("2.10.0+cu128", {}, {"TORCH_FR_BUFFER_SIZE": "2000"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE"}),
        ("2.8.0", {}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/run/nccl_trace_rank_"}, {"TORCH_NCCL_USE_COMM_NONBLOCKING"}),
        ("2.7.1+cu126", {}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}, {"TORCH_NCCL_USE_COMM_NONBLOCKING"}),
        ("2.7.0", {}, {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"}, set()),
        ("2.6.0a0+git1", {}, {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"}, set()),
        ("2.6.0", {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}, {}, {"TORCH_NCCL_USE_COMM_NONBLOCKING"}),
        ("2.13.0", {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/d/x"}, {}, {"TORCH_FR_DUMP_TEMP_FILE"}),
        ("2.13.0", {"NCCL_DEBUG_FILE": "/d/x", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "9"}, {}, {"NCCL_DEBUG_FILE", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"}),
    ],
)  # fmt: skip
def test_nccl_settings_fit_the_version_and_the_users_win(
    version: str, given: dict[str, str], expected: dict[str, str], absent: set[str]
) -> None:
    """The watchdog aborts soon, dumps go to the run directory, and the recorder is on."""
    found = _gpus.nccl_variables(given, version, debug_file="/run/rank-1.nccl", folder="/run")
    assert found.items() >= expected.items()
    assert not found.keys() & (absent | given.keys())


class OnGpu(torch.Tensor):
    """A tensor that reports a GPU as its device; its data is on the CPU."""

    index = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return that GPU."""
        return torch.device("cuda", self.index)


def test_copies_for_an_asynchronous_save_wait_for_every_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model may span several GPUs; the save returns when the copies from all of them have completed."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    state = {}
    for index in (0, 1, 1):
        state[f"w{len(state)}"] = tensor = torch.ones(3).as_subclass(OnGpu)
        tensor.index = index
    HostCopies().copy({"model": state, "step": torch.ones(1)})
    assert sorted(map(str, waited)) == ["cuda:0", "cuda:1"]


# Real ranks.


@pytest.mark.full(but=["seen1-auto-texts1"])
@pytest.mark.parametrize(
    ("seen", "backend", "texts"),
    [
        ({0: [A], 1: [A]}, "auto", ["2 ranks", "see 1", "ranks 0 and 1 would share GPU-a"]),
        ({0: [A, B], 1: []}, "auto", ["rank 1 on", "rank 0 can"]),
        ({0: [], 1: [A]}, "nccl", ["rank 0 on", "rank 1 can"]),
    ],
)
def test_ranks_of_another_launcher_agree_before_they_join(
    tmp_path: Path, seen: dict[int, list[str]], backend: str, texts: list[str]
) -> None:
    """Every rank raises the same error, even those that see no problem themselves."""
    port = free_port()
    envs = [by_hand(rank, 2, port) for rank in range(2)]
    ended = forked_ranks.run(programs.join_with_gpus, envs, seen, backend, folder=tmp_path)
    for rank in ended:
        assert isinstance(rank.error, ddpsafe.ConfigError), rank.error
        assert [text for text in texts if text not in str(rank.error)] == []
    assert max(rank.took_s for rank in ended) < 20


@pytest.mark.parametrize(
    ("seen", "taken"),
    [
        ({0: [A], 1: [B]}, [[0], [0]]),
        ({0: [A, B], 1: [A, B]}, [[0], [1]]),
        ({0: [], 1: []}, [[], []]),
    ],
)
def test_ranks_of_another_launcher_take_one_gpu_each(
    tmp_path: Path, seen: dict[int, list[str]], taken: list[list[int]]
) -> None:
    """A rank's only visible GPU (srun --gpus-per-task=1) is its cuda:0."""
    port = free_port()
    envs = [by_hand(rank, 2, port) for rank in range(2)]
    ended = forked_ranks.run(programs.join_with_gpus, envs, seen, folder=tmp_path)
    assert forked_ranks.values(ended) == taken


def test_spawn_leaves_cuda_to_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CUDA is not initialised before the function, which may choose GPUs, fork, or use none."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ddpsafe.spawn(
        programs.say_what_is_initialised, args=(tmp_path,), nprocs=2, start_method="forkserver"
    )
    found = [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)]
    assert found == ["cuda:0 False", "cuda:1 False"]


def test_nccl_files_of_ranks_are_in_the_run_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each rank has a recorder dump and an NCCL_DEBUG_FILE there, not in /tmp; the user's settings win."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ddpsafe.spawn(
        programs.say_nccl_settings,
        args=(tmp_path,),
        nprocs=2,
        start_method="forkserver",
        run_dir=tmp_path / "run",
        env={"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "77"},
    )
    attempt = tmp_path / "run" / "attempt-1"
    for rank in range(2):
        assert ast.literal_eval((tmp_path / f"rank-{rank}").read_text()) == [
            "77",
            f"{attempt}/nccl_trace_rank_",
            f"{attempt}/rank-{rank}.nccl",
        ]


def test_launch_sets_the_device_before_arguments_are_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unpickling to "cuda" must use the rank's GPU; here the device cannot be set."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ddpsafe.RankRaisedError) as caught:
        ddpsafe.launch(
            programs.do_nothing,
            (programs.ExplodesWhenLoaded(),),
            nproc_per_node=1,
            start_method="forkserver",
            run_dir=tmp_path,
        )
    assert "unpickled before" not in str(caught.value)
    assert re.search("CUDA|_cuda_setDevice|NVIDIA driver", str(caught.value)), caught.value


@pytest.mark.parametrize(("world_size", "keeps"), [(1, True), (2, False)])
def test_only_single_host_groups_are_kept_on_loopback(
    tmp_path: Path, *, world_size: int, keeps: bool
) -> None:
    """Other nodes must reach a rank of a multi-node group, so no interface is set for it."""
    ddpsafe.spawn(
        programs.interfaces_at_init,
        args=(tmp_path, world_size),
        nprocs=1,
        start_method="forkserver",
    )
    before, seen = ast.literal_eval((tmp_path / "rank-0").read_text())
    assert before == ["lo", "=lo"]
    assert seen == (["lo", "=lo"] if keeps else [None, None])


def test_subgroup_is_not_split_from_the_main_group() -> None:
    """With ``use_local_synchronization=True`` only members take part; a split would wait for all ranks."""
    values = ddpsafe.launch(
        programs.make_a_group_of_members,
        nproc_per_node=2,
        backend="gloo",
        start_method="forkserver",
    ).values
    assert values == {0: ["None", "cuda:0", 1], 1: []}
