"""Flag before variable before file before default, for every setting; and errors that name where a value came from."""

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from veilmq.cli.failures import Exit, Failure
from veilmq.cli.sources import flag, resolve, takes_settings, variable
from veilmq.server.config.settings import FIELDS, Address, Settings
from veilmq.testing.for_each import for_each

# For each setting three values that differ from each other and from the default: file, variable, flag.
VALUES: dict[str, tuple[Any, str, str]] = {
    "data": ("a", "b", "c"),
    "sqs": ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"),
    "azure": ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"),
    "mns": ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"),
    "admin": ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"),
    "peer": ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"),
    "advertise": ("a:1", "b:2", "c:3"),
    "credentials": ("a", "b", "c"),
    "queues": ("a", "b", "c"),
    "external_url": ("http://a", "http://b", "http://c"),
    "base_domain": ("a", "b", "c"),
    "sqs_endpoint_strategy": ("dynamic", "standard", "path"),
    "tls_cert": ("a", "b", "c"),
    "tls_key": ("a", "b", "c"),
    "console_hosts": (["a"], "b", "c.example"),
    "dev_host": (["a"], "b", "c.example"),
    "cors_origins": (["http://a"], "http://b", "http://c"),
    "push_allow": (["10.0.0.0/8"], "10.0.0.0/9", "fd00::/8"),
    "simulate": (["disorder=1"], "kms-fault=b=not-found", "push-header-case=documented"),
    "type_attribute": ("a", "b", "c"),
    "type_pointer": ("/a", "/b", "/c/d~1e"),
    "azure_issuer": ("http://a", "http://b", "http://c"),
    "azure_issuer_keys": ("a", "b", "c"),
    "azure_audience": ("a", "b", "c"),
    "cluster": ("postgresql://db1/a", "postgresql://u:p@db1,db2/b", "host=db1 dbname=c"),
    "cluster_name": ("a", "b-1", "c.example"),
    "archive": ("/var/a", "s3://bucket/b", "file:///c"),
    "log_format": ("json", "json", "json"),
    "log_level": ("debug", "warning", "error"),
    "clock_step_s_max": (61, "62", "63"),
    "rollup_minutes_s_max": (3_601, "3602", "3603"),
    "rollup_hours_s_max": (86_401, "86402", "86403"),
    "rollup_bytes_max": (1_048_577, "1048578", "1048579"),
}
NEEDS = {
    "tls_cert": {"tls_key": "k"},
    "tls_key": {"tls_cert": "c"},
    "azure_issuer": {"azure_issuer_keys": "k"},
    "azure_issuer_keys": {"azure_issuer": "http://a"},
}


def values(name: str) -> tuple[Any, str, str]:
    default = FIELDS[name].default
    if name in VALUES:
        return VALUES[name]
    if isinstance(default, bool):
        return not default, str(not default).lower(), str(not default).lower()
    if isinstance(default, int):
        return 1, "2", "3"
    if isinstance(default, float):
        return 1.5, "2.5", "3.5"
    raise AssertionError(f"{name} needs values in this file")


def toml(name: str, value: Any) -> str:
    return f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}\n"


@for_each("name", FIELDS)
def test_the_nearest_source_wins(tmp_path: Path, name: str) -> None:
    in_file, in_environment, in_flag = values(name)
    path = tmp_path / "veilmq.toml"
    path.write_text(toml(name, in_file) + "".join(toml(*each) for each in NEEDS.get(name, {}).items()))
    config = {"config": str(path)}
    environment = {variable(name): in_environment}

    def got(flags: dict[str, Any], environment: dict[str, str]) -> str:
        resolved = resolve(flags, environment)
        assert name in resolved.given
        value = getattr(resolved.settings, name)
        return ",".join(value) if isinstance(value, tuple) and not isinstance(value, Address) else str(value)

    def shown(value: object) -> str:
        return ",".join(value) if isinstance(value, list) else str(value)

    assert got(config, {}).lower() == shown(in_file).lower()
    assert got({}, {variable("config"): str(path)}).lower() == shown(in_file).lower()
    assert got(config, environment).lower() == in_environment
    assert got(config | {name: in_flag}, environment).lower() == in_flag


def test_nothing_given_is_the_defaults() -> None:
    assert resolve(dict.fromkeys((*FIELDS, "config")), {"VEILMQ_SQS": ""}) == (Settings(), frozenset(), {})


def test_a_variable_that_is_nearly_a_setting_is_told_and_others_are_left_alone() -> None:
    environment = {
        "VEILMQ_IDEL_S": "7", "VEILMQ_IDLE_S": "8", "VEILMQ_QUEUE": "q", "VEILMQ_PORT_9324_TCP_ADDR": "10.0.0.1",
    }  # fmt: skip
    resolved = resolve({}, environment)
    assert resolved.misspelt == {"VEILMQ_IDEL_S": "VEILMQ_IDLE_S"}
    assert resolved.settings.idle_s == 8


