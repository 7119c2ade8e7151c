"""Launch helpers for DistributedDataParallel: the command line."""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib
import io
import os
import signal
import sys
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._garbage import exempt_from_gc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HEALTHY, UNHEALTHY, USAGE = 0, 1, 2
"""Exit codes of ``ddpsafe doctor``: nothing will break a job, something will, wrong usage."""

NOBODY_READS: Final = 128 + 13
"""Exit code if the output's reader has exited, as in ``ddpsafe config | head -1``: as by SIGPIPE."""

_OUTPUT: Final = "<output>"

_COMMANDS: Final = {
    "doctor": "examine",
    "checkpoint": "handle_checkpoints",
    "config": "explain_config",
    "status": "show_status",
    "report": "write_report_page",
    "explain": "explain_logs",
    "run": "run_ranks",
    "template": "print_template",
}
"""The function of each command, in ``ddpsafe._commands.<command>``."""

TEMPLATES: Final = ("slurm", "kubernetes", "compose", "sagemaker")
"""The places where jobs run that ``ddpsafe template`` has a file for."""

_DOCTOR: Final = """\
Check this host for what breaks DistributedDataParallel jobs. With --nnodes, run it on every node
at the same time: it then checks the connections between them, too. Under srun or torchrun the
options about nodes come from the launcher.
"""
_EXIT_CODES: Final = "exit codes: 0 healthy or warnings only, 1 something failed, 2 wrong usage"
_EXPLAIN: Final = """\
Read the logs of a failed job, of any launcher and any size, and print what went wrong, the most
likely cause first, with the lines that show it and what to do. Nothing leaves this machine.
"""
_EXPLAIN_EXIT_CODES: Final = (
    "exit codes: 0 no known failure in the logs, 1 one was found, 2 wrong usage"
)
_STATUS: Final = """\
Show where the ranks of your running launches on this host are: phase, steps, last collective,
line, CPU and memory. The ranks keep running, and no process is traced.
"""
_STATUS_EXIT_CODES: Final = "exit codes: 0 a launch is running, 1 none is, 2 wrong usage"
_CHECKPOINT_EXIT_CODES: Final = (
    "exit codes: 0 success, intact, no differences, 1 damage or differences, 2 wrong usage"
)
_RAN_OR_USAGE: Final = "exit codes: 0 success, 2 wrong usage"
_RUN: Final = """\
Start the ranks of a script on this host, as torchrun does: each runs the script from its first
line, with RANK, WORLD_SIZE and the like set, and init_process_group() connects them. For several
nodes run it once on each, with --nnodes and --rdzv-endpoint; under srun with one task per node it
takes both from Slurm.
"""
_RUN_EPILOG: Final = """\
Accepts torchrun's command lines; a note names each option that has no effect here.
exit codes: 0, the failing rank's own, 128 + signal, 78 another attempt cannot help, 2 wrong usage
"""
_RUN_OPTIONS: Final = (
    ("--nproc-per-node", "N", 'ranks: a number, "gpu", "cpu" or "auto"'),
    ("--run-dir", "DIR", "where logs and reports go"),
    ("--console", "WHOSE", "auto, rank-zero, all, tagged, json or none"),
    ("--start-method", "HOW", "spawn or forkserver"),
    ("--backend", "NAME", "for launch() and setup() in the script: gloo, nccl; auto by default"),
    ("--seed", "N", "the seed of every rank"),
    ("--preflight", "WHAT", "off, local or full"),
    ("--max-restarts", "N", "attempts after the first, for failures that a retry can fix"),
    ("--shutdown-timeout", "S", "seconds between SIGTERM and SIGKILL"),
    ("--nnodes", "N", "nodes, each of which runs this command: a number, or MIN:MAX"),
    ("--node-rank", "I", "this node, from 0; node 0 is the host of the endpoint"),
    ("--rdzv-endpoint", "HOST:PORT", "address of the rendezvous, which its host serves"),
    ("--rdzv-id", "ID", "name of the job, the same on all nodes"),
    ("--interface", "NAME", "the network interface of the ranks of this node"),
    ("--secret-file", "FILE", "a file with the job's secret; nodes without it cannot join"),
    ("--role", "NAME", "the value of ROLE_NAME in the ranks"),
    ("-t --tee", "STD", "like torchrun: show every rank's output, each line with its rank"),
    ("-r --redirects", "STD", "like torchrun: 3 shows nothing on the console"),
    ("--local-ranks-filter", "RANKS", "like torchrun: 0 shows rank 0's output"),
)
_OF_TORCHRUN: Final = {"--run-dir": "--log-dir"}
"""Options that torchrun has under another name."""

