"""Operations on the service: its properties (logging, metrics, CORS rules), statistics of the secondary, user
delegation keys.

Strategy: the properties are read from XML, written to XML, and stored as labels of a hidden queue, which is created
with the first of them. Each part is a label, so that parts missing in a request stay unchanged. Logging and metrics are
stored and shown but have no effect (VeilMQ has its own); CORS rules have effect (cors.py). Versions before 2013-08-15
have only logging and hourly metrics, and set both together. A user delegation key is computed and not stored (sas.py).
Source: "Set Queue Service Properties" and the pages of the other operations in the REST API.
"""

from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from veilmq.model.commands import ChangeQueue, CreateQueue, DescribeQueue
from veilmq.model.errors import QueueMissing, VeilError
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.outcomes import Outcome, QueueDescribed
from veilmq.protocols import Element, Response, escape
from veilmq.protocols.azure import limits
from veilmq.protocols.azure.auth.sas import delegation_value
from veilmq.protocols.azure.call import Asked, Call, Plan, service_queue
from veilmq.protocols.azure.cors import CorsRule
from veilmq.protocols.azure.errors import bad_node, bad_parameter, bad_xml, fault_of, missing_node
from veilmq.protocols.azure.fields import (
    CONTENT_TYPE,
    DECLARATION,
    members_of,
    only,
    print_iso,
    print_rfc1123,
    read_document,
    read_iso,
)

LABEL_PREFIX: Final = "azure.service."
_BOOLEANS: Final = {"true": True, "false": False}
_METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "MERGE", "PATCH", "POST", "OPTIONS", "PUT"})
_SECONDS_MAX: Final = 2_147_483_647
_METRICS_VERSIONS: Final = ("1.0",)
_LOGGING_VERSIONS: Final = ("1.0", "2.0")
"""2.0 also logs the bearer of a token ("Storage Analytics log format")."""


class Retention(msgspec.Struct, frozen=True):
    """RetentionPolicy; None: for ever."""

    days: int | None = None


class Logging(msgspec.Struct, frozen=True):
    """Which requests would be logged."""

    delete: bool = False
    read: bool = False
    write: bool = False
    retention: Retention = Retention()
    version: str = "1.0"


class Metrics(msgspec.Struct, frozen=True):
    """Which metrics would be kept."""

    enabled: bool = False
    include_apis: bool | None = None
    retention: Retention = Retention()
    version: str = "1.0"


class Properties(msgspec.Struct, frozen=True):
    """All properties; the defaults are those of a new account."""

    logging: Logging = Logging()
    hour_metrics: Metrics = Metrics()
    minute_metrics: Metrics = Metrics()
    cors: tuple[CorsRule, ...] = ()


_TYPES: Final[dict[str, Any]] = {
    "logging": Logging,
    "hour_metrics": Metrics,
    "minute_metrics": Metrics,
    "cors": tuple[CorsRule, ...],
}


def properties_of(labels: dict[str, str]) -> Properties:
    """The properties in a queue's labels."""
    kept = {
        name: msgspec.json.decode(labels[LABEL_PREFIX + name], type=kind)
        for name, kind in _TYPES.items()
        if LABEL_PREFIX + name in labels
    }
    return Properties(**kept)


def labels_of(change: dict[str, Any]) -> dict[str, str]:
    """The labels that store these fields of `Properties` and leave the others unchanged."""
    return {LABEL_PREFIX + name: msgspec.json.encode(value).decode() for name, value in change.items()}


def read_change(body: bytes, version: str) -> dict[str, Any]:
    """The fields of `Properties` that a Set Queue Service Properties request sets. Raises Refusal."""
    root = read_document(body, "StorageServiceProperties", limits.DOCUMENT_BYTES_MAX)
    old = version < limits.VERSION_CORS
    parts = _OLD_PARTS if old else _PARTS
    members = members_of(root, tuple(parts))
    if old:
        for name in parts:
            _need(members, name)
    return {parts[name][0]: parts[name][1](node) for name, node in members.items()}


