"""Checked by mypy, never run: what a type checker says about a user's code."""

from __future__ import annotations

from datetime import timedelta

from torch import nn
from torch.utils.data import Dataset
from typing_extensions import assert_type

import ddpsafe
from ddpsafe import doctor
from ddpsafe.checkpoint import Checkpointer, PerRank
from ddpsafe.data import DataLoader


class Model(nn.Module):
    """Stand for a user's model, with a method of its own."""

    def feature_count(self) -> int:
        """Return a plain number."""
        return 1


class Squares(Dataset[int]):
    """Stand for a user's dataset."""


def train(ctx: ddpsafe.RankContext, epochs: int, learning_rate: float = 0.1) -> float:
    """Stand for a user's function."""
    assert_type(ctx.rank, int)
    assert_type(ctx.is_main, bool)
    assert_type(ctx.loader(Squares()), DataLoader[int])
    assert_type(ctx.loader(Squares(), train=False), DataLoader[int])
    assert_type(ctx.unwrap(ctx.wrap(Model())), Model)
    assert_type(ddpsafe.current().unwrap(ddpsafe.current().wrap(Model())).feature_count(), int)
    assert_type(ctx.all_gather(epochs), list[int])
    assert_type(ctx.all_reduce({"loss": 0.5}, "max"), dict[str, float])
    ctx.all_reduce(1, "avg")  # type: ignore[arg-type]  # not an operation
    return learning_rate * epochs / ctx.world_size


def checkpoint(loader: DataLoader[int]) -> None:
    """A state is a dict of whatever has a state, and of plain values."""
    state: dict[str, object] = {"loader": loader, "own": PerRank(loader), "best": 0.5}
    with Checkpointer("/runs/1", keep=None, on_failure="warn") as checkpointer:
        assert_type(checkpointer.restore(state), int | None)
        checkpointer.save(state, 1, asynchronous=True)
    Checkpointer("/runs/1", access="write-only")  # type: ignore[arg-type]  # not a choice


def main(rank: int, epochs: int) -> None:
    """Stand for a function that ``torch.multiprocessing.spawn`` ran."""


def launch_keeps_the_type_of_the_result() -> None:
    """The values of a launch have the type that the function returns."""
    result = ddpsafe.launch(train, args=(10,), nproc_per_node=2)
    assert_type(result, ddpsafe.LaunchResult[float])
    assert_type(result.values[0], float)


def the_doctor_takes_fields_and_returns_a_report() -> None:
    """Findings are typed; a field that does not exist is a type error here, too."""
    report = doctor.run(checks={"NET"}, nproc_per_node=2, timeout=timedelta(seconds=5))
    assert_type(report, doctor.Report)
    assert_type(report.failed, tuple[doctor.Finding, ...])
    doctor.run(nodes=2)  # type: ignore[call-arg]  # a misspelled field


def fields_are_checked_by_name() -> None:
    """A field that does not exist, or of the wrong type, is a type error."""
    ddpsafe.launch(train, nproc_per_nodes=2)  # type: ignore[call-arg]  # a misspelled field
    ddpsafe.launch(train, start_method="fork")  # type: ignore[arg-type]  # not a choice


def a_barrier_takes_durations(ctx: ddpsafe.RankContext) -> None:
    """As the configuration does: timedelta, seconds, text."""
    ctx.barrier("epoch", timeout=30)
    ddpsafe.current().barrier(timeout="5min")
    ddpsafe.current().barrier("end", timedelta(seconds=1.5))
    ddpsafe.current().barrier(timeout=[30])  # type: ignore[arg-type]  # no duration


def config_takes_durations() -> ddpsafe.LaunchConfig:
    """A timeout is a timedelta."""
    timeouts = ddpsafe.Timeouts(collective=timedelta(minutes=2))
    return ddpsafe.LaunchConfig(nproc_per_node="auto", timeouts=timeouts)


def spawn_has_the_signature_of_torch() -> None:
    """An unported script type checks."""
    ddpsafe.spawn(main, args=(10,), nprocs=2, join=True)


def process_group_gives_the_context() -> None:
    """The context manager yields a RankContext."""
    with ddpsafe.process_group(backend="gloo") as ctx:
        assert_type(ctx, ddpsafe.RankContext)
