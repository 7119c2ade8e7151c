"""The source follows the house rules that a linter does not check."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest
from source_tree import (
    CHECKOUT,
    PACKAGE,
    Import,
    calls_of,
    imports_of,
    module_of,
    nodes_of,
    parse,
    python_files,
    text_of,
)

import ddpsafe
from ddpsafe.checkpoint import errors as checkpoint_errors
from ddpsafe.data import errors as data_errors

LAYERS: Final = {
    "vocabulary": 0,
    "wire": 1,
    "machinery": 2,
    "launch": 3,
    "entry point": 4,
}
"""A module may import its own layer and the layers below it."""

MACHINERY: Final = {"_launcher", "_worker", "data", "checkpoint", "doctor"}
LAUNCH: Final = {
    "_launch",
    "_preflight",
}  # the functions of __init__, and their checks
ENTRY_POINTS: Final = {"", "__main__", "_commands", "cli", "testing", "_rank_tests"}

UPWARD_FOR_TYPES: Final = {
    ("ddpsafe._errors", "ddpsafe._wire.messages"): "LaunchError.outcomes holds them; nothing runs",
}
"""Imports under TYPE_CHECKING that point up. Siblings may name each other's types freely."""

BETWEEN_SIBLINGS: Final = {
    (
        "ddpsafe._worker.context",
        "ddpsafe.data._loader.loader",
    ): "ctx.loader makes the rank's loader; late",
    (
        "ddpsafe.data._loader.equal_readers",
        "ddpsafe._worker.rank",
    ): "the store in which ranks compare what they read; late",
    (
        "ddpsafe.data._loader.equal_readers",
        "ddpsafe._worker.torch_hooks",
    ): "as above, in ranks that ddpsafe has not started; late",
    (
        "ddpsafe._worker.join.network",
        "ddpsafe.doctor._examine",
    ): "nodes are examined over a store; late",
    ("ddpsafe._worker.join.network", "ddpsafe.doctor._findings"): "as above",
    (
        "ddpsafe.checkpoint._checkpointer",
        "ddpsafe._worker.join.attached",
    ): "who and where the ranks are; late",
    (
        "ddpsafe.checkpoint._memory",
        "ddpsafe._worker.collectives",
    ): "states reach other nodes over the ranks' own process group; late",
    (
        "ddpsafe.checkpoint._memory",
        "ddpsafe._worker.rank",
    ): "where the launcher's memory is; late",
    (
        "ddpsafe.checkpoint._ranks",
        "ddpsafe._worker.pending_exception",
    ): "announces a wait; late",
    (
        "ddpsafe.checkpoint._state",
        "ddpsafe._worker.rank",
    ): "restored generators are not seeded again; late",
    (
        "ddpsafe.checkpoint._checkpointer",
        "ddpsafe._worker.environment",
    ): "tells how far a rank is; late",
}
"""Imports of one part of the machinery by another, each with its reason."""

TORCH_AT_IMPORT: Final[dict[str, str]] = {
    "data": "subclasses torch's samplers and loader; loaded when ddpsafe.data is first used",
    "data/_loader": "as above",
    "data/_samplers": "as above",
}
"""Files, or folders, that import torch when they are imported, each with its reason."""

MAY_POLL: Final = {
    "tests/kits/fault_kit.py": "looks again until what ranks have started is gone, under a deadline",
    "tests/faults/test_launcher_suspended.py": "how long the launcher is suspended is the fault",
    "tests/kits/cost.py": "waits for processes that outlive a command, under a deadline",
    "tests/kits/scripts.py": "wait_until looks for a condition again and again, under a deadline",
}

FORBIDDEN_MODULE_NAMES: Final = {"utils", "helpers", "common", "core", "misc"}

MODULES: Final = python_files(PACKAGE)


def part_of(module: str) -> str:
    """Return the name right below ddpsafe: ``ddpsafe._wire.spec`` is in ``_wire``."""
    return module.removeprefix("ddpsafe").lstrip(".").partition(".")[0]


