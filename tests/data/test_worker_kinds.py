# ruff: noqa: SIM115, ARG001, ARG005, LOG001, PLW0108 - each row makes what it names
"""How the search for hazards classifies objects of real libraries: caught, harmless, or missed.

Each row makes the object with its library, as a dataset would hold it. Rows of missing libraries
are skipped. docs/reference/data.md has the table.
"""

from __future__ import annotations

import bz2
import collections
import concurrent.futures
import contextvars
import csv
import functools
import gzip
import importlib
import io
import itertools
import logging
import mmap
import multiprocessing as mp
import os
import shelve
import socket
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
import urllib.request
import warnings
import wave
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import numpy as np
import pytest
import torch
from data_programs import Numbers
from torch.utils.data import DataLoader as TorchDataLoader

from ddpsafe.data import DataLoader, PerProcess, check_worker_safety
from ddpsafe.data.errors import UnsafeWorkersError

SHARED: dict[str, Any] = {}


def lib(name: str) -> Any:
    """Import a library, also one that the types of this file do not know."""
    return importlib.import_module(name)


class Kit:
    """A folder with a file of each format, and the objects to close at the end."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack

    def text(self) -> Path:
        """Write a table of numbers."""
        path = self.folder / "table.csv"
        path.write_text("a,b\n1,2\n3,4\n")
        return path

    def open(self, mode: str = "rb") -> Any:
        """Open the table."""
        return self.stack.enter_context(self.text().open(mode))

    def zip(self) -> Path:
        """Write a zip archive."""
        path = self.folder / "a.zip"
        with zipfile.ZipFile(path, "w") as packed:
            packed.writestr("x", "x")
        return path

    def tar(self) -> Path:
        """Write a tar archive."""
        path = self.folder / "a.tar"
        with tarfile.open(path, "w") as packed:
            packed.add(self.text(), "x")
        return path

    def closing(self, item: Any) -> Any:
        """Close the object at the end, and return it."""
        self.stack.callback(getattr(item, "close", lambda: None))
        return item

    def database(self) -> sqlite3.Connection:
        """Open an SQLite database."""
        found: sqlite3.Connection = self.closing(sqlite3.connect(self.folder / "db"))
        return found

    def h5(self) -> Any:
        """Open an HDF5 file with a dataset x."""
        file = self.closing(lib("h5py").File(self.folder / "a.h5", "w"))
        file.create_dataset("x", data=[1, 2])
        return file

    def image(self) -> Path:
        """Write an image."""
        path = self.folder / "a.tiff"
        lib("PIL.Image").new("L", (4, 4)).save(path)
        return path

    def server(self) -> str:
        """Serve HTTP on loopback with keep-alive; return the URL."""

        class Answer(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        self.stack.callback(thread.join)
        self.stack.callback(server.server_close)
        self.stack.callback(server.shutdown)
        return f"http://127.0.0.1:{server.server_port}/"


class OpenOnClass:
    """A dataset that holds a file as a class attribute."""

    file: Any = None


def read_shared(index: int) -> Any:
    """Read from a global of the module."""
    return SHARED["file"].read(index)


class ReadsGlobal(Numbers):
    """A dataset whose method reads a global."""

    def __getitem__(self, index: int) -> Any:
        return read_shared(index)


def _lazy_class(kit: Kit) -> Any:
    OpenOnClass.file = kit.open()
    kit.stack.callback(setattr, OpenOnClass, "file", None)
    return OpenOnClass()


def _lazy_global(kit: Kit) -> Any:
    SHARED["file"] = kit.open()
    kit.stack.callback(SHARED.clear)
    return ReadsGlobal(8)


def _many_files(kit: Kit) -> Any:
    quiet: list[Any] = [SimpleNamespace(file=None) for _ in range(300)]
    quiet[-1].file = kit.open()
    return quiet


def _far_file(kit: Kit) -> Any:
    return [[[i, {i: [i]}] for i in range(30_000)], kit.open()]


def _pool(kit: Kit) -> Any:
    pool = kit.stack.enter_context(concurrent.futures.ThreadPoolExecutor(1))
    pool.submit(int).result()
    return pool


def _default(kit: Kit) -> Any:
    def read(index: int, file: Any = kit.open()) -> Any:  # noqa: B008 - what is tested
        return file.read(index)

    return read


def _child(kit: Kit) -> Any:
    child = subprocess.Popen(["/bin/sleep", "0"], stdout=subprocess.PIPE)
    kit.stack.callback(child.stdout.close)  # type: ignore[union-attr]
    child.wait()
    return child


def _logger(kit: Kit) -> Any:
    logger = logging.Logger("kinds")
    handler = logging.FileHandler(kit.folder / "log")
    kit.stack.callback(handler.close)
    logger.addHandler(handler)
    return logger


def _requests(kit: Kit) -> Any:
    session = kit.closing(lib("requests").Session())
    session.trust_env = False
    session.get(kit.server())
    return session


def _urllib3(kit: Kit) -> Any:
    pool = lib("urllib3").PoolManager()
    pool.request("GET", kit.server())
    kit.stack.callback(pool.clear)
    return pool


def _httpx(kit: Kit) -> Any:
    client = kit.closing(lib("httpx").Client(trust_env=False))
    client.get(kit.server())
    return client


def _boto3(_: Kit) -> Any:
    return lib("boto3").client(
        "s3", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    )


def _engine(kit: Kit, *, used: bool) -> Any:
    sqlalchemy = lib("sqlalchemy")
    engine = sqlalchemy.create_engine(f"sqlite:///{kit.folder / 'db'}")
    if used:
        engine.connect().close()
        kit.stack.callback(engine.dispose)
    return engine


def _netcdf(kit: Kit) -> Any:
    file = kit.closing(lib("netCDF4").Dataset(kit.folder / "a.nc", "w"))
    file.createDimension("x", 2)
    return file


def _tables(kit: Kit) -> Any:
    return kit.closing(lib("tables").open_file(str(kit.folder / "t.h5"), "w"))


def _tiff(kit: Kit) -> Any:
    tifffile = lib("tifffile")
    tifffile.imwrite(kit.folder / "t.tiff", np.zeros((4, 4), np.uint8))
    return kit.closing(tifffile.TiffFile(kit.folder / "t.tiff"))


def _xarray(kit: Kit) -> Any:
    xarray = lib("xarray")
    lib("netCDF4")
    xarray.Dataset({"a": ("x", [1, 2])}).to_netcdf(kit.folder / "x.nc", engine="netcdf4")
    return kit.closing(xarray.open_dataset(kit.folder / "x.nc", engine="netcdf4"))


def _npz(kit: Kit) -> Any:
    np.savez(kit.folder / "a.npz", a=np.arange(3))
    return kit.closing(np.load(kit.folder / "a.npz"))


def _npz_memory(kit: Kit) -> Any:
    packed = io.BytesIO()
    np.savez(packed, a=np.arange(3))
    packed.seek(0)
    return kit.closing(np.load(packed))


def _parquet(kit: Kit) -> Path:
    pyarrow = lib("pyarrow")
    path = kit.folder / "a.parquet"
    lib("pyarrow.parquet").write_table(pyarrow.table({"a": [1, 2]}), path)
    return path


def _sound(kit: Kit) -> Any:
    soundfile = lib("soundfile")
    soundfile.write(kit.folder / "a.wav", np.zeros(8), 8000)
    return kit.closing(soundfile.SoundFile(kit.folder / "a.wav"))


def _video(kit: Kit) -> Path:
    av = lib("av")
    path = kit.folder / "a.mp4"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("mpeg4", rate=1)
        stream.width = stream.height = 16
        frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8))
        out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


def _capture(kit: Kit) -> Any:
    capture = lib("cv2").VideoCapture(str(_video(kit)))
    kit.stack.callback(capture.release)
    return capture


def _zmq(kit: Kit) -> Any:
    context = lib("zmq").Context()
    kit.stack.callback(context.term)
    return kit.closing(context.socket(lib("zmq").REQ))


def _mongo(kit: Kit) -> Any:
    return kit.closing(lib("pymongo").MongoClient("127.0.0.1", 9, connect=False))


def _zarr(kit: Kit) -> Any:
    zarr = lib("zarr")
    kit.stack.callback(lib("zarr.core.sync").cleanup_resources)
    return zarr.create_array(str(kit.folder / "z"), shape=(4,), dtype="i4")


def _tensorboard(kit: Kit) -> Any:
    lib("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.utils.tensorboard import SummaryWriter

        return kit.closing(SummaryWriter(str(kit.folder)))  # type: ignore[no-untyped-call]


def _hf(kit: Kit) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lib("datasets").Dataset.from_dict({"a": [1, 2]})


def _hf_stream(kit: Kit) -> Any:
    return _hf(kit).to_iterable_dataset(num_shards=2)


def _webdataset(kit: Kit) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lib("webdataset").WebDataset(str(kit.tar()), shardshuffle=False)


def _parquet_rows(kit: Kit) -> Any:
    return lib("pyarrow.dataset").dataset(_parquet(kit))


def _duckdb(kit: Kit) -> Any:
    return kit.closing(lib("duckdb").connect(str(kit.folder / "duck.db")))


def _nifti(kit: Kit) -> Any:
    nibabel = lib("nibabel")
    nibabel.save(nibabel.Nifti1Image(np.zeros((2, 2, 2)), np.eye(4)), kit.folder / "a.nii")
    return nibabel.load(kit.folder / "a.nii")


def _closed(item: Any) -> Any:
    item.close()
    return item


def _raster(kit: Kit) -> Any:
    rasterio = lib("rasterio")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kit.closing(rasterio.open(kit.image()))


def _fasta(kit: Kit) -> Any:
    (kit.folder / "a.fa").write_text(">x\nACGT\n")
    return kit.closing(lib("pysam").FastaFile(str(kit.folder / "a.fa")))


def _loguru(kit: Kit) -> Any:
    logger = lib("loguru").logger
    number = logger.add(kit.folder / "loguru.log")
    kit.stack.callback(logger.remove, number)
    return logger


def _response(kit: Kit) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    response = opener.open(kit.server())
    response.read()
    return kit.closing(response)


def _bz2(kit: Kit) -> Path:
    path = kit.folder / "a.bz2"
    path.write_bytes(bz2.compress(b"x"))
    return path


def _wave(kit: Kit) -> Path:
    path = kit.folder / "a.wav"
    with wave.open(str(path), "wb") as out:
        out.setparams((1, 2, 8000, 4, "NONE", "NONE"))
        out.writeframes(bytes(8))
    return path


def _exit_stack(kit: Kit) -> Any:
    kit.stack.enter_context(inner := ExitStack())
    inner.enter_context(kit.text().open("rb"))
    return inner


def _local(kit: Kit) -> Any:
    held = threading.local()
    held.file = kit.open()
    return held


class Singleton:
    """A class that opens a file once per process, in a class method."""

    file: Any = None

    @classmethod
    def get(cls) -> Any:
        """Return the file."""
        return cls.file


class ReadsSingleton(Numbers):
    """A dataset whose method uses another class."""

    def __getitem__(self, index: int) -> Any:
        return Singleton.get().read(index)


def _singleton(kit: Kit) -> Any:
    Singleton.file = kit.open()
    kit.stack.callback(setattr, Singleton, "file", None)
    return ReadsSingleton(8)


class Refuses:
    """An object that raises on every access."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __bool__(self) -> bool:
        raise RuntimeError


