"""Every method of `RankContext`, and the function of the same name in the package.

Worlds of one and of three ranks, and code outside any rank.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import context_programs as programs
import forked_ranks
import machine
import numpy as np
import pytest
import torch
from torch import nn

import ddpsafe

MEAN: Final = {1: 0.0, 3: 1.0}
"""The mean of the ranks' numbers, by world size."""


def launch(
    program: Callable[..., Any], *args: object, nproc: int = 3, **fields: Any
) -> dict[int, Any]:
    """Run a program in that many ranks; return each rank's value."""
    defaults = {"backend": "gloo", "start_method": "forkserver"}
    return ddpsafe.launch(program, args, nproc_per_node=nproc, **(defaults | fields)).values


@dataclass(frozen=True, slots=True)
class World:
    """A launch whose ranks have run all programs that succeed; the results are by rank, then by program."""

    size: int
    values: dict[int, dict[Any, Any]]

    def found(self, *name: str) -> dict[int, Any]:
        """Return one program's results, by rank."""
        key = name[0] if len(name) == 1 else name
        return {rank: found[key] for rank, found in self.values.items()}


def launch_world(size: int, folders: pytest.TempPathFactory) -> World:
    """Launch that many ranks, which run all programs that succeed."""
    folder, timeouts = folders.mktemp("world"), {"barrier": 60}
    values = launch(programs.show_everything, folder, nproc=size, timeouts=timeouts)
    return World(size, values)


@pytest.fixture(scope="module", params=[1, 3], ids=str)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a world of one, and one of three."""
    if request.param == 1:
        return launch_world(1, tmp_path_factory)
    three: World = request.getfixturevalue("three")
    return three


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a world of three."""
    return launch_world(3, tmp_path_factory)


@pytest.fixture(scope="module")
def missing() -> dict[int, dict[str, Any]]:
    """Return the results of three ranks that missed each other."""
    return launch(programs.miss_each_other, timeouts={"barrier": 1})


# The rank itself.


@pytest.mark.full(but=["1"])
def test_context_describes_the_rank(world: World) -> None:
    """Ranks, sizes, device, backend, attempt and run directory; `current` returns it anywhere."""
    assert world.found("facts") == {
        rank: {
            "place": (rank, rank, 0),
            "sizes": (world.size, world.size, 1),
            "device": "cpu",
            "backend": "gloo",
            "attempt": 1,
            "run_dir_exists": True,
            "is_main": (rank == 0,) * 2,
            "current": [True, True],
        }
        for rank in range(world.size)
    }


# Models.


def test_model_is_wrapped_and_unwrapped(world: World) -> None:
    """DDP gets the given options and averages gradients; a frozen model is returned as it is."""
    for found in world.found("wrap").values():
        assert (found["type"], found["option"]) == ("DistributedDataParallel", True)
        assert found["gradient"] == [[MEAN[world.size]] * 2]
        assert found["frozen_as_is"]
        assert found["norm"] == "BatchNorm1d"
        assert all(found["unwrapped"])
        assert found["weights"] == [found["weights"][0]] * world.size


# Means.


def test_mean_has_the_type_of_its_argument(world: World) -> None:
    """Numbers, dicts, and tensors of every floating dtype and shape give the same mean on every rank."""
    mean = MEAN[world.size]
    for found in world.found("reduce").values():
        assert (found["float"], found["int"]) == (mean, mean)
        assert found["dict"].keys() == {"a", "b"}
        assert found["dict"]["a"] == mean
        assert found["dict"]["b"].tolist() == [mean, mean]
        assert found["int_tensor"].tolist() == [mean, 2 * mean]
        assert torch.equal(found["strided"], torch.arange(6.0).reshape(2, 3).t() + mean)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            for shape in ((), (0,), (3,), (2, 3)):
                assert torch.equal(
                    found[f"{dtype} {shape}"], torch.full(shape, mean, dtype=dtype)
                ), (dtype, shape)


def test_all_reduce_keeps_type_and_dtype(world: World) -> None:
    """Integers are exact, dicts keep their keys, and tensors keep their dtype."""
    nproc, ranks = world.size, range(world.size)
    expected: dict[str, Callable[[list[Any]], Any]] = {
        "sum": sum, "mean": lambda x: sum(x) / nproc, "min": min, "max": max, "product": math.prod,
    }  # fmt: skip
    for found in world.found("reduce").values():
        for op, reduce in expected.items():
            whole, half, table = found["reduced"][op]
            assert whole == reduce([rank + 1 for rank in ranks])
            assert isinstance(whole, float if op == "mean" else int)
            assert half == reduce([rank + 0.5 for rank in ranks])
            assert table["a"] == whole
            assert table["b"].tolist() == [whole, reduce([2.0] * nproc)]
        most, mixed, short, ones, flag, nan = found["reduced_kinds"]
        assert most == 2**62 + nproc - 1
        assert mixed == 0.5 * (nproc - 1)
        assert (short.tolist(), short.dtype) == ([sum(ranks), nproc], torch.int16)
        assert (ones.tolist(), ones.dtype) == ([nproc] * 2, torch.bfloat16)
        assert flag == nproc - 1
        assert math.isnan(nan)