def layer_of(module: str) -> int:
    """Return the layer of a module; other private modules are vocabulary."""
    part = part_of(module)
    if part in ENTRY_POINTS:
        return LAYERS["entry point"]
    if part in MACHINERY:
        return LAYERS["machinery"]
    if part in LAUNCH:
        return LAYERS["launch"]
    if part == "_wire":
        return LAYERS["wire"]
    assert part.startswith("_"), f"{module} is public, but in no layer: add it to this test"
    return LAYERS["vocabulary"]


def own_imports() -> list[Import]:
    """Return every import of one module of ddpsafe by another."""
    found = [each for file in MODULES for each in imports_of(file)]
    return [each for each in found if each.target.split(".")[0] == "ddpsafe"]


def test_imports_point_down() -> None:
    """No module imports a layer above its own, not even late or for its types.

    The exceptions for types are listed above, with reasons.
    """
    upward = [
        str(each)
        for each in own_imports()
        if layer_of(each.target) > layer_of(each.module)
        and not (each.for_types and (each.module, each.target) in UPWARD_FOR_TYPES)
    ]
    assert upward == []


def test_siblings_do_not_import_each_other() -> None:
    """Only _launch and entry points combine launcher, worker, data, checkpoint and doctor.

    An import under TYPE_CHECKING does not run and may name a sibling's type.
    """
    across = [
        str(each)
        for each in own_imports()
        if {part_of(each.module), part_of(each.target)} <= MACHINERY
        and part_of(each.module) != part_of(each.target)
        and not each.for_types
        and not (each.late and (each.module, each.target) in BETWEEN_SIBLINGS)
    ]
    assert across == []


def test_modules_do_not_import_in_circles() -> None:
    """Imports that run when a module is imported form no circle."""
    assert circles(each for each in own_imports() if not each.late and not each.for_types) == []


CIRCLES_OF_TYPES: Final = {
    "ddpsafe._errors": "LaunchError.outcomes has what `_wire.messages` describes, with errors in it",
    "ddpsafe._worker.rank": "what a process remembers as a rank has the parts that read it",
}
"""Modules that refer to each other by the types that they name, one of each circle, with the reason."""


def test_modules_hardly_refer_to_each_other_in_circles() -> None:
    """Two modules of a circle cannot be understood one after the other: a type moves to the lower one."""
    found = circles(each for each in own_imports() if not each.late)
    named = [CIRCLES_OF_TYPES.keys() & circle for circle in found]
    assert [sorted(circle) for circle, names in zip(found, named, strict=True) if not names] == []
    assert set().union(*named) == CIRCLES_OF_TYPES.keys(), "a circle that is gone"


def circles(imports: Iterable[Import]) -> list[set[str]]:
    """Return the groups of modules that reach each other."""
    edges: dict[str, set[str]] = {module_of(file): set() for file in MODULES}
    for each in imports:
        if each.target != each.module and each.target in edges:
            edges[each.module].add(each.target)

    @functools.cache
    def reached(module: str) -> frozenset[str]:
        found, waiting = set[str](), [module]
        while waiting:
            new = edges[waiting.pop()] - found
            found |= new
            waiting += new
        return frozenset(found)

    groups = {frozenset(m for m in reached(start) if start in reached(m)) for start in edges}
    return [{*group} for group in groups if group]


def test_exceptions_for_imports_are_still_needed() -> None:
    """An exception that is no longer needed must be removed from the list."""
    existing = {(each.module, each.target) for each in own_imports() if each.for_types}
    assert UPWARD_FOR_TYPES.keys() <= existing
    late = {(each.module, each.target) for each in own_imports() if each.late}
    assert BETWEEN_SIBLINGS.keys() <= late


ORDERED: Final = [
    path.parent
    for path in MODULES
    if path.name == "__init__.py" and "imports only those before it::" in text_of(path)
]


