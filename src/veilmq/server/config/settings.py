"""Every setting of the server, as one frozen value.

Strategy: the fields of `Settings` are the whole table: name, type, bounds, default and help text. Flags, `VEILMQ_*`
variables and the keys of `--config` are derived from it (cli/sources.py), so a new field has all three.
`veilmq.server.config` converts one given value; rules that join several fields are checked for every `Settings` value.

What `--simulate NAME=VALUE` makes a server do, for the tests of programs that use it:

disorder=N                  messages of standard queues come out up to N places out of order (1 to 1,000)
kms-fault=KEY=FAULT         a KMS key that fails: SQS's encrypted queues with that key answer so (docs/sqs.md)
push-header-case=documented header names of pushes as Alibaba's Java sample looks them up (default: lower)
"""

import re
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from socket import gethostname
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from veilmq.engine import Limits as EngineLimits
from veilmq.model.instant import SECOND_US
from veilmq.model.message_type import TYPE_ATTRIBUTE
from veilmq.protocols.sqs.errors import KMS_FAULTS
from veilmq.server.http import Limits as ListenerLimits
from veilmq.store import MIB, Options
from veilmq.store.archive import shown_url

ALLOWED: Final = (
    f"disorder=N (1 to 1,000), kms-fault=KEY=FAULT (FAULT one of {', '.join(KMS_FAULTS)}) or"
    " push-header-case=lower|documented"
)
_PATTERNS: Final = {
    "disorder": re.compile(r"[1-9][0-9]{0,2}|1000"),
    "kms-fault": re.compile(rf"[A-Za-z0-9:/_.-]{{1,256}}=(?:{'|'.join(KMS_FAULTS)})"),
    "push-header-case": re.compile(r"lower|documented"),
}


class Simulated(NamedTuple):
    """What is simulated. If a name is given twice the last one counts; only `kms-fault` keys add up."""

    disorder: int = 0
    kms_faults: tuple[tuple[str, str], ...] = ()
    """Keys, each with its fault."""
    documented_case: bool = False
    """Header names of pushes."""


def is_known(given: str) -> bool:
    """Whether it is a simulation that this server has."""
    name, _, value = given.partition("=")
    return name in _PATTERNS and _PATTERNS[name].fullmatch(value) is not None


def simulated(given: Iterable[str]) -> Simulated:
    """Those of a setting whose members `is_known`."""
    found = Simulated()
    for each in given:
        name, _, value = each.partition("=")
        if name == "disorder":
            found = found._replace(disorder=int(value))
        elif name == "kms-fault":
            key, _, fault = value.rpartition("=")
            found = found._replace(kms_faults=(*found.kms_faults, (key, fault)))
        else:
            found = found._replace(documented_case=value == "documented")
    return found


class SettingInvalid(Exception):
    """An invalid setting: its name, and what is allowed."""

    def __init__(self, name: str, allowed: str) -> None:
        super().__init__(f"{name}: {allowed}")
        self.name = name
        self.allowed = allowed