def _torch_reader(kit: Kit) -> Any:
    torch.save([1], kit.folder / "a.pt")
    return torch._C.PyTorchFileReader(str(kit.folder / "a.pt"))


def _mapped(kit: Kit) -> Any:
    torch.save(torch.arange(4), kit.folder / "m.pt")
    return torch.load(kit.folder / "m.pt", mmap=True)


def _pool_of_processes(kit: Kit) -> Any:
    pool = mp.get_context("fork").Pool(1)
    kit.stack.callback(pool.join)
    kit.stack.callback(pool.terminate)
    return pool


def _ended_pool(_: Kit) -> Any:
    pool = mp.get_context("fork").Pool(1)
    pool.close()
    pool.join()
    return pool


def _ended_executor(_: Kit) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
    return pool


def _archives_that_write(kit: Kit) -> Any:
    return [
        kit.stack.enter_context(zipfile.ZipFile(kit.folder / "o.zip", "w")),
        kit.stack.enter_context(tarfile.open(kit.folder / "o.tar", "w")),
        kit.stack.enter_context(gzip.open(kit.folder / "o.gz", "w")),
    ]


def _closed_dataset(kit: Kit) -> Any:
    file = kit.h5()
    dataset = file["x"]
    file.close()
    return dataset


def _zstandard(kit: Kit) -> Any:
    zstandard = lib("zstandard")
    (kit.folder / "a.zst").write_bytes(zstandard.compress(b"x"))
    return kit.closing(zstandard.open(kit.folder / "a.zst", "rb"))


