"""What is sent to the ranks, how, and which message explains what cannot be sent."""

from __future__ import annotations

import collections
import functools
import io
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import hypothesis
import numpy as np
import pickling_programs as programs
import pytest
import torch
from hypothesis import strategies as st
from texts import any_text

import ddpsafe
from ddpsafe._wire import payload

TWO: Final[dict[str, Any]] = {"nproc_per_node": 2, "backend": "gloo", "start_method": "forkserver"}


def round_trip(obj: object) -> Any:
    """Send an object as `launch` sends arguments, and load it as a rank does."""
    pickled = payload.dumps_call(obj)
    return payload.loads(bytes(pickled), pickled.handles)


# Pickled by name and by value.


def test_importable_objects_are_sent_by_name() -> None:
    """A rank runs the code of the file, and classes keep their identity."""
    for obj in (programs.double, programs.Holder, programs.Trainer.run):
        pickled = payload.dumps_call(obj)
        assert b"pickling_programs" in bytes(pickled.stream)
        assert pickled.nbytes() < 100
        assert pickled.handles == ()
        assert round_trip(obj) is obj


@pytest.mark.full
def test_functions_of_every_kind_are_launched() -> None:
    """Lambdas, closures, partials, bound methods and callable objects all run."""
    offset = 100

    def closure(ctx: ddpsafe.RankContext) -> int:
        return offset + ctx.rank

    by_partial = functools.partial(lambda ctx, plus, *, minus: ctx.rank + plus - minus, minus=10)
    trainer = programs.Trainer(100)
    for fn in (lambda ctx: 100 + ctx.rank, closure, trainer.run, trainer):
        assert ddpsafe.launch(fn, **TWO).values == {0: 100, 1: 101}
    assert ddpsafe.launch(by_partial, (110,), **TWO).values == {0: 100, 1: 101}


def test_other_objects_are_sent_by_value_as_arguments_and_results() -> None:
    """This includes local classes: the result has the class that was sent."""
    base = 5

    class Local:
        def __init__(self, x: int) -> None:
            self.x = x

        def add(self, x: int) -> int:
            return self.x + x + base

    def recursive(n: int) -> int:
        return 1 if n == 0 else n * recursive(n - 1)

    functions = [
        programs.double,
        lambda x: x + base,
        Local(1).add,
        functools.partial(max, 3),
        recursive,
        Local,
        str,
    ]
    values = ddpsafe.launch(programs.call_each, (functions,), **TWO).values
    for rank, (doubled, *others, local, text) in values.items():
        n = rank + 10
        assert (doubled, others, text) == (2 * n, [n + 5, n + 6, n, recursive(n)], str(n))
        assert type(local) is Local
        assert local.x == n


def test_a_lambda_carries_the_globals_it_names_and_no_others() -> None:
    """A lock elsewhere in the module does no harm."""
    namespace: dict[str, Any] = {"FACTOR": 3, "LOCK": threading.Lock(), "__name__": "notebook"}
    exec("triple = lambda x: FACTOR * x", namespace)
    assert round_trip(namespace["triple"])(2) == 6


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")  # torch: beta
def test_tensors_of_every_layout_are_sent() -> None:
    """Sparse, quantised, meta, half, empty and with a gradient: as with torch's own pickling."""
    tensors = [
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.empty(2, 3, device="meta"),
        torch.empty(0, 5),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
        torch.nn.Parameter(torch.ones(2)),
        torch.arange(12).reshape(3, 4).T,
    ]
    for sent in tensors:
        for received in (round_trip(sent), payload.loads(bytes(payload.dumps_result(sent)))):
            for fact in ("layout", "dtype", "shape", "device", "requires_grad"):
                assert getattr(received, fact) == getattr(sent, fact)
            assert type(received) is type(sent)
            if sent.device.type != "meta":
                assert torch.equal(received.to_dense(), sent.to_dense())


def test_a_shared_tensor_stays_shared_even_inside_a_model() -> None:
    """Hogwild training updates the caller's own weights, at any depth of the arguments."""
    model = torch.nn.Linear(2, 1, bias=False).share_memory()
    pickled = payload.dumps_call({"models": [model]})
    assert [type(handle) for handle in pickled.handles] == [torch.nn.Parameter]
    assert payload.loads(bytes(pickled), pickled.handles)["models"][0].weight is model.weight


