"""Settings: what each field takes, what its error says, and the rules that join fields."""

from pathlib import Path

import pytest

from veilmq.server.config import parse
from veilmq.server.config.settings import FIELDS, Address, SettingInvalid, Settings
from veilmq.testing.for_each import for_each

GOOD = [
    ("sqs", "127.0.0.1:0", Address("127.0.0.1", 0)),
    ("sqs", "[::1]:9324", Address("::1", 9324)),
    ("sqs", "queue.example:65535", Address("queue.example", 65535)),
    ("data", "there", Path("there")),
    ("parked_max", "7", 7),
    ("idle_s", "1.5", 1.5),
    ("idle_s", "2", 2.0),
    ("cooldowns", "false", False),
    ("insecure", "1", True),
    ("log_format", "json", "json"),
    ("external_url", "https://queue.example:8443/a", "https://queue.example:8443/a"),
    ("external_url", "https://queue/prod", "https://queue/prod"),
    ("base_domain", "queues.example", "queues.example"),
    ("cors_origins", "https://a.example, http://b.example:81", ("https://a.example", "http://b.example:81")),
    ("cors_origins", "*", ("*",)),
    ("dev_host", "elasticmq, my_queue,mq.internal", ("elasticmq", "my_queue", "mq.internal")),
]
BAD = [
    ("sqs", "9324", "HOST:PORT"),
    ("sqs", ":9324", "HOST:PORT"),
    ("sqs", "127.0.0.1:65536", "up to 65535"),
    ("sqs", "::1:9324", "HOST:PORT"),
    ("sqs", "[x]:9324", "HOST:PORT"),
    ("sqs", "[1]:9324", "IPv6"),
    ("sqs", "a..b:9324", "no machine can have that name"),
    ("data", "", "a path"),
    ("credentials", "a\0b", "a path"),
    ("parked_max", "0", ">= 1"),
    ("parked_max", "many", "a whole number, not 'many'"),
    ("data", "~/veilmq", "without ~"),
    ("credentials", "~veilmq/keys.toml", "without ~"),
    ("history_s_max", "99999999999999999999", "<= 3162240000"),
    ("history_bytes_max", "99999999999999999999", "<= 9007199254740992"),
    ("idle_s", "0", "a number of seconds > 0, not '0'"),
    ("idle_s", "soon", "a number of seconds, not 'soon'"),
    ("idle_s", "nan", "0"),
    ("insecure", "perhaps", "true or false"),
    ("log_format", "xml", "human, json"),
    ("external_url", "queue.example", "http://HOST"),
    ("external_url", "http://[:::::]:80", "IPv6"),
    ("external_url", "http://me:hush@queue.example", "http://HOST"),
    ("external_url", "http://queue.example/a/\u00fc", "in ASCII"),
    ("external_url", "http://queue.example/a/queue/prod/", "/queue/NAME"),
    ("base_domain", "a b", "domain name"),
    ("sqs_endpoint_strategy", "off", "dynamic, standard, path"),
    ("cors_origins", "https://a.example/path", "origins"),
    ("dev_host", "elasticmq:9324", "without a port"),
    ("dev_host", "http://elasticmq", "host names"),
    ("dev_host", "*", "host names"),
    ("dev_host", "*.internal", "host names"),
    ("dev_host", "a b", "host names"),
]


@for_each(("name", "text", "value"), GOOD)
def test_text_becomes_a_value(name: str, text: str, value: object) -> None:
    assert parse(name, text, from_text=True) == value


@for_each(("name", "text", "allowed"), BAD)
def test_bad_text_is_refused_with_what_is_allowed(name: str, text: str, allowed: str) -> None:
    with pytest.raises(SettingInvalid) as refused:
        parse(name, text, from_text=True)
    assert refused.value.name == name
    assert allowed in refused.value.allowed
    assert "hush" not in str(refused.value)


def test_a_file_gives_types_not_text() -> None:
    assert parse("parked_max", 7, from_text=False) == 7
    assert parse("idle_s", 2, from_text=False) == 2.0
    assert parse("cors_origins", ["https://a.example"], from_text=False) == ("https://a.example",)
    for name, given in (("parked_max", "7"), ("parked_max", True), ("insecure", 1), ("data", 5), ("sqs", 9324)):
        with pytest.raises(SettingInvalid):
            parse(name, given, from_text=False)


def test_every_field_has_help_and_a_default_that_parses() -> None:
    for field in FIELDS.values():
        assert field.help
        if isinstance(field.default, Path | Address):
            assert parse(field.name, str(field.default), from_text=True) == field.default