def _peewee(kit: Kit) -> Any:
    database = lib("peewee").SqliteDatabase(str(kit.folder / "peewee.db"))
    database.connect()
    return database


def _ipc(kit: Kit) -> Any:
    pyarrow = lib("pyarrow")
    table = pyarrow.table({"a": [1]})
    path = str(kit.folder / "a.arrow")
    with pyarrow.OSFile(path, "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    return pyarrow.ipc.open_file(kit.closing(pyarrow.OSFile(path)))


CAUGHT: dict[str, Callable[[Kit], Any]] = {
    "open(path, 'rb')": lambda k: k.open(),
    "open(path, 'r')": lambda k: k.open("r"),
    "open(path, 'rb+')": lambda k: k.open("rb+"),
    "tempfile.TemporaryFile": lambda k: k.stack.enter_context(tempfile.TemporaryFile()),
    "tempfile.NamedTemporaryFile": lambda k: k.stack.enter_context(tempfile.NamedTemporaryFile()),
    "gzip.open": lambda k: k.closing(gzip.open(_gz(k))),
    "bz2.open": lambda k: k.closing(bz2.open(_bz2(k))),
    "wave.open": lambda k: k.closing(wave.open(str(_wave(k)))),
    "an ExitStack with a file": _exit_stack,
    "a threading.local with a file": _local,
    "a singleton that __getitem__ asks for": _singleton,
    "torch's reader of a checkpoint": _torch_reader,
    "multiprocessing.Pool": _pool_of_processes,
    "zipfile.ZipFile": lambda k: k.closing(zipfile.ZipFile(k.zip())),
    "a member of a ZipFile": lambda k: k.closing(k.closing(zipfile.ZipFile(k.zip())).open("x")),
    "tarfile.TarFile": lambda k: k.closing(tarfile.open(k.tar())),
    "sqlite3.Connection": lambda k: k.database(),
    "sqlite3.Cursor": lambda k: k.database().cursor(),
    "socket.socket": lambda k: k.stack.enter_context(socket.socket()),
    "subprocess.Popen with a pipe": _child,
    "ThreadPoolExecutor, started": _pool,
    "a deque of files": lambda k: collections.deque([k.open()]),
    "the last of 300 readers": _many_files,
    "a file behind 90,000 objects": _far_file,
    "a class attribute": _lazy_class,
    "a global that __getitem__ reads": _lazy_global,
    "a default argument": _default,
    "a bound file.read": lambda k: k.open().read,
    "partial(file.read)": lambda k: functools.partial(k.open().read),
    "csv.reader": lambda k: csv.reader(k.open("r")),
    "csv.DictReader": lambda k: csv.DictReader(k.open("r")),
    "map over a file": lambda k: map(len, k.open()),
    "itertools.chain of files": lambda k: itertools.chain(k.open()),
    "a generator over a file": lambda k: (line for line in k.open()),
    "numpy NpzFile": _npz,
    "h5py.File": lambda k: k.h5(),
    "h5py.Dataset": lambda k: k.h5()["x"],
    "h5py low-level FileID": lambda k: k.h5().id,
    "lmdb.Environment": lambda k: k.closing(lib("lmdb").open(str(k.folder / "lmdb"))),
    "PIL.Image, not yet read": lambda k: k.closing(lib("PIL.Image").open(k.image())),
    "netCDF4.Dataset": _netcdf,
    "tables.File": _tables,
    "tifffile.TiffFile": _tiff,
    "xarray over a netCDF file": _xarray,
    "pyarrow file of a filesystem": lambda k: k.closing(
        lib("pyarrow.fs").LocalFileSystem().open_input_file(str(k.text()))
    ),
    "LevelDB (plyvel)": lambda k: k.closing(
        lib("plyvel").DB(str(k.folder / "level"), create_if_missing=True)
    ),
    "zstandard reader": _zstandard,
    "peewee database, used": lambda k: k.closing(_peewee(k)),
    "pyarrow.OSFile": lambda k: k.closing(lib("pyarrow").OSFile(str(k.text()))),
    "soundfile.SoundFile": _sound,
    "av container": lambda k: k.closing(lib("av").open(str(_video(k)))),
    "cv2.VideoCapture": _capture,
    "rasterio dataset": _raster,
    "pysam.FastaFile": _fasta,
    "duckdb connection": _duckdb,
    "sqlalchemy engine, used": lambda k: _engine(k, used=True),
    "redis.Redis": lambda k: lib("redis").Redis(),
    "redis pipeline": lambda k: lib("redis").Redis().pipeline(),
    "pymongo.MongoClient": _mongo,
    "grpc channel": lambda k: k.closing(lib("grpc").insecure_channel("127.0.0.1:9")),
    "zmq socket": _zmq,
    "requests.Session, used": _requests,
    "urllib3.PoolManager, used": _urllib3,
    "httpx.Client, used": _httpx,
    "fsspec local file": lambda k: k.closing(lib("fsspec").open(str(k.text())).open()),
    "smart_open file": lambda k: k.closing(lib("smart_open").open(k.text(), "rb")),
}

HARMLESS: dict[str, Callable[[Kit], Any]] = {
    "a closed file": lambda k: _closed(k.open()),
    "a file open for writing": lambda k: k.stack.enter_context((k.folder / "o").open("w")),
    "a file open for appending": lambda k: k.stack.enter_context((k.folder / "o").open("ab")),
    "csv.writer": lambda k: csv.writer(k.stack.enter_context((k.folder / "o").open("w"))),
    "sys.stdin, sys.stdout": lambda _: [sys.stdin, sys.stdout, sys.__stdin__],
    "/dev/urandom": lambda k: k.stack.enter_context(Path("/dev/urandom").open("rb")),
    "io.BytesIO": lambda _: io.BytesIO(b"x"),
    "SpooledTemporaryFile in memory": lambda k: k.stack.enter_context(tempfile.SpooledTemporaryFile()),
    "logger with a file": _logger,
    "LoggerAdapter": lambda k: logging.LoggerAdapter(_logger(k), {}),
    "loguru with a file": _loguru,
    "SummaryWriter": _tensorboard,
    "tqdm bar": lambda k: k.closing(lib("tqdm").tqdm(total=1, file=io.StringIO())),
    "rich Console": lambda _: lib("rich.console").Console(),
    "ZipFile, TarFile, gzip that write": _archives_that_write,
    "shelve, closed": lambda k: _closed(shelve.open(str(k.folder / "shelf"))),
    "ThreadPoolExecutor, shut down": _ended_executor,
    "multiprocessing.Pool, closed": _ended_pool,
    "multiprocessing Queue, Lock, Value": lambda _: [mp.Queue(), mp.Lock(), mp.Value("i", 0)],
    "a property, a proxy, a Mock": lambda _: [mock.MagicMock(), property(len), Refuses()],
    "lmdb.Environment, closed": lambda k: _closed(lib("lmdb").open(str(k.folder / "lmdb"))),
    "h5py.Dataset of a closed file": _closed_dataset,
    "av container, closed": lambda k: _closed(lib("av").open(str(_video(k)))),
    "duckdb connection, closed": lambda k: _closed(_duckdb(k)),
    "grpc channel, closed": lambda _: _closed(lib("grpc").insecure_channel("127.0.0.1:9")),
    "pyarrow ipc file (pread)": _ipc,
    "polars.LazyFrame": lambda k: lib("polars").scan_csv(k.text()),
    "peewee database, closed": lambda k: _closed(_peewee(k)),
    "scipy sparse matrix": lambda _: lib("scipy.sparse").eye(3),
    "torch.load(mmap=True)": _mapped,
    "ZipFile, closed": lambda k: _closed(zipfile.ZipFile(k.zip())),
    "ZipFile on BytesIO": lambda k: zipfile.ZipFile(io.BytesIO(k.zip().read_bytes())),
    "TarFile, closed": lambda k: _closed(tarfile.open(k.tar())),
    "TarFile on BytesIO": lambda k: tarfile.open(fileobj=io.BytesIO(k.tar().read_bytes())),
    "NpzFile on BytesIO": _npz_memory,
    "sqlite3.Connection, closed": lambda k: _closed(k.database()),
    "h5py.File, closed": lambda k: _closed(k.h5()),
    "socket, closed": lambda _: _closed(socket.socket()),
    "mmap.mmap": lambda k: k.closing(mmap.mmap(k.open().fileno(), 0, access=mmap.ACCESS_READ)),
    "numpy.memmap": lambda k: np.memmap(k.text(), mode="r"),
    "pyarrow.memory_map": lambda k: k.closing(lib("pyarrow").memory_map(str(k.text()))),
    "pyarrow ParquetFile (pread)": lambda k: k.closing(lib("pyarrow.parquet").ParquetFile(_parquet(k))),
    "pyarrow.dataset": _parquet_rows,
    "pyarrow.Table": lambda _: lib("pyarrow").table({"a": [1]}),
    "pandas.DataFrame": lambda _: lib("pandas").DataFrame({"a": [1]}),
    "polars.DataFrame": lambda _: lib("polars").DataFrame({"a": [1]}),
    "Hugging Face Dataset": _hf,
    "Hugging Face IterableDataset": _hf_stream,
    "WebDataset": _webdataset,
    "zarr over a folder": _zarr,
    "nibabel image, lazy": _nifti,
    "PIL.Image, read": lambda k: _loaded(lib("PIL.Image").open(k.image())),
    "fsspec filesystem": lambda _: lib("fsspec").filesystem("file"),
    "fsspec OpenFile, not opened": lambda k: lib("fsspec").open(str(k.text())),
    "diskcache, lazy": lambda k: PerProcess(_cache, str(k.folder)),
    "requests.Session, unused": lambda k: k.closing(lib("requests").Session()),
    "httpx.Client, unused": lambda k: k.closing(lib("httpx").Client(trust_env=False)),
    "boto3 client, unused": _boto3,
    "sqlalchemy engine, unused": lambda k: _engine(k, used=False),
    "ThreadPoolExecutor, not started": lambda _: concurrent.futures.ThreadPoolExecutor(1),
    "urllib response, read": _response,
    "PerProcess": lambda k: PerProcess(open, k.text(), "rb"),
    "torch.Generator, numpy Generator": lambda _: [torch.Generator(), np.random.default_rng(0)],
    "nn.Module": lambda _: torch.nn.Linear(2, 2),
}  # fmt: skip

MISSED: dict[str, Callable[[Kit], Any]] = {
    "os.scandir": lambda k: k.stack.enter_context(os.scandir(k.folder)),
    "ijson over a file": lambda k: lib("ijson").items(k.open(), "item"),
    "a plain number of a descriptor": lambda k: k.open().fileno(),
    "a file in a ContextVar": lambda k: _hidden(k),
}


OF_EXTRA: Final = frozenset(
    {
        "Hugging Face Dataset", "Hugging Face IterableDataset", "LevelDB (plyvel)",
        "SummaryWriter", "WebDataset", "av container", "av container, closed",
        "boto3 client, unused", "cv2.VideoCapture", "duckdb connection",
        "duckdb connection, closed", "grpc channel", "grpc channel, closed",
        "httpx.Client, unused", "httpx.Client, used", "ijson over a file", "loguru with a file",
        "netCDF4.Dataset", "nibabel image, lazy", "pandas.DataFrame", "peewee database, closed",
        "peewee database, used", "polars.DataFrame", "polars.LazyFrame",
        "pyarrow ParquetFile (pread)", "pyarrow file of a filesystem", "pyarrow ipc file (pread)",
        "pyarrow.OSFile", "pyarrow.Table", "pyarrow.dataset", "pyarrow.memory_map",
        "pymongo.MongoClient", "pysam.FastaFile", "rasterio dataset", "redis pipeline",
        "redis.Redis", "requests.Session, unused", "requests.Session, used", "smart_open file",
        "soundfile.SoundFile", "sqlalchemy engine, unused", "sqlalchemy engine, used",
        "tables.File", "tifffile.TiffFile", "urllib3.PoolManager, used",
        "xarray over a netCDF file", "zarr over a folder", "zstandard reader",
    }
)  # fmt: skip
"""Kinds of libraries that the extra `datasets` has, and no other session installs."""


def rows(kinds: dict[str, Callable[[Kit], Any]]) -> list[Any]:
    """Return the kinds, those marked that the quick session leaves out."""
    marks = {kind: pytest.mark.extra("datasets") for kind in OF_EXTRA}
    marks["a file behind 90,000 objects"] = pytest.mark.full  # a second of searching
    return [pytest.param(kind, marks=marks.get(kind, ())) for kind in kinds]


def _cache(folder: str) -> Any:
    return lib("diskcache").Cache(folder)


def _loaded(image: Any) -> Any:
    image.load()
    image.close()
    return image


def _gz(kit: Kit) -> Path:
    path = kit.folder / "a.gz"
    with gzip.open(path, "wb") as packed:
        packed.write(b"x")
    return path


def _hidden(kit: Kit) -> Any:
    hidden: contextvars.ContextVar[Any] = contextvars.ContextVar("hidden")
    hidden.set(kit.open())
    return hidden


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    """Return the folder, and close everything afterwards."""
    with ExitStack() as stack:
        yield Kit(tmp_path, stack)


class Holding(Numbers):
    """A dataset that holds an object, such as its reader."""

    def __init__(self, what: Any) -> None:
        super().__init__(4)
        self.reader = what


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.mark.parametrize("kind", rows(CAUGHT))
def test_objects_that_workers_would_share_are_caught(kind: str, kit: Kit) -> None:
    """The search reports them as unsafe, and the loader refuses to fork."""
    dataset = Holding(CAUGHT[kind](kit))
    found = check_worker_safety(dataset)
    assert [hazard.severity for hazard in found][:1] == ["unsafe"], found
    with pytest.raises(UnsafeWorkersError):
        iter(DataLoader(dataset, 2, num_workers=1, multiprocessing_context="fork"))


@pytest.mark.parametrize("kind", rows(HARMLESS))
def test_harmless_objects_are_not_reported(kind: str, kit: Kit) -> None:
    """Nothing is reported as unsafe."""
    found = check_worker_safety(Holding(HARMLESS[kind](kit)))
    assert [hazard for hazard in found if hazard.severity == "unsafe"] == []


@pytest.mark.parametrize("extra", [False, pytest.param(True, marks=pytest.mark.extra("datasets"))])
def test_loader_reads_with_all_harmless_objects_as_torch_does(kit: Kit, *, extra: bool) -> None:
    """One dataset holds them all: no crash, no refusal, the same batches."""
    makers = [make for kind, make in HARMLESS.items() if extra or kind not in OF_EXTRA]
    dataset = Holding([make(kit) for make in makers])
    ours = DataLoader(dataset, 2, num_workers=1, multiprocessing_context="fork")
    theirs = TorchDataLoader(dataset, 2, num_workers=1, multiprocessing_context="fork")
    assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in theirs]


@pytest.mark.parametrize("kind", rows(MISSED))
def test_missed_objects_are_documented(kind: str, kit: Kit) -> None:
    """Move the row, and its entry in the docs, once the search finds one."""
    found = check_worker_safety(Holding(MISSED[kind](kit)))
    assert [hazard for hazard in found if hazard.severity == "unsafe"] == []


def test_there_are_at_least_a_hundred_kinds() -> None:
    """The table does not shrink."""
    assert len(CAUGHT) + len(HARMLESS) + len(MISSED) >= 100
