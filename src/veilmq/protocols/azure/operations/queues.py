"""Create and Delete Queue, its metadata, its access policies, and the list of queues.

Strategy: a queue made here gets Azure's retention of 7 days, and equals an existing one if its metadata does. Queues
whose names Azure does not allow are listed by their alias, or not at all; a marker names the last queue of its page.

Metadata is `x-ms-meta-*` headers and one label, in JSON, because setting metadata replaces the whole. Names are
compared without case but keep the case in which they were set. That case is a label of its own, which does not count
when two queues are compared. Source: the pages of these operations in the REST API; "Setting and retrieving properties
and metadata".
"""

from base64 import b64decode, urlsafe_b64encode
from collections.abc import Sequence
from typing import Final

import msgspec

from veilmq.model.commands import ChangeQueue, CreateQueue, DeleteQueue, DescribeQueue, ListQueues
from veilmq.model.instant import SECOND_US
from veilmq.model.messages import first_forbidden_character
from veilmq.model.outcomes import Outcome, QueueCreated, QueueDescribed, QueuesListed
from veilmq.model.settings.queue import QueueInfo, shown_name
from veilmq.protocols import Request, Response, escape
from veilmq.protocols.azure import errors, limits
from veilmq.protocols.azure.addresses import service_endpoint, whole_number
from veilmq.protocols.azure.auth.sas import policies_label, policies_of, read_policies, write_policies
from veilmq.protocols.azure.call import Asked, Call, Plan, sole
from veilmq.protocols.azure.errors import Refusal, bad_parameter
from veilmq.protocols.azure.fields import CONTENT_TYPE, DECLARATION, escape_attribute

_COOLDOWN_US: Final = 30 * SECOND_US
"""How long Azure reserves the name of a deleted queue."""
_DEFAULTS: Final = {"retention_us": limits.TTL_SECONDS_DEFAULT * SECOND_US}
_MARKER_START: Final = "1!"
_COUNT: Final = b"x-ms-approximate-messages-count"
_METADATA: Final = "azure.metadata"
_HEADER_CASE: Final = "azure.spelling"
_PREFIX: Final = limits.METADATA_PREFIX
_DECODER: Final = msgspec.json.Decoder(dict[str, str])


def plan_create(asked: Asked) -> Plan:
    """Create Queue."""
    metadata = read_metadata(asked.request)
    command = CreateQueue(
        queue=asked.queue(),
        origin=asked.sender.origin,
        change={"labels": values_label(metadata)},
        defaults=_DEFAULTS | {"labels": labels_of(metadata)},
        cooldown_us=_COOLDOWN_US if asked.endpoint.cooldowns else 0,
    )
    return (command,), None