def _need(members: dict[str, Element], name: str) -> Element:
    if name not in members:
        raise missing_node(name)
    return members[name]


def _boolean(node: Element) -> bool:
    if node.text.lower() not in _BOOLEANS:
        raise bad_node(node.name, node.text, "Not true or false.")
    return _BOOLEANS[node.text.lower()]


def _number(node: Element, minimum: int, maximum: int) -> int:
    text = node.text
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and minimum <= int(text) <= maximum):
        raise bad_node(node.name, text, f"Not a whole number from {minimum} to {maximum}.")
    return int(text)


def _version(members: dict[str, Element], allowed: tuple[str, ...]) -> str:
    node = _need(members, "Version")
    if node.text not in allowed:
        raise bad_node("Version", node.text, f"The version is {' or '.join(allowed)}.")
    return node.text


def _retention(members: dict[str, Element]) -> Retention:
    policy = members_of(_need(members, "RetentionPolicy"), ("Enabled", "Days"))
    if not _boolean(_need(policy, "Enabled")):
        if "Days" in policy and policy["Days"].text:
            raise bad_xml("Element Days is only expected when RetentionPolicy is enabled.")
        return Retention()
    return Retention(_number(_need(policy, "Days"), 1, limits.RETENTION_DAYS_MAX))


def _logging(node: Element) -> Logging:
    members = members_of(node, ("Version", "Delete", "Read", "Write", "RetentionPolicy"))
    delete, read, write = (_boolean(_need(members, name)) for name in ("Delete", "Read", "Write"))
    return Logging(delete, read, write, _retention(members), _version(members, _LOGGING_VERSIONS))


def _metrics(node: Element) -> Metrics:
    members = members_of(node, ("Version", "Enabled", "IncludeAPIs", "RetentionPolicy"))
    enabled = _boolean(_need(members, "Enabled"))
    include = None
    if enabled:
        include = _boolean(_need(members, "IncludeAPIs"))
    elif "IncludeAPIs" in members and members["IncludeAPIs"].text:
        raise bad_node("IncludeAPIs", members["IncludeAPIs"].text, "Only with Enabled true.")
    return Metrics(enabled, include, _retention(members), _version(members, _METRICS_VERSIONS))


def _cors(node: Element) -> tuple[CorsRule, ...]:
    rules = tuple(_rule(child) for child in only(node, "CorsRule"))
    if len(rules) > limits.CORS_RULES_MAX:
        raise bad_xml(f"There are at most {limits.CORS_RULES_MAX} CORS rules.")
    size_bytes = sum(len(",".join(part).encode()) for rule in rules for part in _texts(rule))
    if size_bytes > limits.CORS_BYTES_MAX:
        raise bad_xml(f"The CORS rules exceed {limits.CORS_BYTES_MAX} bytes.")
    return rules


def _texts(rule: CorsRule) -> tuple[tuple[str, ...], ...]:
    return rule.origins, rule.methods, rule.allowed_headers, rule.exposed_headers


def _rule(node: Element) -> CorsRule:
    names = ("AllowedOrigins", "AllowedMethods", "AllowedHeaders", "ExposedHeaders", "MaxAgeInSeconds")
    members = members_of(node, names)
    origins, methods = (_list(_need(members, name)) for name in names[:2])
    allowed, exposed = (_list(_need(members, name)) for name in names[2:4])
    for name, values in zip(names[:2], (origins, methods), strict=True):
        if not values:
            raise bad_node(name, "", "At least one must be given.")
    if len(origins) > limits.CORS_ORIGINS_MAX:
        raise bad_node("AllowedOrigins", ",".join(origins), f"At most {limits.CORS_ORIGINS_MAX} origins.")
    for method in methods:
        if method not in _METHODS:
            raise bad_node("AllowedMethods", method, "Not a method that a rule can allow.")
    for name, headers in (("AllowedHeaders", allowed), ("ExposedHeaders", exposed)):
        prefixes = sum(header.endswith("*") and header != "*" for header in headers)
        if prefixes > limits.CORS_PREFIXES_MAX or len(headers) - prefixes > limits.CORS_HEADERS_MAX:
            reason = f"At most {limits.CORS_HEADERS_MAX} headers and {limits.CORS_PREFIXES_MAX} prefixes."
            raise bad_node(name, ",".join(headers), reason)
    return CorsRule(origins, methods, allowed, exposed, _number(_need(members, "MaxAgeInSeconds"), 0, _SECONDS_MAX))


