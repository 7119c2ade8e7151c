"""A rank ends as Python ends a program: what the script left for its end is done, also after an error."""

from __future__ import annotations

import gzip
import sys
import zipfile
from pathlib import Path

import h5py
import pytest
import scripts

TRAINING = """
    import atexit, csv, gzip, sys, tempfile, time, zipfile
    from concurrent.futures import ThreadPoolExecutor
    import h5py, torch, torch.distributed as dist

    class Holder:
        pass

    class Late:  # writes when it is deleted, or in a thread that outlives the function
        def __init__(self, name):
            self.name = name

        def __del__(self):
            open(self.name, "w").write("row\\n")

        def write_later(self):
            time.sleep(0.3)
            self.__del__()

    GLOBAL = []

    def train(rank, fails):
        GLOBAL.append(open(f"plain-{rank}", "w"))
        GLOBAL[0].write("row\\n")
        held = torch.held = Holder()  # in a module of a library
        held.packed = gzip.open(f"packed-{rank}", "wt")
        held.packed.write("row\\n")
        held.bytes = open(f"bytes-{rank}", "wb")
        held.bytes.write(b"row\\n")
        held.archive = zipfile.ZipFile(f"archive-{rank}", "w")
        held.archive.writestr("member", "row\\n")
        held.named = tempfile.NamedTemporaryFile(dir=".", prefix=f"temporary-{rank}-")
        held.folder = tempfile.TemporaryDirectory(dir=".", prefix=f"temporary-{rank}-")
        table = open(f"table-{rank}", "w", newline="")  # in a local of the traceback
        csv.writer(table, lineterminator="\\n").writerow(["row"])
        held.table = None if fails else table
        held.hdf5 = h5py.File(f"hdf5-{rank}", "w")
        held.hdf5["row"] = 1
        GLOBAL.append(Late(f"deleted-{rank}"))
        ThreadPoolExecutor(1).submit(Late(f"thread-{rank}").write_later)
        atexit.register(lambda: open(f"exit-{rank}", "w").write("row\\n"))

        def hook(kind, value, trace):
            open(f"hook-{rank}", "w").write(kind.__name__)

        sys.excepthook = hook
        print("unfinished", rank, end="")
        sys.stderr.write(f"also unfinished {rank}")
        if fails and rank == 1:
            raise ValueError("bad batch")
        if fails:
            dist.barrier()

    def launched(ctx, fails):
        train(ctx.rank, fails)

    if __name__ == "__main__":
        if sys.argv[1] == "launch":
            import ddpsafe
            ddpsafe.launch(launched, (sys.argv[2] == "fails",), nproc_per_node=2, backend="gloo")
        else:
            dist.init_process_group("gloo")
            train(dist.get_rank(), sys.argv[2] == "fails")
"""


def _require_all_rows(folder: Path, rank: int) -> None:
    for kind in ("plain", "bytes", "table", "exit", "deleted", "thread"):
        assert (folder / f"{kind}-{rank}").read_text() == "row\n", kind
    assert gzip.decompress((folder / f"packed-{rank}").read_bytes()) == b"row\n"
    with h5py.File(folder / f"hdf5-{rank}") as file:
        assert file["row"][()] == 1
    with zipfile.ZipFile(folder / f"archive-{rank}") as archive:
        assert archive.read("member") == b"row\n"


@pytest.mark.parametrize("ends", ["returns", "fails"])
@pytest.mark.parametrize("style", ["launch", "run"])
def test_open_files_are_written_and_temporary_ones_removed(
    tmp_path: Path, style: str, ends: str
) -> None:
    """In globals, objects, modules of libraries and locals of the traceback; exit functions run first."""
    path = scripts.write(tmp_path, "train.py", TRAINING)
    command = ["-m", "ddpsafe", "run", "--nproc-per-node", "2"] if style == "run" else []
    ended = scripts.Script(
        [*command, str(path), style, ends],
        folder=tmp_path,
        env={"DDPSAFE_RUN_DIR": str(tmp_path / "logs")},
    ).end()
    assert (ended.code == 0) == (ends == "returns"), ended.err
    # Rank 0 waits for rank 1, and SIGTERM may end it before it raises.
    for rank in (1,) if ends == "fails" else (0, 1):
        _require_all_rows(tmp_path, rank)
        log = tmp_path / "logs" / "attempt-1" / f"rank-{rank}"
        assert f"unfinished {rank}" in log.with_suffix(".out").read_text()
        assert f"also unfinished {rank}" in log.with_suffix(".err").read_text()
    assert not [*tmp_path.glob("temporary-1*" if ends == "fails" else "temporary-*")]
    if ends == "fails":
        assert "rank 1 (world_size 2) raised ValueError" in ended.err
    hooked = (tmp_path / "hook-1").exists()
    assert hooked == (style == "run" and ends == "fails")


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells which signals are handled in C"
)
def test_a_handler_in_c_outlives_a_launch(tmp_path: Path) -> None:
    """Python says that such a signal has its default; `faulthandler.register` is one that sets it."""
    source = """
        import faulthandler, signal
        import ddpsafe

        def use(ctx):
            faulthandler.register(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
            return ctx.rank

        if __name__ == "__main__":
            faulthandler.register(signal.SIGUSR1)
            faulthandler.register(signal.SIGTERM)
            print(ddpsafe.launch(use, nproc_per_node=2, backend="gloo").values)
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGTERM)
            print("alive")
    """
    ended = scripts.run(tmp_path, source, fresh=True)
    assert ended.lines() == ["{0: 0, 1: 1}", "alive"]
    assert ended.err.count("most recent call first") >= 2