def answer_create(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """201, or 204 if the queue existed with the same metadata."""
    created: QueueCreated = sole(call, outcomes)
    return Response(201 if created.created else 204, None, b"")


def plan_delete(asked: Asked) -> Plan:
    """Delete Queue."""
    return (DeleteQueue(queue=asked.queue(), origin=asked.sender.origin),), None


def plan_describe(asked: Asked) -> Plan:
    """Get Queue Metadata and Get Queue ACL."""
    return (DescribeQueue(queue=asked.queue(), origin=asked.sender.origin),), None


def answer_metadata(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """Metadata and the number of messages, in headers only. Messages in flight and delayed ones count, too."""
    described: QueueDescribed = sole(call, outcomes)
    info = described.info
    count = (_COUNT, str(info.counts.total).encode())
    metadata = metadata_of(info.settings.labels)
    shown = [(_PREFIX + name.encode(), value.encode()) for name, value in metadata.items()]
    return Response(200, None, b"", (count, *shown))


def plan_set_metadata(asked: Asked) -> Plan:
    """Set Queue Metadata: replaces all metadata."""
    change = {"labels": labels_of(read_metadata(asked.request))}
    return (ChangeQueue(queue=asked.queue(), origin=asked.sender.origin, change=change),), None


def answer_acl(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """The stored access policies."""
    described: QueueDescribed = sole(call, outcomes)
    return Response(200, CONTENT_TYPE, write_policies(policies_of(described.info.settings.labels)))


def plan_set_acl(asked: Asked) -> Plan:
    """Set Queue ACL: replaces all policies, and takes effect at once."""
    change = {"labels": policies_label(read_policies(asked.request.body))}
    return (ChangeQueue(queue=asked.queue(), origin=asked.sender.origin, change=change),), None


def plan_list(asked: Asked) -> Plan:
    """List Queues."""
    parameters = asked.parameters
    count = whole_number(parameters, "maxresults", 1, limits.LIST_MAX) or limits.LIST_MAX
    include = [each for each in parameters.get("include", "").lower().split(",") if each]
    if any(each != "metadata" for each in include):
        raise bad_parameter("include", parameters["include"], "Only metadata can be included.")
    key = asked.sender.account.key
    prefix = parameters.get("prefix", "")
    if first_forbidden_character(prefix) is not None:
        raise bad_parameter("prefix", prefix, "It has a character that XML 1.0 cannot carry.")
    command = ListQueues(
        origin=asked.sender.origin,
        account=key.account,
        region=key.home_region,
        prefix=prefix,
        after=_read_marker(parameters.get("marker", "")),
        count_max=count,
        names=limits.QUEUE_NAME_WHOLE.pattern,
    )
    return (command,), bool(include)


def answer_list(call: Call, outcomes: Sequence[Outcome]) -> Response:
    """A page of names, with metadata if asked for."""
    listed: QueuesListed = sole(call, outcomes)
    asked: Asked = call.asked
    parameters = asked.parameters
    endpoint = service_endpoint(asked.endpoint, asked.request, asked.place)
    old = asked.version < limits.VERSION_CORS
    attribute = f'{"AccountName" if old else "ServiceEndpoint"}="{escape_attribute(endpoint)}"'
    given = "".join(
        f"<{name}>{escape(parameters[name.lower()])}</{name}>"
        for name in ("Prefix", "Marker", "MaxResults")
        if parameters.get(name.lower())
    )
    queues = "".join(
        _queue(info, _name(info), call.memo, f"{endpoint}{_name(info)}" if old else "") for info in listed.queues
    )
    following = _marker_after(listed.queues[-1]) if listed.more else ""
    text = (
        f"{DECLARATION}<EnumerationResults {attribute}>{given}<Queues>{queues}</Queues>"
        f"<NextMarker>{following}</NextMarker></EnumerationResults>"
    )
    return Response(200, CONTENT_TYPE, text.encode())


def _name(info: QueueInfo) -> str:
    """The queue's name or alias in Azure."""
    return shown_name(info, limits.QUEUE_NAME_WHOLE) or info.key.name


def _queue(info: QueueInfo, name: str, with_metadata: bool, url: str) -> str:
    shown = f"<Url>{escape(url)}</Url>" if url else ""
    if with_metadata:
        pairs = metadata_of(info.settings.labels).items()
        shown += f"<Metadata>{''.join(f'<{each}>{escape(value)}</{each}>' for each, value in pairs)}</Metadata>"
    return f"<Queue><Name>{name}</Name>{shown}</Queue>"


def _marker_after(info: QueueInfo) -> str:
    return _MARKER_START + urlsafe_b64encode(_name(info).encode()).decode()


def _read_marker(marker: str) -> str:
    """The name in a marker. Raises Refusal: InvalidMarker."""
    if not marker:
        return ""
    try:
        name = b64decode(marker.removeprefix(_MARKER_START).encode("ascii"), b"-_", validate=True).decode()
    except ValueError:
        raise Refusal(errors.INVALID_MARKER) from None
    if not marker.startswith(_MARKER_START) or not name:
        raise Refusal(errors.INVALID_MARKER)
    return name


class Metadata(msgspec.Struct, frozen=True):
    """Metadata that a request gives."""

    values: dict[str, str]
    """Values by lower-case name."""
    header_case: dict[str, str]
    """Lower-case name -> name as sent, where they differ."""


def read_metadata(request: Request) -> Metadata:
    """Read the metadata in a request's headers. Raises Refusal."""
    metadata: dict[str, str] = {}
    total_bytes = 0
    for name, value in request.headers.items():
        if not name.startswith(_PREFIX):
            continue
        key = name[len(_PREFIX) :].decode("latin-1")
        if not key:
            raise Refusal(errors.EMPTY_METADATA_KEY)
        text = value.decode("latin-1")
        is_printable = text.isascii() and text.isprintable()
        if not limits.METADATA_NAME.match(key) or name in request.duplicates or not is_printable:
            raise Refusal(errors.INVALID_METADATA, {"HeaderName": name.decode("latin-1")})
        total_bytes += len(key) + len(value)
        metadata[key] = text
    if total_bytes > limits.METADATA_BYTES_MAX:
        raise Refusal(errors.METADATA_TOO_LARGE, {"MaxLimit": str(limits.METADATA_BYTES_MAX)})
    sent = ((name, (request.header_case or {}).get(_PREFIX + name.encode(), b"").decode()) for name in metadata)
    header_case = {name: text[len(_PREFIX) :] for name, text in sent if text[len(_PREFIX) :] not in {"", name}}
    return Metadata(metadata, header_case)


def values_label(metadata: Metadata) -> dict[str, str]:
    """The label that is compared when two queues are."""
    return {_METADATA: _text(metadata.values)}


def labels_of(metadata: Metadata) -> dict[str, str]:
    """The labels that store exactly this metadata."""
    return values_label(metadata) | {_HEADER_CASE: _text(metadata.header_case)}


def _text(pairs: dict[str, str]) -> str:
    return msgspec.json.encode(pairs, order="sorted").decode() if pairs else ""


def metadata_of(labels: dict[str, str]) -> dict[str, str]:
    """The metadata in a queue's labels, by name as it was set."""
    text, spelled = labels.get(_METADATA), labels.get(_HEADER_CASE)
    values = _DECODER.decode(text) if text else {}
    header_case = _DECODER.decode(spelled) if spelled else {}
    return {header_case.get(name, name): value for name, value in values.items()}
