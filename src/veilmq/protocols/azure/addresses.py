"""Parses what a request addresses: account, primary or secondary, queue, message, and the query's parameters.

Strategy: a host of the form `<account>.queue.<anything>`, `<account>.localhost` or `<account>.<base domain>` names the
account (host style); for every other host the first segment of the path does (path style). A `-secondary` after the
name means the secondary endpoint. Parameter names are case-insensitive; a repeated parameter is refused, so that the
signed and the used value cannot differ.
"""

import re
from enum import IntEnum
from functools import lru_cache
from typing import Final
from urllib.parse import unquote_to_bytes

import msgspec

from veilmq.protocols import Request, is_secure
from veilmq.protocols.azure import errors, limits
from veilmq.protocols.azure.errors import Refusal, bad_parameter, missing_parameter, out_of_range

SECONDARY: Final = "-secondary"
_SERVICE_LABEL: Final = "queue"
_OF_NAMESPACE: Final = frozenset({"", "svc"})
_MESSAGES: Final = "messages"


class Endpoint(msgspec.Struct, frozen=True):
    """How clients reach the listener, and the operator's settings."""

    external_url: str | None = None
    """The start of ServiceEndpoint, without account, instead of the address that the client used."""
    base_domain: str | None = None
    trusted_proxy: bool = False
    """Believe X-Forwarded-Proto, X-Forwarded-Host and the last X-Forwarded-For."""
    cooldowns: bool = True
    """QueueBeingDeleted for 30 seconds, as on Azure."""
    authority: str = "https://login.microsoftonline.com"
    """Where the challenge for a refused bearer token sends the client."""


class Kind(IntEnum):
    """What a path names."""

    SERVICE = 1
    QUEUE = 2
    MESSAGES = 3
    MESSAGE = 4


class Place(msgspec.Struct, frozen=True):
    """A parsed path and host."""

    account: str
    secondary: bool
    kind: Kind
    queue: str
    message: str
    path_style: bool


def read_place(request: Request, base_domain: str | None) -> Place:
    """Parse the request's host and path. Raises Refusal: InvalidUri."""
    host = request.host
    path = request.path
    if len(path) > _PATH_BYTES_CACHED_MAX or len(host) > _HOST_BYTES_MAX or b"/messages/" in path:
        return _place(host, path, base_domain)
    return _known_place(host, path, base_domain)


_PATH_BYTES_CACHED_MAX: Final = 128
_HOST_BYTES_MAX: Final = 261
"""The longest name with its port (RFC 1035, 2.3.4). A longer one is not cached."""


def account_of_host(host: bytes, base_domain: str | None) -> str | None:
    """The account that a host names in host style, including `-secondary`; None: the path names it."""
    name = host.rpartition(b":")[0] if host.rpartition(b":")[2].isdigit() else host
    first, _, rest = name.decode("latin-1").lower().partition(".")
    service, _, beyond = rest.partition(".")
    # A Kubernetes service in a namespace `queue` is `NAME.queue` or `NAME.queue.svc...`, not an account.
    of_service = service == _SERVICE_LABEL and beyond.partition(".")[0] not in _OF_NAMESPACE
    if rest == "localhost" or of_service or (base_domain and rest == base_domain.lower()):
        return first
    return None


def _place(host: bytes, path: bytes, base_domain: str | None) -> Place:
    try:
        segments = unquote_to_bytes(path).decode().split("/")
    except UnicodeDecodeError:
        raise Refusal(errors.REQUEST_URL_FAILED_TO_PARSE) from None
    if segments[0]:
        raise Refusal(errors.INVALID_URI)
    segments = segments[1:-1] if segments[-1] == "" else segments[1:]
    account = (_known_account if len(host) <= _HOST_BYTES_MAX else account_of_host)(host, base_domain)
    path_style = account is None
    if account is None:
        if not segments:
            raise Refusal(errors.INVALID_URI, {"Reason": "The path must begin with the name of the storage account."})
        account, *segments = segments
    secondary = account.endswith(SECONDARY)
    account = account.removesuffix(SECONDARY)
    if path_style and secondary and segments and segments[0] == account:
        # For a secondary in path style the Python SDK puts `ACCOUNT-secondary` before the path of the primary.
        del segments[0]
    if not segments:
        return Place(account, secondary, Kind.SERVICE, "", "", path_style)
    queue = segments[0]
    if len(segments) == 1:
        return Place(account, secondary, Kind.QUEUE, queue, "", path_style)
    if segments[1] != _MESSAGES or len(segments) > 3:
        raise Refusal(errors.INVALID_URI)
    if len(segments) == 2:
        return Place(account, secondary, Kind.MESSAGES, queue, "", path_style)
    return Place(account, secondary, Kind.MESSAGE, queue, segments[2], path_style)


