"""``ddpsafe doctor``: options to fields, report to terminal, file or pipe."""

from __future__ import annotations

import os
import shlex
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import PydanticCustomError

from ddpsafe import doctor
from ddpsafe._commands.terminal import progress, show_report
from ddpsafe._config import LaunchConfig
from ddpsafe._config.durations import parse_duration
from ddpsafe._config.endpoint import parse_endpoint
from ddpsafe._config.problems import find_near
from ddpsafe._errors import ConfigError, DDPSafeError, Explanation
from ddpsafe._world import find_world
from ddpsafe.cli import HEALTHY, UNHEALTHY, USAGE, complain, say
from ddpsafe.doctor._codes import CODES, read_page
from ddpsafe.doctor._findings import to_copy

if TYPE_CHECKING:
    from argparse import Namespace

    from ddpsafe._world import World
    from ddpsafe.doctor import Report

_LAST_PORT: Final = 65535


def examine(options: Namespace) -> int:
    """Examine as the options say, and show what was found."""
    if options.explain is not None:
        return _explain(options.explain)
    try:
        try:
            world = find_world(os.environ)
        except ConfigError:  # a finding of its own: DS-ENV-001
            world = None
        if world is not None and world.local_rank > 0:
            return HEALTHY  # the first process of each node speaks for it
        config, fields = _what_is_asked(options, world)
        report = _examine(options, config, fields)
        if options.html:
            Path(options.html).write_text(report.to_html(), encoding="utf-8")
    except DDPSafeError as error:
        complain(str(error))
        return USAGE if isinstance(error, ConfigError) else UNHEALTHY
    except OSError as error:
        complain(f"{options.html} cannot be written: {error.strerror}.")
        return USAGE
    if options.json:
        say(report.to_json())
    else:
        show_report(report, verbose=options.verbose)
    return HEALTHY if report.healthy else UNHEALTHY


def _explain(code: str) -> int:
    """Print the page of a finding."""
    page = read_page(code.upper())
    if page is None:
        near = find_near(code.upper(), list(CODES))
        hint = f" Did you mean {near}?" if near else f" Codes are written as {next(iter(CODES))}."
        complain(f"--explain: there is no finding {code!r}.{hint}")
        return USAGE
    say(page.rstrip())
    return HEALTHY


def _examine(options: Namespace, config: LaunchConfig | None, fields: dict[str, Any]) -> Report:
    try:
        timeout = parse_duration(options.timeout)
    except PydanticCustomError as error:
        raise _bad_timeout(options.timeout, error.message()) from None
    if not isinstance(timeout, timedelta):
        raise _bad_timeout(options.timeout, "it is not a duration")
    secret = None if options.secret_file is None else _secret(options.secret_file)
    with progress(quiet=options.json and not options.verbose) as say_progress:
        return doctor.run(
            config,
            mesh=False if options.no_mesh else None,
            timeout=timeout,
            on_progress=say_progress,
            secret=secret,
            **fields,
        )


def _secret(path: str) -> str:
    """Read what the nodes of a job know."""
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        what = f"--secret-file: {path} cannot be read: {why}."
        fix = "name a file with one line of text, the same on every node."
        raise ConfigError(Explanation(what, cause="a wrong path.", fix=fix)) from None
    if not secret:
        what = f"--secret-file: {path} is empty."
        fix = to_copy("write a secret into it:", f"openssl rand -hex 32 > {shlex.quote(path)}")
        raise ConfigError(Explanation(what, cause="nothing was written into it.", fix=fix))
    return secret


def _bad_timeout(text: str, why: str) -> ConfigError:
    fix = 'write seconds (30) or a text such as "30s" or "2min".'
    return ConfigError(Explanation(f"--timeout: got {text!r}.", cause=f"{why}.", fix=fix))


def _what_is_asked(
    options: Namespace, world: World | None
) -> tuple[LaunchConfig | None, dict[str, Any]]:
    config = LaunchConfig.from_toml(options.config) if options.config else None
    names = ("nnodes", "node_rank", "backend", "nproc_per_node")
    given = {name: getattr(options, name) for name in names}
    fields = {
        **_of_launcher(world),
        **{name: value for name, value in given.items() if value is not None},
    }
    known = fields.pop("endpoint", None)
    rendezvous = {
        name: value
        for name, value in (
            ("endpoint", options.rdzv_endpoint or known),
            ("interface", options.interface),
        )
        if value is not None
    }
    return config, {**fields, **({"rendezvous": rendezvous} if rendezvous else {})}


def next_port(endpoint: str) -> str:
    """Return an endpoint one port above.

    Raises:
        ConfigError: There is no port above.
    """
    host, _, port = endpoint.rpartition(":")
    if int(port) >= _LAST_PORT:
        message = f"The nodes meet one port above {endpoint} to examine each other; there is none."
        raise ConfigError(message)
    return f"{host}:{int(port) + 1}"


def _of_launcher(world: World | None) -> dict[str, Any]:
    """Return what srun or torchrun knows of the nodes; nothing on a single one."""
    if world is None or world.nnodes == 1:
        return {}
    from ddpsafe._worker.join.launcher_address import find_endpoint

    endpoint = find_endpoint(world, os.environ)
    # torchrun's own store listens at MASTER_PORT.
    where = next_port(str(endpoint)) if endpoint.is_served else str(endpoint)
    try:
        parse_endpoint(where)
    except ValueError:  # DS-ENV-003 says why; there is no place to meet
        return {}
    return {
        "nnodes": world.nnodes,
        "node_rank": world.node_rank,
        "nproc_per_node": world.local_world_size,
        "endpoint": where,
    }
