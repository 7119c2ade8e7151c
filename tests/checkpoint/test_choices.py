"""Which checkpoints are saved, kept and restored, and what they hold besides the state."""

from __future__ import annotations

import contextlib
import math
import shutil
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpsafe._errors import ConfigError
from ddpsafe.checkpoint import Checkpointer, Keep, _checkpointer, _format, _schedule, errors

DEEP: Any = 1
for _ in range(150):
    DEEP = [DEEP]


@pytest.fixture
def five(tmp_path: Path) -> Path:
    """Return a directory with the checkpoints of steps 1 to 5."""
    with Checkpointer(tmp_path / "c", keep=None) as checkpointer:
        for step in range(1, 6):
            checkpointer.save({"x": step}, step)
    return tmp_path / "c"


def test_restoring_a_chosen_step_sets_later_ones_aside(five: Path) -> None:
    """After a loss spike, training continues from that step and saves the later ones again."""
    state = {"x": 0}
    with Checkpointer(five, keep=None) as checkpointer:
        assert checkpointer.restore(state, step=3) == 3
        assert state == {"x": 3}
        assert checkpointer.steps() == [3, 2, 1]
        checkpointer.save({"x": 40}, 4)
        assert checkpointer.restore(state) == 4
    assert state == {"x": 40}
    aside = sorted(path.name[:23] for path in five.glob(".aside-*"))
    assert aside == [".aside-step-00000000000"] * 2


def test_reader_restores_a_chosen_step_and_moves_nothing(five: Path) -> None:
    """Evaluating an older step does not disturb the training job."""
    state = {"x": 0}
    reader = Checkpointer(five, access="read")
    assert reader.restore(state, step=2) == 2
    assert (state, reader.latest()) == ({"x": 2}, 5)


def test_missing_or_damaged_chosen_step_is_an_error(five: Path) -> None:
    """No other step is restored instead."""
    reader = Checkpointer(five, access="read")
    with pytest.raises(errors.MissingCheckpointError) as missing:
        reader.restore({"x": 0}, step=9)
    explanation = missing.value.explanation
    assert explanation.what == f"There is no checkpoint of step 9 in {five}."
    assert explanation.cause == (
        "it was not saved, or has been removed since; there are steps 2, 3, 4, 5 and 1 older."
    )
    assert list(missing.value.steps.values()) == [(5, 4, 3, 2, 1)]
    (reader.path(4) / "state.pt").write_bytes(b"")
    with (
        pytest.warns(errors.CheckpointWarning, match="truncated"),
        pytest.raises(errors.CorruptCheckpointError, match="step 4"),
    ):
        reader.restore({"x": 0}, step=4)


LOSSES: Any = {5: 0.5, 4: 0.2, 3: None, 2: 0.1, 1: 0.9}


@pytest.mark.parametrize(
    ("keep", "stays"),
    [
        (Keep(), [5, 4, 3]),
        (Keep(newest=1), [5]),
        (Keep(newest=None), [5, 4, 3, 2, 1]),
        (Keep(newest=None, best=1, metric="loss"), [5, 4, 3, 2, 1]),
        (Keep(newest=1, every=2), [5, 4, 2]),
        (Keep(newest=1, best=1, metric="loss"), [5, 2]),
        (Keep(newest=1, best=2, metric="loss"), [5, 4, 2]),
        (Keep(newest=1, best=2, metric="loss", mode="max"), [5, 1]),
        (Keep(newest=1, best=9, metric="loss"), [5, 4, 2, 1]),
        (Keep(newest=1, best=1, metric="accuracy"), [5]),
        (Keep(newest=2, best=1, metric="loss", every=3), [5, 4, 3, 2]),
    ],
    ids=str,
)
def test_keep_rules_combine(keep: Keep, stays: list[int]) -> None:
    """The newest, the best by a metric and every n-th step are kept; NaN is never the best."""
    steps = [5, 4, 3, 2, 1]
    doomed = keep.find_doomed(steps, {step: {"loss": loss} for step, loss in LOSSES.items()})
    assert [step for step in steps if step not in doomed] == stays


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"newest": 0}, "newest=0"),
        ({"every": 0}, "every=0"),
        ({"best": -1}, "best=-1"),
        ({"best": 1}, "best= needs metric="),
        ({"metric": "loss"}, "metric= needs best="),
        ({"mode": "least"}, "mode='least'"),
        ({"newest": True}, "newest=True"),
    ],
)
def test_keep_rules_that_keep_nothing_are_refused(rules: dict[str, Any], message: str) -> None:
    """The error is raised when the rules are made, not when the first checkpoint has been deleted."""
    with pytest.raises(ConfigError, match=message):
        Keep(**rules)