def test_weights_give_the_mean_over_samples(three: World) -> None:
    """Ranks have 1, 2 and 3 samples; a rank without samples has no influence; counts are not rounded."""
    for found in three.found("reduce").values():
        assert found["weighted"] == pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6)
        assert found["weight_beside_nan"] == 1.5
        assert found["many_samples"] == pytest.approx((1 + 2) / 100_005, rel=0.01)
        assert found["dict_weighted"] == {"loss": pytest.approx((1 * 1 + 2 * 2) / 3)}
        assert found["bool_tensor"].tolist() == pytest.approx([2 / 3])


def test_mean_of_a_loss_leaves_the_loss_unchanged(world: World) -> None:
    """The loss keeps its value and its graph, and backward computes its own gradient."""
    mean = sum(range(1, world.size + 1)) / world.size
    assert world.found("live loss") == {
        rank: {"mean": mean, "loss": rank + 1.0, "gradient": rank + 1.0, "dict_untouched": True}
        for rank in range(world.size)
    }


def test_ranks_that_disagree_about_a_mean_fail_at_once(three: World) -> None:
    """Different keys or weights of zero raise an error on every rank; none hangs, and all can continue."""
    for rank, found in three.found("nonsense").items():
        keys, zero, operation, unknown = found["errors"]
        assert operation.startswith("MismatchError: all_reduce: the ranks passed different")
        assert "did you mean 'mean'? Write one of 'sum', 'mean'" in unknown
        own = "'accuracy': one number, 'loss'" if rank == 1 else "{'loss': one number}"
        assert keys.startswith("MismatchError: reduce_mean: the ranks passed different keys")
        assert own in keys
        assert zero.startswith("ValueError: reduce_mean: the weights of all ranks sum to zero")
        assert found["took_s"] < 10
        assert found["after"] == 1.0


# Objects.


def test_objects_are_gathered_by_rank_and_broadcast_from_any(world: World) -> None:
    """Every rank gets all objects, of any size, in rank order; broadcast takes a source rank."""
    nproc = world.size
    expected = {
        "gathered": [(rank, [rank, rank]) for rank in range(nproc)],
        "by_length": list(range(nproc)),
        "broadcast": {"seed": 7},
        "broadcast_src": f"from {nproc - 1}",
        "broadcast_none": None,
    }
    assert world.found("exchange") == dict.fromkeys(range(nproc), expected)


# Barriers.


def test_no_rank_passes_a_barrier_before_all_reach_it(world: World) -> None:
    """This holds even if the barrier's name has been used before."""
    ranks = range(world.size)
    assert world.found("meet") == {rank: [list(ranks)] * 5 for rank in ranks}


def test_missing_rank_is_named_on_every_rank_that_waited(missing: dict[int, Any]) -> None:
    """Rank 2 does not enter: ranks 0 and 1 report it with the barrier's name, within the limit."""
    for rank in (0, 1):
        found = missing[rank]["miss_a_barrier"]
        error = found["error"]
        assert error.setting == "barrier"
        assert error.missing_ranks == (2,)
        assert error.waited_s == pytest.approx(1, abs=2)
        assert found["took_s"] < 1 + 10
        assert f"rank {rank} (world_size 3)" in str(error)
        assert "at the barrier 'save the model'" in str(error)
        assert "rank 2 did not reach it" in str(error)
        assert "attempt 1" in str(error)
        assert "What to do:" in str(error)


def test_barrier_timeout_of_zero_does_not_wait(three: World) -> None:
    """Zero is a deadline like any other, and does not mean the default."""
    assert max(three.found("not all are there").values()) < 20


def test_ranks_at_different_barriers_do_not_meet(missing: dict[int, Any]) -> None:
    """Rank 0 is at "evaluate", the others are at "train": each side reports the other as missing."""
    errors = {rank: found["meet_under_other_names"] for rank, found in missing.items()}
    missed = {rank: error.missing_ranks for rank, error in errors.items()}
    assert missed == {0: (1, 2), 1: (0,), 2: (0,)}


# Rank 0 first.


