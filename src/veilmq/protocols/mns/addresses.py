"""Parses the path of a request and the names in it, and writes URLs and ARNs.

Strategy: a path is one of ten kinds with up to two names, parsed once and cached. The account comes from the signing
key, and the region is the account's home, so neither the Host nor an ARN's middle parts matter, and an ARN that an SDK
made from `127.0.0.1` works.
"""

import re
from enum import Enum
from ipaddress import AddressValueError, IPv6Address
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec

from veilmq.model.settings.access import AccessKey
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import SubscriptionSettings, TopicKey, is_hidden
from veilmq.protocols import Bounded, Request, address_used, show
from veilmq.protocols.mns import errors, limits
from veilmq.protocols.mns.errors import Fault, Refusal

_PLACES_MAX: Final = 4_096
_PATH_BYTES_CACHED_MAX: Final = 512
"""Longer than any path with valid names."""
_QUEUE_ARN: Final = re.compile(r"acs:mns:[^:/]*:[^:/]*:/?queues/([^/:]*)\Z")
_URL: Final = re.compile(
    r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?(?:[/?][!-~]*)?\Z", re.IGNORECASE
)
_SCHEMES: Final = ("http://", "https://")
_URL_RULE: Final = (
    "has a host that could be a name or an address, a port from 1 to 65535 if any, no user, no fragment, and no blanks "
    "or characters beyond ASCII"
)
_HOST_CHARACTERS_MAX: Final = 253
_LABEL_CHARACTERS_MAX: Final = 63
_UNSERVED: Final = ("mail:", "sms:")
_QUEUE_FAULTS: Final = (errors.QUEUE_NAME_LENGTH_ERROR, errors.INVALID_QUEUE_NAME)
"""For a name that is too long, and one that is not allowed."""
_TOPIC_FAULTS: Final = (errors.TOPIC_NAME_LENGTH_ERROR, errors.TOPIC_NAME_INVALID)
_SUBSCRIPTION_FAULTS: Final = (errors.SUBSCRIPTION_NAME_LENGTH_ERROR, errors.SUBSCRIPTION_NAME_INVALID)


class Endpoint(msgspec.Struct, frozen=True):
    """How clients reach the listener, and the operator's settings."""

    external_url: str | None = None
    """The start of URLs in responses, instead of the address that the client used."""
    trusted_proxy: bool = False
    """Believe X-Forwarded-Proto and X-Forwarded-Host."""


class Kind(Enum):
    """What a path names."""

    ROOT = "/"
    QUEUES = "/queues"
    QUEUE = "/queues/{queue}"
    QUEUE_MESSAGES = "/queues/{queue}/messages"
    TOPICS = "/topics"
    TOPIC = "/topics/{topic}"
    TOPIC_MESSAGES = "/topics/{topic}/messages"
    SUBSCRIPTIONS = "/topics/{topic}/subscriptions"
    SUBSCRIPTION = "/topics/{topic}/subscriptions/{subscription}"
    OPEN_SERVICE = "/commonbuy/openservice"


class Place(NamedTuple):
    """A parsed path; its names may be invalid."""

    kind: Kind
    name: str = ""
    """Of the queue or topic."""
    subscription: str = ""


_PATTERNS: Final = {tuple(kind.value.split("/")[1:]): kind for kind in Kind if kind is not Kind.ROOT}
_places: Final[Bounded[bytes, Place]] = Bounded(_PLACES_MAX)


def read_place(path: bytes) -> Place:
    """Parse the path of a request. Raises Refusal: InvalidRequestURL."""
    known = _places.get(path)
    if known is not None:
        return known
    place = _read_place(path)
    return _places.keep(path, place) if len(path) <= _PATH_BYTES_CACHED_MAX else place


def _read_place(path: bytes) -> Place:
    try:
        text = unquote_to_bytes(path).decode()
    except UnicodeDecodeError:
        raise Refusal(errors.INVALID_REQUEST_URL) from None
    parts = text.rstrip("/").split("/")[1:]
    if not parts:
        return Place(Kind.ROOT)
    for pattern, kind in _PATTERNS.items():
        if len(pattern) == len(parts) and all(
            each == part or (each.startswith("{") and part) for each, part in zip(pattern, parts, strict=True)
        ):
            names = [part for each, part in zip(pattern, parts, strict=True) if each.startswith("{")]
            return Place(kind, *names)
    raise Refusal(errors.INVALID_REQUEST_URL)