@pytest.mark.parametrize("folder", ORDERED, ids=lambda folder: folder.name)
def test_modules_of_a_folder_import_those_before_them(folder: Path) -> None:
    """The order in the folder's docstring is complete and followed."""
    text = text_of(folder / "__init__.py")
    order = re.findall(r"^    (\w+)  ", text.partition("those before it::")[2], re.MULTILINE)
    stems = [file.stem for file in folder.glob("*.py") if file.stem != "__init__"]
    assert sorted(order) == sorted(stems)
    package = module_of(folder / "__init__.py")
    backward = [
        str(each)
        for each in own_imports()
        if each.module.rpartition(".")[0] == each.target.rpartition(".")[0] == package
        and not each.for_types
        and order.index(each.module.rpartition(".")[2])
        < order.index(each.target.rpartition(".")[2])
    ]
    assert backward == []


LAUNCHER_ORDER: Final = ("processes", "diagnosis", "watch", "attempt", "nodes")


def test_parts_of_the_launcher_import_those_below_them() -> None:
    """Nodes > attempt > watch > diagnosis > processes: watch may import diagnosis, but not the reverse."""
    upward = [
        str(each)
        for each in own_imports()
        if each.module.startswith("ddpsafe._launcher.")
        and each.target.startswith("ddpsafe._launcher.")
        and not each.for_types
        and (mine := each.module.split(".")[2]) in LAUNCHER_ORDER
        and (theirs := each.target.split(".")[2]) in LAUNCHER_ORDER
        and LAUNCHER_ORDER.index(mine) < LAUNCHER_ORDER.index(theirs)
    ]
    assert upward == []


def _listed(path: Path) -> str:
    """Return the entry that excepts a file: its folder or itself."""
    folder = path.parent.as_posix()
    return folder if folder in TORCH_AT_IMPORT else path.as_posix()


def test_torch_is_imported_late() -> None:
    """No module imports torch when it is imported, except those listed with a reason."""
    eager = {
        _listed(each.file.relative_to(PACKAGE))
        for file in MODULES
        for each in imports_of(file)
        if each.target.split(".")[0] == "torch" and not each.late and not each.for_types
    }
    assert eager == TORCH_AT_IMPORT.keys()


DOCUMENTED: Final = {"_exit", "_getframe", "_current_frames", "_current_exceptions"}
"""Names of the standard library that are public despite their underscore."""


def test_private_names_of_the_standard_library_are_in_one_module() -> None:
    """`_stdlib_private` uses them, guarded, and has its own test for each version of Python."""
    found = []
    for file in MODULES:
        if module_of(file) == "ddpsafe._stdlib_private":
            continue
        roots = {
            (name.asname or name.name).partition(".")[0]
            for node in nodes_of(file)
            if isinstance(node, ast.Import)
            for name in node.names
            if name.name.partition(".")[0] in sys.stdlib_module_names
        }
        found += [
            f"{file}:{node.lineno}: {ast.unparse(node)}"
            for node in nodes_of(file)
            if isinstance(node, ast.Attribute)
            and re.match(r"_[a-z]", node.attr)
            and node.attr not in DOCUMENTED
            and ast.unparse(node).partition(".")[0] in roots
        ]
    assert found == []


PRIVATE_OF_TORCH: Final = {
    "ddpsafe._torch_private": "read from torch's objects, without importing torch",
    "ddpsafe._worker.torch_hooks": "replaced or read in torch itself, in a rank",
    "ddpsafe.data._loader.torchs_loader": "overridden in torch's DataLoader",
    "ddpsafe._launcher.nodes.torchs_rendezvous": "the state of TorchElastic's rendezvous",
}
"""The modules that use private names of torch, and for what."""

