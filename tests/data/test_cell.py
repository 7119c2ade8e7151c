"""Which epoch a pass reads: the three rules by rows, and against a model with all ranks in step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from data_programs import Numbers, WithEpoch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from torch.utils.data import DistributedSampler as TorchDistributedSampler
from torch.utils.data import Sampler, SequentialSampler

from ddpsafe.data import DataLoader, DistributedSampler, ShardedIterable
from ddpsafe.data.errors import DataWarning, LateSetEpochError

N, BATCH = 12, 4
STEPS = N // BATCH


class Told(WithEpoch, Numbers):
    """Sample i is i, and the epoch that the dataset was given."""

    def __getitem__(self, index: int) -> Any:
        return index, int(self.epoch)


class Numbered(WithEpoch):
    """A source of a stream: sample i is i, and the epoch that it was given."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(i, self.epoch) for i in range(N)])


class Converting(Sampler[int]):
    """A sampler that converts the epoch that it is given."""

    epoch = 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter([(i + self.epoch) % N for i in range(N)])

    def set_epoch(self, epoch: int) -> None:
        """Store a converted copy."""
        self.epoch = int(epoch)


class ReadOnly(Converting):
    """A sampler whose epoch is a property."""

    epoch = property(lambda self: vars(self).get("_epoch", 0))  # type: ignore[assignment]

    def set_epoch(self, epoch: int) -> None:
        """Store it."""
        self._epoch = int(epoch)


def loader_of(kind: str, **options: Any) -> tuple[DataLoader[Any], dict[str, Any]]:
    """Make a loader, and return what has a ``set_epoch()`` beside it."""
    data = Told(N)
    samplers: dict[str, Callable[[], Any]] = {
        "ddpsafe's": lambda: DistributedSampler(N, 1, 0),
        "torch's": lambda: TorchDistributedSampler(range(N), 1, 0),
        "converting": Converting,
        "property": ReadOnly,
        "without an epoch": lambda: SequentialSampler(range(N)),
    }
    if kind == "stream":
        stream = ShardedIterable(Numbered(), num_replicas=1, rank=0)
        return DataLoader(stream, BATCH, **options), {"sampler": stream}
    sampler = samplers[kind]()
    loader: DataLoader[Any] = DataLoader(data, BATCH, sampler=sampler, **options)
    return loader, {"sampler": sampler, "dataset": data}


def order_of(kind: str, epoch: int) -> list[int]:
    """Return the samples of an epoch in the order of a sampler."""
    if kind in {"ddpsafe's", "torch's"}:
        sampler = TorchDistributedSampler(range(N), 1, 0)
        sampler.set_epoch(epoch)
        return list(sampler)
    first = epoch if kind in {"converting", "property"} else 0
    return [(i + first) % N for i in range(N)]


