"""Errors are pickled with all their facts, and each phase has exactly one class."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

import pytest

from ddpsafe import _errors
from ddpsafe._launcher.uncaught import presentable, without_frames

FACTS: Final = {
    "attempt": 2,
    "attempts": 3,
    "exit_code": 137,
    "hostname": "gpu-07",
    "kind": "killed",
    "local_rank": 1,
    "log_path": Path("/runs/1/attempt-2/rank-3.err"),
    "missing_ranks": (1, 3),
    "name": "head.weight",
    "node_rank": 1,
    "origin": "own",
    "outcomes": {3: "an outcome"},
    "pid": 4711,
    "problems": ("first", "second"),
    "rank": 3,
    "ranks": (2, 3),
    "report": {"check": "finding"},
    "run_dir": Path("/runs/1"),
    "setting": "barrier",
    "stacks": {1: "train.py:12"},
    "unfinished_ranks": (1,),
    "values": {0: "saved"},
    "waited_s": 20.5,
    "why": "its launcher has ended",
}
"""A value that is not the default for every fact that an error class takes."""

CLASSES: Final = [
    each
    for each in vars(_errors).values()
    if inspect.isclass(each) and issubclass(each, _errors.DDPSafeError)
]

NO_ERROR_OF_ITS_OWN: Final = {
    "grace": "a rank that outlives it is killed, which is the next step and no failure",
    "stop": "ranks that outlive it are ended, and PreemptedError names them, as it does the others",
    "node_loss": "a node that is away for longer is lost: NodeLostError, as when its launcher has ended",
}


def build(cls: type[_errors.DDPSafeError]) -> _errors.DDPSafeError:
    """Return an error with every fact that its class takes."""
    names: list[str] = []
    if inspect.isfunction(cls.__init__):  # the base takes a message only, as Exception does
        names = inspect.getfullargspec(cls.__init__).kwonlyargs
    error = cls("what happened", **{name: FACTS[name] for name in names})
    error.__cause__ = ValueError("the root of it")
    return error


LOCAL: Final = {"outcomes", "problems", "report", "run_dir", "values"}
"""What each process fills in itself."""


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_error_is_the_same_after_it_was_plain_data(cls: type[_errors.DDPSafeError]) -> None:
    """As JSON it reaches other ranks and nodes: class, explanation and facts, without what is local."""
    error = build(cls)
    error.explanation = _errors.Explanation("what", "cause", "fix", ("a detail",), Path("/runs/1"))
    plain = json.loads(json.dumps(_errors.to_plain(error)))
    local = {name: value for name, value in vars(error).items() if name in LOCAL}
    copy = _errors.from_plain(plain, **local)
    assert type(copy) is cls
    assert str(copy) == str(error)
    expected = {name: value for name, value in vars(error).items() if name != "explanation"}
    found = {name: value for name, value in vars(copy).items() if name in expected}
    assert found == expected
    assert not LOCAL & plain["facts"].keys()
    assert _errors.describes(plain, cls)
    assert _errors.describes(plain, _errors.DDPSafeError)
    assert not _errors.describes(plain, Unknown)
    assert not _errors.describes(None, cls)


class Unknown(_errors.PreflightError):
    """A user's subclass, which other processes may not have."""


def test_an_error_of_an_unknown_class_is_of_the_nearest_known_one() -> None:
    """So it is for a class of a part of ddpsafe that is not imported there; other data is refused."""
    error = Unknown("what", kind="mount")
    copy = _errors.from_plain(_errors.to_plain(error))
    assert type(copy) is _errors.PreflightError
    assert (copy.kind, copy.exit_code, copy.explanation) == ("mount", 1, error.explanation)
    for bad in ({}, {"classes": []}, {"classes": ["OSError"]}, {"classes": ["ConfigError"]}):
        with pytest.raises(ValueError, match="not an error of ddpsafe"):
            _errors.from_plain(bad)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_error_survives_pickling_with_its_facts(cls: type[_errors.DDPSafeError]) -> None:
    """Type, message and facts are unchanged, so that no message has to be parsed."""
    error = build(cls)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_error_survives_pickling_with_its_cause(cls: type[_errors.DDPSafeError]) -> None:
    """Its cause is kept if the cause can be pickled."""
    copy = pickle.loads(pickle.dumps(build(cls)))
    assert repr(copy.__cause__) == repr(ValueError("the root of it"))


def test_every_timeout_has_exactly_one_error() -> None:
    """It is `LaunchTimeoutError` with the name of the field."""
    from ddpsafe import Timeouts

    fields = set(Timeouts.model_fields) - NO_ERROR_OF_ITS_OWN.keys()
    assert set(get_args(_errors.Limit)) == fields


def test_message_answers_the_four_questions() -> None:
    """They are what happened and where, the likely cause, what to do, and where the logs are."""
    text = str(_errors.Explanation("what and where", "why", "do this", logs="/runs/1"))
    what, cause, fix, logs = text.splitlines()
    assert what == "what and where"
    assert cause.strip() == "Likely cause: why"
    assert fix.strip() == "What to do: do this"
    assert logs.strip() == "Logs: /runs/1"


@dataclasses.dataclass
class _EqualError(Exception):
    """Equal to every instance with the same code, as an exception that is a dataclass."""

    code: int


class _IncomparableError(Exception):
    """An exception whose class refuses comparison."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("not comparable")

    __hash__ = Exception.__hash__


@pytest.mark.parametrize(
    "causes",
    [
        (_EqualError(1), _EqualError(1), ValueError("the root of it")),
        (_IncomparableError(), ValueError("root")),
    ],
    ids=["equal ones", "one that raises when compared"],
)
def test_causes_are_compared_by_identity(
    causes: Sequence[BaseException],
) -> None:
    """Equal causes are neither merged nor taken for a circle; `retry` compares in the same way."""
    chain = [_errors.ConfigError("It is wrong."), *causes]
    for error, cause in itertools.pairwise(chain):
        error.__cause__ = cause
    assert list(map(id, _errors.causes_of(chain[0]))) == list(map(id, chain))
    again = pickle.loads(pickle.dumps(chain[0]))
    assert type(again.__cause__) is type(causes[0])


def test_an_error_that_is_only_shown_does_not_set_the_exit_status() -> None:
    """An error that leaves the library sets it, by a hook that remains installed."""
    hook = sys.excepthook
    error = build(_errors.RankExitedError)
    assert (error.exit_code, without_frames(error)) == (137, error)
    assert sys.excepthook is hook


@pytest.mark.parametrize("others", [0, 1], ids=["its own", "its cause's"])
def test_an_error_in_a_circle_of_causes_can_be_shown_and_pickled(others: int) -> None:
    """``raise error from error`` makes such a circle, in which a naive loop would never end."""
    chain = [_errors.ConfigError("It is wrong."), _errors.ConfigError("So is this.")][: others + 1]
    for error, cause in zip(chain, [*chain[1:], chain[0]], strict=True):
        error.__cause__ = cause
    assert presentable(chain[0]) is chain[0]
    again = pickle.loads(pickle.dumps(chain[0]))
    assert (str(again), again.__cause__) == ("It is wrong.", None)
