"""Secrets are recognized by name and never shown."""

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
        "SSHPASS",
        "PGPASS",
        "AZURE_STORAGE_CONNECTION_STRING",
        "DB_CONN_STR",
        "BLOB_SAS",
        "SIGNING_SALT",
    ],
)
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