_known_account = lru_cache(4_096)(account_of_host)
_known_place = lru_cache(4_096)(_place)


def check_queue_name(name: str) -> str:
    """The name, if Azure allows it. Raises Refusal: OutOfRangeInput, InvalidResourceName."""
    if not limits.QUEUE_NAME_CHARACTERS_MIN <= len(name) <= limits.QUEUE_NAME_CHARACTERS_MAX:
        raise Refusal(errors.OUT_OF_RANGE_INPUT)
    if not limits.QUEUE_NAME.match(name):
        raise Refusal(errors.INVALID_RESOURCE_NAME)
    return name


def read_query(query: bytes) -> dict[str, str]:
    """Parameters by lower-case name, decoded once. Raises Refusal for a repeated one or invalid UTF-8."""
    parameters: dict[str, str] = {}
    if not query:
        return parameters
    pairs = query.split(b"&")
    if len(pairs) > limits.QUERY_PAIRS_MAX:
        raise Refusal(errors.REQUEST_URL_FAILED_TO_PARSE, {"Reason": f"More than {limits.QUERY_PAIRS_MAX} parameters."})
    for pair in pairs:
        raw_name, _, raw = pair.partition(b"=")
        if not raw_name:
            continue
        try:
            name = (unquote_to_bytes(raw_name) if b"%" in raw_name else raw_name).decode().lower()
            value = (unquote_to_bytes(raw) if b"%" in raw else raw).decode()
        except UnicodeDecodeError:
            raise Refusal(errors.REQUEST_URL_FAILED_TO_PARSE) from None
        if name in parameters:
            raise bad_parameter(name, value, "The parameter is given more than once.")
        parameters[name] = value
    return parameters


def service_endpoint(endpoint: Endpoint, request: Request, place: Place) -> str:
    """The URL to which queue names are appended for this client; ends in a slash."""
    account = place.account + (SECONDARY if place.secondary else "")
    if endpoint.external_url is not None:
        return f"{endpoint.external_url.rstrip('/')}/{account}/"
    headers = request.headers
    scheme = b"https" if is_secure(request, endpoint.trusted_proxy) else b"http"
    host = request.host or b"localhost"
    if endpoint.trusted_proxy:
        host = headers.get(b"x-forwarded-host", host).partition(b",")[0].strip()
    start = f"{scheme.decode()}://{host.decode('latin-1')}/"
    return f"{start}{account}/" if place.path_style else start


_INTEGER: Final = re.compile(r"[+-]?[0-9]+\Z")
_INTEGER_CHARACTERS_MAX: Final = 20
"""A longer number is out of every range, and is not converted, which would take long."""


def whole_number(parameters: dict[str, str], name: str, minimum: int, maximum: int) -> int | None:
    """The parameter's value; None if it is not given. Raises Refusal: not a number, or out of range."""
    text = parameters.get(name)
    if text is None:
        return None
    if not _INTEGER.match(text):
        raise bad_parameter(name, text, "Not a whole number.")
    value = int(text) if len(text) <= _INTEGER_CHARACTERS_MAX else None
    if value is None or not minimum <= value <= maximum:
        raise out_of_range(name, text, minimum, maximum)
    return value


def required(parameters: dict[str, str], name: str) -> str:
    """The parameter's text. Raises Refusal: MissingRequiredQueryParameter."""
    text = parameters.get(name)
    if not text:
        raise missing_parameter(name)
    return text


def check_timeout(parameters: dict[str, str]) -> None:
    """Check that `timeout` is a number of seconds; a value above the service's maximum means the maximum, so any is
    accepted."""
    whole_number(parameters, "timeout", 0, limits.TIMEOUT_SECONDS_MAX)
