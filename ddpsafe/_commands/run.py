"""``ddpsafe run``: starts the ranks of a script, each of which runs it as ``__main__``."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._config import LaunchConfig
from ddpsafe._config.endpoint import complete_endpoint
from ddpsafe._config.parts import DETERMINISTIC
from ddpsafe._errors import FAILURE_KINDS, ConfigError, DDPSafeError, Explanation
from ddpsafe._host import is_directory_gone, plain_host, show_endpoint
from ddpsafe._launch import run_processes, telling_node_0
from ddpsafe._launcher.uncaught import without_frames
from ddpsafe._logging import current_fields, json_line, json_of_error
from ddpsafe._worker.script import Kind, Script, run_script
from ddpsafe._world import find_node_place, read_nnodes, require_int
from ddpsafe.cli import HEALTHY, PARTS, TORCHRUN_NOTED, USAGE, complain

if TYPE_CHECKING:
    from argparse import Namespace


def run_ranks(options: Namespace) -> int:
    """Start the ranks and wait for them; an error decides the exit code."""
    if is_directory_gone():
        complain("The current directory has been removed; change to one that exists.")
        return USAGE
    if options.script is None:
        complain(
            "ddpsafe run needs a script, for example:  ddpsafe run --nproc-per-node 2 train.py"
        )
        return USAGE
    try:
        fields, notes = read_options(options)
        config = (
            LaunchConfig.from_toml(options.config, **fields)
            if options.config
            else LaunchConfig(**fields)
        )
        # Node 0 would wait for this node, which cannot join without the script.
        with telling_node_0(config):
            target = _require_target(options)
    except ConfigError as error:
        complain(str(error))
        return USAGE
    is_json = config.console == "json"
    if options.quiet:
        logging.getLogger("ddpsafe").setLevel(logging.ERROR)
    for note in notes if not options.quiet else ():
        complain(json_line("INFO", note, current_fields()) if is_json else f"ddpsafe run: {note}")
    script = Script(
        target=target,
        name=options.script,
        arguments=tuple(options.arguments),
        kind=_kind_of(options),
        launcher_path=None if getattr(sys.flags, "safe_path", False) else sys.path[0],
        has_stdin=sys.stdin is not None,
    )
    if options.role is not None:
        os.environ["ROLE_NAME"] = options.role
    try:
        run_processes(run_script, (script,), config, command=(target, *options.arguments))
    except DDPSafeError as error:
        if is_json:
            complain(json_of_error(error))
        else:
            # As Python prints it, the rank's own exception first, without ddpsafe's frames.
            complain("".join(traceback.format_exception(without_frames(error))).rstrip())
        return error.exit_code
    return HEALTHY


def read_options(options: Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return fields of `LaunchConfig`, and notes on options that act differently from torchrun.

    Raises:
        ConfigError: A value that must be a number is not one.
    """
    _fill_in_torchruns_variables(options)
    names = ("nproc_per_node", "run_dir", "console", "start_method", "backend", "seed", "preflight")
    fields: dict[str, Any] = {
        name: value for name in names if (value := getattr(options, name)) is not None
    }
    # The field refuses a relative path, which in a command line means this directory.
    if "run_dir" in fields:
        fields["run_dir"] = Path(fields["run_dir"]).absolute()
    notes: list[str] = []
    fields |= _read_nodes(options, notes)
    fields |= _read_parts(options)
    # These choose whose output the console shows; files have every rank's output in any case.
    tee, redirects, ranks = options.tee, options.redirects, options.local_ranks_filter
    if ranks:
        fields.setdefault("console", "rank-zero" if ranks == "0" else "tagged")
        if ranks != "0":
            notes.append("--local-ranks-filter: the console shows every rank, or only rank 0.")
    elif tee not in (None, "0"):
        fields.setdefault("console", "tagged")
        if tee != "3":
            notes.append("--tee: both streams of every rank are shown.")
    elif redirects == "3":
        fields.setdefault("console", "none")
    elif redirects not in (None, "0"):
        notes.append("--redirects: the console shows both streams or none; files have both.")
    for name, why in TORCHRUN_NOTED.items():
        if getattr(options, name[2:].replace("-", "_")) is not None:
            notes.append(f"{name} has no effect: {why}.")
    if options.virtual_local_rank:
        notes.append("--virtual-local-rank has no effect: LOCAL_RANK counts from 0 as always.")
    return fields, notes


