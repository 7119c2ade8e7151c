"""Network interface names, validated by the rules of the libraries that read them.

gloo takes literal names, separated by commas. NCCL takes prefixes, separated by commas, after an
optional ``^`` (all but these) and an optional ``=`` (exact names instead of prefixes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpsafe._config.endpoint import find_address
from ddpsafe._config.problems import Problem, find_near, show
from ddpsafe._errors import ConfigProblem
from ddpsafe._host import expand_nccl, list_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

GLOO: Final = "GLOO_SOCKET_IFNAME"
NCCL: Final = "NCCL_SOCKET_IFNAME"
# IFNAMSIZ - 1 of the Linux kernel.
_LONGEST_NAME: Final = 15


def find_shape_problem(variable: str, value: str) -> Problem | None:
    """Return what is wrong with an interface variable as written, without looking at the machine."""
    if variable == NCCL:
        value = value.removeprefix("^").removeprefix("=")
    library = "gloo" if variable == GLOO else "NCCL"
    for item in value.split(","):
        if not item or item != item.strip():
            why = "an interface name in it is empty or has blanks around it"
            return Problem(why=why, write='names with commas and nothing else between: "eth0,eth1"')
        if item[0] in "^=":
            why = (
                "gloo takes literal names only; '^' and '=' belong to NCCL_SOCKET_IFNAME"
                if library == "gloo"
                else "'^' and '=' may appear once each, at the very start, in this order"
            )
            return Problem(
                why=why, write='"eth0"' if library == "gloo" else '"^docker,lo" or "=eth0"'
            )
        if find_address(item) is not None:
            why = f"{item} is an IP address, but {library} needs the name of an interface"
            return Problem(
                why=why, write='the name that `ip addr` shows beside the address, e.g. "eth0"'
            )
        # NCCL allows a port after a colon for InfiniBand cards only, not for sockets.
        if len(item) > _LONGEST_NAME or any(c in "/: \t" or not c.isprintable() for c in item):
            return Problem(
                why=f"{show(item)} cannot be the name of an interface (at most 15 characters, "
                "no '/', ':' or blanks)",
                write='the name as `ip link` shows it, e.g. "eth0"',
            )
    return None


def check_interfaces(
    env: Mapping[str, str], *, existing: Iterable[str] | None = None
) -> Iterator[ConfigProblem]:
    """Yield the problems of the interface variables that the ranks will have, inherited ones included."""
    names = list(list_names() if existing is None else existing)
    for variable in (GLOO, NCCL):
        value = env.get(variable)
        if not value:
            continue
        problem = find_shape_problem(variable, value) or _absent(variable, value, names)
        if problem is not None:
            yield _about(variable, value, problem)


def check_interface(name: str) -> ConfigProblem | None:
    """Check that `Rendezvous.interface` exists on this machine; return the problem, if any."""
    names = list_names()
    problem = find_shape_problem(GLOO, name) or _absent(GLOO, name, names)
    return None if problem is None else _about("rendezvous.interface", name, problem)


def _about(field: str, value: str, problem: Problem) -> ConfigProblem:
    return ConfigProblem(field=field, given=show(value), why=problem.why, write=problem.write)


def _absent(variable: str, value: str, names: list[str]) -> Problem | None:
    missing = [] if expand_nccl(value, names) else [value]
    if variable == GLOO:
        missing = [item for item in value.split(",") if item not in names]
    if not missing:
        return None
    near = find_near(missing[0].lstrip("^="), names)
    return Problem(
        why=f"no interface of this machine is called {', '.join(map(repr, missing))}; "
        f"it has {', '.join(names)}",
        write=repr(near) if near else f"one of {', '.join(names)}",
    )
