"""Secrets: which names hold one, and that none comes through."""

from __future__ import annotations

import pytest

from ddpsafe._secrets import Mask, hide_value, is_secret_name


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "SLURM_JWT",
        "SENTRY_DSN",
    ],
)
def test_names_of_secrets_are_recognised(name: str) -> None:
    """By what they are called, not by what is in them."""
    assert is_secret_name(name)
    assert hide_value(name, "x") == "***"


@pytest.mark.parametrize(
    "name", ["PATH", "MASTER_PORT", "NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH"]
)
def test_other_names_are_not(name: str) -> None:
    """A value that may be shown helps."""
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
    ],
)
def test_texts_are_struck_out(text: str, shown: str) -> None:
    """Also where a secret stands in the middle, and in what lies inside of lists."""
    mask = Mask.of({"MY_TOKEN": "s3cr3t-long", "OTHER_KEY": "s3cr3t"})
    assert mask.text(text) == shown
    assert mask.value({"a": [text, 1]}) == {"a": [shown, 1]}