REFUSED: Final = [
    ("x", "sum", "x is 'x', of type str, and it is not a number, a tensor or a dict of them."),
    (None, "sum", "x is None, of type NoneType"),
    ([1.0, 2.0], "sum", "pass torch.as_tensor(x)"),
    (np.ones(2), "sum", "of type ndarray, and it is not a number"),
    ({"loss": 1.0, "name": "a"}, "sum", "x['name'] is 'a', of type str"),
    ({"val": {"loss": None}}, "sum", "x['val']['loss'] is None"),
    ({1: 1.0, "a": 2.0}, "sum", "its keys have no order"),
    (1j, "sum", "x is 1j, of type complex"),
    (torch.ones(2, dtype=torch.complex64), "sum", "pass torch.view_as_real(x)"),
    (torch.ones(2).to_sparse(), "sum", "pass x.to_dense()"),
    (torch.ones(2, device="meta"), "sum", "without values"),
    (torch.ones(2, dtype=torch.int64), "mean", "pass x.double()"),
    (2**63, "sum", "it may not fit 64 bits"),
    (1.0, "avg", "did you mean 'mean'? Write one of 'sum', 'mean', 'min', 'max', 'product'."),
    (1.0, "prod", "did you mean 'product'?"),
    (1.0, "sums", "did you mean 'sum'?"),
    (1.0, torch.distributed.ReduceOp.AVG, "did you mean 'mean'?"),
    (1.0, "xyz", "write one of 'sum'"),
]


@pytest.mark.parametrize(("x", "op", "said"), REFUSED)
def test_invalid_operands_are_refused_with_their_value(x: Any, op: Any, said: str) -> None:
    """This holds in a world of one too, so the first machine finds it."""
    with pytest.raises(ddpsafe.ConfigError) as caught:
        ddpsafe.current().all_reduce(x, op)
    assert said in str(caught.value)


@pytest.mark.parametrize("weight", ["many", -1, float("nan"), float("inf"), None.__class__])
def test_an_invalid_weight_is_refused(weight: Any) -> None:
    """Negative and infinite weights would give a mean outside the range of the values."""
    with pytest.raises(ddpsafe.ConfigError, match="reduce_mean"):
        ddpsafe.current().reduce_mean(1.0, weight=weight)


@pytest.mark.parametrize(
    ("x", "op", "result"),
    [
        (True, "max", True),
        (False, "min", False),
        (True, "product", True),
        (True, "sum", 1),
        (3, "max", 3),
        (np.float32(0.5), "sum", 0.5),
        (np.int64(3), "sum", 3),
        (np.ones(1, dtype=bool)[0], "max", True),
        (np.array(2.0), "max", 2.0),
        (Fraction(1, 2), "sum", 0.5),
        ({"b": np.int64(1), "a": {"c": True}}, "max", {"a": {"c": True}, "b": 1}),
    ],
)
def test_numbers_of_every_kind_are_reduced_by_type(x: Any, op: Any, result: object) -> None:
    """The maximum of booleans is a boolean, and their sum is a number."""
    found = ddpsafe.current().all_reduce(x, op)
    assert (found, type(found)) == (result, type(result))


@pytest.mark.parametrize("src", [1, 7, -1, "0", None, 0.5])
def test_broadcast_from_a_nonexistent_rank_is_refused(src: Any) -> None:
    """This holds in a world of one too."""
    with pytest.raises(ddpsafe.ConfigError, match="there is no such rank; world_size is 1"):
        ddpsafe.current().broadcast("text", src=src)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("text", "all_reduce: x is 'x', of type str"),
        ("complex", "pass torch.view_as_real(x)"),
        ("lambda", "all_gather: obj['schedule'] cannot be pickled"),
        ("rank", "broadcast(src=7): there is no such rank; world_size is 3."),
        ("broadcast", "broadcast: obj[0] cannot be pickled"),
    ],
)
def test_unpicklable_object_is_refused_before_the_collective(
    what: str, said: str, three: World
) -> None:
    """Rank 1 can catch the error and pass another object: the other ranks do not notice."""
    assert said in three.found("cannot travel")[1][what]


@pytest.mark.parametrize("form", ["context", "local", "call"])
def test_rank_zero_goes_first(form: str, world: World) -> None:
    """In every form, rank 0 finishes before any other rank begins, and each gets its own result."""
    done = [(0, "train"), (0, "test")]
    assert world.found("first", form) == dict.fromkeys(range(world.size), done)


