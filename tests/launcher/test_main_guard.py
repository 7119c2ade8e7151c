"""A launch may be in a script, a module, standard input, a prompt or a notebook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import scripts
from nbformat import NotebookNode

REFUSED = re.compile(r"^ddpsafe\.ConfigError: (.*):(\d+) launches at the top level", re.MULTILINE)


def launching(*lines: str) -> str:
    """Return a script that prints when it is imported, defines a function, and ends with `lines`."""
    head = [
        "import ddpsafe, os",
        "os.write(1, f'imported as {__name__}\\n'.encode())",
        "def train(ctx): return ctx.rank + 10",
        "def main(**options):",
        "    print(ddpsafe.launch(train, **{'nproc_per_node': 2, **options}).values)",
    ]
    return "\n".join([*head, *lines]) + "\n"


FIRST_LINE = launching().count("\n") + 1
"""The line of the script on which the argument of `launching` begins."""


# Refused.


@pytest.mark.full(but=["call"])
@pytest.mark.parametrize(
    ("lines", "line"),
    [
        (["main()"], 0),
        (["result = ddpsafe.launch(", "    train,", ")"], 0),
        (["ddpsafe.spawn(train, nprocs=2)"], 0),
        (["try:", "    main()", "except ValueError:", "    raise", "else:", "    pass"], 1),
        (["with open(__file__):", "    for _ in range(2):", "        main()"], 2),
        (["while True:", "    [main() for _ in range(2)]"], 1),
        (["class Job:", "    main()"], None),
    ],
    ids=["call", "several lines", "spawn", "try", "with and for", "while", "class"],
)
def test_a_launch_without_a_guard_is_refused_before_anything_starts(
    tmp_path: Path, lines: list[str], line: int | None
) -> None:
    """The message has file and line, the reason, and the line to write; no rank imports the script."""
    run = scripts.run(tmp_path, launching(*lines), fresh=lines == ["main()"])
    assert run.code == 78
    assert run.out == "imported as __main__\n"
    found = REFUSED.search(run.err)
    assert found is not None, run.err
    assert found[1] == str(tmp_path / "script.py")
    if line is not None:
        assert int(found[2]) == FIRST_LINE + line
    assert "Likely cause: every rank imports the script" in run.err
    assert 'if __name__ == "__main__":' in run.err


def test_a_launch_without_a_guard_is_refused_in_a_module_too(tmp_path: Path) -> None:
    """Ranks import the module of ``python -m package.module`` as they import a script."""
    (tmp_path / "package").mkdir()
    module = scripts.write(tmp_path, "package/module.py", launching("main()"))
    run = scripts.Script(["-m", "package.module"], folder=tmp_path).end()
    found = REFUSED.search(run.err)
    assert found is not None, run.err
    assert (found[1], int(found[2])) == (str(module), FIRST_LINE)
    assert run.out == "imported as __main__\n"


def test_a_launch_under_an_if_that_is_not_a_guard_ends_in_the_first_ranks(tmp_path: Path) -> None:
    """The source does not reveal the mistake, but ranks that import the script refuse to launch."""
    call = f"main(start_method='forkserver', run_dir={str(tmp_path / 'run')!r})"
    run = scripts.run(tmp_path, launching("if ddpsafe:", f"    {call}"))
    assert run.code == 1
    assert 1 <= run.out.count("imported as __mp_main__") <= 2
    assert run.out.count("imported as") <= 3
    assert "launch() was called while a rank was importing the script" in run.err
    assert "RankExitedError: rank " in run.err
    assert "while starting (importing the script)" in run.err


# Accepted.


@pytest.mark.full
def test_a_guard_may_be_nested_and_contain_the_function(tmp_path: Path) -> None:
    """A function defined under the guard cannot be imported by name, so it is pickled by value."""
    source = launching(
        "try:",
        "    if ddpsafe:",
        "        if __name__ == '__main__':",
        "            offset = 20",
        "            class Twenty:",
        "                def __init__(self, rank): self.value = rank + offset",
        "            def late(ctx): return Twenty(ctx.rank)",
        "            main(start_method='spawn', nproc_per_node=1)",
        "            options = {'nproc_per_node': 2, 'start_method': 'forkserver'}",
        "            values = ddpsafe.launch(late, **options).values",
        "            print([(type(each) is Twenty, each.value) for each in values.values()])",
        "finally:",
        "    pass",
    )
    run = scripts.run(tmp_path, source)
    assert run.lines() == [
        "imported as __main__",
        "imported as __mp_main__",
        "{0: 10}",
        "imported as __mp_main__",
        "imported as __mp_main__",
        "[(True, 20), (True, 21)]",
    ]
    assert run.err == ""


def test_a_package_that_is_run_needs_no_guard(tmp_path: Path) -> None:
    """No rank runs ``package/__main__.py`` again, so no guard is needed there."""
    scripts.write(tmp_path, "package/__main__.py", launching("main(start_method='forkserver')"))
    run = scripts.Script(["-m", "package"], folder=tmp_path).end()
    assert run.lines() == ["imported as __main__", "{0: 10, 1: 11}"]
    assert run.err == ""


@pytest.mark.full(but=["pdb"])
@pytest.mark.parametrize(
    "module",
    [["pdb", "-c", "continue", "-c", "q"], ["cProfile"], ["trace", "--count", "-C", "counts"]],
    ids=["pdb", "cProfile", "trace"],
)
def test_a_script_may_run_under_a_module_that_looks_into_it(
    tmp_path: Path, module: list[str]
) -> None:
    """Pdb takes ``__spec__`` out of the main module, which multiprocessing reads."""
    scripts.write(tmp_path, "train.py", launching("if __name__ == '__main__':", "    main()"))
    run = scripts.Script(["-m", *module, "train.py"], folder=tmp_path, text="").end()
    assert run.out.count("{0: 10, 1: 11}") == 1, run.err


@pytest.mark.full
@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.soak), "forkserver"])
def test_a_path_object_in_sys_path_is_ignored_as_python_does(tmp_path: Path, method: str) -> None:
    """Many scripts add one without effect, but Python's own fork server does not start with one."""
    source = launching(
        "import pathlib, sys",
        "sys.path.append(pathlib.Path('src'))",
        "if __name__ == '__main__':",
        f"    main(start_method={method!r})",
    )
    run = scripts.run(tmp_path, source, fresh=True)
    assert (run.lines()[-1], run.err) == ("{0: 10, 1: 11}", "")