@for_each("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"])
def test_loopback(host: str) -> None:
    assert Address(host, 1).loopback
    assert Settings(sqs=Address(host, 1)).sqs.host == host


@for_each("host", ["0.0.0.0", "::", "192.0.2.1", "queue.example"])
@for_each("name", ["sqs", "azure", "mns", "admin"])
def test_beyond_loopback_needs_credentials_and_tls_or_insecure(name: str, host: str) -> None:
    where = {name: Address(host, 7000)}
    keys, tls = Path("keys.toml"), {"tls_cert": Path("c.pem"), "tls_key": Path("k.pem")}
    for lacking, allowed in (({}, "credentials"), (tls, "credentials"), ({"credentials": keys}, "tls_cert")):
        with pytest.raises(SettingInvalid, match=allowed) as refused:
            Settings(**where, **lacking)
        assert refused.value.name == name
    Settings(**where, credentials=keys, **tls)
    Settings(**where, credentials=keys, insecure=True)


@for_each("host", ["0.0.0.0", "10.1.2.3", "172.16.0.0", "172.31.255.255", "192.168.1.1", "::", "fd00::1"])
def test_names_of_a_private_network_open_its_addresses(host: str) -> None:
    for name in ("sqs", "azure", "mns", "admin"):
        Settings(dev_host=("elasticmq",), **{name: Address(host, 7000)})


def test_names_of_a_private_network_open_nothing_else() -> None:
    for host, why in (
        *((host, "beyond private networks") for host in ("8.8.8.8", "2600::1", "fc00::1", "fe80::1", "172.32.0.1")),
        *((host, "beyond private networks") for host in ("169.254.1.1", "240.0.0.1", "203.0.113.5", "100.64.0.1")),
        ("elasticmq", "is a name: with dev_host give an address"),
    ):
        with pytest.raises(SettingInvalid, match=why) as refused:
            Settings(dev_host=("elasticmq",), azure=Address(host, 7000))
        assert refused.value.name == "azure"
    with pytest.raises(SettingInvalid, match="give a credentials file instead of dev_host") as refused:
        Settings(dev_host=("elasticmq",), cluster="postgresql://db", peer=Address("10.0.0.5", 9327))
    assert refused.value.name == "peer"
    with pytest.raises(SettingInvalid, match="with a credentials file") as refused:
        Settings(dev_host=("elasticmq",), credentials=Path("keys.toml"))
    assert refused.value.name == "dev_host"


def test_two_ports_cannot_share_an_address() -> None:
    with pytest.raises(SettingInvalid, match="taken by sqs"):
        Settings(sqs=Address("127.0.0.1", 7000), admin=Address("127.0.0.1", 7000))
    Settings(sqs=Address("127.0.0.1", 0), admin=Address("127.0.0.1", 0))


def test_regions_in_queue_urls_need_a_name_that_clients_resolve() -> None:
    assert Settings().sqs_domain is None
    assert Settings(sqs_endpoint_strategy="standard").sqs_domain == "localhost"
    with pytest.raises(SettingInvalid, match="base_domain"):
        Settings(sqs_endpoint_strategy="standard", external_url="https://a")
    both = Settings(sqs_endpoint_strategy="standard", external_url="https://a", base_domain="b")
    assert both.sqs_domain == "b"


def test_certificate_and_key_belong_together() -> None:
    with pytest.raises(SettingInvalid, match="neither"):
        Settings(tls_cert=Path("c.pem"))


def test_what_is_shown_is_what_differs_as_plain_values() -> None:
    assert Settings().shown() == {}
    shown = Settings(sqs=Address("::1", 7000), data=Path("d"), parked_max=5).shown()
    assert shown == {"data": "d", "sqs": "[::1]:7000", "parked_max": 5}
    assert Settings(archive="sftp://me:secret@host/a").shown() == {"archive": "sftp://me:***@host/a"}


def test_limits_reach_their_rooms() -> None:
    settings = Settings(parked_max=11, idle_s=12.0, history_s_max=13, floor_bytes=14, topics_per_account_max=15)
    assert settings.engine_limits().parked_max == 11
    assert settings.listener_limits("sqs").idle_s == 12.0
    assert settings.store_options().history_us_max == 13_000_000
    assert settings.store_options().floor_bytes == 14
    assert settings.store_options().topics_per_account_max == 15
    assert Settings(subscriptions_per_account_max=17).store_options().subscriptions_per_account_max == 17
    assert Settings(queues_per_account_max=16).store_options().queues_per_account_max == 16