# What cannot be sent.


def open_file() -> Any:
    """Open a file that the caller closes."""
    return tempfile.TemporaryFile()


def generator() -> Iterator[int]:
    """Return a generator to suspend half way."""
    yield 1


UNSENDABLE: Final[dict[str, Callable[[], Any]]] = {
    "an open file": open_file,
    "a text file": lambda: io.TextIOWrapper(open_file()),
    "a lock": threading.Lock,
    "a re-entrant lock": threading.RLock,
    "an event": threading.Event,
    "a generator": generator,
    "a socket": socket.socket,
    "a frame": sys._getframe,
}


@pytest.fixture
def unsendable(request: pytest.FixtureRequest) -> Iterator[object]:
    """Make an object that cannot be sent, and close it afterwards."""
    thing = UNSENDABLE[request.param]()
    yield thing
    if hasattr(thing, "close"):
        thing.close()


@pytest.mark.parametrize("unsendable", UNSENDABLE, indirect=True)
def test_an_object_bound_to_its_process_is_refused_before_anything_starts(
    unsendable: object, run_dir: Path
) -> None:
    """The message has the path of the object, the reason, and what to pass instead."""
    with pytest.raises(ddpsafe.ConfigError) as caught:
        ddpsafe.launch(
            programs.double, ("fine", {"model": [1, unsendable]}), run_dir=run_dir, **TWO
        )
    first, cause, fix = str(caught.value).splitlines()[:3]
    assert first.startswith("args[1]['model'][1]")
    assert "cannot be sent to another process: " in first
    assert "belong to one process" in cause
    assert "create it inside the function" in fix
    assert caught.value.__cause__ is not None
    assert not run_dir.exists()


@pytest.fixture
def lock() -> Any:
    """Make a lock, which cannot be sent."""
    return threading.Lock()


def in_a_slot(lock: object) -> programs.Slotted:
    """Put the lock into a slot of a base class."""
    return programs.Slotted("fine", base=lock)


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda lock: lock, "args[0]"),
        (lambda lock: {"model": programs.Options(file=lock)}, "args[0]['model'].file"),
        (lambda lock: programs.Options(extra={"a": (1, lock)}), "args[0].extra['a'][1]"),
        (lambda lock: programs.Holder([lock]), "args[0].held[0]"),
        (programs.Slotted, "args[0].held"),
        (in_a_slot, "args[0].base_slot"),
        (programs.FrozenHolder, "args[0].held"),
        (lambda lock: programs.Holder(lock).method, "args[0].__self__.held"),
        (lambda lock: functools.partial(max, 1, lock), "args[0].args[1]"),
        (lambda lock: functools.partial(max, key=lock), "args[0].keywords['key']"),
        (lambda lock: lambda: lock, "args[0] closure variable 'lock'"),
        (lambda lock: lambda: [lambda: lock], "args[0] closure variable 'lock'"),
        (lambda lock: {(1, 2): {None: lock}}, "args[0][(1, 2)][None]"),
        (lambda lock: {lock: 1}, "args[0] key <unlocked"),
        (lambda lock: {lock}, "args[0] element <unlocked"),
        (lambda lock: ValueError("text", lock), "args[0].args[1]"),
        (lambda lock: collections.deque([0, lock]), "args[0][1]"),
    ],
)
def test_the_path_leads_to_the_unpicklable_object(
    lock: object, wrap: Callable[[object], object], path: str
) -> None:
    """It leads through containers, attributes, slots, methods, partials and closures."""
    with pytest.raises(ddpsafe.ConfigError) as caught:
        ddpsafe.launch(programs.double, (wrap(lock),), **TWO)
    named = str(caught.value).partition(" cannot be sent to another process: ")[0]
    if "<" in path:
        assert named.startswith(path)
    else:
        assert named == path