def test_best_is_known_after_a_restart(tmp_path: Path) -> None:
    """Checkpoints store their metrics, so the next job keeps the best one of the previous job."""
    rules = Keep(newest=1, best=1, metric="loss")
    losses = [0.5, 0.1, math.nan, 0.3, 0.2]
    for step, loss in enumerate(losses):
        with Checkpointer(tmp_path, keep=rules) as checkpointer:
            checkpointer.restore({"x": 0})
            checkpointer.save({"x": step}, step, metrics={"loss": loss})
    reader = Checkpointer(tmp_path, access="read")
    assert reader.steps() == [4, 1]
    assert reader.info(1).metrics == {"loss": 0.1}


def test_metadata_is_read_without_loading_the_state(tmp_path: Path) -> None:
    """Metadata is plain JSON values; a step that does not exist is reported as missing."""
    metadata = {"run": "a", "git": ["main", 4], "lr": 0.1, "none": None}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"x": 1}, 1, metadata=metadata, metrics={"loss": torch.tensor(0.5)})
        info = checkpointer.info(1)
        with pytest.raises(errors.MissingCheckpointError):
            checkpointer.info(2)
        for wrong in ("1", -1, True):
            with pytest.raises(ConfigError, match=r"info\(step="):
                checkpointer.info(wrong)  # type: ignore[arg-type]  # type: ignore[arg-type]  # under test
    assert (info.metadata, info.metrics, info.names) == (metadata, {"loss": 0.5}, ("x",))
    assert (info.step, info.world_size) == (1, 1)
    assert info.size_bytes > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"metadata": {"x": print}},
        {"metadata": {"x": math.nan}},
        {"metadata": ["x"]},
        {"metadata": 3},
        {"metadata": {"x": {1: 2}}},
        {"metadata": {1: 2, "1": 3}},
        {"metadata": {"x": "\ud800"}},
        {"metadata": {"x": [[["x"]] * 3, *([[]] * 3)], "y": {"\ud800": 1}}},
        {"metadata": {"x": DEEP}},
        {"metrics": {"\ud800": 1}},
        {"metrics": {"loss": 10**400}},
        {"metrics": {"loss": torch.ones(2)}},
        {"metrics": {"loss": torch.ones((), device="meta")}},
        {"metrics": {"loss": "low"}},
        {"metrics": {1: 2.0}},
        {"metrics": 0.5},
    ],
    ids=str,
)
def test_invalid_metric_or_metadata_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Nothing is saved in that case."""
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ConfigError, match=f"save\\({next(iter(wrong))}"):
            checkpointer.save({"x": 1}, 1, **wrong)
        assert checkpointer.latest() is None


def test_unreadable_manifest_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that succeeds can be restored: the manifest is read back before the rename."""
    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(_format, "_MAX_MANIFEST_BYTES", 5_000)
        checkpointer.save({"x": 1}, 1)
        with pytest.raises(errors.SaveError, match="could not be read back"):
            checkpointer.save({"x": 1}, 2, metadata={"x": "x" * 5_000})
        assert checkpointer.restore({"x": 0}) == 1