class Script:
    """Runs the steps of a row, and notes the epoch of each pass."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.kind = kind
        self.loader, self.others = loader_of(kind, **options)
        self.epochs: list[int] = []

    def read(self, count: int | None, *, asks: bool = True) -> None:
        """Read some batches, or all; a pass that asks finds the end."""
        batches = []
        for batch in self.loader:
            batches.append(batch)
            if len(batches) == count or (not asks and len(batches) == STEPS):
                break
        (epoch,) = {int(e) for _, epochs in batches for e in epochs}
        indices = [int(i) for indices, _ in batches for i in indices]
        assert indices == order_of(self.kind, epoch)[: len(indices)]
        self.epochs.append(epoch)

    def run(self, steps: list[Any], through: str) -> None:
        """Run steps: passes, settings of the epoch, and loops over epochs."""
        for step in steps:
            if isinstance(step, int):
                target = self.loader if through == "loader" else self.others[through]
                target.set_epoch(step)
            elif isinstance(step, tuple):
                count, body = step
                for _ in self.loader.epochs(count):
                    self.run([each for each in body if each != "break"], through)
                    if "break" in body:
                        break
            elif step == "pass":
                self.read(None)
            elif step == "by number":
                self.read(None, asks=False)
            else:
                self.read({"peek": 1, "left": 2}[step])


ROWS: dict[str, tuple[list[Any], list[int]]] = {
    "each pass is the next epoch": (["pass", "by number", "pass"], [0, 1, 2]),
    "a pass that was left counts": (["left", "peek", "pass"], [0, 1, 2]),
    "what the user set is read": ([3, "pass", 0, "pass", 7, "pass"], [3, 0, 7]),
    "and the next one then": ([2, "pass", "pass", "by number", "pass"], [2, 3, 4, 5]),
    "the same epoch again": ([3, "pass", 3, "pass", 3, "by number", 3, "pass"], [3, 3, 3, 3]),
    "until a pass of it is complete": ([3, "peek", "left", "pass", "pass"], [3, 3, 3, 4]),
    "which a loop need not notice": ([3, "peek", "by number", "peek", "pass"], [3, 3, 4, 5]),
    "epoch 0, where samplers begin": ([0, "peek", "pass", "pass"], [0, 0, 1]),
    "only if it was set": (["peek", "pass"], [0, 1]),
    "the last of several": ([3, 5, "pass"], [5]),
    "a loop": ([(3, ["pass"])], [0, 1, 2]),
    "a second loop continues": ([(2, ["pass"]), (4, ["pass"])], [0, 1, 2, 3]),
    "a loop that is over": ([(2, ["pass"]), (2, ["pass"]), "pass"], [0, 1, 2]),
    "looks in a loop": ([(2, ["peek", "pass", "peek", "left"])], [0, 0, 0, 0, 1, 1, 1, 1]),
    "a loop whose passes are left": ([(3, ["left"])], [0, 1, 2]),
    "a look before a loop": (["peek", (2, ["pass"])], [0, 0, 1]),
    "a whole pass before a loop": (["by number", (2, ["pass"])], [0, 1]),
    "set before a loop": ([1, (3, ["pass"])], [1, 2]),
    "set, and looked at, before a loop": ([1, "peek", (3, ["pass"])], [1, 1, 2]),
    "set in a loop": ([(2, [5, "peek", "pass"])], [5, 5, 5, 5]),
    "a loop that is left": ([(5, ["pass", "break"]), "pass"], [0, 1]),
    "in the middle of a pass": ([(5, ["peek", "break"]), "pass"], [0, 1]),
    "the loop's epoch is not set": ([1, "peek", (5, ["peek", "break"]), "pass"], [1, 1, 2]),
    "before its first pass": ([(5, ["break"]), "pass", "pass"], [0, 1]),
}
"""Steps, and the epoch of each pass: a number sets the epoch, a tuple is a loop over epochs."""

KINDS = ["ddpsafe's", "torch's", "converting", "property", "without an epoch", "stream"]

NOT_SHOWN = {
    "stream": {"which a loop need not notice", "a whole pass before a loop"},  # has no length
    "property": {"the same epoch again", "epoch 0, where samplers begin"},  # keeps no mark
}
"""Rows that a kind cannot show; those of a property hold if the loader's epoch is set."""


@pytest.mark.parametrize(
    ("kind", "row"),
    [(k, r) for k in KINDS for r in ROWS if k != "stream" or r not in NOT_SHOWN["stream"]],
)
def test_epochs_follow_the_three_rules(kind: str, row: str) -> None:
    """Set through the loader, for any sampler; torch's orders are those of the epochs."""
    steps, expected = ROWS[row]
    script = Script(kind)
    script.run(steps, "loader")
    assert script.epochs == expected


PLACES = [*((kind, "sampler") for kind in KINDS if kind != "without an epoch")]
PLACES += [("ddpsafe's", "dataset"), ("without an epoch", "dataset")]
SETTING = [row for row in ROWS if "set" in row or type(ROWS[row][0][0]) is int]


@pytest.mark.parametrize(
    ("kind", "through", "row"),
    [(*place, r) for place in PLACES for r in SETTING if r not in NOT_SHOWN.get(place[0], ())],
)
def test_epochs_may_be_set_on_the_sampler_or_the_dataset(kind: str, through: str, row: str) -> None:
    """The rules are the same."""
    steps, expected = ROWS[row]
    script = Script(kind)
    script.run(steps, through)
    assert script.epochs == expected


@pytest.mark.parametrize("row", ["until a pass of it is complete", "looks in a loop"])
@pytest.mark.parametrize("kind", ["ddpsafe's", pytest.param("torch's", marks=pytest.mark.full)])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_follow_the_rules(kind: str, row: str, *, persistent: bool) -> None:
    """Those that persist receive the epoch through shared memory."""
    steps, expected = ROWS[row]
    script = Script(kind, num_workers=1, persistent_workers=persistent)
    script.run(steps, "loader")
    assert script.epochs == expected


