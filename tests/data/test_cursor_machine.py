"""The loader's epoch and offset, compared with a model of a dozen lines."""

from __future__ import annotations

from typing import Any

import pytest
from data_programs import Numbers
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from ddpsafe.data import DataLoader, DistributedSampler

N, REPLICAS, BATCH = 23, 2, 4
STEPS = 3


def expected(epoch: int, first: int) -> list[list[int]]:
    """Return the batches of an epoch from the given one on, in torch's order."""
    sampler = DistributedSampler(N, REPLICAS, 1)
    sampler.set_epoch(epoch)
    own = list(sampler)
    return [own[i : i + BATCH] for i in range(first * BATCH, len(own), BATCH)]


class CursorMachine(RuleBasedStateMachine):
    """Any sequence of iter, next, break, set_epoch, state_dict and load_state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.loader = self.make()
        self.epoch, self.base, self.chosen = 0, 0, True
        self.by_user = False
        self.iterator: Any = None
        self.left: list[list[int]] = []
        self.delivered = 0
        self.saved: Any = None

    @staticmethod
    def make() -> DataLoader[int]:
        """Make the loader of rank 1."""
        return DataLoader(Numbers(N), BATCH, sampler=DistributedSampler(N, REPLICAS, 1))

    @rule()
    def begin(self) -> None:
        """Begin an iteration of the chosen epoch, of an interrupted one, or of the next."""
        if not self.chosen and not (self.by_user and self.left):
            self.epoch, self.base, self.by_user = self.epoch + 1, 0, False
        self.chosen = False
        self.delivered = 0
        self.left = expected(self.epoch, self.base)
        self.iterator = iter(self.loader)

    @precondition(lambda self: self.iterator is not None)
    @rule()
    def advance(self) -> None:
        """Read one batch, or reach the end."""
        batch = next(self.iterator, None)
        if not self.left:
            assert batch is None
            self.iterator = None
            return
        assert [int(x) for x in batch] == self.left.pop(0)
        self.delivered += 1

    @rule()
    def leave(self) -> None:
        """Break out of the loop."""
        self.iterator = None

    @precondition(lambda self: self.iterator is None)
    @rule(epoch=st.integers(0, 4), through=st.sampled_from(["loader", "sampler"]))
    def choose(self, epoch: int, through: str) -> None:
        """Set the epoch as a user would."""
        target = self.loader if through == "loader" else self.loader.sampler
        target.set_epoch(epoch)  # type: ignore[union-attr]
        if epoch != self.epoch:
            self.base = 0
        self.epoch, self.chosen, self.delivered = epoch, True, 0
        self.by_user = True

    @rule()
    def save(self) -> None:
        """Save, and check the state."""
        self.saved = self.loader.state_dict()
        position = self.base + self.delivered
        assert self.saved["epoch"] == self.epoch
        assert self.saved["finished"] == (position >= STEPS)
        assert self.saved["consumed"] == min(N, position * BATCH * REPLICAS)

    @precondition(lambda self: self.saved is not None)
    @rule(fresh=st.booleans())
    def load(self, *, fresh: bool) -> None:
        """Load the state into this loader or into that of a new process."""
        if fresh:
            self.loader = self.make()
        self.loader.load_state_dict(self.saved)
        self.iterator, self.delivered, self.by_user = None, 0, False
        if self.saved["finished"]:
            self.epoch, self.base, self.chosen = self.saved["epoch"], STEPS, False
        else:
            self.epoch, self.chosen = self.saved["epoch"], True
            self.base = self.saved["consumed"] // (BATCH * REPLICAS)


CursorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCursor = pytest.mark.filterwarnings("ignore::ddpsafe.data.errors.DataWarning")(
    CursorMachine.TestCase
)