_FROM_TORCHRUNS_VARIABLES: Final = {
    "nproc_per_node": "DDPSAFE_NPROC_PER_NODE",
    "max_restarts": "DDPSAFE_RETRY__ATTEMPTS",
    "shutdown_timeout": "DDPSAFE_TIMEOUTS__GRACE",
    "redirects": "DDPSAFE_CONSOLE",
    "tee": "DDPSAFE_CONSOLE",
    "local_ranks_filter": "DDPSAFE_CONSOLE",
    "run_dir": "DDPSAFE_RUN_DIR",
    "role": "",
}
_SWITCHES: Final = ("standalone", "module", "no_python", "run_path", "virtual_local_rank")


def _fill_in_torchruns_variables(options: Namespace) -> None:
    """Fill in options from ``PET_<OPTION>``, as torchrun does, unless ddpsafe's own variable is set.

    Those of a node are read by `find_node_place`.
    """
    for name, own in _FROM_TORCHRUNS_VARIABLES.items():
        variable = "PET_LOG_DIR" if name == "run_dir" else f"PET_{name.upper()}"
        if getattr(options, name) is None and own not in os.environ:
            setattr(options, name, os.environ.get(variable))
    for name in _SWITCHES:
        if os.environ.get(f"PET_{name.upper()}", "0") not in {"", "0"}:
            setattr(options, name, True)


def _read_parts(options: Namespace) -> dict[str, dict[str, Any]]:
    """Return the fields of timeouts and retry, from ddpsafe's and torchrun's options.

    Raises:
        ConfigError: A value that must be a number is not one.
    """
    timeouts: dict[str, Any] = {}
    retry: dict[str, Any] = {}
    if options.shutdown_timeout is not None:
        timeouts["grace"] = _number(options, "shutdown_timeout")
    if options.max_restarts is not None:
        # torchrun restarts after any failure; those left out here would only happen again.
        retry = {
            "attempts": _number(options, "max_restarts") + 1,
            "on": FAILURE_KINDS - DETERMINISTIC,
        }
    parts = {"timeouts": timeouts, "retry": retry}
    for part, names in PARTS.items():
        for name in names:
            value = getattr(options, f"{part}.{name}")
            if value is not None:
                # As in environment variables, "null" stands for None.
                parts[part][name] = None if value == "null" else value
    return {part: given for part, given in parts.items() if given}


def _read_nodes(options: Namespace, notes: list[str]) -> dict[str, Any]:
    """Return the fields about the nodes and their rendezvous; append to `notes`.

    Raises:
        ConfigError: A value that must be a number is not one.
    """
    fields: dict[str, Any] = {}
    rendezvous: dict[str, Any] = {
        name: value
        for name, option in (
            ("endpoint", "rdzv_endpoint"),
            ("id", "rdzv_id"),
            ("interface", "interface"),
            ("secret_file", "secret_file"),
        )
        if (value := getattr(options, option)) is not None
    }
    if options.nnodes is not None:
        fewest, fields["nnodes"] = read_nnodes("--nnodes", str(options.nnodes))
        if fewest != fields["nnodes"]:
            rendezvous["min_nodes"] = fewest
    if options.node_rank is not None:
        fields["node_rank"] = _number(options, "node_rank")
    if options.master_addr is not None and "endpoint" not in rendezvous:
        # The default of torchrun's --master-port.
        port = 29500 if options.master_port is None else _number(options, "master_port")
        rendezvous["endpoint"] = show_endpoint(plain_host(options.master_addr), port)
    if options.standalone:
        fields["nnodes"] = 1
    if "nnodes" not in fields and "DDPSAFE_NNODES" not in os.environ and options.config is None:
        fields, rendezvous = _fill_in_node(fields, rendezvous, notes)
    if fields.get("nnodes", 1) == 1 and "DDPSAFE_NNODES" not in os.environ:
        if fields.pop("node_rank", 0) != 0:
            what = (
                f"--node-rank={options.node_rank} is not possible: without --nnodes the job has one "
                "node, whose node_rank is 0."
            )
            raise ConfigError(Explanation(what, fix="add --nnodes, the same on all nodes."))
        # Libraries read it as TORCHELASTIC_RUN_ID. With --standalone, torchrun too chooses one.
        id_ = None if options.standalone else rendezvous.get("id")
        notes += [
            f"--{name.replace('_', '-')} has no effect: the ranks of one node meet in a private "
            "folder."
            for name in _MULTI_NODE_OPTIONS
            if getattr(options, name) is not None and not (name == "rdzv_id" and id_)
        ]
        return {**fields, **({"rendezvous": {"id": id_}} if id_ else {})}
    if "JOB_COMPLETION_INDEX" in os.environ:  # set in the pods of a Kubernetes Indexed Job
        index = require_int(os.environ, "JOB_COMPLETION_INDEX", because="--nnodes")
        fields.setdefault("node_rank", index)
    if "endpoint" in rendezvous:
        # Add the default port, as torchrun does.
        rendezvous["endpoint"] = complete_endpoint(rendezvous["endpoint"])
    return {**fields, **({"rendezvous": rendezvous} if rendezvous else {})}