PARTS: Final = {
    "timeouts": (
        "attempt",
        "start",
        "collective",
        "barrier",
        "progress",
        "finish",
        "node_loss",
        "grace",
        "stop",
    ),
    "retry": ("attempts", "on", "backoff_initial", "backoff_max", "jitter", "no_progress"),
}
"""Fields of `timeouts` and `retry`, each an option of ``ddpsafe run``. A test compares them."""

_PARTS: Final = "Each overrides one field of the configuration; see docs/reference/config.md."
TORCHRUN_NOTED: Final = {
    "--rdzv-backend": "nodes always meet at the endpoint, and ranks of one node in a private folder",
    "--rdzv-conf": "rendezvous.join and timeouts.start of the configuration limit the start",
    "--local-addr": "--interface chooses the network interface of the ranks of several nodes",
    "--monitor-interval": "the exit of a rank is noticed at once",
    "--event-log-handler": "RUN_DIR has a report of each failed attempt",
    "--numa-binding": "ranks are not bound to cores; numactl can do that",
    "--signals-to-handle": "SIGINT, SIGTERM, SIGHUP, SIGQUIT and SIGUSR1 are handled",
    "--duplicate-stdout-filters": "RUN_DIR has the whole output of each rank",
    "--duplicate-stderr-filters": "RUN_DIR has the whole output of each rank",
    "--logs-specs": "RUN_DIR has the output of each rank",
}
"""torchrun's options that have no effect here, and why they are not needed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: The arguments after the program's name; this process's by default.

    Returns:
        The exit code.
    """
    # Print "?" for a character that the terminal cannot encode, instead of failing.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        from ddpsafe._host import act_by_default

        # The kernel keeps the default action from the first process of a container.
        signal.signal(signal.SIGTERM, act_by_default)
    try:
        try:
            argv = sys.argv[1:] if arguments is None else arguments
            if not argv:
                complain(make_parser().format_help().rstrip())
                return USAGE
            if not argv[0].startswith("-") and argv[0] not in _COMMANDS:
                near = difflib.get_close_matches(argv[0], _COMMANDS, n=1)
                guess = (
                    f"did you mean {near[0]}?" if near else f"choose from {', '.join(_COMMANDS)}."
                )
                complain(f"ddpsafe: there is no command {argv[0]!r}; {guess}")
                return USAGE
            options, unknown = make_parser().parse_known_args(argv)
            if unknown:
                from ddpsafe._stdlib_private import options_of

                parser: argparse.ArgumentParser = options.parser
                option = next(
                    (argument for argument in unknown if argument.startswith("-")), unknown[0]
                )
                name = option.partition("=")[0]
                known = options_of(parser)
                begun = [option for option in known if option.startswith(name) and name != "-"]
                near = [*begun, *difflib.get_close_matches(name, known, n=1)]
                text = f"there is no option {name}" + (
                    f"; did you mean {near[0]}?" if near else "."
                )
                if options.command == "run":
                    text += " Options of the script go after its name."
                parser.error(text)
            with exempt_from_gc() if arguments is None else nullcontext():
                command = find_command(options.command)
            return command(options)
        finally:
            if sys.stdout is not None:  # None if the process was started with it closed
                with _naming_output():
                    sys.stdout.flush()
            if arguments is None:
                gc.freeze()  # the interpreter ends: spare it a collection of all modules
    except BrokenPipeError:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except BrokenPipeError:
            _discard_outputs()
        return NOBODY_READS
    except OSError as error:
        if error.filename != _OUTPUT:
            raise
        with suppress(OSError):
            complain(f"ddpsafe: the output cannot be written: {error.strerror}")
        _discard_outputs()
        return USAGE
    except KeyboardInterrupt:
        # Die by the signal, without a traceback, so that a shell's loop around it ends, too.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
        return 128 + signal.SIGINT


@contextmanager
def _naming_output() -> Iterator[None]:
    """Name the output in an error, so that `main` knows it from errors about other files."""
    try:
        yield
    except OSError as error:
        error.filename = _OUTPUT
        raise


