"""Models are compared before they are copied, and `launch(seed=…)` seeds each rank once they are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import context_programs as programs
import pytest
import scripts
from fault_kit import World, require_rank

import ddpsafe

ORDER, BUILT = "a fixed order on every rank", "build the same model on every rank"
DIFFERENT: dict[str, tuple[str, str, str]] = {
    "order of buffers": ("full_freq", "position 6", ORDER),
    "order of parameters": ("full_bias", "position 0", ORDER),
    "another name": ("head_a.weight", "'head_b.weight'", BUILT),
    "one more": ("full_freq", "parameter 'extra.weight'", BUILT),
    "one less": ("extra.weight", "parameter 'extra.weight'", BUILT),
    "shape": ("head.weight", "shape [5, 3], float32) instead of", "ddpsafe.current().broadcast(size)"),
    "dtype": ("2.weight", "(shape [3, 3], float64)", "convert it on every rank"),
    "frozen": ("0.weight", "(shape [3, 3], float32, frozen)", "requires_grad by the same condition"),
    "tied": ("2.weight", "parameter '2.bias' (shape [3]", BUILT),
    "own buffers": ("shard_of_rank_0", "(shape [2], float32)", BUILT),
    "long name": ("ä" * 50, "ä1'", BUILT),
}  # fmt: skip
"""Kind of difference: the first name, what the message shows, and the advice."""

ALLOWED = ["equal", "allowed: not copied", "allowed: without synchronization", "allowed: ignored"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """Return what each of three ranks got for each model; one launch for all of them."""
    world = World(folder=tmp_path_factory.mktemp("models"), ranks=3)
    result = world.launch(programs.compare, [*DIFFERENT, *ALLOWED])
    return [result.values[rank] for rank in range(3)]


@pytest.mark.parametrize("kind", DIFFERENT)
def test_a_model_that_differs_is_refused_on_every_rank(
    found: list[dict[str, tuple[str, tuple[int, ...], str]]], kind: str
) -> None:
    """Every rank gets the same error: which ranks differ, the first name, and what each has there."""
    name, shown, advice = DIFFERENT[kind]
    wrapped = found[:2] if kind == "order of parameters" else found
    assert len({rank[kind] for rank in wrapped}) == 1
    text, ranks, first = found[0][kind]
    assert ranks == ((1, 2) if kind == "own buffers" else (1,))
    assert first.startswith(name)
    assert shown in text
    assert advice in text
    assert all(f"rank {rank}: position" in text for rank in range(len(wrapped)))


@pytest.mark.parametrize("kind", ALLOWED)
def test_what_ddp_does_not_copy_may_differ(found: list[dict[str, object]], kind: str) -> None:
    """Equal models are wrapped; so are those that differ only in what DDP leaves alone."""
    assert [rank[kind] for rank in found] == ["", "", ""]


def test_a_script_that_wraps_by_itself_is_checked_too(tmp_path: Path) -> None:
    """The rank that differs is blamed, before its first step."""
    world = World(folder=tmp_path, ranks=3)
    error = world.spawn_fails(ddpsafe.RankRaisedError, programs.wrap_by_hand)
    require_rank(error, 1)
    assert isinstance(error.__cause__, ddpsafe.MismatchError)
    assert "buffer 'local_freq' (shape [4], float32) instead of buffer 'full_freq'" in str(error)


CALLER: Final = """
import traceback
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Mine(DistributedDataParallel):
    def __init__(self, model, extra):
        super().__init__(model)

class Model(torch.nn.Linear):
    def named_parameters(self, *args, **kwargs):
        frames = traceback.extract_stack()
        for caller, frame in zip(frames, frames[1:]):
            if frame.name == "__init__" and "nn/parallel/distributed" in frame.filename:
                callers.add(caller.filename)
        yield from super().named_parameters(*args, **kwargs)

dist.init_process_group("gloo")
callers = set()
for make in (DistributedDataParallel, lambda model: Mine(model, 1)):
    make(Model(2, 2))
    print(callers == {__file__}, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", [("script.py",), ("-m", "script")])
def test_warnings_of_the_constructor_are_the_callers(tmp_path: Path, how: tuple[str, ...]) -> None:
    """The line that wraps calls DDP itself: torch's warnings name it, and filters by module apply."""
    scripts.write(tmp_path, "script.py", CALLER)
    command = ["-m", "ddpsafe", "run", "--nproc-per-node", "2", *how]
    done = scripts.Script(command, folder=tmp_path).end()
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["True"] * 4


def draw(folder: Path, how: str, *, seed: int | None = 3, ranks: int = 2) -> list[dict[str, Any]]:
    """Return what each rank drew."""
    folder.mkdir()
    result = World(folder=folder, ranks=ranks).launch(programs.draw_after_wrap, how, seed=seed)
    return [result.values[rank] for rank in range(ranks)]


@pytest.mark.parametrize("how", ["wrap", "by hand"])
def test_dropout_differs_between_ranks_once_the_model_is_wrapped(tmp_path: Path, how: str) -> None:
    """The models were equal before DDP copied any; the same launch again draws the same."""
    zero, one = draw(tmp_path / "first", how)
    assert zero["weights"] == one["weights"]
    assert zero["mask"] != one["mask"]
    assert not zero["second wrap"]
    assert not one["second wrap"]
    assert draw(tmp_path / "again", how) == [zero, one]
    (alone,) = draw(tmp_path / "alone", "wrap", ranks=1)
    assert alone["mask"] == zero["mask"]


@pytest.mark.parametrize(
    ("how", "seed"),
    [("restored", 3), ("own seed", 3), pytest.param("wrap", None, marks=pytest.mark.full)],
)
def test_a_generator_that_was_set_stays(tmp_path: Path, how: str, seed: int | None) -> None:
    """A restored checkpoint and the script's own seed win, and nothing is seeded without a seed."""
    for rank in draw(tmp_path / "run", how, seed=seed):
        assert rank["unchanged"]
        assert not rank["second wrap"]