def train(model: torch.nn.Module) -> None:
    """Change the parameters as an optimizer does."""
    model(torch.ones(2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({}, None),
        ({"metrics": {"loss": 0.5}, "metadata": {"a": 1}}, None),
        ({"metrics": {"loss": 0.4}}, "the metrics"),
        ({"metadata": {"a": 2}}, "the metadata"),
        ({"more": 1}, "'more'"),
        ({"train": True}, "the parameters of the models"),
    ],
    ids=str,
)
@pytest.mark.parametrize("restored", [False, True])
def test_changes_that_a_saved_step_does_not_include_are_reported(
    tmp_path: Path, change: dict[str, Any], lost: str | None, *, restored: bool
) -> None:
    """A step that was saved or restored is not saved again; whatever changed since is named."""
    model = torch.nn.Linear(2, 2)
    state: dict[str, Any] = {"model": model, "epoch": 1}
    beside = {"metrics": {"loss": 0.5}, "metadata": {"a": 1}}
    with contextlib.ExitStack() as stack:
        checkpointer = stack.enter_context(Checkpointer(tmp_path))
        checkpointer.save(state, 1, **beside)
        if restored:
            checkpointer.close()
            checkpointer = stack.enter_context(Checkpointer(tmp_path))
            checkpointer.restore(state)
        given = dict(change)
        if given.pop("train", None):
            train(model)
        state |= {name: given.pop(name) for name in ("more",) if name in given}
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            checkpointer.save(state, 1, **given)
        texts = [str(each.message) for each in warned]
        assert len(texts) == (lost is not None)
        assert lost is None or f"These changes are lost: {lost}." in texts[0]


@pytest.mark.parametrize("every", [10, timedelta(seconds=10)], ids=["steps", "time"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
@pytest.mark.parametrize("fails", [False, True], ids=["", "fails"])
def test_each_interval_has_one_save(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: int | timedelta,
    *,
    asynchronous: bool,
    fails: bool,
) -> None:
    """Also while it is written in the background, and if it fails: a disk stays full for longer than a step."""
    now_s = 100.0
    for module in (_schedule, _checkpointer):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    saved = []
    with Checkpointer(tmp_path / "c", every=every, on_failure="warn") as checkpointer:
        checkpointer.save({"x": 0}, 0)
        if fails:
            shutil.rmtree(tmp_path / "c")
            (tmp_path / "c").write_text("")
        for step in range(6, 50, 6):
            now_s += 6
            if checkpointer.is_due(step):
                saved.append(step)
                with contextlib.ExitStack() as stack:
                    if fails:
                        stack.enter_context(pytest.warns(errors.CheckpointWarning, match=str(step)))
                    checkpointer.save({"x": step}, step, asynchronous=asynchronous)
                    if fails:
                        checkpointer.wait()
            elif not fails:
                checkpointer.wait()  # as at the end of an epoch
    assert saved == ([12, 24, 30, 42] if every == 10 else [12, 24, 36, 48])


@pytest.mark.parametrize(
    ("saved", "newest", "steps", "due"),
    [
        # Nothing is saved: due at a multiple, and at the first step after one that was skipped.
        (None, None, [1, 9, 10, 11, 19, 21], [10, 21]),
        # The directory has step 10, then 25: steps count from there.
        (None, 10, [11, 20, 31], [20, 31]),
        (None, 25, [26, 29, 30], [30]),
        # A save of step 20 is still being written, or has failed.
        (20, 10, [21, 29, 30], [30]),
        (20, None, [21, 29, 30], [30]),
        # A return to an earlier step: no step to count from.
        (None, 100, [20, 21], [20]),
    ],
)
def test_steps_count_from_the_last_save(
    saved: int | None, newest: int | None, steps: list[int], due: list[int]
) -> None:
    """Rows of what was saved, of the steps that are asked for, and of those that are due, every 10."""
    schedule = _schedule.StepInterval(10)
    if saved is not None:
        schedule.begin(saved, 0.0)
    assert [step for step in steps if schedule.is_due(step, newest)] == due


@pytest.mark.parametrize(
    ("waited_s", "looks", "answers"),
    [
        # 60 s, a step per second: twice as many steps are skipped from look to look, and never too many.
        (0.0, [(0, 0.0), (1, 1.0), (2, 2.0), (4, 4.0), (32, 32.0)], [1, 2, 4, 8, 60]),
        # The last save was 50 s before.
        (50.0, [(0, 0.0), (8, 8.0), (10, 10.0)], [1, 10, -20]),
        # The training has returned to an earlier step: its speed is measured from there.
        (0.0, [(90, 0.0), (10, 5.0), (12, 9.0)], [91, 11, 14]),
    ],
)
def test_the_clock_is_looked_at_when_it_may_be_time(
    waited_s: float, looks: list[tuple[int, float]], answers: list[int]
) -> None:
    """Rows of steps and times at which it is looked at, and of the next look; negative if a save is due."""
    schedule = _schedule.TimeInterval(timedelta(minutes=1), 0.0, waited_s)
    found = [schedule.decide(step, now_s) for step, now_s in looks]
    assert [-each["next"] if each["due"] else each["next"] for each in found] == answers


def test_is_due_requires_an_interval(tmp_path: Path) -> None:
    """The error says which argument to pass."""
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(ConfigError, match="every=timedelta"),
    ):
        checkpointer.is_due(1)
    with pytest.raises(ConfigError, match="every=0"):
        Checkpointer(tmp_path, every=0)


def test_values_that_do_not_match_are_kept_and_listed(tmp_path: Path) -> None:
    """A trained body gets a new head: tensors that match are loaded, the others are named."""
    body = torch.nn.Linear(4, 3)
    saved = torch.nn.Sequential(body, torch.nn.Linear(3, 2))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"model": saved, "epoch": 3}, 1)
    now = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 9))
    head = now[1].weight.detach().clone()
    state: dict[str, Any] = {"model": now, "epoch": 0, "best": 7}
    reader = Checkpointer(tmp_path, access="read")
    with pytest.raises(errors.CheckpointMismatchError, match="strict=False"):
        reader.restore(state)
    with pytest.warns(errors.CheckpointWarning, match="in part") as warned:
        assert reader.restore(state, strict=False) == 1
    assert torch.equal(now[0].weight, body.weight)
    assert torch.equal(now[1].weight, head)
    assert (state["epoch"], state["best"]) == (3, 7)
    text = str(warned[0].message)
    for path in ("model['1.weight']", "model['1.bias']", "best"):
        assert f"{path}: " in text
    assert "model['0.weight']" not in text


