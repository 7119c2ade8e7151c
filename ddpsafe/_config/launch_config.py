"""`LaunchConfig`: the settings of a launch, from arguments, environment, file and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import BaseSettings, InitSettingsSource, SettingsConfigDict
from typing_extensions import Self, TypedDict, Unpack

from ddpsafe._config.field_validators import (
    validate_backend,
    validate_env,
    validate_integer,
    validate_nproc,
    validate_start_method,
)
from ddpsafe._config.parts import Rendezvous, RetryPolicy, Timeouts
from ddpsafe._config.paths import AbsolutePath, DataPath
from ddpsafe._config.problems import (
    COUNTS_OF_RANKS,
    Part,
    Problem,
    describe_fields,
    problems_of,
    raise_config_error,
    require_none,
    show,
    show_at,
    unknown_field,
    wrong,
)
from ddpsafe._config.sources import (
    DELIMITER,
    PREFIX,
    ConfigFile,
    EnvironmentSource,
    find_variable,
    implicit_file_problems,
    read_config_file,
    slipped_variables,
)
from ddpsafe._errors import ConfigProblem

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from pydantic_settings import PydanticBaseSettingsSource

__tracebackhide__ = True  # pytest shows the line of the caller, not these

# The file for the config being built, as pydantic-settings has no argument for it.
_file: ContextVar[ConfigFile | None] = ContextVar("ddpsafe_config_file", default=None)


class GroupFields(TypedDict, total=False):
    """The fields that `process_group` and `setup`, which start no processes, accept beside the backend."""

    rendezvous: Rendezvous | Mapping[str, object]
    timeouts: Timeouts | Mapping[str, object]
    data_paths: Mapping[str, DataPath | str | os.PathLike[str] | Mapping[str, object]]
    run_dir: str | os.PathLike[str] | None
    env: Mapping[str, str | int | float]
    preflight: Literal["off", "local", "full"]
    seed: int | None


class SpawnFields(GroupFields, total=False):
    """`LaunchFields` for a call that has `nprocs` and `start_method` as parameters of its own."""

    nnodes: int
    node_rank: int | None
    retry: RetryPolicy | Mapping[str, object]
    console: Literal["auto", "rank-zero", "all", "tagged", "json", "none"]
    backend: str


class LaunchFields(SpawnFields, total=False):
    """The fields of `LaunchConfig` as keyword arguments, in any form that the model accepts."""

    nproc_per_node: int | Literal["gpu", "cpu", "auto"]
    start_method: Literal["spawn", "forkserver"]


class LaunchConfig(BaseSettings):
    """The settings of a launch.

    Each field comes from the argument, else from the environment (``DDPSAFE_*``, with two underscores
    before a field of a part: ``DDPSAFE_TIMEOUTS__GRACE=10``), else from ``[tool.ddpsafe]`` in the
    pyproject.toml of the current directory, else from the default. Parts (`timeouts`, `retry`,
    `rendezvous`) and tables (`env`, `data_paths`) are merged field by field.

    Raises:
        ConfigError: The settings are wrong; it lists every problem.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        env_prefix=PREFIX,
        env_nested_delimiter=DELIMITER,
        env_ignore_empty=True,
        env_parse_none_str="null",
    )

    nproc_per_node: Annotated[
        int | Literal["gpu", "cpu", "auto"], BeforeValidator(validate_nproc)
    ] = Field(
        default="auto",
        description="Ranks on this node: a number from 1, one per GPU, one per core, or one per GPU if "
        "there are any and one per core if not.",
        examples=["4", '"gpu"', '"cpu"', '"auto"'],
    )
    nnodes: Annotated[int, BeforeValidator(validate_integer)] = Field(
        default=1,
        ge=1,
        le=100_000,
        description="Nodes of the job, each with its own launcher. With more than one, the launchers "
        "connect through rendezvous.endpoint and start, watch and restart their ranks together.",
        examples=["2"],
    )
    node_rank: Annotated[int, BeforeValidator(validate_integer)] | None = Field(
        default=None,
        ge=0,
        description="This node's number, from 0. In a launch, node 0 is the host of the endpoint; the "
        "other nodes are ordered by this number, or by their names (None). The doctor needs it if no "
        "launcher sets it.",
        examples=["0", "None"],
    )
    rendezvous: Rendezvous = Field(
        default=Rendezvous(),
        description="Where the nodes connect, required with more than one, and through which interface.",
        examples=['{"endpoint": "gpu-01:29400"}', '{"interface": "eth0"}'],
    )
    backend: Annotated[str, BeforeValidator(validate_backend)] = Field(
        default="auto",
        description='Backend of the process group. "auto": nccl with GPUs, else gloo.',
        examples=['"auto"', '"gloo"', '"cpu:gloo,cuda:nccl"'],
    )
    start_method: Annotated[
        Literal["spawn", "forkserver"], BeforeValidator(validate_start_method)
    ] = Field(
        default="spawn",
        description='How ranks are started. "forkserver" is faster, as it has already loaded torch.',
        examples=['"spawn"', '"forkserver"'],
    )
    timeouts: Timeouts = Field(
        default=Timeouts(),
        description="How long each phase may take.",
        examples=['{"start": 60, "collective": "10min"}'],
    )
    retry: RetryPolicy = Field(
        default=RetryPolicy(),
        description="Which failures are retried.",
        examples=['{"attempts": 3, "on": {"port", "mount", "peer-lost"}}'],
    )
    data_paths: dict[str, DataPath] = Field(
        default={},
        description="Paths that the job needs, by name; checked on every node before ranks start.",
        examples=['{"train": "/data/train"}'],
    )
    run_dir: AbsolutePath | None = Field(
        default=None,
        description="Directory for logs, errors and reports. None: a private temporary directory that "
        "is removed if the launch succeeds.",
        examples=['"/scratch/runs/7"', "None"],
    )
    env: Annotated[dict[str, str], BeforeValidator(validate_env)] = Field(
        default={},
        description="Extra environment variables of the ranks.",
        examples=['{"NCCL_DEBUG": "INFO"}'],
    )
    preflight: Literal["off", "local", "full"] = Field(
        default="local",
        description='Checks before the start. "off": none. "local": this machine, in under 100 ms. '
        '"full": every node and every pair of nodes.',
        examples=['"local"', '"full"', '"off"'],
    )
    seed: Annotated[int, BeforeValidator(validate_integer)] | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="Seed of every rank, set as by `seed_all`; from the first wrapped model on, "
        "torch's differs between ranks. None: seeds are not changed.",
        examples=["0", "None"],
    )
    console: Literal["auto", "rank-zero", "all", "tagged", "json", "none"] = Field(
        default="auto",
        description="Which ranks' output the console shows. \"auto\": rank 0's under `launch`, every "
        'rank\'s under `spawn`. "tagged": every rank\'s, each line with its rank. "json": every line '
        "of every rank and of ddpsafe as an object with time, level, message, rank, attempt, node.",
        examples=['"rank-zero"', '"all"', '"tagged"', '"json"', '"none"', '"auto"'],
    )

    def __init__(self, /, **fields: Unpack[LaunchFields]) -> None:
        # `from_toml` has already read the file that was named.
        file = _file.get() or read_config_file()
        given = _parts_as_tables(dict(fields))
        token = _file.set(file)
        try:
            _build(self, BaseSettings.__init__, given, file)
        finally:
            _file.reset(token)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Put the sources in order: argument, environment, file."""
        del env_settings, dotenv_settings, file_secret_settings
        file = _file.get()
        return (
            init_settings,
            EnvironmentSource(settings_cls),
            InitSettingsSource(settings_cls, {} if file is None else file.table),
        )

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], /, **fields: Unpack[LaunchFields]) -> Self:
        """Read a config from a TOML file instead of the pyproject.toml of the current directory.

        Args:
            path: A file with a ``[tool.ddpsafe]`` table, or with the fields at the top level.
            **fields: Fields that override the environment, which overrides the file.

        Raises:
            ConfigError: The file cannot be read, or the config is wrong; it lists every problem.
        """
        token = _file.set(read_config_file(path, cls.model_fields))
        try:
            return cls(**fields)
        finally:
            _file.reset(token)

    @classmethod
    def resolve(cls, config: LaunchConfig | None = None, /, **fields: Unpack[LaunchFields]) -> Self:
        """Override fields of an existing config.

        Args:
            config: The config; environment and file are not read again. With None, they are read as
                by the constructor.
            **fields: Fields that override it; parts and tables are merged field by field.

        Raises:
            ConfigError: The result is wrong; it lists every problem.
        """
        if config is None:
            return cls(**fields)
        if not isinstance(config, LaunchConfig):
            raise_config_error(
                ConfigProblem(
                    field="config",
                    given=show_at((), config),
                    why=f"expected a LaunchConfig, got a {type(config).__name__}",
                    write="config=LaunchConfig(...), or the fields as keyword arguments",
                )
            )
        given = _set_fields(config)
        for name, value in _parts_as_tables(dict(fields)).items():
            below = given.get(name)
            both = isinstance(below, dict) and isinstance(value, dict)
            given[name] = below | value if both else value
        # Not BaseSettings, which would read the environment and the file again.
        resolved = cls.__new__(cls)
        _build(resolved, BaseModel.__init__, given)
        return resolved

    @field_validator("node_rank")
    @classmethod
    def _check_node_rank(cls, value: int | None, info: ValidationInfo) -> int | None:
        nnodes = info.data.get("nnodes")
        if value is not None and nnodes is not None and value >= nnodes:
            valid = "node_rank=0" if nnodes == 1 else f"a node_rank from 0 to {nnodes - 1}"
            raise wrong(
                f"nodes count from 0, and the last of nnodes={nnodes} is {nnodes - 1}",
                write=f"{valid}, or a larger nnodes",
            )
        return value

    @field_validator("rendezvous")
    @classmethod
    def _check_rendezvous(cls, value: Rendezvous, info: ValidationInfo) -> Rendezvous:
        nnodes = info.data.get("nnodes", 1)
        if nnodes > 1:
            endpoint = value.parsed()
            whys = []
            if endpoint is None:
                whys.append(f"nnodes={nnodes} nodes need an endpoint to connect to")
            if endpoint is not None and endpoint.port == 0:
                whys.append(f"port 0 means a different free port on each of nnodes={nnodes} nodes")
            write = 'a host that all nodes can reach, and a port: "gpu-01:29400"'
            require_none(
                [Problem(why=why, write=write, where=("endpoint",)) for why in whys],
                given=value.endpoint,
            )
        least = value.min_nodes
        if least is not None and least > nnodes:
            raise wrong(
                f"rendezvous.min_nodes={least} is more than nnodes={nnodes}, the maximum",
                write=f"min_nodes={nnodes} or less, or a larger nnodes",
            )
        return value

    @field_validator("data_paths")
    @classmethod
    def _check_names(cls, value: dict[str, DataPath]) -> dict[str, DataPath]:
        for name in value:
            if not name.strip() or not name.isprintable():
                raise wrong(
                    f"{show(name)} is empty or not printable, so no message could name the path",
                    write='data_paths={"train": "/data/train"}',
                )
        return value


describe_fields(LaunchConfig)


def refuse_fields(fields: Mapping[str, object], allowed: type, *, why: str, write: str) -> None:
    """Refuse fields of a `LaunchConfig` that have no meaning for the call, which accepts `allowed`.

    Raises:
        ConfigError: There are such fields.
    """
    names: frozenset[str] = allowed.__optional_keys__  # type: ignore[attr-defined] # of a TypedDict
    counts = () if "nproc_per_node" in names else COUNTS_OF_RANKS
    unknown = {*(LaunchConfig.model_fields.keys() - names), *counts}
    foreign = [name for name in fields if name in unknown]
    if foreign:
        raise_config_error(
            *(
                ConfigProblem(field=name, given=show_at([name], fields[name]), why=why, write=write)
                for name in foreign
            )
        )


def _parts_as_tables(fields: dict[str, Any]) -> dict[str, Any]:
    """Turn parts that are models into tables of the fields that were set, so that sources can merge."""
    return {
        name: _set_fields(value) if isinstance(value, Part) else value
        for name, value in fields.items()
    }


def _set_fields(model: BaseModel) -> dict[str, Any]:
    """Return the fields of a model that the user set, its parts as tables."""
    return _parts_as_tables({name: getattr(model, name) for name in model.model_fields_set})


def _build(
    config: BaseModel,
    init: Callable[..., None],
    given: dict[str, Any],
    file: ConfigFile | None = None,
) -> None:
    """Call `init`, the `__init__` of pydantic, with the fields; turn its errors into one `ConfigError`."""

    def source(location: Sequence[int | str]) -> str:
        """Return the variable or file that set the value at `location`; empty for an argument."""
        if _is_in(location, given):
            return ""
        variable = find_variable(location)
        if variable is not None:
            return variable
        return str(file.path) if file is not None and _is_in(location, file.table) else ""

    model = type(config)
    # pydantic-settings would take names with a leading underscore for its own options.
    underscored = [name for name in given if name.startswith("_")]
    problems = [unknown_field(name, given[name], model) for name in underscored]
    try:
        init(config, **{name: value for name, value in given.items() if name not in underscored})
    except ValidationError as error:
        problems += problems_of(error, model, source=source)
    problems += slipped_variables(model)
    problems += implicit_file_problems(file)
    if problems:
        raise_config_error(*problems)


def _is_in(location: Sequence[int | str], table: Mapping[str, object]) -> bool:
    value: object = table
    for part in location:
        if not isinstance(value, Mapping):
            return True  # the whole value was given, and the problem is further down in it
        if part not in value:
            return False
        value = value[part]
    return True