_MULTI_NODE_OPTIONS: Final = ("rdzv_endpoint", "rdzv_id", "master_addr", "master_port", "interface")


def _fill_in_node(
    fields: dict[str, Any], rendezvous: dict[str, Any], notes: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fill in missing fields from the variables of srun, mpirun or a pod, with a note about it."""
    place = find_node_place(os.environ)
    if place is None:
        return fields, rendezvous
    known = {"endpoint": place.endpoint, "id": place.job, "min_nodes": place.min_nodes}
    rendezvous = {
        **{name: value for name, value in known.items() if value is not None},
        **rendezvous,
    }
    fields = {"nnodes": place.nnodes, **fields}
    if place.node_rank is not None:
        fields.setdefault("node_rank", place.node_rank)
    endpoint = rendezvous.get("endpoint")
    notes.append(
        f"{place.said_by} says: this is node {fields.get('node_rank', '?')} of {place.nnodes}"
        + (
            f", and they meet at {endpoint}."
            if endpoint
            else "; --rdzv-endpoint must name where they meet."
        )
    )
    return fields, rendezvous


def _number(options: Namespace, name: str) -> int:
    text = str(getattr(options, name))
    if not text.isdecimal():
        option = f"--{name.replace('_', '-')}"
        raise ConfigError(Explanation(f"{option}={text} is not a whole number of at least 0."))
    return int(text)


def _kind_of(options: Namespace) -> Kind:
    if options.module:
        return "module"
    return "program" if options.no_python and not options.run_path else "script"


def _require_target(options: Namespace) -> str:
    if options.module and options.no_python:
        raise ConfigError("--module and --no-python exclude each other.")
    kind = _kind_of(options)
    name: str = options.script
    if kind == "module":
        # Check only that the top-level package exists, since looking further would import it.
        package = name.partition(".")[0]
        path, here = sys.path, str(Path.cwd())
        sys.path = [here, *path]  # as in the ranks
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):  # e.g. an empty name, or __main__
            spec = None
        finally:
            sys.path = path
        if spec is None:
            message = f"There is no module {package!r} in {here} or among the installed packages."
            raise ConfigError(message)
        return name
    if kind == "program":
        if shutil.which(name) is None:
            raise ConfigError(
                f"There is no program {name!r} to run; a file needs a path and must be executable."
            )
        return name
    if not (Path(name).is_file() or Path(name, "__main__.py").is_file()):
        near = difflib.get_close_matches(name, [file.name for file in Path.cwd().glob("*.py")], n=1)
        advice = f"did you mean {near[0]}?" if near else "for a module write -m MODULE."
        if Path(name).name.startswith("python"):
            advice = "every rank runs the script with this Python already; leave that word out."
        if Path(name).exists():
            message = f"{name!r} is neither a file that each rank can read nor a directory with a __main__.py."
            raise ConfigError(message)
        raise ConfigError(f"There is no script {name!r} in {Path.cwd()}; {advice}")
    return str(Path(name).absolute())
