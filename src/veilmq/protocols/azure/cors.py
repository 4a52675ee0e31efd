"""What the account's CORS rules say to a web page: preflights, and headers on answers.

Strategy: the first rule whose origin, method and headers all fit decides; none fits: a preflight is refused, and an
actual request is carried out and answered without headers, so that the browser hides it. Source: "Cross-Origin Resource
Sharing (CORS) support for Azure Storage", "Preflight Queue Request".
"""

from veilmq.protocols.azure.errors import CORS_PREFLIGHT_FAILURE, INVALID_HEADER_VALUE, Refusal, bad_header
from veilmq.protocols.azure.properties import CorsRule
from veilmq.protocols.http import Request, Response

Headers = tuple[tuple[bytes, bytes], ...]


def preflight(rules: tuple[CorsRule, ...], request: Request) -> Response:
    """The answer to a preflight. Raises Refusal: CorsPreflightFailure."""
    origin, method, headers = read_preflight(request)
    for rule in rules:
        if _origin_fits(rule, origin) and method in rule.methods and _headers_fit(rule, headers):
            answer = [*_origin_headers(rule, origin), (b"access-control-allow-methods", method.encode())]
            if headers:
                answer.append((b"access-control-allow-headers", ",".join(headers).encode("latin-1")))
            answer.append((b"access-control-max-age", str(rule.max_age_s).encode()))
            return Response(200, None, b"", tuple(answer))
    raise Refusal(CORS_PREFLIGHT_FAILURE)


def read_preflight(request: Request) -> tuple[str, str, tuple[str, ...]]:
    """Origin, method and headers that a preflight asks for. Raises Refusal."""
    values = []
    for name in (b"origin", b"access-control-request-method"):
        value = request.headers.get(name, b"").decode("latin-1")
        if not value:
            extra = {"HeaderName": name.decode().title(), "HeaderValue": ""}
            raise Refusal(INVALID_HEADER_VALUE, extra, message="A required CORS header is not present.")
        if not value.isascii() or not value.isprintable():
            raise bad_header(name.decode().title(), value)
        values.append(value)
    asked = request.headers.get(b"access-control-request-headers", b"").decode("latin-1")
    headers = tuple(part for each in asked.split(",") if (part := each.strip()))
    if not asked.isascii() or not all(header.isprintable() for header in headers):
        raise bad_header("Access-Control-Request-Headers", asked)
    return values[0], values[1], headers


def answer_headers(rules: tuple[CorsRule, ...], origin: str, method: str) -> Headers:
    """What is added to the answer of an actual request; empty if no rule fits."""
    for rule in rules:
        if _origin_fits(rule, origin) and method in rule.methods:
            exposed = ",".join(rule.exposed_headers).encode()
            shown = ((b"access-control-expose-headers", exposed),) if exposed else ()
            return (*_origin_headers(rule, origin), *shown)
    return ((b"vary", b"Origin"),) if rules else ()


def fits(rules: tuple[CorsRule, ...], origin: str, method: str) -> bool:
    """Whether some rule lets the page make that request."""
    return any(_origin_fits(rule, origin) and method in rule.methods for rule in rules)


def _origin_headers(rule: CorsRule, origin: str) -> Headers:
    if "*" in rule.origins:
        return ((b"access-control-allow-origin", b"*"),)
    return (
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-allow-credentials", b"true"),
        (b"vary", b"Origin"),
    )


def _origin_fits(rule: CorsRule, origin: str) -> bool:
    return any(_matches(pattern.lower(), origin.lower()) for pattern in rule.origins)


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