PRIVATE_OF_OTHERS: Final = {
    ("ddpsafe._rank_tests", "_do_configure"): "pytest has no public name for it",
    ("ddpsafe.data._consistency", "_fingerprint"): "of the datasets library; documented there",
    ("ddpsafe.data._loader.worker_safety", "_channel"): "of gRPC's channel behind an interceptor",
    ("ddpsafe.cli", "_ActionsContainer"): "in an annotation; parsers and groups share it",
}
"""Private names of others that are used outside of a module for them, each with its reason."""

_NAMED_TUPLES: Final = {"_asdict", "_fields", "_replace"}
_PRIVATE_IN_TORCH: Final = re.compile(r"\btorch(\.\w+)*\._[a-z]\w*")


def private_names_of_others(file: Path) -> Iterator[tuple[str, int]]:
    """Yield private names that a file uses and does not define itself, with the line.

    Those of ``self`` may come from a base class, which defines them.
    """
    defined: set[str] = set()
    for node in nodes_of(file):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.Name(id=name, ctx=ast.Store())
            ):
                defined.add(name)
    for node in nodes_of(file):
        match node:
            case ast.Attribute(value=ast.Name(id="self")):
                continue
            case ast.Attribute(attr=name) if re.match(r"_[a-zA-Z]", name):
                pass
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ) if re.match(r"_[a-zA-Z]", name):
                pass
            case ast.ImportFrom(module=str(module), level=0) if module.split(".")[0] == "torch":
                for part in (*module.split("."), *(alias.name for alias in node.names)):
                    if part.startswith("_"):
                        yield part, node.lineno
                continue
            case ast.Constant(value=str(text)) if "\n" not in text:
                if found := _PRIVATE_IN_TORCH.search(text):
                    yield found[0], node.lineno
                continue
            case _:
                continue
        if name not in defined | DOCUMENTED | _NAMED_TUPLES:
            yield name, node.lineno  # type: ignore[attr-defined]  # both nodes have lines


def test_private_names_of_torch_are_in_the_modules_that_say_so() -> None:
    """Else an update of torch breaks a place where no one looks; so for other libraries, too."""
    found = {
        (module_of(file), name): f"{file}:{line}: {name}"
        for file in MODULES
        if module_of(file) not in PRIVATE_OF_TORCH and module_of(file) != "ddpsafe._stdlib_private"
        for name, line in private_names_of_others(file)
    }
    assert [where for key, where in found.items() if key not in PRIVATE_OF_OTHERS] == []
    assert PRIVATE_OF_OTHERS.keys() <= found.keys(), "an exception that is no longer needed"
    for module in PRIVATE_OF_TORCH:
        file = PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
        assert "private name" in (ast.get_docstring(parse(file)) or "").lower(), module


def test_messages_between_processes_do_not_import_torch() -> None:
    """_wire does not import torch at all, so that the launcher and the doctor work without it."""
    imports = [each for file in python_files(PACKAGE / "_wire") for each in imports_of(file)]
    assert [str(each) for each in imports if each.target.split(".")[0] == "torch"] == []


def test_importing_the_package_imports_neither_torch_nor_pydantic(tmp_path: Path) -> None:
    """``import ddpsafe`` is cheap; heavy modules are imported at first use."""
    code = f"""
import sys
sys.path.insert(0, {str(installed_folder().parent)!r})
import ddpsafe
print(*sorted({{"torch", "pydantic", "numpy", "rich", "tenacity", "psutil"}} & sys.modules.keys()))
"""
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def installed_folder() -> Path:
    """Return the folder of the ddpsafe that these tests import."""
    import ddpsafe

    return Path(ddpsafe.__file__).parent


def test_source_read_here_is_the_package_that_is_tested() -> None:
    """The installed wheel holds exactly the files of the checkout, py.typed included.

    The rules of ``ddpsafe explain``, which it has packed, are compared in tests/explain.
    """
    names = {
        folder: {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
            and path.suffix not in {".pyc", ".pyo"}
            and path.parent != folder / "doctor" / "pages"  # of docs/findings, for the wheel only
            and not (path.suffix in {".toml", ".json"} and folder / "_explain" in path.parents)
        }
        for folder in (PACKAGE, installed_folder())
    }
    assert names[installed_folder()] == names[PACKAGE]
    assert "py.typed" in names[PACKAGE]