def _discard_outputs() -> None:
    """Discard what could not be written: Python would flush it at exit, and print an error about it."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for output in filter(None, (sys.stdout, sys.stderr)):  # None: it is closed
        os.dup2(devnull, output.fileno())
    os.close(devnull)


def find_command(name: str) -> Callable[[argparse.Namespace], int]:
    """Return the function of a command."""
    # Its module is imported only now, so that help is fast.
    module = importlib.import_module(f"ddpsafe._commands.{name}")
    command: Callable[[argparse.Namespace], int] = getattr(module, _COMMANDS[name])
    return command


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    from ddpsafe import __version__
    from ddpsafe._stdlib_private import parser_of_beginnings

    parser = argparse.ArgumentParser(prog="ddpsafe", description=__doc__)
    parser.add_argument("--version", action="version", version=f"ddpsafe {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=parser_of_beginnings()
    )
    _add_doctor(commands.add_parser, "check this host, or all nodes of a job")
    about = "print the configuration and where each value comes from"
    config = commands.add_parser(
        "config", help=about, description=f"{about.capitalize()}.", epilog=_RAN_OR_USAGE
    )
    _add_common(config)
    _add_checkpoint(commands.add_parser, "list, verify, compare and import checkpoints")
    _add_run(commands.add_parser, "start the ranks of a script on this host")
    about = "show what the ranks of running launches do"
    status = commands.add_parser(
        "status", help=about, description=_STATUS, epilog=_STATUS_EXIT_CODES
    )
    status.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        nargs="?",
        help="the run directory of one launch; without it, all your launches",
    )
    status.add_argument(
        "--watch", action="store_true", help="repeat every second, until the launch has ended"
    )
    status.add_argument("--stacks", action="store_true", help="show the stacks of all threads, too")
    form = status.add_mutually_exclusive_group()
    _add_json(form)
    form.add_argument("--openmetrics", action="store_true", help="print metrics for Prometheus")

    about = "write the page of a run: report.html"
    report = commands.add_parser(
        "report", help=about, description=f"{about.capitalize()}.", epilog=_RAN_OR_USAGE
    )
    report.add_argument("run_dir", metavar="RUN_DIR", help="the run directory of a launch")
    report.add_argument("--html", metavar="FILE", help="the page; RUN_DIR/report.html by default")

    about = "find what went wrong in the logs of any launcher"
    explain = commands.add_parser(
        "explain", help=about, description=_EXPLAIN, epilog=_EXPLAIN_EXIT_CODES
    )
    explain.add_argument(
        "logs", metavar="LOG", nargs="*", help="files or folders; by default, or with -, stdin"
    )
    explain.add_argument(
        "--rules",
        metavar="FILE",
        action="append",
        default=[],
        help="rules of your own: a TOML file, or a folder of them; may be repeated",
    )
    form = explain.add_mutually_exclusive_group()
    _add_json(form)
    form.add_argument("--markdown", action="store_true", help="print a summary for an issue")

    about = "print a job file to start from: Slurm, Kubernetes, …"
    template = commands.add_parser(
        "template", help=about, description=f"{about.capitalize()}.", epilog=_RAN_OR_USAGE
    )
    template.add_argument("place", metavar="PLACE", choices=TEMPLATES, help=", ".join(TEMPLATES))
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _add_doctor(add: Callable[..., argparse.ArgumentParser], about: str) -> None:
    parser = add("doctor", help=about, description=_DOCTOR, epilog=_EXIT_CODES)
    nodes = parser.add_argument_group("nodes")
    nodes.add_argument("--nnodes", metavar="N", help="number of nodes")
    nodes.add_argument("--node-rank", metavar="I", help="this node, from 0")
    nodes.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT", help="the rendezvous, on which node 0 listens"
    )
    nodes.add_argument("--interface", metavar="NAME", help="the network interface of the ranks")
    nodes.add_argument("--backend", metavar="NAME", help="gloo, nccl, …; auto by default")
    nodes.add_argument(
        "--secret-file",
        metavar="FILE",
        help="a file that only the nodes of the job can read; nodes without it cannot join",
    )
    nodes.add_argument("--no-mesh", action="store_true", help="check this host only")
    _add_common(parser)
    parser.add_argument("--nproc-per-node", metavar="N", help="ranks on this node")
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        default="1min",
        help="for each half; 30, 30s, 2min (%(default)s)",
    )
    parser.add_argument("--explain", metavar="CODE", help="print the page of a finding and exit")
    parser.add_argument("--html", metavar="FILE", help="write a page of which hosts reach which")
    parser.add_argument("--verbose", action="store_true", help="show passed checks, too")


def _add_checkpoint(add: Callable[..., argparse.ArgumentParser], about: str) -> None:
    epilog = _CHECKPOINT_EXIT_CODES
    parser = add("checkpoint", help=about, description=f"{about.capitalize()}.", epilog=epilog)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    place = "a directory that a Checkpointer writes to"
    which = "a checkpoint's folder, or a directory, whose newest checkpoint is used"

    listing = actions.add_parser("ls", help="list the checkpoints of a directory", epilog=epilog)
    listing.add_argument("directory", metavar="DIRECTORY", help=place)
    verifying = actions.add_parser(
        "verify", help="check every byte; exits with 1 if a checkpoint is damaged", epilog=epilog
    )
    verifying.add_argument("directory", metavar="DIRECTORY", help=place)
    verifying.add_argument("--step", metavar="N", type=int, help="only this checkpoint")
    comparing = actions.add_parser(
        "diff", help="compare two; exits with 1 if they differ", epilog=epilog
    )
    comparing.add_argument("before", metavar="BEFORE", help=which)
    comparing.add_argument("after", metavar="AFTER", help=which)
    importing = actions.add_parser(
        "import", help="make a file of torch.save a checkpoint", epilog=epilog
    )
    importing.add_argument("file", metavar="FILE", help="the file; nothing in it is executed")
    importing.add_argument("directory", metavar="DIRECTORY", help=place)
    importing.add_argument("--step", metavar="N", type=int, required=True, help="its step")
    importing.add_argument(
        "--name", metavar="NAME", default="model", help="name of the state if the file has only one"
    )
    importing.add_argument(
        "--rename",
        metavar="OLD=NEW",
        action="append",
        default=[],
        help="rename OLD in the state to NEW",
    )
    for action in (listing, verifying, comparing, importing):
        _add_json(action)


def _add_common(parser: argparse.ArgumentParser) -> None:
    _add_config_file(parser)
    _add_json(parser)


def _add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def _add_config_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help="a TOML file, instead of the pyproject.toml here"
    )


def _add_run(add: Callable[..., argparse.ArgumentParser], about: str) -> None:
    parser = add(
        "run",
        help=about,
        # In an error, a usage line with all forty options would hide what is wrong.
        usage="ddpsafe run [OPTION …] SCRIPT …",
        description=_RUN,
        epilog=_RUN_EPILOG,
    )
    for names, metavar, text in _RUN_OPTIONS:
        _add_both(parser, names, metavar=metavar, help=text)
    _add_config_file(parser)
    parser.add_argument(
        "--quiet", action="store_true", help="no notes and warnings; output and errors remain"
    )
    parts = parser.add_argument_group("timeouts and retry", _PARTS)
    for part, fields in PARTS.items():
        for name in fields:
            _add_both(parts, f"--{part}.{name.replace('_', '-')}", metavar="VALUE")
    parser.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m"
    )
    _add_both(parser, "--no-python", action="store_true", help="SCRIPT is a program, not Python")
    _add_both(parser, "--standalone", action="store_true", help="one node")
    # Accepted without effect: an option of `python -m torch.distributed.launch`.
    _add_both(parser, "--use-env", action="store_true", help=argparse.SUPPRESS)
    _add_both(parser, "--run-path", action="store_true", help=argparse.SUPPRESS)
    for names in ("--master-addr", "--master-port"):
        _add_both(parser, names, metavar="VALUE", help=argparse.SUPPRESS)
    for names in TORCHRUN_NOTED:
        # Another class that writes logs would have to be torch's; its default is the one that we replace.
        choices = ["default"] if names == "--logs-specs" else None
        _add_both(parser, names, metavar="VALUE", choices=choices, help=argparse.SUPPRESS)
    _add_both(parser, "--virtual-local-rank", action="store_true", help=argparse.SUPPRESS)
    # Optional for argparse: without a script, the command prints an error with an example.
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="the script of each rank")
    parser.add_argument(
        "arguments", metavar="…", nargs=argparse.REMAINDER, help="arguments of the script"
    )


def _add_both(parser: argparse._ActionsContainer, names: str, **how: Any) -> None:
    """Add an option; the help shows neither its spelling with underscores nor torchrun's other name."""
    shown = names.split()
    action = parser.add_argument(*shown, **how)
    spellings = [name for name in shown if name.startswith("--")]
    spellings += [_OF_TORCHRUN[name] for name in spellings if name in _OF_TORCHRUN]
    spellings += [f"--{name[2:].replace('-', '_')}" for name in spellings]
    hidden = [name for name in dict.fromkeys(spellings) if name not in shown]
    if hidden:
        parser.add_argument(*hidden, **{**how, "dest": action.dest, "help": argparse.SUPPRESS})


def say(text: str) -> None:
    """Print a result to standard output."""
    with _naming_output():
        print(text)


def on_terminal() -> bool:
    """Return whether results are printed to a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()  # None: it is closed


def complain(text: str) -> None:
    """Print an error or a note to standard error."""
    with _naming_output():
        print(text, file=sys.stderr)