@pytest.mark.full
def test_relative_imports_of_a_module_work_in_ranks(tmp_path: Path) -> None:
    """That includes ``python -m package``, whose ``__main__`` ranks do not run again."""
    scripts.write(tmp_path, "package/settings.py", "OFFSET = 30\n")
    source = """
        from .settings import OFFSET
        import ddpsafe

        def train(ctx):
            return ctx.rank + OFFSET

        if __name__ == "__main__":
            print(ddpsafe.launch(train, nproc_per_node=2, start_method="forkserver").values)
    """
    scripts.write(tmp_path, "package/module.py", source)
    scripts.write(tmp_path, "package/__main__.py", source)
    for name in ("package.module", "package"):
        run = scripts.Script(["-m", name], folder=tmp_path).end()
        assert run.lines() == ["{0: 30, 1: 31}"]
        assert run.err == ""


def test_a_rank_that_torchrun_started_needs_no_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch spawns no process, so no process imports the script again."""
    for name, text in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, text)
    run = scripts.run(tmp_path, launching("main()"))
    assert run.lines() == ["imported as __main__", "{0: 10}"]


# Without a script, functions are pickled by value.

BY_VALUE = """\
import ddpsafe
class Report:
    def __init__(self, rank): self.rank = rank
    def __repr__(self): return f"Report({self.rank + base})"

base = 40
def helper(rank): return Report(rank)

def train(ctx, *, fails=False):
    assert not fails, "it fails"
    return helper(ctx.rank)

