"""Errors keep their facts, advice stands once, and no text shows a secret."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import pickle
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

import pytest
from source_tree import CHECKOUT, PACKAGE, text_of

from ddpsafe import _errors
from ddpsafe._advice import ADVICE, COMMANDS, GENERAL
from ddpsafe._explain.catalogue import built_in
from ddpsafe._launcher.uncaught import presentable, without_frames
from ddpsafe._secrets import Mask, hide_value, is_secret_name

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
def test_error_survives_pickling_with_its_facts_and_cause(cls: type[_errors.DDPSafeError]) -> None:
    """So no message has to be parsed; a cause is kept if it can be pickled."""
    error = build(cls)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
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
def test_causes_are_compared_by_identity(causes: Sequence[BaseException]) -> None:
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


# Advice that several parts give.


SOURCES = {
    path: text_of(path)
    for pattern in ("*.py", "*.toml")
    for path in sorted(PACKAGE.rglob(pattern))
    if path.name != "_advice.py"
}


@pytest.mark.parametrize("code", ADVICE)
def test_it_is_what_explain_and_another_part_say(code: str) -> None:
    """And no part has a text of its own beside it."""
    rule = built_in().of_code[code]
    cause, fix = (text.format_map(GENERAL) for text in ADVICE[code])
    assert cause.lower() in rule.cause.lower()
    assert fix.lower() in rule.fix.lower()
    used = [
        path for path, text in SOURCES.items() if f'["{code}"]' in text or f"['{code}']" in text
    ]
    assert used, f"only explain says it; write it in the rule {code}"
    for text in (*ADVICE[code], *COMMANDS.get(code, ())):
        parts = [part.strip(" .;,") for part in re.split(r"\{\w+\}", text)]
        copies = [
            str(path.relative_to(CHECKOUT))
            for part in parts
            if len(part) > len("docker run --shm-size")
            for path, source in SOURCES.items()
            if part in source
        ]
        assert copies == []


def test_every_command_belongs_to_advice_and_names_known_facts() -> None:
    """A fact without general words could not be shown by explain."""
    assert COMMANDS.keys() <= ADVICE.keys()
    for texts in (*ADVICE.values(), *COMMANDS.values()):
        assert all(text.format_map(GENERAL) for text in texts)


# Secrets.


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "SLURM_JWT",
        "SENTRY_DSN", "SSHPASS", "PGPASS", "AZURE_STORAGE_CONNECTION_STRING", "DB_CONN_STR",
        "BLOB_SAS", "SIGNING_SALT",
    ],
)  # fmt: skip
def test_names_of_secrets_are_recognised(name: str) -> None:
    """Only the name counts, not the value."""
    assert is_secret_name(name)
    assert hide_value(name, "x") == "***"


@pytest.mark.parametrize(
    "name", ["PATH", "MASTER_PORT", "NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH"]
)
def test_other_names_are_not_secrets(name: str) -> None:
    """Showing other values helps the reader."""
    assert hide_value(name, "value") == "value"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tcp://me:pa:ss@host/x", "tcp://***@host/x"),
        ("https://ghp_0123456789@host", "https://***@host"),
        ("serve --db-password=abc --port 1", "serve --db-password=*** --port 1"),
        ("serve --token abc", "serve --token ***"),
        ("the value s3cr3t-long stands here", "the value *** stands here"),
        ("user@host and http://host:80/path", "user@host and http://host:80/path"),
        ("mongodb://u:pa/ss@h/db", "mongodb://***@h/db"),
        ("redis://:p@ss@h:6379", "redis://***@h:6379"),
        ("http://host:80/a@b", "http://host:80/a@b"),
        (
            "AccountName=me;AccountKey=abc==;EndpointSuffix=x",
            "AccountName=me;AccountKey=***;EndpointSuffix=x",
        ),
        ("Server=h;Pwd=a b;Uid=u", "Server=h;Pwd=***;Uid=u"),
        ("https://h/blob?sv=2020&sig=abc%3D&se=1", "https://h/blob?sv=2020&sig=***&se=1"),
        ('{"password": "abc", "port": 1}', '{"password": "***", "port": 1}'),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("sshpass -p abc ssh host", "sshpass -p *** ssh host"),
        ("curl -u me:abc http://h", "curl -u me:*** http://h"),
        ("key hf_" + "a" * 34 + " here", "key *** here"),
        ("max_tokens=100 tokenizer=bert", "max_tokens=100 tokenizer=bert"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", "***"),
    ],
)
def test_secrets_in_texts_are_replaced(text: str, shown: str) -> None:
    """That includes secrets in the middle of a text and inside of lists."""
    mask = Mask.of({"MY_TOKEN": "s3cr3t-long", "OTHER_KEY": "s3cr3t"})
    assert mask.text(text) == shown
    assert mask.value({"a": [text, 1]}) == {"a": [shown, 1]}
