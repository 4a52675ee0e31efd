"""Service properties, statistics of the secondary, user delegation keys.

Strategy: the properties are labels of a hidden queue, which is created with the first of them. A user delegation key is
computed and not stored (sas.py). Source: the pages of these operations in the REST API.
"""

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec

from veilmq.model.commands import ChangeQueue, CreateQueue, DescribeQueue
from veilmq.model.errors import QueueMissing, VeilError
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.outcomes import Outcome, QueueDescribed
from veilmq.protocols.azure import limits
from veilmq.protocols.azure.auth.sas import delegation_value
from veilmq.protocols.azure.call import Asked, Call, Plan, service_queue
from veilmq.protocols.azure.errors import bad_node, bad_parameter, fault_of, missing_node
from veilmq.protocols.azure.instants import print_iso, print_rfc1123, read_iso
from veilmq.protocols.azure.operations.properties import (
    Properties,
    labels_of,
    properties_of,
    read_change,
    write_properties,
)
from veilmq.protocols.azure.xml import CONTENT_TYPE, DECLARATION, members_of, read_document
from veilmq.protocols.http import Response
from veilmq.protocols.xml import escape

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