def _list(node: Element) -> tuple[str, ...]:
    values = tuple(part for each in node.text.split(",") if (part := each.strip()))
    for value in values:
        if len(value) > limits.CORS_NAME_CHARACTERS_MAX or not (value.isascii() and value.isprintable()):
            reason = f"At most {limits.CORS_NAME_CHARACTERS_MAX} printable ASCII characters."
            raise bad_node(node.name, value, reason)
    return values


_PARTS: Final[dict[str, tuple[str, Callable[[Element], Any]]]] = {
    "Logging": ("logging", _logging),
    "HourMetrics": ("hour_metrics", _metrics),
    "MinuteMetrics": ("minute_metrics", _metrics),
    "Cors": ("cors", _cors),
}
_OLD_PARTS: Final = {"Logging": _PARTS["Logging"], "Metrics": _PARTS["HourMetrics"]}


def write_properties(properties: Properties, version: str) -> bytes:
    """The body of Get Queue Service Properties."""
    logging, hour = properties.logging, _written_metrics(properties.hour_metrics)
    text = (
        f"<Logging><Version>{logging.version}</Version>"
        f"<Read>{_flag(logging.read)}</Read><Write>{_flag(logging.write)}</Write>"
        f"<Delete>{_flag(logging.delete)}</Delete>{_written_retention(logging.retention)}</Logging>"
    )
    if version < limits.VERSION_CORS:
        text += f"<Metrics>{hour}</Metrics>"
    else:
        text += (
            f"<HourMetrics>{hour}</HourMetrics>"
            f"<MinuteMetrics>{_written_metrics(properties.minute_metrics)}</MinuteMetrics>"
            f"<Cors>{''.join(map(_written_rule, properties.cors))}</Cors>"
        )
    return f"{DECLARATION}<StorageServiceProperties>{text}</StorageServiceProperties>".encode()


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _written_retention(retention: Retention) -> str:
    days = "" if retention.days is None else f"<Days>{retention.days}</Days>"
    return f"<RetentionPolicy><Enabled>{_flag(retention.days is not None)}</Enabled>{days}</RetentionPolicy>"


def _written_metrics(metrics: Metrics) -> str:
    include = "" if metrics.include_apis is None else f"<IncludeAPIs>{_flag(metrics.include_apis)}</IncludeAPIs>"
    start = f"<Version>{metrics.version}</Version><Enabled>{_flag(metrics.enabled)}</Enabled>"
    return f"{start}{include}{_written_retention(metrics.retention)}"


def _written_rule(rule: CorsRule) -> str:
    lists = zip(("AllowedOrigins", "AllowedMethods", "AllowedHeaders", "ExposedHeaders"), _texts(rule), strict=True)
    inside = "".join(f"<{name}>{escape(','.join(values))}</{name}>" for name, values in lists)
    return f"<CorsRule>{inside}<MaxAgeInSeconds>{rule.max_age_s}</MaxAgeInSeconds></CorsRule>"


_TENANT_UNKNOWN = "00000000-0000-0000-0000-000000000000"


def properties_from(outcome: Outcome, command: Any) -> Properties:
    """The properties in the description of the hidden queue. Raises Refusal."""
    if isinstance(outcome, QueueMissing):
        return Properties()
    if isinstance(outcome, VeilError):
        raise fault_of(outcome, command)
    assert isinstance(outcome, QueueDescribed)
    return properties_of(outcome.info.settings.labels)


def plan_get_properties(asked: Asked) -> Plan:
    """Get Queue Service Properties."""
    return (DescribeQueue(queue=service_queue(asked.sender.account.key), origin=asked.sender.origin),), None