class Versioned(torch.nn.Module):
    """A model that notes the version of the state that it loads."""

    _version = 2

    def __init__(self, size: int) -> None:
        super().__init__()
        self.body = torch.nn.Parameter(torch.ones(2))
        self.head = torch.nn.Parameter(torch.ones(size))
        self.loaded: list[int | None] = []

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        self.loaded.append(local_metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.filterwarnings("ignore::ddpsafe.checkpoint.errors.CheckpointWarning")
@pytest.mark.parametrize("size", [2, 3])
def test_partial_restore_keeps_the_versions_of_modules(tmp_path: Path, size: int) -> None:
    """A module that converts older states would take one without a version for such a state."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"model": Versioned(2)}, 1)
    now = Versioned(size)
    assert Checkpointer(tmp_path, access="read").restore({"model": now}, strict=False) == 1
    assert now.loaded == [2]


def test_non_strict_restore_of_a_matching_state_gives_no_warning(tmp_path: Path) -> None:
    """With nothing to skip, strict=False behaves as strict=True."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"x": torch.ones(2)}, 1)
        state = {"x": torch.zeros(2)}
        assert checkpointer.restore(state, strict=False) == 1
    assert torch.equal(state["x"], torch.ones(2))


class Compiled(torch.nn.Module):
    """A model whose first layer may be compiled."""

    def __init__(self, *, is_compiled: bool) -> None:
        super().__init__()
        layer = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        self.layer = torch.compile(layer) if is_compiled else layer
        self.head = torch.nn.Linear(3, 1)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch warns on its own import
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_compiled_submodule_loads_as_the_same_model(
    tmp_path: Path,
    before: bool,  # noqa: FBT001 - a parameter of a test
    after: bool,  # noqa: FBT001 - likewise
) -> None:
    """A model trained with torch.compile continues without it, and the other way round."""
    saved, now = Compiled(is_compiled=before), Compiled(is_compiled=after)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"model": saved}, 1, asynchronous=before)
        assert checkpointer.restore({"model": now}) == 1
        assert "_orig_mod" not in str(
            torch.load(checkpointer.path(1) / "state.pt", weights_only=True).keys()
        )
    for ours, theirs in zip(now.parameters(), saved.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_metrics_without_the_one_that_keep_needs_are_refused(tmp_path: Path) -> None:
    """A misspelt name would delete the best checkpoints; a save without any metrics is allowed."""
    keep = Keep(newest=1, best=1, metric="loss")
    with Checkpointer(tmp_path / "c", keep=keep) as checkpointer:
        checkpointer.save({"a": 1}, 1)
        with pytest.raises(ConfigError, match=r"Keep\(metric='loss'\) is not among"):
            checkpointer.save({"a": 2}, 2, metrics={"los": 1.0})