@for_each(
    ("text", "told"),
    [
        ("sqs = 5", ["line 1: sqs", "HOST:PORT"]),
        ('\nsqss = "x"', ["line 2: sqss", "did you mean sqs"]),
        ('log-format = "json"', ["line 1: log-format", "did you mean log_format"]),
        ("[server]\n", ["line 1: server", "no such setting"]),
        ("idle_s = '5'", ["line 1: idle_s", "a number of seconds"]),
        ("sqs = \nadmin = ''", ["line 1: is not TOML at column 7"]),
        ("idle_s = 5\ngarbage", ["line 2: is not TOML: it ends too early"]),
        ("idle_s = 5\ncors_origins = [\n'a',\n\n", ["line 3: is not TOML: it ends too early"]),
        ("idle_s = " + "9" * 5_000, ["veilmq.toml: is not TOML"]),
        ("sqs = '0.0.0.0:1'", ["line 1: sqs", "credentials"]),
        ("tls_cert = 'c'", ["line 1: tls_cert", "its key"]),
    ],
)
def test_a_bad_file_is_told_by_file_line_and_key(tmp_path: Path, text: str, told: list[str]) -> None:
    path = tmp_path / "veilmq.toml"
    path.write_text(text)
    with pytest.raises(Failure) as failed:
        resolve({"config": str(path)}, {})
    assert failed.value.code is Exit.USAGE
    for part in [str(path), *told]:
        assert part in str(failed.value)
    if "did you mean" in str(failed.value):
        assert not failed.value.advice  # a list of all settings would hide the right one


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="cannot be read"):
        resolve({}, {"VEILMQ_CONFIG": str(tmp_path / "none")})


def test_an_error_names_the_flag_or_the_variable() -> None:
    for flags, environment, name in (
        ({"parked_max": "x"}, {}, "--parked-max"),
        ({}, {"VEILMQ_PARKED_MAX": "x"}, "VEILMQ_PARKED_MAX"),
        ({"sqs": "0.0.0.0:1"}, {}, "--sqs"),
        ({"admin": "127.0.0.1:9324"}, {}, "--admin"),
    ):
        with pytest.raises(Failure, match=f"^{name}: "):
            resolve(flags, environment)


LISTS = {
    "push_allow": ("10.0.0.0/8", "192.168.0.0/16", "fd00::/8"),
    "console_hosts": ("a.example", "b.example", "localhost"),
    "dev_host": ("elasticmq", "azurite", "my_queue"),
    "cors_origins": ("https://a.example", "https://b.example", "http://localhost:3000"),
    "simulate": ("kms-fault=alias/a=disabled", "disorder=3", "push-header-case=documented"),
}


@for_each("name", [name for name, field in FIELDS.items() if field.listed])
def test_a_list_is_gathered_in_each_source(tmp_path: Path, name: str) -> None:
    first, second, third = LISTS[name]

    def command(flags: dict[str, Any]) -> None:
        assert getattr(resolve(flags, {}).settings, name) == LISTS[name]

    runner = CliRunner()
    app = typer.Typer()
    app.command()(takes_settings(command))
    for given in ([first, second, third], [f"{first},{second}", third], [f"{first}, {second} ,{third}"]):
        done = runner.invoke(app, [part for each in given for part in (flag(name), each)], catch_exceptions=False)
        assert done.exit_code == 0
    assert getattr(resolve({}, {variable(name): f"{first},{second}, {third}"}).settings, name) == LISTS[name]
    path = tmp_path / "veilmq.toml"
    for value in ([first, second, third], [f"{first},{second}", third], f"{first}, {second}, {third}"):
        path.write_text(toml(name, value))
        assert getattr(resolve({"config": str(path)}, {}).settings, name) == LISTS[name]


def test_one_bad_member_of_a_list_is_named() -> None:
    with pytest.raises(Failure, match=r"^--push-allow: expected networks such as .*, not '10\.0\.0\.1'"):
        resolve({"push_allow": ["fd00::/8", "10.0.0.0/8,10.0.0.1"]}, {})


def test_names() -> None:
    assert flag("tls_cert") == "--tls-cert"
    assert variable("tls_cert") == "VEILMQ_TLS_CERT"


@for_each("given", ["10.0.0.0/99", "127.0.0.1/8", "300.0.0.0/8", "10.0.0.0", "10.0.0.0/8,fd00::/129", "fd00::1/8"])
def test_what_is_no_network_ends_the_start(given: str) -> None:
    """It would be met again when the first push is due, with nobody there to read of it."""
    with pytest.raises(Failure, match=r"^--push-allow: expected networks such as"):
        resolve({"push_allow": given}, {})
    assert resolve({"push_allow": " 10.0.0.0/8, fd00::/8,"}, {}).settings.push_allow == ("10.0.0.0/8", "fd00::/8")


def test_a_variable_that_is_set_up_for_the_commands_is_told() -> None:
    with pytest.raises(Failure, match=r"^VEILMQ_ADMIN: expected HOST:PORT") as failed:
        resolve({}, {"VEILMQ_ADMIN": "https://mq.example.com:9325"})
    assert "to other commands, where they find a server" in failed.value.advice
    with pytest.raises(Failure) as failed:
        resolve({}, {"VEILMQ_SQS": "https://mq.example.com"})
    assert failed.value.advice == ""


@for_each(
    ("given", "told"),
    [
        ({}, "`veilmq keys new` makes a key"),
        ({"credentials": "keys.toml"}, "--insecure"),
    ],
)
def test_what_an_address_beyond_loopback_needs_is_told(given: dict[str, str], told: str) -> None:
    with pytest.raises(Failure, match=r"--sqs: .* can be reached from other machines") as refused:
        resolve({"sqs": "0.0.0.0:9324", **given}, {})
    assert told in refused.value.advice
    with pytest.raises(Failure, match=r"--azure: .* is taken") as refused:
        resolve({"sqs": "0.0.0.0:1", "azure": "0.0.0.0:1", "credentials": "keys.toml", "insecure": "true"}, {})
    assert refused.value.advice == ""