BUDGETS: Final = {
    "ddpsafe": (5_490, "the public names, the errors, and what all parts share"),
    "ddpsafe/_commands": (1_490, "eight commands, which parse options and print"),
    "ddpsafe/_config": (2_430, "42 fields from four sources, each problem with its place"),
    "ddpsafe/_explain": (2_710, "reads any log once, in any launcher's form; the rules are data"),
    "ddpsafe/_job": (3_120, "the channel, the endpoint and the network that all parts use"),
    "ddpsafe/_launcher": (11_540, "52 rows of guarantees.md: start, watch, diagnosis, report"),
    "ddpsafe/_launcher/nodes": (4_920, "12 rows: who takes part, and one result on all nodes"),
    "ddpsafe/_wire": (2_800, "what crosses a process, as plain data"),
    "ddpsafe/_worker": (5_970, "what runs in a rank: the context, hooks in torch, waits"),
    "ddpsafe/checkpoint": (
        6_040,
        "a save that survives any kill, its verification, and states in memory",
    ),
    "ddpsafe/data": (6_960, "each sample once, and an exact resume"),
    "ddpsafe/doctor": (9_100, "checks of one host, and of all pairs of hosts"),
    "tests": (2_980, "what is true of all parts"),
    "tests/checkpoint": (3_520, "the folder of the same name"),
    "tests/config": (1_150, "the folder of the same name"),
    "tests/data": (5_480, "the folder of the same name"),
    "tests/docs": (1_060, "every line of the documentation that runs"),
    "tests/doctor": (3_780, "the folder of the same name"),
    "tests/explain": (1_730, "160 known failures; 930 healthy lines are data"),
    "tests/faults": (5_890, "a file for each way to die: the specification"),
    "tests/frameworks": (480, "Lightning, Accelerate and others, installed"),
    "tests/gpu": (650, "what needs a GPU"),
    "tests/job": (370, "the folder of the same name"),
    "tests/kits": (5_080, "what several tests use: machines, networks, launches"),
    "tests/launcher": (6_960, "the folder of the same name, with the table of root causes"),
    "tests/nccl_on_cpu": (1_320, "torch's NCCL code without a GPU"),
    "tests/nodes": (5_810, "several launchers: joins, losses, networks that break"),
    "tests/nodes/simulation": (2_420, "hosts, network and clocks of jobs in virtual time"),
    "tests/programs": (8_900, "what runs in ranks"),
    "tests/slurm": (380, "a Slurm of this machine alone"),
    "tests/smoke": (230, "the installed wheel"),
    "tests/testing": (540, "the pytest plugin"),
    "tests/typing": (100, "what mypy must accept and refuse"),
    "tests/wire": (640, "the folder of the same name"),
    "tests/worker": (2_070, "the folder of the same name"),
}
"""The most lines of Python that a folder may have, and what they are for.

A folder without a budget counts as a part of the one above it.
"""
RULES_OF_EXPLAIN: Final = 8_350
"""The most lines of TOML: 400 rules, each with its examples."""


@pytest.mark.parametrize("folder", BUDGETS)
def test_a_folder_is_no_larger_than_its_budget(folder: str) -> None:
    """Without a number, each cut was regrown within a day."""
    path, others = CHECKOUT / folder, [CHECKOUT / name for name in BUDGETS if name != folder]
    files = [
        file
        for file in python_files(path)
        if not any(other in file.parents and path in other.parents for other in others)
    ]
    _check_budget(folder, files, BUDGETS[folder][0])


def test_the_rules_of_explain_are_no_larger_than_their_budget() -> None:
    """A rule for each sentence of each library would never end."""
    _check_budget(
        "ddpsafe/_explain/**/*.toml", (PACKAGE / "_explain").rglob("*.toml"), RULES_OF_EXPLAIN
    )


