"""Applies the account's CORS rules: preflights, and headers on responses.

Strategy: origins are compared byte by byte. The first rule whose origin and method match decides, even if its headers
do not match and a later rule's would. If none matches, a preflight is refused; an actual request is carried out and
answered without CORS headers, so that the browser hides the response. Responses that caches may store say whether they
depend on the Origin, even to clients without one. Browsers do not support prefixes of exposed headers, so each matching
response header is listed by name. Source: "Cross-Origin Resource Sharing (CORS) support for Azure Storage", "Preflight
Queue Request".
"""

from typing import Final

import msgspec

from veilmq.protocols import Request, Response
from veilmq.protocols.azure import errors
from veilmq.protocols.azure.errors import Refusal, bad_header

Headers = tuple[tuple[bytes, bytes], ...]
CACHED: Final = frozenset({"GET", "HEAD"})
"""Methods whose responses caches store."""
_ANY: Final = "*"
_VARY: Final = ((b"vary", b"Origin"),)
_ALWAYS: Final = (b"Content-Type", b"Content-Length", b"Date")
"""Headers that the listener adds to every response."""


class CorsRule(msgspec.Struct, frozen=True):
    """What pages of some origins may do."""

    origins: tuple[str, ...]
    methods: tuple[str, ...]
    allowed_headers: tuple[str, ...]
    exposed_headers: tuple[str, ...]
    max_age_s: int


class CorsHeaders(msgspec.Struct, frozen=True):
    """What the rules add to a response."""

    headers: Headers = ()
    exposed: tuple[str, ...] = ()
    """Names of headers that the page may read, and prefixes that end in an asterisk."""

    def beside(self, headers: Headers) -> Headers:
        """The CORS headers to add to a response with these headers."""
        if not self.exposed:
            return self.headers
        prefixes = [name.lower() for name in self.exposed if name.endswith(_ANY)]
        shown = [name.encode() for name in self.exposed if not name.endswith(_ANY)]
        if prefixes:
            names = (*(name for name, _ in headers), *_ALWAYS)
            shown += [name for name in names if any(_header_fits(each, name.decode().lower()) for each in prefixes)]
        if not shown:
            return self.headers
        return (*self.headers, (b"access-control-expose-headers", b",".join(dict.fromkeys(shown))))


NOTHING: Final = CorsHeaders()


def preflight(rules: tuple[CorsRule, ...], request: Request) -> Response:
    """The response to a preflight. Raises Refusal: CorsPreflightFailure."""
    origin, method, headers = read_preflight(request)
    rule = _rule_for(rules, origin, method)
    if rule is None or not _headers_fit(rule, headers):
        raise Refusal(errors.CORS_PREFLIGHT_FAILURE)
    answer = [*_named(origin), (b"access-control-allow-methods", method.encode())]
    if headers:
        answer.append((b"access-control-allow-headers", ",".join(headers).encode("latin-1")))
    answer.append((b"access-control-max-age", str(rule.max_age_s).encode()))
    return Response(200, None, b"", tuple(answer))


def read_preflight(request: Request) -> tuple[str, str, tuple[str, ...]]:
    """Origin, method and headers of a preflight. Raises Refusal."""
    values = []
    for name in (b"origin", b"access-control-request-method"):
        value = request.headers.get(name, b"").decode("latin-1")
        if not value:
            extra = {"HeaderName": name.decode().title(), "HeaderValue": ""}
            raise Refusal(errors.INVALID_HEADER_VALUE, extra, message="A required CORS header is not present.")
        if not value.isascii() or not value.isprintable():
            raise bad_header(name.decode().title(), value)
        values.append(value)
    asked = request.headers.get(b"access-control-request-headers", b"").decode("latin-1")
    headers = tuple(part for each in asked.split(",") if (part := each.strip()))
    if not asked.isascii() or not all(header.isprintable() for header in headers):
        raise bad_header("Access-Control-Request-Headers", asked)
    return values[0], values[1], headers


def headers_for(rules: tuple[CorsRule, ...], origin: str | None, method: str) -> CorsHeaders:
    """What to add to the response of an actual request. origin None: it has no Origin."""
    rule = _rule_for(rules, origin, method)
    varies = _VARY if rules and method in CACHED and not (rule is not None and _ANY in rule.origins) else ()
    if rule is None:
        return CorsHeaders(varies)
    return CorsHeaders((*_origin_headers(rule, origin or _ANY), *varies), rule.exposed_headers)


def fits(rules: tuple[CorsRule, ...], origin: str, method: str) -> bool:
    """Whether a rule allows the page that request."""
    return _rule_for(rules, origin, method) is not None


def _rule_for(rules: tuple[CorsRule, ...], origin: str | None, method: str) -> CorsRule | None:
    """The rule that decides; without an origin, one for every origin."""
    for rule in rules:
        if method in rule.methods and (_ANY in rule.origins if origin is None else _origin_fits(rule, origin)):
            return rule
    return None


def _origin_headers(rule: CorsRule, origin: str) -> Headers:
    if _ANY in rule.origins:
        return ((b"access-control-allow-origin", b"*"),)
    return _named(origin)


def _named(origin: str) -> Headers:
    """A successful preflight returns its own origin, whatever the rule says (Preflight Queue Request)."""
    return (
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-allow-credentials", b"true"),
    )


def _origin_fits(rule: CorsRule, origin: str) -> bool:
    return any(_matches(pattern, origin) for pattern in rule.origins)


def _matches(pattern: str, origin: str) -> bool:
    if pattern in {"*", origin}:
        return True
    before, star, after = pattern.partition("://*.")
    return bool(star) and origin.startswith(f"{before}://") and origin.endswith(f".{after}")


def _headers_fit(rule: CorsRule, headers: tuple[str, ...]) -> bool:
    patterns = [pattern.lower() for pattern in rule.allowed_headers]
    return all(any(_header_fits(pattern, header.lower()) for pattern in patterns) for header in headers)


def _header_fits(pattern: str, header: str) -> bool:
    return header.startswith(pattern[:-1]) if pattern.endswith("*") else header == pattern