def answer_properties(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """200 with all properties of the version."""
    properties = properties_from(outcomes[0], call.commands[0])
    return Response(200, CONTENT_TYPE, write_properties(properties, call.asked.version))


def plan_set_properties(asked: Asked) -> Plan:
    """Set Queue Service Properties: missing parts stay unchanged."""
    change = read_change(asked.request.body, asked.version)
    queue, origin = service_queue(asked.sender.account.key), asked.sender.origin
    labels = {"labels": labels_of(change)}
    return (CreateQueue(queue=queue, origin=origin), ChangeQueue(queue=queue, origin=origin, change=labels)), None


def answer_accepted(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """202."""
    for command, outcome in zip(call.commands, outcomes, strict=True):
        if isinstance(outcome, VeilError):
            raise fault_of(outcome, command)
    return Response(202, None, b"")


def plan_stats(asked: Asked) -> Plan:
    """Get Queue Service Stats: only on the secondary endpoint."""
    if not asked.place.secondary:
        raise bad_parameter("comp", "stats", "Statistics are served by the secondary endpoint alone.")
    return (), None


def answer_stats(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """Both endpoints read the same store, so the secondary is always up to date."""
    text = (
        f"{DECLARATION}<StorageServiceStats><GeoReplication><Status>live</Status>"
        f"<LastSyncTime>{print_rfc1123(call.asked.wall)}</LastSyncTime></GeoReplication></StorageServiceStats>"
    )
    return Response(200, CONTENT_TYPE, text.encode())


class _KeyInfo(msgspec.Struct, frozen=True):
    start: Instant
    expiry: Instant
    delegated_tenant: str


def plan_delegation_key(asked: Asked) -> Plan:
    """Get User Delegation Key."""
    root = read_document(asked.request.body, "KeyInfo", limits.DOCUMENT_BYTES_MAX)
    members = {name: node.text for name, node in members_of(root, ("Start", "Expiry", "DelegatedUserTid")).items()}
    if not members.get("Expiry"):
        raise missing_node("Expiry")
    times: dict[str, Instant] = {"Start": asked.wall}
    for name in ("Start", "Expiry"):
        if not members.get(name):
            continue
        read = read_iso(members[name])
        if read is None:
            raise bad_node(name, members[name], "Not a time in the form of ISO 8601.")
        times[name] = read
    start, expiry, longest_us = times["Start"], times["Expiry"], limits.DELEGATION_SECONDS_MAX * SECOND_US
    if expiry <= max(start, asked.wall) or expiry > min(start, asked.wall) + longest_us:
        reason = "Expiry is after now and Start, and at most 7 days after either."
        raise bad_node("Expiry", members["Expiry"], reason)
    tenant = members.get("DelegatedUserTid", "")
    if len(tenant) > limits.POLICY_ID_CHARACTERS_MAX or not tenant.isprintable():
        raise bad_node("DelegatedUserTid", tenant, "Not a tenant's id.")
    return (), _KeyInfo(start, expiry, tenant)


def answer_delegation_key(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """200 with the key and all fields that its SAS must contain."""
    info: _KeyInfo = call.memo
    sender = call.asked.sender
    identity = sender.identity
    assert identity is not None
    tenant = identity.tenant or _TENANT_UNKNOWN
    fields = (identity.object_id, tenant, print_iso(info.start), print_iso(info.expiry), "q", call.asked.version)
    value = b64encode(delegation_value(sender.account.secrets[0], (*fields, info.delegated_tenant))).decode()
    names = ("SignedOid", "SignedTid", "SignedStart", "SignedExpiry", "SignedService", "SignedVersion")
    pairs = [*zip(names, fields, strict=True)]
    if info.delegated_tenant:
        pairs.append(("SignedDelegatedUserTid", info.delegated_tenant))
    inside = "".join(f"<{name}>{escape(text)}</{name}>" for name, text in [*pairs, ("Value", value)])
    return Response(200, CONTENT_TYPE, f"{DECLARATION}<UserDelegationKey>{inside}</UserDelegationKey>".encode())
