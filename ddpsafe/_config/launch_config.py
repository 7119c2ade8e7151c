"""`LaunchConfig`: what was asked for, from arguments, environment, file and defaults."""

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

from ddpsafe._config.launch_fields import (
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

_file: ContextVar[ConfigFile | None] = ContextVar("ddpsafe_config_file", default=None)
"""The file that the config being made is read from; pydantic-settings has no argument for it."""


class GroupFields(TypedDict, total=False):
    """What `process_group` and `setup` can be asked for, beside the backend: they start nothing."""

    rendezvous: Rendezvous | Mapping[str, object]
    timeouts: Timeouts | Mapping[str, object]
    data_paths: Mapping[str, DataPath | str | os.PathLike[str] | Mapping[str, object]]
    run_dir: str | os.PathLike[str] | None
    env: Mapping[str, str | int | float]
    preflight: Literal["off", "local", "full"]
    seed: int | None


class SpawnFields(GroupFields, total=False):
    """`LaunchFields` of a call that has `nprocs` and `start_method` as parameters."""

    nnodes: int
    node_rank: int | None
    retry: RetryPolicy | Mapping[str, object]
    console: Literal["auto", "rank-zero", "all", "tagged", "json", "none"]
    backend: str


class LaunchFields(SpawnFields, total=False):
    """The fields of `LaunchConfig` as keyword arguments, in any form the model reads."""

    nproc_per_node: int | Literal["gpu", "cpu", "auto"]
    start_method: Literal["spawn", "forkserver"]


class LaunchConfig(BaseSettings):
    """What a launch is asked to do.

    Each field comes from the argument, else from the environment (``DDPSAFE_*``, parts of a part
    after two underscores: ``DDPSAFE_TIMEOUTS__GRACE=10``), else from ``[tool.ddpsafe]`` in the
    pyproject.toml of the current directory, else from the default. Parts (`timeouts`, `retry`,
    `rendezvous`) and tables (`env`, `data_paths`) are merged field by field.

    Raises:
        ConfigError: With every problem at once.
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
        description="Ranks on this node: a number from 1, one per GPU, one per core, or GPUs if "
        "there are any and cores if not.",
        examples=["4", '"gpu"', '"cpu"', '"auto"'],
    )
    nnodes: Annotated[int, BeforeValidator(validate_integer)] = Field(
        default=1,
        ge=1,
        le=100_000,
        description="Nodes of the job, each with a launcher of its own. With more than one the "
        "launchers meet at rendezvous.endpoint and start, watch and restart their ranks together.",
        examples=["2"],
    )
    node_rank: Annotated[int, BeforeValidator(validate_integer)] | None = Field(
        default=None,
        ge=0,
        description="This node among all, from 0. In a launch, node 0 is the host of the endpoint; "
        "the others keep the order that is said here, else that of their names (None). The doctor "
        "asks for it where no launcher says it.",
        examples=["0", "None"],
    )
    rendezvous: Rendezvous = Field(
        default=Rendezvous(),
        description="Where the nodes meet, needed with more than one, and on which interface.",
        examples=['{"interface": "eth0"}'],
    )
    backend: Annotated[str, BeforeValidator(validate_backend)] = Field(
        default="auto",
        description='Backend of the process group. "auto": nccl on GPUs, else gloo.',
        examples=['"auto"', '"gloo"', '"cpu:gloo,cuda:nccl"'],
    )
    start_method: Annotated[
        Literal["spawn", "forkserver"], BeforeValidator(validate_start_method)
    ] = Field(
        default="spawn",
        description='How ranks are started. "forkserver" has torch loaded already and is faster.',
        examples=['"spawn"', '"forkserver"'],
    )
    timeouts: Timeouts = Field(
        default=Timeouts(),
        description="How long each phase may take.",
        examples=['{"rendezvous": 60, "collective": "10min"}'],
    )
    retry: RetryPolicy = Field(
        default=RetryPolicy(),
        description="Which failures deserve another attempt.",
        examples=['{"attempts": 3, "on": {"port", "mount", "peer-lost"}}'],
    )
    data_paths: dict[str, DataPath] = Field(
        default={},
        description="Paths the job needs, by name; checked on every node before ranks start.",
        examples=['{"train": "/data/train"}'],
    )
    run_dir: AbsolutePath | None = Field(
        default=None,
        description="Where logs, errors and reports go. None: a private temporary directory that "
        "is removed when all went well.",
        examples=['"/scratch/runs/7"', "None"],
    )
    env: Annotated[dict[str, str], BeforeValidator(validate_env)] = Field(
        default={},
        description="Extra environment variables of the ranks.",
        examples=['{"NCCL_DEBUG": "INFO"}'],
    )
    preflight: Literal["off", "local", "full"] = Field(
        default="local",
        description='Checks before the start: none, this machine (under 100 ms), or "full", '
        "every node and every pair of them.",
        examples=['"local"', '"full"', '"off"'],
    )
    seed: Annotated[int, BeforeValidator(validate_integer)] | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="Seed of every rank, as `seed_all` sets it. None: seeds are left alone.",
        examples=["0", "None"],
    )
    console: Literal["auto", "rank-zero", "all", "tagged", "json", "none"] = Field(
        default="auto",
        description='Whose output the console shows. "auto": rank 0\'s under `launch`, every '
        'rank\'s under `spawn`. "tagged": every rank\'s, each line with its rank. "json": every line '
        "of every rank and of ddpsafe as an object with time, level, message, rank, attempt, node.",
        examples=['"rank-zero"', '"all"', '"tagged"', '"json"', '"none"', '"auto"'],
    )

    def __init__(self, /, **fields: Unpack[LaunchFields]) -> None:
        """Read the sources and validate every field."""
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
        """Read a config from a TOML file, in place of the pyproject.toml of this directory.

        Args:
            path: A file with a ``[tool.ddpsafe]`` table, or with the fields at the top level.
            **fields: Fields that win over the environment, which wins over the file.

        Raises:
            ConfigError: When the file cannot be read, or with every problem of the config.
        """
        token = _file.set(read_config_file(path))
        try:
            return cls(**fields)
        finally:
            _file.reset(token)

    @classmethod
    def resolve(cls, config: LaunchConfig | None = None, /, **fields: Unpack[LaunchFields]) -> Self:
        """Lay `fields` over a config that is already built.

        Args:
            config: The config; None reads environment and file as the constructor does. A config
                that is built already is not read from anywhere a second time.
            **fields: Fields that win over it; parts and tables are merged field by field.

        Raises:
            ConfigError: With every problem at once.
        """
        if config is None:
            return cls(**fields)
        if not isinstance(config, LaunchConfig):
            raise_config_error(
                [
                    ConfigProblem(
                        field="config",
                        given=show_at((), config),
                        why=f"expected a LaunchConfig, got a {type(config).__name__}",
                        write="config=LaunchConfig(...), or the fields as keyword arguments",
                    )
                ]
            )
        given = _set_fields(config)
        for name, value in _parts_as_tables(dict(fields)).items():
            below = given.get(name)
            both = isinstance(below, dict) and isinstance(value, dict)
            given[name] = below | value if both else value
        resolved = cls.__new__(cls)
        _build(resolved, BaseModel.__init__, given)
        return resolved

    @field_validator("node_rank")
    @classmethod
    def _be_one_of_the_nodes(cls, value: int | None, info: ValidationInfo) -> int | None:
        nnodes = info.data.get("nnodes")
        if value is not None and nnodes is not None and value >= nnodes:
            raise wrong(
                f"nodes count from 0, and nnodes={nnodes} has {nnodes} of them",
                write=f"node_rank=0 to {nnodes - 1}, or a larger nnodes",
            )
        return value

    @field_validator("rendezvous")
    @classmethod
    def _let_nodes_meet(cls, value: Rendezvous, info: ValidationInfo) -> Rendezvous:
        nnodes = info.data.get("nnodes", 1)
        if nnodes > 1:
            endpoint = value.parsed()
            whys = []
            if endpoint is None:
                whys.append(f"nnodes={nnodes} nodes need a place to meet")
            elif endpoint.is_loopback:
                whys.append(
                    f"{endpoint.host} is each node itself, so nnodes={nnodes} nodes never meet there"
                )
            if endpoint is not None and endpoint.port == 0:
                whys.append(f"port 0 is another free port on each of nnodes={nnodes} nodes")
            write = 'a host all nodes can reach, and a port: "gpu-01:29400"'
            require_none(
                [Problem(why=why, write=write, where=("endpoint",)) for why in whys],
                given=value.endpoint,
            )
        least = value.min_nodes
        if least is not None and least > nnodes:
            raise wrong(
                f"nnodes={nnodes} is the most there may be, and rendezvous.min_nodes={least} is more",
                write=f"min_nodes={nnodes} or less, or a larger nnodes",
            )
        return value

    @field_validator("data_paths")
    @classmethod
    def _have_names(cls, value: dict[str, DataPath]) -> dict[str, DataPath]:
        for name in value:
            if not name.strip() or not name.isprintable():
                raise wrong(
                    f"{show(name)} cannot be the name of a path in a message",
                    write='data_paths={"train": "/data/train"}',
                )
        return value


describe_fields(LaunchConfig)


def refuse_fields(fields: Mapping[str, object], allowed: type, *, why: str, write: str) -> None:
    """Refuse fields of a `LaunchConfig` that mean nothing where they were passed.

    Args:
        fields: What was passed. Names that are not fields are left to the config.
        allowed: The typed dict of those that mean something.
        why: Why the others do not.
        write: What to write in place of them.

    Raises:
        ConfigError: There are such fields.
    """
    foreign = [
        name
        for name in fields
        if name in LaunchConfig.model_fields.keys() - _names_of(allowed)
        or (name in COUNTS_OF_RANKS and "nproc_per_node" not in _names_of(allowed))
    ]
    if foreign:
        raise_config_error(
            ConfigProblem(field=name, given=show_at([name], fields[name]), why=why, write=write)
            for name in foreign
        )


def _names_of(fields: type) -> frozenset[str]:
    names: frozenset[str] = fields.__optional_keys__  # type: ignore[attr-defined] # of a TypedDict
    return names


def _parts_as_tables(fields: dict[str, Any]) -> dict[str, Any]:
    """Turn parts that are models into what the user set of them, so that sources can merge."""
    return {
        name: _set_fields(value) if isinstance(value, Part) else value
        for name, value in fields.items()
    }


def _set_fields(model: BaseModel) -> dict[str, Any]:
    """Return the fields of a model that the user has set, those of its parts as tables."""
    return _parts_as_tables({name: getattr(model, name) for name in model.model_fields_set})


def _build(
    config: BaseModel,
    init: Callable[..., None],
    given: dict[str, Any],
    file: ConfigFile | None = None,
) -> None:
    """Call `init` with the fields; translate what pydantic finds into one `ConfigError`.

    Args:
        config: What is built.
        init: Pydantic's, with or without what the settings' sources hold.
        given: The arguments of the call.
        file: The file below them, where one is read.
    """

    def source(location: Sequence[int | str]) -> str:
        """Return the variable or the file that the value at `location` came from, if one did."""
        if _is_in(location, given):
            return ""
        variable = find_variable(location)
        if variable is not None:
            return variable
        return str(file.path) if file is not None and _is_in(location, file.table) else ""

    model = type(config)
    # pydantic-settings takes names with an underscore for options of its own.
    odd = [name for name in given if name.startswith("_")]
    problems = [unknown_field(name, given[name], model) for name in odd]
    try:
        init(config, **{name: value for name, value in given.items() if name not in odd})
    except ValidationError as error:
        problems += problems_of(error, model, source=source)
    problems += slipped_variables(model.model_fields)
    problems += implicit_file_problems(file)
    if problems:
        raise_config_error(problems)


def _is_in(location: Sequence[int | str], table: Mapping[str, object]) -> bool:
    value: object = table
    for part in location:
        if not isinstance(value, Mapping):
            return True  # the value as a whole was given, and is wrong further down
        if part not in value:
            return False
        value = value[part]
    return True