@pytest.mark.parametrize("through", ["loader", "sampler"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("delivered", [0, 2])
def test_late_set_epoch_is_refused(through: str, workers: int, delivered: int) -> None:
    """PyTorch ignores it with workers and follows it without; here it is an error in both cases."""
    loader, others = loader_of("ddpsafe's", num_workers=workers)
    iterator = iter(loader)
    for _ in range(delivered):
        next(iterator)
    late = r"set_epoch\(5\) came after iter\(\)"
    if through == "loader" and delivered == 0:
        with pytest.raises(LateSetEpochError, match=late):
            loader.set_epoch(5)
        return
    (loader if through == "loader" else others["sampler"]).set_epoch(5)
    with pytest.raises(LateSetEpochError, match=late):
        next(iterator)


@pytest.mark.parametrize("through", ["loader", "sampler"])
def test_the_running_epoch_may_be_set_after_iter(through: str) -> None:
    """It has the effect of setting it before: the epoch lasts until a pass of it is complete."""
    loader, others = loader_of("ddpsafe's")
    iterator = iter(loader)
    (loader if through == "loader" else others["sampler"]).set_epoch(0)
    next(iterator)
    del iterator
    assert {int(e) for _, epochs in loader for e in epochs} == {0}
    assert {int(e) for _, epochs in loader for e in epochs} == {1}


def test_an_old_iterator_may_exist_but_not_be_used() -> None:
    """A new pass may begin while the old iterator exists; continuing the old one warns or raises."""
    loader, _ = loader_of("ddpsafe's")
    old = iter(loader)
    next(old)
    assert len(list(loader)) == STEPS
    with pytest.warns(DataWarning, match="another iteration has begun"):
        next(old)
    unused = iter(loader)
    iter(loader)
    with pytest.raises(LateSetEpochError, match="no longer valid"):
        next(unused)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_nested_loops_over_one_loader_work_as_with_torch(num_workers: int) -> None:
    """The outer loop continues, and one warning says that only the inner one is counted."""
    loader, _ = loader_of("ddpsafe's", num_workers=num_workers)
    with pytest.warns(DataWarning, match="counts only the newest one") as caught:
        lengths = [len(list(loader)) for _ in loader]
    # Python 3.12 warns about forks.
    told = [each for each in caught if each.category is DataWarning]
    assert (lengths, len(told)) == ([STEPS] * STEPS, 1)


def test_two_iterations_over_persistent_workers_are_refused() -> None:
    """They share the workers, so the first would receive the second's batches."""
    loader, _ = loader_of("ddpsafe's", num_workers=1, persistent_workers=True)
    old = iter(loader)
    next(old)
    new = iter(loader)
    with pytest.raises(LateSetEpochError, match="another iteration has begun"):
        next(old)
    assert len(list(new)) == STEPS


class Stateful(Numbers):
    """A dataset with a state of its own, so that the loader replays its sampler."""

    def state_dict(self) -> dict[str, int]:
        """Return a state."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load nothing."""


@pytest.mark.parametrize(("asked", "following"), [(1, 3), (2, 3), (3, 4), (4, 4)])
@pytest.mark.parametrize("data", [Numbers(13), Stateful(13)], ids=["plain", "stateful"])
def test_ranks_with_fewer_batches_decide_as_the_others(
    data: Numbers, asked: int, following: int
) -> None:
    """Rank 0 has three batches and rank 1 two: a pass that asked both for two is complete on neither."""
    for rank in range(2):
        sampler = DistributedSampler(13, 2, rank, pad=False)
        loader = DataLoader(data, 3, sampler=sampler)
        loader.set_epoch(3)
        iterator = iter(loader)
        for _ in range(asked):
            next(iterator, None)
        next(iter(loader))
        assert loader.state_dict()["epoch"] == following


def test_the_number_of_remaining_epochs_is_known() -> None:
    """A progress bar has a total, before and in the loop."""
    loader, _ = loader_of("ddpsafe's")
    next(iter(loader))
    epochs = loader.epochs(3)
    assert len(epochs) == 3
    assert [len(epochs) for _ in epochs] == [3, 3, 3]
    list(loader)
    assert len(loader.epochs(9)) == 6


class InStep(RuleBasedStateMachine):
    """Any sequence of iter, next, break, set_epoch, state_dict and load_state_dict, on all ranks alike.

    The model knows what all ranks know: the epoch, the position, the world and the batch size.
    """

    size = 13  # rank 0 has a batch more than rank 1

    def __init__(self) -> None:
        super().__init__()
        self.make(2, 3)
        self.epoch = self.base = self.asked = 0
        self.chosen, self.by_user = True, False
        self.iterators: list[Any] = []
        self.saved: Any = None

    def make(self, world: int, batch: int) -> None:
        """Make the loaders of all ranks, as new processes would."""
        self.world, self.batch = world, batch
        self.loaders = [
            DataLoader(
                Numbers(self.size),
                batch,
                sampler=DistributedSampler(self.size, world, rank, pad=False),
            )
            for rank in range(world)
        ]

    def left(self, rank: int) -> list[list[int]]:
        """Return the batches of a rank from the position on: its share of one order for all worlds."""
        sampler = DistributedSampler(self.size, 1, 0)
        sampler.set_epoch(self.epoch)
        own = list(sampler)[self.base :][rank :: self.world]
        return [own[i : i + self.batch] for i in range(0, len(own), self.batch)]

    def is_complete(self) -> bool:
        """Return whether the newest pass counts as read: not if it was a look at the first batch."""
        most, fewest = len(self.left(0)), len(self.left(self.world - 1))
        return self.asked >= (max(most, 2) if fewest else most)

    @rule(times=st.integers(0, 4))
    def begin(self, times: int) -> None:
        """Begin a pass of the chosen epoch, of one that was set and is not complete, or of the next."""
        if not self.chosen and (not self.by_user or self.is_complete()):
            self.epoch, self.base, self.by_user = self.epoch + 1, 0, False
        self.chosen, self.asked = False, 0
        self.iterators = [iter(loader) for loader in self.loaders]
        self.advance(times)

    @precondition(lambda self: self.iterators)
    @rule()
    def read_on(self) -> None:
        """Ask every rank for one more batch."""
        self.advance(1)

    def advance(self, times: int) -> None:
        """Ask every rank for some batches; some may have none in the last step."""
        for rank, iterator in enumerate(self.iterators):
            batches = [[int(x) for x in batch] for batch in itertools.islice(iterator, times)]
            assert batches == self.left(rank)[self.asked : self.asked + times]
        self.asked += times

    @rule(epoch=st.integers(0, 4), through=st.sampled_from(["loader", "sampler"]))
    def choose(self, epoch: int, through: str) -> None:
        """Set the epoch as a user would, after a loop that was left."""
        self.iterators = []
        for loader in self.loaders:
            (loader if through == "loader" else loader.sampler).set_epoch(epoch)  # type: ignore[union-attr]
        if epoch != self.epoch:
            self.base = 0
        self.epoch, self.chosen, self.by_user, self.asked = epoch, True, True, 0

    @rule()
    def save(self) -> None:
        """Save, and check the state: it is the same on every rank."""
        states = [loader.state_dict() for loader in self.loaders]
        self.saved = states[0]
        assert all(state == self.saved for state in states)
        consumed = min(self.size, self.base + self.asked * self.batch * self.world)
        assert (self.saved["epoch"], self.saved["consumed"]) == (self.epoch, consumed)
        assert self.saved["finished"] == (consumed == self.size)

    @precondition(lambda self: self.saved is not None)
    @rule(world=st.integers(1, 4), batch=st.integers(1, 7), fresh=st.booleans())
    def load(self, world: int, batch: int, *, fresh: bool) -> None:
        """Load the state into these loaders, or into those of new processes, in another world."""
        if fresh:
            self.make(world, batch)
        for loader in self.loaders:
            loader.load_state_dict(self.saved)
        self.iterators, self.asked, self.by_user = [], 0, False
        self.epoch, self.base = self.saved["epoch"], self.saved["consumed"]
        self.chosen = not self.saved["finished"]


InStep.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, derandomize=True, deadline=None
)
TestInStep = pytest.mark.filterwarnings("ignore::ddpsafe.data.errors.DataWarning")(InStep.TestCase)
