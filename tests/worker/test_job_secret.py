"""Ranks of another launcher that share a secret ignore what other users write into their store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import attached_programs as programs
import forked_ranks
import pytest
import scripts
from forked_ranks import by_hand, free_port

from ddpsafe._job.store_keys import FolderStore, SignedKeys

NAME: Final = "DDPSAFE_JOB_SECRET"
SECRET: Final = "a secret of 24 characters"
OTHER_SECRET: Final = "another one of the same sort"


@pytest.mark.full(but=["secret"])
@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "none"])
def test_another_user_can_neither_stop_nor_fail_ranks_with_a_secret(
    secret: str | None, tmp_path: Path
) -> None:
    """That user reads every key of the store, and writes a stop, a failure and a missing rank.

    Without a secret the ranks believe these messages, which shows that they are effective.
    """
    torch = pytest.importorskip("torch")
    if not hasattr(torch.distributed.Store, "list_keys"):
        pytest.skip("strangers cannot list the keys of this torch's store")
    port = free_port()
    given = {} if secret is None else {NAME: secret}
    envs = [by_hand(rank, 2, port) | given for rank in range(2)]
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(
            forked_ranks.run, programs.train_beside_a_stranger, envs, str(tmp_path), folder=tmp_path
        )
        joined = [tmp_path / f"joined-{rank}" for rank in range(2)]
        scripts.wait_until(lambda: all(path.exists() for path in joined) or running.done())
        assert programs.forge(port, 2)
        (tmp_path / "forged").touch()
        found = [rank.value for rank in running.result()]
    if secret is not None:
        assert found == [{"stopped": False, "error": "", "sum": 1}] * 2
    else:
        assert all(each["stopped"] or "it was rank 0" in each["error"] for each in found)


@pytest.mark.full(but=["different"])
@pytest.mark.parametrize(
    ("secrets", "said"),
    [
        ((SECRET, None), "rank 1 (world_size 2) on"),
        ((None, SECRET), "has one, and rank 0 at"),
        ((SECRET, OTHER_SECRET), "has another one."),
    ],
    ids=["missing", "superfluous", "different"],
)
def test_a_rank_with_another_secret_is_refused_at_once(
    secrets: tuple[str | None, str | None], said: str, tmp_path: Path
) -> None:
    """Rank 1 reports the difference; rank 0 names the rank that has not joined."""
    port = free_port()
    envs = [
        by_hand(rank, 2, port) | ({} if secret is None else {NAME: secret})
        for rank, secret in enumerate(secrets)
    ]
    first, second = forked_ranks.run(programs.join_soon, envs, folder=tmp_path)
    assert second.value.startswith(f"ConfigError: {NAME}: ")
    assert said in second.value
    assert first.value.startswith("RendezvousTimeoutError: ")
    assert "rank 1" in first.value


def test_programs_started_by_a_rank_of_another_launcher_do_not_inherit_the_secret(
    tmp_path: Path,
) -> None:
    """The rank itself still has it, and joins a second group with it."""
    port = free_port()
    envs = [by_hand(rank, 2, port) | {NAME: SECRET} for rank in range(2)]
    found = forked_ranks.run(programs.join_twice_and_start_a_program, envs, folder=tmp_path)
    assert [each.value for each in found] == [[1, 1, None]] * 2


@pytest.mark.full(but=["forkserver"])
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_ranks_of_a_launch_do_not_get_the_secret_of_its_launcher(
    start_method: str, tmp_path: Path
) -> None:
    """Nor does a program that the script starts on import; the launcher keeps it."""
    source = f"""
        import os, subprocess, sys
        import ddpsafe

        NAMES = [{NAME!r}]
        SHOW = "import os, sys; print([os.environ.get(name) for name in sys.argv[1:]])"
        at_import = subprocess.check_output([sys.executable, "-S", "-c", SHOW, *NAMES], text=True)

        def look(ctx):
            return at_import.strip(), [os.environ.get(name) for name in NAMES]

        if __name__ == "__main__":
            values = ddpsafe.launch(
                look, nproc_per_node=1, backend="gloo", start_method={start_method!r}
            ).values
            print(values[0], [os.environ[name] for name in NAMES] == [{SECRET!r}])
    """
    path = scripts.write(tmp_path, "script.py", source)
    env = {NAME: SECRET}
    done = scripts.Script([str(path)], folder=tmp_path, env=env).end()
    assert done.lines() == ["('[None]', [None]) True"], done.err


def _plain(raw: FolderStore, _: SignedKeys) -> None:
    raw.set("key", "forged")


def _other_key(raw: FolderStore, keys: SignedKeys) -> None:
    keys.set("another key", "true")
    raw.set("key", raw.get("another key"))


def _other_scope(raw: FolderStore, _: SignedKeys) -> None:
    SignedKeys(raw, SECRET.encode(), "an earlier start").set("key", "true")


def _other_secret(raw: FolderStore, _: SignedKeys) -> None:
    SignedKeys(raw, OTHER_SECRET.encode(), "this start").set("key", "true")


def _changed(raw: FolderStore, keys: SignedKeys) -> None:
    keys.set("key", "true")
    raw.set("key", raw.get("key")[:-1])


def _moved_border(raw: FolderStore, keys: SignedKeys) -> None:
    keys.set("ke", "ytrue")
    raw.set("key", raw.get("ke")[:64] + b"true")


FORGED: Final = [_plain, _other_key, _other_scope, _other_secret, _changed, _moved_border]


@pytest.mark.parametrize("forge", FORGED)
def test_a_value_that_is_not_signed_for_its_key_is_ignored(
    forge: Callable[[FolderStore, SignedKeys], None], tmp_path: Path
) -> None:
    """check() does not see it, and get() refuses it."""
    raw = FolderStore(tmp_path / "keys")
    keys = SignedKeys(raw, SECRET.encode(), "this start")
    forge(raw, keys)
    assert not keys.check(["key"])
    with pytest.raises(RuntimeError, match="by another program"):
        keys.get("key")


def test_signed_keys_behave_as_those_of_the_store() -> None:
    """Values are returned; the first compare_set on an unset key wins; a forged value counts as unset."""
    from torch.distributed import HashStore

    raw = HashStore()
    keys = SignedKeys(raw, SECRET.encode(), "this start")
    keys.set("text", "true")
    keys.set("bytes", b"\x00\xff")
    assert [keys.get("text"), keys.get("bytes")] == [b"true", b"\x00\xff"]
    assert keys.check(["text", "bytes"])
    assert not keys.check(["text", "nothing"])
    assert keys.compare_set("first", "", "mine") == b"mine"
    assert keys.compare_set("first", "", "yours") == b"mine"
    assert keys.compare_set("first", "mine", "next") == b"next"
    raw.set("claim", "forged")
    assert keys.compare_set("claim", "", "mine") == b"mine"
    assert keys.get("claim") == b"mine"
    assert keys.delete_key("claim")
    assert not keys.check(["claim"])