def is_name(name: str) -> bool:
    """Whether MNS allows the name for a queue or topic."""
    return len(name) <= limits.NAME_CHARACTERS_MAX and limits.NAME.match(name) is not None


def _checked(name: str, characters_max: int, faults: tuple[Fault, Fault]) -> str:
    if len(name) > characters_max:
        raise Refusal(faults[0])
    if not limits.NAME.match(name):
        raise Refusal(faults[1])
    return name


def queue_of(key: AccessKey, name: str) -> QueueKey:
    """The queue of that name. Raises Refusal: InvalidQueueName, QueueNameLengthError."""
    _checked(name, limits.NAME_CHARACTERS_MAX, _QUEUE_FAULTS)
    return QueueKey(key.account, key.home_region, name)


def topic_of(key: AccessKey, name: str) -> TopicKey:
    """The topic of that name. Raises Refusal: TopicNameInvalid, TopicNameLengthError."""
    _checked(name, limits.NAME_CHARACTERS_MAX, _TOPIC_FAULTS)
    return TopicKey(key.account, key.home_region, name)


def subscription_name(name: str) -> str:
    """Check the name. Raises Refusal: SubscriptionNameInvalid, SubscriptionNameLengthError."""
    return _checked(name, limits.SUBSCRIPTION_NAME_CHARACTERS_MAX, _SUBSCRIPTION_FAULTS)


def queue_of_text(key: AccessKey, text: str) -> QueueKey | None:
    """The queue of a name or an ARN; None if the text is neither."""
    found = _QUEUE_ARN.match(text)
    name = found[1] if found is not None else text
    return QueueKey(key.account, key.home_region, name) if is_name(name) else None


def read_endpoint(key: AccessKey, text: str) -> SubscriptionSettings:
    """A subscription with this endpoint and the defaults. Raises Refusal: EndpointInvalid."""
    if len(text) > limits.ENDPOINT_CHARACTERS_MAX:
        raise Refusal(errors.ENDPOINT_INVALID, f"An endpoint has at most {limits.ENDPOINT_CHARACTERS_MAX} characters.")
    if _QUEUE_ARN.match(text):
        queue = queue_of_text(key, text)
        if queue is not None:
            return SubscriptionSettings(endpoint=text, queue=queue)
    found = _URL.match(text)
    if found is not None and "#" not in text and _is_host(found[1]) and 0 < int(found[2] or 80) <= 65_535:
        return SubscriptionSettings(endpoint=text, url=text)
    if text.startswith(_UNSERVED):
        raise Refusal(errors.ENDPOINT_INVALID, "This server sends neither mail nor short messages.")
    if text.lower().startswith(_SCHEMES):
        raise Refusal(errors.ENDPOINT_INVALID, f"{show(text)} is not a URL for pushes, which {_URL_RULE}.")
    raise Refusal(
        errors.ENDPOINT_INVALID,
        f"{show(text)} is neither acs:mns:<region>:<account>:queues/<name> nor an http or https URL.",
    )


def _is_host(text: str) -> bool:
    """Whether it is an IPv6 address in brackets, or a possible host name or IPv4 address (RFC 1035, 2.3.4)."""
    if text.startswith("["):
        try:
            IPv6Address(text[1:-1])
        except AddressValueError:
            return False
        return True
    name = text.removesuffix(".")
    labels = name.split(".")
    return len(name) <= _HOST_CHARACTERS_MAX and all(0 < len(label) <= _LABEL_CHARACTERS_MAX for label in labels)


def arn(queue: QueueKey) -> str:
    """The resource name of a queue; for a hidden queue of pushes, that of its subscription.

    Source: the pages of SendMessage and Unsubscribe, "Authorization".
    """
    start = f"acs:mns:{queue.region}:{queue.account}:"
    if is_hidden(queue.name):
        topic, subscription = queue.name.removesuffix("/").split("/")
        return f"{start}/topics/{topic}/subscriptions/{subscription}"
    return f"{start}queues/{queue.name}"


def url_start(endpoint: Endpoint, request: Request) -> str:
    """The start of URLs for this client: the scheme, host and port that it used, without a final slash."""
    if endpoint.external_url is not None:
        return endpoint.external_url.rstrip("/")
    return address_used(request, endpoint.trusted_proxy)