def test_keyword_arguments_and_the_function_are_searched_too(lock: Any) -> None:
    """The search covers the function's closure, globals and defaults."""
    with pytest.raises(ddpsafe.ConfigError, match=re.escape("kwargs['lock'] cannot be sent")):
        ddpsafe.launch(programs.double, kwargs={"lock": lock}, **TWO)

    def train(_ctx: object) -> bool:
        return bool(lock.locked())

    with pytest.raises(ddpsafe.ConfigError, match=r"train closure variable 'lock' cannot be sent"):
        ddpsafe.launch(train, **TWO)
    namespace: dict[str, Any] = {"LOCK": lock, "__name__": "notebook"}
    exec("def train(ctx): return LOCK.locked()", namespace)
    with pytest.raises(ddpsafe.ConfigError, match=r"train global variable 'LOCK' cannot be sent"):
        ddpsafe.launch(namespace["train"], **TWO)

    def with_default(_ctx: object, guard: object = lock) -> None:
        del guard

    with pytest.raises(ddpsafe.ConfigError, match=r"with_default.* cannot be sent"):
        ddpsafe.launch(with_default, **TWO)


class Refuses:
    """Raises its own reason for not being picklable."""

    def __reduce__(self) -> Any:
        msg = "open the database in the rank"
        raise RuntimeError(msg)


def test_the_reason_an_object_gives_is_shown() -> None:
    """Whatever a user's class raises becomes part of the message."""
    with pytest.raises(
        ddpsafe.ConfigError, match=re.escape("args[0]['db'] cannot be sent")
    ) as caught:
        ddpsafe.launch(programs.double, ({"db": Refuses()},), **TWO)
    assert "open the database in the rank" in str(caught.value)


# The search itself.


@st.composite
def nests(draw: st.DrawFn) -> tuple[object, str]:
    """Make nested containers with one lock in them, and return them with the path to it."""
    nested: object = threading.Lock()
    path = ""
    for sort in draw(st.lists(st.sampled_from(("list", "tuple", "dict", "object")), max_size=12)):
        before = draw(st.lists(st.integers(), max_size=3))
        if sort == "dict":
            key = draw(any_text(max_size=5) | st.integers())
            nested, step = {**dict.fromkeys(map(str, before)), key: nested}, f"[{key!r}]"
        elif sort == "object":
            nested, step = programs.Holder(nested), ".held"
        else:
            items = [*before, nested, None]
            nested, step = (items if sort == "list" else tuple(items)), f"[{len(before)}]"
        path = step + path
    return nested, path


@hypothesis.given(nests())
@hypothesis.settings(max_examples=100, deadline=None)
def test_the_path_found_is_correct(nested: tuple[object, str]) -> None:
    """A reader can paste it after the name of the argument."""
    obj, path = nested
    found = payload.find_unpicklable(obj, "args[0]")
    assert found is not None
    assert found[0] == f"args[0]{path}"
    assert isinstance(found[1], TypeError)


def test_nothing_is_found_in_a_picklable_object() -> None:
    """Cycles do not matter, as pickle follows them."""
    cycle: list[object] = [1, {"a": programs.Holder(None)}]
    cycle.append(cycle)
    assert payload.find_unpicklable(cycle, "args") is None


def test_a_child_with_a_reference_to_its_parent_is_not_blamed(lock: object) -> None:
    """A callback references a trainer that has a lock: the lock is named, not the callback."""
    trainer, callback = programs.Holder(None), programs.Holder(None)
    callback.held = {"trainer": trainer}
    trainer.held = [callback, {"guard": lock}]
    found = payload.find_unpicklable(trainer, "args[0]")
    assert found is not None
    assert found[0] == "args[0].held[1]['guard']"


@pytest.mark.timeout(20)
def test_the_search_ends_despite_cycles_and_great_depth(lock: object) -> None:
    """It names an object on the way within seconds, whatever the graph looks like."""
    ring = [programs.Holder(None) for _ in range(200)]
    for one, next_one in zip(ring, [*ring[1:], ring[0]], strict=True):
        one.held = next_one
    knot: list[object] = []
    knot += [knot, {"self": knot}, ring[0], lock]
    found = payload.find_unpicklable(knot, "args")
    assert found is not None
    assert found[0] == "args[3]"
    deep: object = lock
    for _ in range(100_000):
        deep = [deep]
    found = payload.find_unpicklable(deep, "args")
    assert found is not None
    assert re.fullmatch(r"args(\[0\])+", found[0])
    assert len(found[0]) < 1000