_OTHER_FILES: Final = 2_000
"""The 1,000 connections of the admin port, 256 pushes under way, connections that are refused, the data directory."""
_AZURE_HEADERS_MAX: Final = 4_096
"""As many headers of metadata as `header_bytes_max` has room for."""
_PRIVATE_NETWORKS: Final = tuple(map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fd00::/8")))


class Address(NamedTuple):
    """Where a port listens. Port 0 takes a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def address(self) -> IPv4Address | IPv6Address | None:
        """The address; None if the host is a name."""
        try:
            return ip_address(self.host)
        except ValueError:
            return None

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it. A name other than `localhost` could be any machine: False."""
        return self.host.lower() == "localhost" if self.address is None else self.address.is_loopback

    @property
    def private(self) -> bool:
        """Whether it is an address of a private network (RFC 1918, RFC 4193), or all addresses of this machine. A name
        could be any address: False."""
        address = self.address
        return address is not None and (address.is_unspecified or any(address in each for each in _PRIVATE_NETWORKS))

    @property
    def unspecified(self) -> bool:
        """Whether it means all addresses of this machine, and so none to which another one could connect."""
        return self.address is not None and self.address.is_unspecified


AtLeast1 = Annotated[int, Meta(ge=1, le=2**53)]
Bytes = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Raises SettingInvalid if the values contradict each other. The text of each field is its help."""

    data: Annotated[Path, Meta(description="The data directory; made if it is missing.")] = Path("veilmq-data")
    queues: Annotated[
        Path | None, Meta(description="Queues to create at start: TOML, or ElasticMQ's queues {} in a .conf file.")
    ] = None
    reserve_bytes: Annotated[
        Bytes, Meta(description="Kept back on disk, so that receives and deletes go on when it is full.")
    ] = 64 * MIB
    floor_bytes: Annotated[
        Bytes, Meta(description="Sends are refused below this much free disk (or below 2 % of it, if less).")
    ] = 256 * MIB
    cache_bytes: Annotated[Bytes, Meta(description="Memory for database pages.")] = 64 * MIB
    sqs: Annotated[Address, Meta(description="Address of the port for Amazon SQS.")] = Address("127.0.0.1", 9324)
    azure: Annotated[Address, Meta(description="Address for Azure Queue Storage.")] = Address("127.0.0.1", 10001)
    mns: Annotated[Address, Meta(description="Address for Alibaba Cloud MNS.")] = Address("127.0.0.1", 9326)
    admin: Annotated[Address, Meta(description="Where health, metrics and /api/v1 are served.")] = Address(
        "127.0.0.1", 9325
    )
    external_url: Annotated[
        str | None, Meta(description="The start of queue URLs, instead of the address that the client used.")
    ] = None
    base_domain: Annotated[
        str | None, Meta(description="sqs.<region>.<this name> names the region, in the Host header and in queue URLs.")
    ] = None
    sqs_endpoint_strategy: Annotated[
        Literal["dynamic", "standard", "path"],
        Meta(description="Regions in queue URLs: as addressed; sqs.<region>.<base domain>; or /queue/<region>/..."),
    ] = "dynamic"
    trusted_proxy: Annotated[
        bool, Meta(description="Believe X-Forwarded-Proto, -Host and -For: only behind a proxy that sets them.")
    ] = False
    credentials: Annotated[
        Path | None, Meta(description="Accounts, keys and grants (TOML, mode 0600). Without: development mode.")
    ] = None
    dev_host: Annotated[
        tuple[str, ...],
        Meta(description="Development mode: host names for clients in a private network: elasticmq,azurite."),
    ] = ()
    azure_issuer: Annotated[
        str | None, Meta(description="`iss` of the bearer tokens that Azure clients may come with.")
    ] = None
    azure_issuer_keys: Annotated[
        Path | None, Meta(description="The issuer's public keys (a JSON Web Key Set); read again when it changes.")
    ] = None
    azure_audience: Annotated[str | None, Meta(description="`aud` taken beside https://storage.azure.com.")] = None
    admin_bodies: Annotated[
        bool,
        Meta(description="Whether anybody may read bodies of messages at the admin port; a backup still has them."),
    ] = True
    console_bodies: Annotated[
        bool, Meta(description="Whether the console shows bodies of messages and searches in them.")
    ] = True
    console_hosts: Annotated[
        tuple[str, ...],
        Meta(description="Host names of the admin port under which the console answers, with commas between."),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...], Meta(description="Origins of web pages that may call SQS, with commas between; * for all.")
    ] = ()
    push_allow: Annotated[
        tuple[str, ...],
        Meta(description="Networks beyond public ones that pushes may go to, with commas between, say 10.0.0.0/8."),
    ] = ()
    tls_cert: Annotated[Path | None, Meta(description="PEM certificate chain; TLS on every port.")] = None
    tls_key: Annotated[Path | None, Meta(description="PEM key of the certificate, without a passphrase.")] = None
    insecure: Annotated[bool, Meta(description="Allow addresses beyond loopback without TLS.")] = False
    type_attribute: Annotated[
        str, Meta(description="The message attribute that names a message's type, for plans and the history.")
    ] = TYPE_ATTRIBUTE
    type_pointer: Annotated[
        str | None, Meta(description="Where the body, if it is JSON, has its type: a JSON pointer such as /type.")
    ] = None
    cooldowns: Annotated[
        bool,
        Meta(description="Refuse to create a deleted queue for 60 s (Azure: 30 s), and to purge twice in 60 s (SQS)."),
    ] = True
    simulate: Annotated[
        tuple[str, ...],
        Meta(
            description="For tests, with commas between: disorder=N, kms-fault=KEY=FAULT, push-header-case=documented."
        ),
    ] = ()
    clock_step_s_max: Annotated[
        Annotated[int, Meta(ge=60, le=100 * 366 * 86_400)],
        Meta(description="If a start finds the clock further ahead than this, nothing expires by that until accepted."),
    ] = 3600
    requests_per_second_max: Annotated[
        Bytes, Meta(description="Requests of one account to SQS; beyond, RequestThrottled. 0: no bound.")
    ] = 0
    queues_per_account_max: Annotated[
        AtLeast1, Meta(description="Queues of one account, push subscriptions among them; beyond, none is created.")
    ] = 100_000
    topics_per_account_max: Annotated[AtLeast1, Meta(description="Topics of an account; beyond, none is created.")] = (
        100_000
    )
    subscriptions_per_account_max: Annotated[
        AtLeast1, Meta(description="Subscriptions of one account to its topics; beyond, none is added.")
    ] = 100_000
    parked_max: Annotated[AtLeast1, Meta(description="Receives that may wait at a time.")] = 20_000
    parked_per_account_max: Annotated[AtLeast1, Meta(description="Receives of one account that may wait.")] = 10_000
    parked_per_queue_max: Annotated[AtLeast1, Meta(description="Receives of one queue that may wait.")] = 5_000
    parked_brake: Annotated[
        bool, Meta(description="Beyond these, answer after 1 s and not at once: slows clients that poll in a loop.")
    ] = False
    connections_max: Annotated[AtLeast1, Meta(description="Connections to one data port.")] = 10_000
    body_bytes_max: Annotated[AtLeast1, Meta(description="Body of one request.")] = 7 * MIB
    held_bytes_max: Annotated[AtLeast1, Meta(description="Unfinished requests of a port; unread answers of all.")] = (
        128 * MIB
    )
    header_deadline_s: Annotated[Seconds, Meta(description="For the headers of a request to arrive.")] = 10.0
    body_deadline_s: Annotated[Seconds, Meta(description="For its body to arrive; a long one gets more.")] = 60.0
    answer_deadline_s: Annotated[Seconds, Meta(description="For a client to read an answer.")] = 30.0
    idle_s: Annotated[Seconds, Meta(description="How long a connection without a request stays open.")] = 75.0
    shutdown_deadline_s: Annotated[Seconds, Meta(description="For requests under way to end at shutdown.")] = 10.0
    history_s_max: Annotated[
        Annotated[int, Meta(ge=1, le=100 * 366 * 86_400)], Meta(description="Events older than this are trimmed.")
    ] = 7 * 86_400
    history_bytes_max: Annotated[Bytes, Meta(description="The oldest events beyond this size are trimmed.")] = (
        1024 * MIB
    )
    rollup_minutes_s_max: Annotated[
        Annotated[int, Meta(ge=3_600, le=366 * 86_400)],
        Meta(description="How long the counts of each queue by the minute are kept."),
    ] = 86_400
    rollup_hours_s_max: Annotated[
        Annotated[int, Meta(ge=86_400, le=100 * 366 * 86_400)],
        Meta(description="How long the counts of each queue by the hour are kept."),
    ] = 90 * 86_400
    rollup_bytes_max: Annotated[
        Annotated[int, Meta(ge=MIB, le=(1 << 53) - 1)],
        Meta(description="Size of these counts, half for minutes, half for hours; the oldest beyond are dropped."),
    ] = 512 * MIB
    error_lines: Annotated[
        bool, Meta(description="Keep the first line of an error for which a worker gives a message back.")
    ] = True
    archive: Annotated[
        str | None,
        Meta(description="Keep a copy that lags by seconds at this URL, for `veilmq restore`. For a server alone."),
    ] = None
    archive_every_s: Annotated[
        Annotated[float, Meta(ge=0.1, le=3_600)], Meta(description="How often changes are written to the archive.")
    ] = 2.0
    archive_keep_s: Annotated[
        Annotated[int, Meta(ge=0, le=100 * 366 * 86_400)],
        Meta(description="How far back any instant can be restored from the archive."),
    ] = 7 * 86_400
    cluster: Annotated[
        str | None,
        Meta(description="The PostgreSQL that holds the cluster's log; `data` is then a copy. See docs/cluster.md."),
    ] = None
    cluster_name: Annotated[
        str | None, Meta(description="This server's name in the cluster, if not the machine's host name.")
    ] = None
    peer: Annotated[
        Address, Meta(description="Where the other servers of the cluster pass their clients' calls on to this one.")
    ] = Address("127.0.0.1", 9327)
    advertise: Annotated[Address | None, Meta(description="Where the others reach that port, if not at `peer`.")] = None
    single_copy: Annotated[
        bool, Meta(description="Accept a PostgreSQL without a synchronous standby: losing its machine loses messages.")
    ] = False
    log_format: Annotated[Literal["human", "json"], Meta(description="How log lines are written to stderr.")] = "human"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="The least level that is logged.")
    ] = "info"
    traces: Annotated[
        bool, Meta(description="Make OpenTelemetry spans of sends, receives and settlements, exported as OTEL_* say.")
    ] = False

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SettingInvalid("tls_cert", "give the certificate and its key, or neither")
        if self.sqs_endpoint_strategy == "standard" and self.external_url is not None and self.base_domain is None:
            raise SettingInvalid("sqs_endpoint_strategy", "standard needs base_domain beside external_url")
        if self.simulated.disorder and self.credentials is not None:
            raise SettingInvalid("simulate", "disorder is for development mode: not with a credentials file")
        if self.dev_host and self.credentials is not None:
            raise SettingInvalid("dev_host", "is for development mode: with a credentials file any Host is taken")
        if (self.azure_issuer is None) != (self.azure_issuer_keys is None):
            raise SettingInvalid("azure_issuer", "give the issuer and its keys, or neither")
        if self.archive is not None and self.cluster is not None:
            raise SettingInvalid("archive", "a cluster has its own: see `veilmq cluster init --snapshots --keep`")
        taken: dict[Address, str] = {}
        for name, address in self.addresses().items():
            if address.port and taken.setdefault(address, name) != name:
                raise SettingInvalid(name, f"{address} is taken by {taken[address]}: give each its own port")
            if address.loopback or (self.dev_host and address.private and name != "peer"):
                continue
            if self.dev_host and name != "peer":
                if address.address is None:
                    raise SettingInvalid(name, f"{address} is a name: with dev_host give an address, such as 0.0.0.0")
                raise SettingInvalid(name, f"{address} is beyond private networks, which is all that dev_host opens")
            if self.credentials is None:
                instead = " instead of dev_host" if self.dev_host else ""
                advice = f"give a credentials file{instead}, or use 127.0.0.1"
                raise SettingInvalid(name, f"{address} can be reached from other machines: {advice}")
            if self.tls_cert is None and not self.insecure:
                raise SettingInvalid(
                    name, f"{address} can be reached from other machines: give tls_cert and tls_key, or say insecure"
                )

    def addresses(self) -> dict[str, Address]:
        """All ports by name."""
        ports = {"sqs": self.sqs, "azure": self.azure, "mns": self.mns, "admin": self.admin}
        return ports if self.cluster is None else ports | {"peer": self.peer}

    @property
    def server_name(self) -> str:
        """This server's name in its cluster."""
        return self.cluster_name or gethostname()

    @property
    def sqs_domain(self) -> str | None:
        """The domain after `sqs.<region>.` in hosts and queue URLs of SQS; None: not used."""
        return self.base_domain or ("localhost" if self.sqs_endpoint_strategy == "standard" else None)

    @property
    def simulated(self) -> Simulated:
        """What `simulate` asks for."""
        return simulated(self.simulate)

    @property
    def files_needed(self) -> int:
        """Files that a server opens whose data ports are full: one a connection, and those of the rest."""
        return 3 * self.connections_max + _OTHER_FILES

    def engine_limits(self) -> EngineLimits:
        """Bounds of the engine."""
        return EngineLimits(
            parked_max=self.parked_max,
            parked_per_account_max=self.parked_per_account_max,
            parked_per_queue_max=self.parked_per_queue_max,
            unread_bytes_max=self.held_bytes_max,
            brake_us=SECOND_US if self.parked_brake else 0,
        )

    def listener_limits(self, name: str) -> ListenerLimits:
        """Bounds of the data port of that name. At Azure's, each pair of metadata is a header."""
        limits = ListenerLimits(
            body_bytes_max=self.body_bytes_max,
            header_deadline_s=self.header_deadline_s,
            body_deadline_s=self.body_deadline_s,
            answer_deadline_s=self.answer_deadline_s,
            idle_s=self.idle_s,
            connections_max=self.connections_max,
            held_bytes_max=self.held_bytes_max,
        )
        return msgspec.structs.replace(limits, header_count_max=_AZURE_HEADERS_MAX) if name == "azure" else limits

    def store_options(self) -> Options:
        """Bounds of the store."""
        return Options(
            history_us_max=self.history_s_max * SECOND_US,
            history_bytes_max=self.history_bytes_max,
            rollup_minutes_us_max=self.rollup_minutes_s_max * SECOND_US,
            rollup_hours_us_max=self.rollup_hours_s_max * SECOND_US,
            rollup_bytes_max=self.rollup_bytes_max,
            queues_per_account_max=self.queues_per_account_max,
            topics_per_account_max=self.topics_per_account_max,
            subscriptions_per_account_max=self.subscriptions_per_account_max,
            clock_step_us_max=self.clock_step_s_max * SECOND_US,
            error_lines=self.error_lines,
            reserve_bytes=self.reserve_bytes,
            floor_bytes=self.floor_bytes,
            cache_bytes=self.cache_bytes,
            type_attribute=self.type_attribute,
            type_pointer=self.type_pointer or "",
            disorder=self.simulated.disorder,
        )

    def shown(self) -> dict[str, Any]:
        """The settings that differ from their defaults, as plain values for the log, without secrets."""
        plain = {name: getattr(self, name) for name in FIELDS if getattr(self, name) != FIELDS[name].default}
        if self.cluster is not None:
            plain["cluster"] = "given"  # it may hold a password
        if self.archive is not None:
            plain["archive"] = shown_url(self.archive)
        return {name: str(value) if isinstance(value, Path | Address) else value for name, value in plain.items()}


class Field(NamedTuple):
    """One setting, as flags and files use it."""

    name: str
    type: Any
    """Without `| None`."""
    default: Any
    help: str
    group: str

    @property
    def listed(self) -> bool:
        """Whether it is a list: a flag that may be repeated."""
        return bool(self.type == tuple[str, ...])

    @property
    def metavar(self) -> str:
        """The placeholder of the value in a usage text."""
        if get_origin(self.type) is Literal:
            return "|".join(get_args(self.type))
        return _METAVARS.get(self.name) or _METAVARS_BY_TYPE.get(self.type, "TEXT")


_GROUPS: Final = {
    "data": "Data", "sqs": "Ports", "credentials": "Access", "tls_cert": "TLS", "type_attribute": "Messages",
    "requests_per_second_max": "Limits", "history_s_max": "History", "archive": "Archive", "cluster": "Cluster",
    "log_format": "Logs",
}  # fmt: skip
"""The first setting of each group, in the order of `Settings`."""
_METAVARS: Final = {
    "data": "DIR",
    "dev_host": "NAMES",
    "base_domain": "NAME",
    "external_url": "URL",
    "azure_issuer": "URL",
    "type_attribute": "NAME",
    "type_pointer": "POINTER",
    "cors_origins": "ORIGINS",
    "console_hosts": "NAMES",
    "push_allow": "NETWORKS",
    "simulate": "NAME=VALUE",
    "cluster": "URL",
    "cluster_name": "NAME",
    "archive": "URL",
}
_METAVARS_BY_TYPE: Final[dict[Any, str]] = {Path: "FILE", Address: "HOST:PORT", int: "N", float: "SECONDS"}


def _fields() -> dict[str, Field]:
    hints = get_type_hints(Settings, include_extras=True)
    fields, group = {}, ""
    for info in msgspec.structs.fields(Settings):
        kind, *metas = get_args(hints[info.name])
        (text,) = [meta.description for meta in metas if meta.description]
        group = _GROUPS.get(info.name, group)
        if get_origin(kind) is UnionType:
            (kind,) = [part for part in get_args(kind) if part is not NoneType]
        fields[info.name] = Field(info.name, kind, info.default, text, group)
    return fields


FIELDS: Final[Mapping[str, Field]] = _fields()
