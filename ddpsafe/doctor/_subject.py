"""What the doctor examines: this host, as the ranks of one job would find it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, Strict

from ddpsafe._config.endpoint import Endpoint, parse_endpoint
from ddpsafe._config.sources import find_variable, read_config_file
from ddpsafe._errors import ConfigError
from ddpsafe._gpus import count_device_nodes
from ddpsafe._host import as_setting, plain_host, show_endpoint
from ddpsafe._text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe._clock import Deadline
    from ddpsafe._config import LaunchConfig
    from ddpsafe.doctor._system.torch_probe import TorchProbe


Text = Annotated[str, Strict(), Field(max_length=500), AfterValidator(printable)]
"""What another node may send as text: it comes out as one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What the checks examine.

    Attributes:
        env: The variables its ranks would have: those of this process, overridden by the config's.
        nproc: Ranks on this node, as far as is known without torch.
        at_launch: Whether a launch waits for the checks. Their thresholds are then those that break
            it, not those that a careful user would want to know about.
        deadline: When the examination ends.
        probe: The process that imports torch; None if there is none.
    """

    config: LaunchConfig
    env: Mapping[str, str]
    nproc: int
    at_launch: bool
    deadline: Deadline
    probe: TorchProbe | None = None

    @property
    def nnodes(self) -> int:
        """Number of nodes of the job."""
        return self.config.nnodes

    @property
    def endpoint(self) -> Endpoint | None:
        """The rendezvous endpoint: the config's, else MASTER_ADDR and MASTER_PORT."""
        if self.config.rendezvous.endpoint is not None:
            return self.config.rendezvous.parsed()
        host, port = self.env.get("MASTER_ADDR"), self.env.get("MASTER_PORT")
        if not host or not port:
            return None
        try:
            return parse_endpoint(show_endpoint(plain_host(host), port))
        except ValueError:  # reported by DS-ENV-003 and DS-ENV-004
            return None

    @property
    def backend(self) -> str:
        """The backend; "auto" is nccl if the driver has created devices and ranks may use them."""
        if self.config.backend != "auto":
            return self.config.backend
        return "nccl" if count_device_nodes() and self.config.nproc_per_node != "cpu" else "gloo"

    @property
    def wants_gpus(self) -> bool:
        """Whether the job requires GPUs, and does not just use them if there are any."""
        return "nccl" in self.config.backend or self.config.nproc_per_node == "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableSource:
    """Where a variable of the ranks was set, and the line that changes it there.

    Attributes:
        kind: ``shell``: the environment of this process; ``variable``: a ``DDPSAFE_ENV__*``
            variable; ``file``: a TOML file; ``argument``: ``env=`` of the call.
        where: The name of that variable, or the path of the file.
    """

    kind: Literal["shell", "variable", "file", "argument"] = "shell"
    where: Text = ""

    def set_line(self, name: str, value: str) -> str:
        """Return the line that sets the variable there."""
        if self.kind == "file":
            return f"{name} = {json.dumps(value)}    # in [tool.ddpsafe.env] of {self.where}"
        if self.kind == "argument":
            return f"env={{{json.dumps(name)}: {json.dumps(value)}}}    # in the call"
        variable = self.where if self.kind == "variable" else name
        return f"export {as_setting(variable, value)}"

    def unset_line(self, name: str) -> str:
        """Return the line that removes the variable there."""
        if self.kind == "file":
            return f"# delete the line {name} = … in [tool.ddpsafe.env] of {self.where}"
        if self.kind == "argument":
            return f"# remove {json.dumps(name)} from env= in the call"
        return f"unset {self.where if self.kind == 'variable' else name}"


def find_place(config: LaunchConfig, name: str) -> VariableSource:
    """Return where a variable of the ranks was set; the shell if it is not set at all."""
    if name not in config.env:
        return VariableSource()
    # Where a source has another value, an argument of the call has overridden it.
    variable = find_variable(("env", name))
    if variable is not None and os.environ.get(variable) == config.env[name]:
        return VariableSource(kind="variable", where=variable)
    try:
        file = read_config_file()
    except ConfigError:
        return VariableSource(kind="argument")
    table = {} if file is None else file.table.get("env", {})
    if file is not None and isinstance(table, dict) and table.get(name) == config.env[name]:
        return VariableSource(kind="file", where=str(file.path))
    return VariableSource(kind="argument")


def environment_of(config: LaunchConfig) -> dict[str, str]:
    """Return the variables that the ranks of a config would have."""
    return {**os.environ, **config.env}