def test_the_search_survives_objects_that_raise_when_inspected(lock: object) -> None:
    """Examples are an empty cell, and properties and representations that raise."""

    class Hostile:
        __slots__ = ("inner",)

        def __init__(self) -> None:
            self.inner = lock

        def __repr__(self) -> str:
            raise RuntimeError

        def __getattr__(self, name: str) -> object:
            raise LookupError(name)

        def __hash__(self) -> int:
            return 1

    def with_empty_cell() -> object:
        return later

    for obj in (Hostile(), {Hostile(): 1}, {Hostile()}, with_empty_cell, [lock, with_empty_cell]):
        found = payload.find_unpicklable([obj], "args")
        assert found is None or found[0].startswith("args[0]")
        if obj is not with_empty_cell:
            assert found is not None
    later = 1
    assert with_empty_cell() == later


# Large arrays and tensors.

LARGE: Final = 1 << 19
"""Numbers of 8 bytes: several times the limit above which data is sent outside the pickle."""


def large_objects() -> dict[str, Any]:
    """Return objects with large memory, in every form that matters to the receiver."""
    tensor = torch.arange(LARGE, dtype=torch.float64)
    parameter = torch.nn.Parameter(torch.ones(LARGE), requires_grad=False)
    return {
        "tensor": tensor,
        "view": tensor[1:],
        "transposed": tensor.view(2, -1).t(),
        "bfloat16": torch.ones(LARGE, dtype=torch.bfloat16),
        "with a gradient": torch.ones(LARGE, requires_grad=True),
        "parameter": parameter,
        "array": np.arange(LARGE),
        "array of Fortran": np.ones((2, LARGE), order="F"),
        "bytes": bytes(8 * LARGE),
        "small": torch.arange(3),
        "empty": torch.empty(0, 3),
        "meta": torch.empty(LARGE, device="meta"),
    }


@pytest.mark.full
@pytest.mark.parametrize("how", ["in memory", "mapped"])
def test_large_tensors_and_arrays_arrive_unchanged(tmp_path: Path, how: str) -> None:
    """Values, types and layouts match; a view still shares its tensor's memory, and all are writable."""
    sent = large_objects()
    for pickled in (payload.dumps_call(sent), payload.dumps_result(sent)):
        (tmp_path / "file").write_bytes(bytes(pickled))
        with (tmp_path / "file").open("rb") as file:
            data = payload.map_file(file.fileno()) if how == "mapped" else bytes(pickled)
        received: Any = payload.loads(data)
        assert list(received) == list(sent)
        for name, value in sent.items():
            assert type(received[name]) is type(value), name
            if isinstance(value, torch.Tensor) and value.is_meta:
                assert received[name].shape == value.shape
            elif isinstance(value, torch.Tensor):
                torch.testing.assert_close(received[name], value, rtol=0, atol=0)
                assert received[name].stride() == value.stride(), name
                assert received[name].requires_grad == value.requires_grad, name
            else:
                assert np.array_equal(received[name], value), name
        received["tensor"][1] = -1
        assert received["view"][0] == -1
        received["array"][:] = 7
        received["array of Fortran"][:] = 7
        assert (tmp_path / "file").read_bytes() == bytes(pickled)  # other ranks map it too


def test_large_memory_is_not_copied_into_the_pickle() -> None:
    """In both directions it is written from where it is."""
    sent = large_objects()
    for name in ("tensor", "array", "parameter"):
        for pickled in (payload.dumps_call(sent[name]), payload.dumps_result(sent[name])):
            assert len(pickled.stream) < 2_000, name


def test_a_large_argument_and_a_large_result_are_exact_in_every_attempt(tmp_path: Path) -> None:
    """This holds even if the first attempt failed and the caller has changed the array since."""
    array = np.arange(LARGE)

    def change(_failure: ddpsafe.DDPSafeError) -> None:
        array[:] = 0

    result = ddpsafe.launch(
        programs.double_in_the_second_attempt,
        (array,),
        on_retry=change,
        retry={"on": ConnectionError, "backoff_initial": 0, "jitter": 0},
        run_dir=tmp_path,
        **TWO,
    )
    assert result.attempts == 2
    for value in result.values.values():
        assert np.array_equal(value, 2 * np.arange(LARGE))


def test_a_rank_that_cannot_write_its_result_to_a_file_sends_it_through_the_pipe() -> None:
    """On a full disk, for example; it only takes longer."""
    values = ddpsafe.launch(programs.return_much_without_a_folder, (LARGE,), **TWO).values
    assert {rank: int(value.sum()) for rank, value in values.items()} == {0: LARGE, 1: LARGE}
