"""Reads settings: from flags, then `VEILMQ_*` variables, then the `--config` file, then the defaults.

Strategy: each source gives text or TOML values by the names of `Settings`' fields. The first source that has a name
wins, and only winning values are parsed. Errors name the source as the user wrote it: `--sqs`, `VEILMQ_SQS`, or file
and key.
"""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple

import typer

from veilmq import accelerator
from veilmq.cli.failures import Exit, Failure, file_advice
from veilmq.server.config import FileInvalid, parse, read_toml
from veilmq.server.config.settings import FIELDS, Address, Field, SettingInvalid, Settings

PREFIX: Final = "VEILMQ_"
CONFIG: Final = "config"
_OTHERS: Final = (f"{PREFIX}QUEUE", f"{PREFIX}TOKEN_FILE", f"{PREFIX}CLIENT_NAME", accelerator.VARIABLE)
"""Variables of commands other than `serve`, and of every process."""
_ADMIN_ADVICE: Final = (
    "To serve it is the address where its own admin port listens; to other commands, where they find a server. "
    "Unset it here, or give --admin."
)
_REACHABLE: Final = "can be reached from other machines"
_KEYS_ADVICE: Final = "Say --credentials FILE; `veilmq keys new` makes a key for it. For development: --dev-host NAME."
_TLS_ADVICE: Final = "Say --tls-cert FILE and --tls-key FILE; behind a proxy that ends TLS, --insecure."
_ALIKE: Final = 0.85
"""Similarity of `difflib`: one or two letters of a name differ."""


class Resolved(NamedTuple):
    """The settings, and the names of those that were given."""

    settings: Settings
    given: frozenset[str]
    misspelt: Mapping[str, str] = MappingProxyType({})
    """Misspelt variables, and the ones that were probably meant."""


class _Given(NamedTuple):
    source: str
    value: object
    from_text: bool


def resolve(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Resolved:
    """The settings of all sources together. A flag of None was not given. Raises Failure.

    flags: by field name, and `config`; for a list, one item per flag.
    """
    given = _from_file(*_config(flags, environment))
    for name in FIELDS:
        if environment.get(variable(name)):
            given[name] = _Given(variable(name), environment[variable(name)], from_text=True)
        if flags.get(name) is not None:
            given[name] = _Given(flag(name), flags[name], from_text=True)
    values = {}
    for name, (source, value, from_text) in given.items():
        try:
            values[name] = parse(name, value, from_text=from_text)
        except SettingInvalid as error:
            advice = _ADMIN_ADVICE if source == variable("admin") and "://" in str(value) else ""
            raise Failure(Exit.USAGE, f"{source}: {error.allowed}", advice) from None
    try:
        return Resolved(Settings(**values), frozenset(given), _misspelt(environment))
    except SettingInvalid as error:
        source = given[error.name].source if error.name in given else flag(error.name)
        advice = ""
        if _REACHABLE in error.allowed:
            advice = _TLS_ADVICE if values.get("credentials") else _KEYS_ADVICE
        raise Failure(Exit.USAGE, f"{source}: {error.allowed}", advice) from None


def _misspelt(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables close to a setting's name; not every unknown one: Kubernetes sets VEILMQ_SERVICE_HOST and more."""
    known = [variable(name) for name in (*FIELDS, CONFIG)]
    others = [name for name in environment if name.startswith(PREFIX) and name not in (*known, *_OTHERS)]
    return {name: near[0] for name in others if (near := get_close_matches(name, known, 1, _ALIKE))}


def _config(flags: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[str, str]:
    """The source that names the file, and its path; empty if there is none."""
    if flags.get(CONFIG):
        return flag(CONFIG), str(flags[CONFIG])
    return variable(CONFIG), environment.get(variable(CONFIG), "")


def _from_file(source: str, path: str) -> dict[str, _Given]:
    if not path:
        return {}
    try:
        tables, lines = read_toml(Path(path))
    except FileInvalid as error:
        advice = file_advice(error, missing="Check the path.")
        raise Failure(Exit.USAGE, f"{source}: {error}", advice) from None
    given = {}
    for name, value in tables.items():
        line = lines.of(name)
        where = f"{path}: {name}" if line is None else f"{path}: line {line}: {name}"
        if name not in FIELDS:
            if near := get_close_matches(name.replace("-", "_"), FIELDS, 1):
                raise Failure(Exit.USAGE, f"{where}: no such setting, did you mean {near[0]}?")
            raise Failure(Exit.USAGE, f"{where}: no such setting", f"The settings are: {', '.join(FIELDS)}.")
        given[name] = _Given(where, value, from_text=False)
    return given


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def takes_settings(command: Callable[[dict[str, Any]], None], *more: inspect.Parameter) -> Callable[..., None]:
    """A typer command with a flag for each setting, and `more`; passes the given ones to `command` by name."""

    def with_flags(**flags: Any) -> None:
        command(flags)

    parameters = [_config_flag(), *map(_parameter, FIELDS.values()), *more]
    with_flags.__doc__ = command.__doc__
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_flags


def _parameter(field: Field) -> inspect.Parameter:
    default = _shown_default(field.default)
    text = field.help + (f" [default: {default}]" if default else "")
    names = flag(field.name)
    kind: Any = str
    if field.type is bool:
        names, kind = f"{names}/--no-{field.name.replace('_', '-')}", bool
    elif field.listed:
        text, kind = f"{text} May be repeated.", list[str]
    metavar = None if kind is bool else field.metavar
    option = typer.Option(names, metavar=metavar, help=text, show_default=False, rich_help_panel=field.group)
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _config_flag() -> inspect.Parameter:
    text = "Settings by their names with _ for -, as TOML. Flags and VEILMQ_* variables go before it."
    annotation = Annotated[str | None, typer.Option("--config", metavar="FILE", help=text, show_default=False)]
    return inspect.Parameter(CONFIG, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _shown_default(default: object) -> str:
    if isinstance(default, bool):
        return ""
    return str(default) if isinstance(default, Path | Address | str | int | float) else ""