def test_failure_of_rank_zero_is_the_error_of_the_launch(run_dir: Path) -> None:
    """The others stop waiting for rank 0 when it fails, and the launch blames rank 0."""
    with pytest.raises(ddpsafe.RankRaisedError, match="the mirror is gone") as caught:
        launch(programs.fail_first, "call", run_dir=run_dir)
    assert caught.value.rank == 0
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_failure_of_rank_zero_is_raised_on_all_ranks_at_once(three: World) -> None:
    """Rank 0 gets its own error, the others one that quotes it; none hangs, and all can continue."""
    values = three.found("rank zero fails")
    assert isinstance(values[0]["error"], ConnectionRefusedError)
    for rank in (1, 2):
        error = values[rank]["error"]
        assert isinstance(error, ddpsafe.RankRaisedError)
        assert error.rank == 0
        assert "ConnectionRefusedError: the mirror is gone" in str(error)
        assert f"rank {rank} (world_size 3)" in str(error)
    for found in values.values():
        assert found["took_s"] < 10
        assert found["gathered"] == [0, 1, 2]
        assert found["second"] == "well"


def test_absent_rank_zero_is_named(missing: dict[int, Any]) -> None:
    """The other ranks wait no longer than timeouts.barrier, and name rank 0."""
    for rank in (1, 2):
        error = missing[rank]["keep_them_waiting"]
        assert error.setting == "barrier"
        assert error.missing_ranks == (0,)
        assert error.waited_s < machine.hang_limit(11)


# Printing, stopping and seeds.


@pytest.mark.full(but=["1"])
@pytest.mark.parametrize("nproc", [1, 3])
def test_only_rank_zero_prints(nproc: int, capfd: pytest.CaptureFixture[str]) -> None:
    """One line, with sep and end of print; torch warns of nothing while ranks wait for a slow one."""
    launch(programs.speak, nproc=nproc, console="all")
    assert capfd.readouterr() == ("hello-from-0!\n\n", "")


def test_all_ranks_agree_to_stop() -> None:
    """One rank receives SIGUSR1; all return True at the same call, and the launch is preempted."""
    with pytest.raises(ddpsafe.PreemptedError) as caught:
        launch(programs.ask_to_stop)
    calls = caught.value.values
    assert set(calls) == {0, 1, 2}
    assert len(set(calls.values())) == 1, f"the ranks stopped at different calls: {calls}"
    assert "SIGUSR1 to rank 2" in str(caught.value)
    assert (caught.value.kind, caught.value.exit_code) == ("preempted", 75)


def test_seeds_agree_for_models_and_differ_for_data(
    three: World, missing: dict[int, dict[str, Any]]
) -> None:
    """Draws from torch are equal on every rank; those from random and numpy differ."""
    first = three.found("seed")
    assert first == {rank: found["seed"] for rank, found in missing.items()}
    assert first[0]["torch"] == first[1]["torch"] == first[2]["torch"]
    assert len({found["random"] for found in first.values()}) == 3
    assert len({found["numpy"] for found in first.values()}) == 3


# Outside any rank.


def test_methods_are_no_ops_outside_any_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """A script that runs without any launcher needs no ``if`` around them."""
    ctx = ddpsafe.current()
    assert (ctx.rank, ctx.world_size, ctx.local_rank, ctx.nnodes) == (0, 1, 0, 1)
    assert (ctx.attempt, ctx.run_dir, str(ctx.device)) == (1, None, "cpu")
    model, loss = nn.Linear(2, 2), torch.ones(1)
    ctx.barrier("no other rank")
    with ctx.rank_zero_first():
        pass
    ctx.print("hello", "alone")
    assert ctx.is_main
    assert ctx.wrap(model) is model
    assert ctx.unwrap(model) is model
    assert ctx.all_gather("me") == ["me"]
    assert ctx.broadcast("me") == "me"
    assert ctx.reduce_mean(3.0, weight=2) == 3.0
    assert torch.equal(ctx.reduce_mean(loss), loss)
    assert ctx.reduce_mean({"b": 1.0, "a": 2.0}) == {"b": 1.0, "a": 2.0}
    assert ctx.rank_zero_first(math.sqrt, 4) == 2
    assert not ctx.stop_requested()
    assert capsys.readouterr().out == "hello alone\n"


def test_rank_with_peers_cannot_act_alone_before_setup(tmp_path: Path) -> None:
    """WORLD_SIZE is 2 and setup was not called: an error, not a model without its peers."""
    env = forked_ranks.by_hand(1, 2, forked_ranks.free_port())
    ranks = forked_ranks.run(programs.act_before_setup, [env], folder=tmp_path)
    (errors,) = forked_ranks.values(ranks)
    for name, error in errors.items():
        assert isinstance(error, ddpsafe.ConfigError), name
        assert "rank 1 (world_size 2) has no process group yet" in str(error)


def test_seed_all_works_outside_any_rank() -> None:
    """The same seed gives the same numbers."""
    state = random.getstate()
    drawn = []
    for _ in range(2):
        ddpsafe.seed_all(3)
        drawn.append((torch.rand(1).item(), random.random()))
    random.setstate(state)
    assert drawn[0] == drawn[1]