options = dict(nproc_per_node=RANKS, start_method="METHOD")
values = ddpsafe.launch(train, **options).values
print(values, type(values[0]) is Report)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        pytest.param(["-"], "forkserver", marks=pytest.mark.soak),
        (["-c"], "spawn"),
        (["-i", "-q"], "forkserver"),
    ],
)
def test_functions_without_a_file_are_launched(
    tmp_path: Path, arguments: list[str], method: str
) -> None:
    """The program is on standard input, on the command line, or typed at the prompt."""
    ranks = 1 if method == "spawn" else 2
    text = BY_VALUE.replace("METHOD", method).replace("RANKS", str(ranks))
    if arguments == ["-c"]:
        run = scripts.Script(["-c", text], folder=tmp_path).end()
    else:
        run = scripts.Script(arguments, folder=tmp_path, text=text).end()
    reports = ", ".join(f"{rank}: Report({40 + rank})" for rank in range(ranks))
    assert run.lines() == [f"{{{reports}}} True"]
    if "-i" not in arguments:  # the prompt itself goes to stderr
        assert run.err == ""


@pytest.mark.full
def test_a_failed_launch_returns_to_the_prompt(tmp_path: Path) -> None:
    """Only a script exits with an error's exit code; a session keeps its variables."""
    text = "import ddpsafe\nddpsafe.launch(5)\nprint('still', 'here')\n"
    run = scripts.Script(["-i", "-q"], folder=tmp_path, text=text).end()
    assert "ddpsafe.ConfigError" in run.err
    assert (run.code, run.lines()) == (0, ["still here"])


def execute(folder: Path, *cells: str) -> list[NotebookNode]:
    """Run a notebook in a new kernel, as Jupyter does; return the cells' outputs."""
    import nbclient
    import nbformat
    from nbformat import v4

    path = folder / "notebook.ipynb"
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells]), path)
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=int(scripts.LIMIT_S),
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    return [cell.outputs for cell in notebook.cells]


# jupyter_client and zmq warn about themselves.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "start_method", [pytest.param("spawn", marks=pytest.mark.soak), "forkserver"]
)
def test_a_notebook_launches_a_function_from_a_cell(tmp_path: Path, start_method: str) -> None:
    """Output, values and exceptions reach the cell; loader workers read a dataset that a cell defines."""
    outputs: list[Any] = execute(
        tmp_path,
        """
            import ddpsafe, torch
            torch.set_num_threads(1)
            class BadBatch(Exception):
                pass
            def train(ctx, fails):
                print(f"hello from rank {ctx.rank}")
                ctx.barrier()  # or rank 1 may fail while rank 0 still connects
                if fails:
                    raise BadBatch("batch 17")
                return ctx.broadcast({"from": ctx.rank}, src=1), ctx.rank
            class Squares(torch.utils.data.Dataset):
                def __len__(self):
                    return 8
                def __getitem__(self, index):
                    return index ** 2
            def read(ctx):
                loader = ctx.loader(Squares(), batch_size=2, num_workers=2)
                return torch.cat(list(loader)).tolist()
        """,
        f"""
            options = dict(nproc_per_node=2, start_method="{start_method}")
            ddpsafe.launch(train, (False,), **options).values
        """,
        """
            sorted(sum(ddpsafe.launch(read, **options).values.values(), []))
        """,
        """
            try:
                ddpsafe.launch(train, (True,), **options)
            except ddpsafe.RankRaisedError as error:
                print(type(error.__cause__) is BadBatch, error.run_dir.exists())
                import shutil
                shutil.rmtree(error.run_dir)
                raise
        """,
    )
    defined, launched, loaded, failed = outputs
    assert defined == []
    stream, result = launched
    assert (stream.name, stream.text) == ("stdout", "hello from rank 0\n")
    assert result.data["text/plain"] == "{0: ({'from': 1}, 0), 1: ({'from': 1}, 1)}"
    assert loaded[-1].data["text/plain"] == str([index**2 for index in range(8)])
    assert failed[0].text == "hello from rank 0\n"
    printed = "".join(output.text for output in failed if output.get("name") == "stdout")
    assert printed == "hello from rank 0\nTrue True\n"
    assert failed[-1].ename == "RankRaisedError"
    assert "raised BadBatch" in failed[-1].evalue
    assert "batch 17" in failed[-1].evalue
    # The kernel's name for the first cell is that of a file that does not exist.
    assert "at Cell In[1]:9 in train" in failed[-1].evalue
    shown = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(failed[-1].traceback))
    assert 'File "Cell In[1]", line 9, in train' in shown
    assert "ipykernel_" not in failed[-1].evalue