def _check_budget(name: str, files: Iterable[Path], most: int) -> None:
    lines = sum(text_of(file).count("\n") for file in files)
    assert lines <= most, (
        f"{name} has {lines} lines, and its budget is {most}. Write it shorter, or delete what it"
        " replaces. If a promise needs the lines, raise the number in BUDGETS in a commit of its"
        " own, whose body says which row of docs/guarantees.md they pay for."
    )


def test_no_module_has_a_catch_all_name() -> None:
    """A module is named for its contents."""
    assert [str(file) for file in MODULES if file.stem in FORBIDDEN_MODULE_NAMES] == []


def test_a_file_stem_is_unique_in_its_package() -> None:
    """A module's name leads to a single file."""
    stems = Counter(
        (file.relative_to(PACKAGE).parts[0].removesuffix(".py"), file.stem.lstrip("_"))
        for file in MODULES
        if file.stem != "__init__"
    )
    assert {stem for stem, count in stems.items() if count > 1} == set()


def test_a_class_name_is_unique() -> None:
    """A class name is unambiguous in the whole package."""
    classes = Counter(
        node.name for file in MODULES for node in nodes_of(file) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in classes.items() if count > 1] == []


SLEEPERS: Final = [
    file
    for file in [*python_files(CHECKOUT / "tests"), *python_files(CHECKOUT / "examples")]
    if file.parent.name != "programs"  # they run in ranks, and simulate slow and hanging ones
]


def test_nothing_sleeps_until_something_has_probably_happened() -> None:
    """A sleep is not synchronisation.

    A literal of 60 seconds or more is a rank that hangs on purpose, and no test waits for its end.
    ``FAULT_..._S`` is how long a fault lasts, or takes to show, so the duration is part of the test.
    """
    waits = [
        f"{file}:{call.lineno}: {ast.unparse(call)}"
        for file in SLEEPERS
        if file.relative_to(CHECKOUT).as_posix() not in MAY_POLL and "sleep" in text_of(file)
        for call in calls_of(file, "sleep")
        if not _is_a_hang(call)
    ]
    assert waits == []


def _is_a_hang(call: ast.Call) -> bool:
    match call.args:
        case [ast.Constant(value=int() | float() as seconds)]:
            return seconds >= 60
        case [ast.Name(id=name)]:
            return name.startswith("FAULT_") and name.endswith("_S")
    return False


RECEIVERS: Final = {
    "LaunchConfig": {"config", "asked", "resolved"},
    "Timeouts": {"timeouts", "_timeouts"},
    "RetryPolicy": {"retry", "policy"},
    "Rendezvous": {"rendezvous"},
    "DataPath": {"wanted", "data_path", "self"},
}
"""The names of variables through which the fields of each configuration part are read."""


def test_every_option_is_read() -> None:
    """A documented field that is never read would have no effect."""
    from ddpsafe import _config

    reads = {
        (_last_name(node.value), node.attr)
        for file in python_files(PACKAGE)
        for node in nodes_of(file)
        if isinstance(node, ast.Attribute)
    }
    dead = [
        f"{model}.{field}"
        for model, names in RECEIVERS.items()
        for field in getattr(_config, model).model_fields
        if not any((name, field) in reads for name in names)
    ]
    assert dead == []


class _Made(ast.NodeVisitor):
    """Collects the names of classes that code creates or passes on, not those it only checks for."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        self.names.add(node.id)

    def visit_Call(self, node: ast.Call) -> None:
        if _last_name(node.func) not in {"isinstance", "issubclass"}:
            self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)


def test_every_error_is_raised() -> None:
    """A public error is created somewhere, or is the base class of one that is."""
    made = _Made()
    for file in python_files(PACKAGE):
        made.visit(parse(file))
    errors = [
        value
        for module in (ddpsafe._errors, checkpoint_errors, data_errors)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    assert len(errors) > 20
    never = [error.__name__ for error in errors if error.__name__ not in made.names]
    assert [name for name in never if not _subclasses(name, errors)] == []


def _subclasses(name: str, errors: list[type[Exception]]) -> list[type[Exception]]:
    return [error for error in errors if name in {base.__name__ for base in error.__mro__[1:]}]


WORDS: Final = {
    r"(?<!there )\b(is|are|was|were) no (?!longer|more|other|worse|better|less|such)": "is not a …",
    r"\b(nobody|somebody|anybody|everybody)\b": "name who: no rank, another user, every process",
    r"\banew\b": "again, from the start",
    r"\bin vain\b": "without success, without effect",
    r"\bown one\b|\ban own\b": "its own …, a … of its own",
    r"\bmend(s|ed|ing)?\b": "fix, repair",
    r"\b(\w+ of|none of) ours\b": "ddpsafe's, this run's",
    r"\bno matter of\b": "has nothing to do with",
    r"\bonly lost it\b": "failed because of rank …",
    r"\brank \d+, \d": "ranks 0 and 2, by ranks_text()",
    r"\branks \d+(, \d+)+(?! and|,|\d)": "ranks 0, 1 and 2, by ranks_text()",
    r"\bmanieth\b": "every k-th",
    r"\b(come|came|comes) to pass\b": "happen",
    r"\bgoes on\b": "continues",
    r"\bhindmost\b": "furthest behind",
    r"\b(be it|as ever(?! before))\b": "whether …; as before",
    r"\btell whether\b": "Return whether",
    r"\b(is|are|was|were) told (?!to\b)": "is reported, named, logged; receives",
    r"\b(testimony|farewell|headway|litter|attendees?)\b": "the thing itself, without a metaphor",
}
"""Patterns of wording that reads as translated, and what to write instead."""

METAPHORS: Final = re.compile(
    r"verdict|heed(s|ed|ing)?\b|\bobey|witness|stranger|symptom|testimon|\bmeetings?\b|\bjudge",
    re.IGNORECASE,
)
"""Metaphors, which are used neither in names nor in sentences: a reader has to translate them."""

WRITTEN: Final = [
    file
    for place in ("ddpsafe", "docs", "tests", "examples", "benchmarks")
    for file in sorted((CHECKOUT / place).rglob("*"))
    if file.suffix in {".py", ".md"} and file != Path(__file__) and "_build" not in file.parts
] + sorted(CHECKOUT.glob("*.md"))


@pytest.mark.full
def test_no_metaphor_is_used() -> None:
    """The package and its pages use result, check, follow, other user, barrier and sign instead."""
    texts = [file for file in WRITTEN if "tests" not in file.relative_to(CHECKOUT).parts]
    assert [place for file in texts for place in places_of(METAPHORS, file)] == []


@pytest.mark.full
def test_plain_english_is_written() -> None:
    """Messages, docstrings, comments and pages avoid wording that a reader has to translate."""
    # Every pattern begins at a word boundary, so one combined search is faster.
    any_of_them = re.compile(rf"\b(?:{'|'.join(WORDS)})", re.IGNORECASE)
    found = [
        f"{place}; write: {instead}"
        for file in WRITTEN
        if any_of_them.search(text_of(file))
        for words, instead in WORDS.items()
        for place in places_of(re.compile(words, re.IGNORECASE), file)
    ]
    assert found == []


def places_of(pattern: re.Pattern[str], file: Path) -> list[str]:
    """Return the lines of a file that match a pattern."""
    if not pattern.search(text_of(file)):  # most files, so their lines need not be searched
        return []
    lines = enumerate(text_of(file).splitlines(), start=1)
    name = file.relative_to(CHECKOUT)
    return [f"{name}:{number}: {line.strip()}" for number, line in lines if pattern.search(line)]


def _last_name(node: ast.AST) -> str:
    """Return the name that an expression ends with: ``timeouts`` of ``plan.config.timeouts``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
