"""Signatures that botocore makes are right; every change to a signed request is not.

The wall clock that the codec is given is moved, never the signer's.
"""

import calendar
import email.utils
import hashlib
import hmac
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import botocore.awsrequest
import msgspec
import pytest
from botocore.auth import SigV4Auth, SigV4QueryAuth
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from veilmq.model.commands import DescribeQueue, Send
from veilmq.model.errors import QueueMissing
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.settings.access import EVERYTHING, AccessKey
from veilmq.protocols import Request, Response
from veilmq.protocols.sqs import auth, limits
from veilmq.protocols.sqs.auth.signature_parts import canonical_path
from veilmq.protocols.sqs.auth.signature_parts import stamp_of as signed_at
from veilmq.protocols.sqs.codec import Call, Codec, Endpoint
from veilmq.testing.for_each import for_each

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
KEY = AccessKey("AKIDEXAMPLE", SECRET, "111122223333", grants=EVERYTHING)
TEMPORARY = AccessKey("ASIATEMPORARY", SECRET, "111122223333", EVERYTHING, session_token="tok+/=en" * 9)
OTHER = AccessKey("AKIDOTHER", "another secret", "444455556666", home_region="eu-west-1", grants=EVERYTHING)
HOST = "127.0.0.1:9324"
URL = f"http://{HOST}/111122223333/jobs"
BODY = b'{"QueueUrl":"%s","MessageBody":"hello"}' % URL.encode()
FORM = b"Action=SendMessage&Version=2012-11-05&MessageBody=hello+there"
JSON_HEADERS = {"Content-Type": "application/x-amz-json-1.0", "X-Amz-Target": "AmazonSQS.SendMessage"}


class Ring:
    """Some keys, changeable."""

    checks = True

    def __init__(self, *keys: AccessKey) -> None:
        self.keys = {key.id: key for key in keys}

    def find(self, key_id: str) -> AccessKey | None:
        return self.keys.get(key_id)


@pytest.fixture
def ring() -> Ring:
    return Ring(KEY, TEMPORARY, OTHER)


@pytest.fixture
def codec(ring: Ring) -> Codec:
    return Codec(ring, Endpoint())


def as_request(signed: Any) -> Request:
    """The request as it would be on the wire."""
    prepared = signed.prepare()
    target = prepared.url.partition(HOST)[2]
    headers = {name.lower().encode(): str(value).encode() for name, value in prepared.headers.items()}
    headers.setdefault(b"host", HOST.encode())
    return Request(
        prepared.method, (target or "/").encode(), headers, prepared.body or b"", "127.0.0.1", False, "0" * 36
    )


def sign(
    key: AccessKey = KEY,
    method: str = "POST",
    path: str = "/",
    headers: dict[str, str] | None = None,
    body: bytes = BODY,
    service: str = "sqs",
    region: str = "us-east-1",
    auth: Callable[..., Any] = SigV4Auth,
    **more: Any,
) -> Request:
    """A request that botocore signed: in the header, or in the query string with `auth=SigV4QueryAuth`."""
    headers = dict(JSON_HEADERS if headers is None else headers)
    request = botocore.awsrequest.AWSRequest(method, f"http://{HOST}{path}", headers, body)
    auth(Credentials(key.id, key.secret, key.session_token), service, region, **more).add_auth(request)
    return as_request(request)


def presigned(
    key: AccessKey = KEY, expires: int = 300, query: str = "Action=SendMessage&MessageBody=a%20b%2B%2F~", **more: Any
) -> Request:
    """A GET on the queue URL that carries its signature in the query string."""
    path = f"/111122223333/jobs?{query}"
    return sign(key, "GET", path, {}, b"", auth=SigV4QueryAuth, expires=expires, **more)


def stamp_of(request: Request) -> int:
    """When it was signed, in seconds since 1970."""
    text = request.headers.get(b"x-amz-date", b"").decode()
    text = text or parse_qs(request.query.decode())["X-Amz-Date"][0]
    return calendar.timegm(time.strptime(text, "%Y%m%dT%H%M%SZ"))


def decode(codec: Codec, request: Request, later_s: float = 0.0) -> Call | Response:
    """What the codec makes of it `later_s` after it was signed."""
    return codec.decode(request, Instant(int((stamp_of(request) + later_s) * SECOND_US)), Instant(0))


def code_of(answer: Call | Response) -> str:
    """`ok`, or the error's code in the Query form."""
    if isinstance(answer, Call):
        return "ok"
    for name, value in answer.headers:
        if name == b"x-amzn-query-error":
            return value.decode().partition(";")[0]
    return answer.body.decode().partition("<Code>")[2].partition("</Code>")[0]


SIGNED = {
    "json": sign,
    "form": lambda: sign(
        path="/111122223333/jobs",
        headers={"Content-Type": "application/x-www-form-urlencoded; charset=utf-8"},
        body=FORM,
    ),
    "get": lambda: sign(
        method="GET", path="/111122223333/jobs?Action=SendMessage&MessageBody=a%20b%2F~", headers={}, body=b""
    ),
    "presigned": presigned,
    "temporary": lambda: sign(TEMPORARY),
    "temporary presigned": lambda: presigned(TEMPORARY),
}


@for_each("kind", SIGNED)
def test_a_right_signature_passes_twice(codec: Codec, kind: str) -> None:
    request = SIGNED[kind]()
    for _ in range(2):
        call = decode(codec, request)
        assert isinstance(call, Call), call
        assert call.key is (TEMPORARY if "temporary" in kind else KEY)
        (command,) = call.commands
        assert isinstance(command, Send)
        assert command.queue.account == "111122223333"


def changed(request: Request, **values: Any) -> Request:
    """A copy with other fields."""
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return Request(**{**fields, **values})


def with_header(request: Request, name: bytes, value: bytes) -> Request:
    """A copy with another header."""
    return changed(request, headers={**request.headers, name: value})


MUTATIONS: dict[str, Callable[[Request], Request]] = {
    "body": lambda request: changed(request, body=request.body + b" "),
    "method": lambda request: changed(request, method="GET"),
    "path": lambda request: changed(request, target=b"/x"),
    "query": lambda request: changed(request, target=request.target + b"?a=b"),
    "host": lambda request: with_header(request, b"host", b"127.0.0.1:9325"),
    "target": lambda request: with_header(request, b"x-amz-target", b"AmazonSQS.DeleteQueue"),
    "type": lambda request: with_header(request, b"content-type", b"application/x-amz-json-1.1"),
    "later": lambda request: with_header(request, b"x-amz-date", _next_second(request.headers[b"x-amz-date"])),
    "signature": lambda request: _authorization(
        request, lambda text: text[:-1] + (b"0" if text[-1:] != b"0" else b"1")
    ),
    "upper case": lambda request: _authorization(request, lambda text: text[:-64] + text[-64:].upper()),
    "key": lambda request: _authorization(request, lambda text: text.replace(b"AKIDEXAMPLE", b"AKIDOTHER")),
    "region": lambda request: _authorization(request, lambda text: text.replace(b"us-east-1", b"us-east-2")),
    "hash of nothing": lambda request: with_header(request, b"x-amz-content-sha256", b"UNSIGNED-PAYLOAD"),
    "unsigned header": lambda request: with_header(request, b"x-amz-security", b"1"),
    "no signed header": lambda request: changed(
        request, headers={name: value for name, value in request.headers.items() if name != b"content-type"}
    ),
}


def _next_second(stamp: bytes) -> bytes:
    return stamp[:-3] + (b"00Z" if stamp[-3:-1] == b"59" else b"%02dZ" % (int(stamp[-3:-1]) + 1))


def _authorization(request: Request, change: Callable[[bytes], bytes]) -> Request:
    return with_header(request, b"authorization", change(request.headers[b"authorization"]))


@for_each("warm", [False, True], ids=["first", "after a right one"])
@for_each("mutation", MUTATIONS)
def test_every_change_is_seen(codec: Codec, mutation: str, warm: bool) -> None:
    request = sign()
    if warm:
        assert isinstance(decode(codec, request), Call)
    answer = decode(codec, MUTATIONS[mutation](request))
    assert isinstance(answer, Response)
    assert (code_of(answer), answer.status) == ("SignatureDoesNotMatch", 403)
    assert isinstance(decode(codec, request), Call)


@given(data=st.data())
def test_no_bit_of_a_signed_request_may_flip(data: st.DataObject) -> None:
    request = sign()
    codec = Codec(Ring(KEY), Endpoint())
    place = data.draw(st.sampled_from(["body", "authorization", "x-amz-date", "x-amz-target", "host"]))
    original = request.body if place == "body" else request.headers[place.encode()]
    index = data.draw(st.integers(0, len(original) - 1))
    flipped = bytearray(original)
    flipped[index] ^= 1 << data.draw(st.integers(0, 6))
    mutated = bytes(flipped)
    if place == "authorization" and mutated.replace(b" ", b"") == original.replace(b" ", b""):
        return
    wrong = changed(request, body=mutated) if place == "body" else with_header(request, place.encode(), mutated)
    wall = Instant(stamp_of(request) * SECOND_US)
    answer = codec.decode(wrong, wall, Instant(0))
    assert isinstance(answer, Response)
    assert 400 <= answer.status < 500
    assert isinstance(codec.decode(request, wall, Instant(0)), Call)


@for_each(
    "change",
    [
        lambda query: query.replace(b"MessageBody=a", b"MessageBody=b"),
        lambda query: query + b"&DelaySeconds=0",
        lambda query: query.replace(b"X-Amz-Expires=300", b"X-Amz-Expires=301"),
        lambda query: query.replace(b"Action=SendMessage&", b""),
    ],
)
def test_every_change_to_a_presigned_url_is_seen(codec: Codec, change: Callable[[bytes], bytes]) -> None:
    request = presigned()
    mutated = changed(request, target=change(request.target))
    assert mutated.target != request.target
    answer = codec.decode(mutated, Instant(stamp_of(request) * SECOND_US), Instant(0))
    assert code_of(answer) == "SignatureDoesNotMatch"


def test_a_presigned_url_with_a_body_is_not_the_one_that_was_signed(codec: Codec) -> None:
    request = presigned()
    assert code_of(decode(codec, changed(request, body=b"DelaySeconds=9"))) == "SignatureDoesNotMatch"


@for_each(
    ("later_s", "code"),
    [
        (-900.5, "SignatureDoesNotMatch"),
        (-900, "ok"),
        (-899, "ok"),
        (0, "ok"),
        (899, "ok"),
        (900, "ok"),
        (900.5, "SignatureDoesNotMatch"),
        (1e6, "SignatureDoesNotMatch"),
    ],
)
@for_each("warm", [False, True], ids=["first", "after a right one"])
def test_a_signature_is_good_for_15_minutes_either_way(codec: Codec, later_s: float, code: str, warm: bool) -> None:
    request = sign()
    if warm:
        assert isinstance(decode(codec, request), Call)
    assert code_of(decode(codec, request, later_s)) == code


@for_each(
    ("later_s", "code"),
    [
        (-901, "SignatureDoesNotMatch"),
        (-900, "ok"),
        (-899, "ok"),
        (299, "ok"),
        (300, "ok"),
        (300.5, "RequestExpired"),
    ],
)
def test_a_presigned_url_is_good_as_long_as_it_says(codec: Codec, later_s: float, code: str) -> None:
    assert code_of(decode(codec, presigned(expires=300), later_s)) == code


@for_each(
    ("expires", "code"),
    [
        (-1, "IncompleteSignature"),
        (0, "IncompleteSignature"),
        (1, "ok"),
        (2, "ok"),
        (604_799, "ok"),
        (604_800, "ok"),
        (604_801, "IncompleteSignature"),
    ],
)
def test_a_presigned_url_cannot_be_good_for_ever(codec: Codec, expires: int, code: str) -> None:
    assert code_of(decode(codec, presigned(expires=expires))) == code


@for_each("step", [-1, 0, 1])
def test_a_presigned_url_has_so_many_parameters(codec: Codec, step: int) -> None:
    lacking = limits.FORM_PAIRS_MAX + step - (presigned().query.count(b"&") + 1)
    more = "".join(f"&x{number}=y" for number in range(lacking))
    request = presigned(query=f"Action=SendMessage&MessageBody=a%20b%2B%2F~{more}")
    assert request.query.count(b"&") + 1 == limits.FORM_PAIRS_MAX + step
    assert code_of(decode(codec, request)) == ("ok" if step <= 0 else "MalformedQueryString")


@for_each(
    ("characters", "code"),
    [(0, "SignatureDoesNotMatch"), (1, "ok"), (2, "ok"), (63, "ok"), (64, "ok"), (65, "SignatureDoesNotMatch")],
)
@for_each("make", [sign, presigned])
def test_a_regions_name_has_so_many_characters(
    codec: Codec, make: Callable[..., Request], characters: int, code: str
) -> None:
    assert code_of(decode(codec, make(region="r" * characters))) == code


UNKNOWN = AccessKey("AKIDNOBODY", SECRET, "111122223333")


@pytest.mark.parametrize("make", [sign, presigned])
def test_an_unknown_key_is_told_so(codec: Codec, make: Callable[[AccessKey], Request]) -> None:
    answer = decode(codec, make(UNKNOWN))
    assert isinstance(answer, Response)
    assert (code_of(answer), answer.status) == ("InvalidClientTokenId", 403)


@pytest.mark.parametrize("make", [sign, presigned])
def test_temporary_credentials_need_their_token(codec: Codec, make: Callable[[AccessKey], Request]) -> None:
    assert code_of(decode(codec, make(TEMPORARY))) == "ok"
    for token in (None, "tok+/=en" * 8):
        answer = decode(codec, make(with_values(TEMPORARY, session_token=token)))
        assert code_of(answer) == "InvalidClientTokenId"
    assert code_of(decode(codec, make(with_values(KEY, session_token="made up")))) == "InvalidClientTokenId"


def with_values(key: AccessKey, **values: Any) -> AccessKey:
    """A copy with other fields."""
    return msgspec.structs.replace(key, **values)


def test_the_region_of_the_scope_is_the_queues(codec: Codec) -> None:
    for region in ("us-east-1", "eu-central-1"):
        call = decode(codec, sign(region=region))
        assert isinstance(call, Call)
        assert call.commands[0].queue.region == region


@for_each("service", ["sns", "SQS", "s3"])
def test_a_signature_for_another_service_is_refused(codec: Codec, service: str) -> None:
    assert code_of(decode(codec, sign(service=service))) == "SignatureDoesNotMatch"


def raw_sign(
    names: list[str],
    headers: dict[str, str],
    payload: str | None = None,
    scope_day: str | None = None,
    term: str = "aws4_request",
) -> Request:
    """By hand, to do what botocore does not. Values are canonical already."""
    stamp = headers["x-amz-date"]
    scope = f"{scope_day or stamp[:8]}/us-east-1/sqs/{term}"
    lines = "".join(f"{name}:{' '.join(headers[name].split())}\n" for name in names)
    payload = payload or hashlib.sha256(BODY).hexdigest()
    canonical = f"POST\n/\n\n{lines}\n{';'.join(names)}\n{payload}"
    key = b"AWS4" + SECRET.encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    authorization = (
        f"AWS4-HMAC-SHA256 Credential={KEY.id}/{scope}, SignedHeaders={';'.join(names)}, Signature={signature}"
    )
    raw = {name.encode(): value.encode() for name, value in headers.items()}
    return Request("POST", b"/", {**raw, b"authorization": authorization.encode()}, BODY, "::1", False, "0" * 36)


PLAIN = {"host": HOST, "x-amz-date": "20260131T120000Z", "x-amz-target": "AmazonSQS.SendMessage"}
NAMES = ["host", "x-amz-date", "x-amz-target"]


def test_the_hand_signer_signs_right(codec: Codec) -> None:
    assert code_of(decode(codec, raw_sign(NAMES, PLAIN))) == "ok"


@for_each(
    ("names", "more"),
    [
        (["x-amz-date", "x-amz-target"], {}),
        (["host", "x-amz-target"], {}),
        (["host", "x-amz-date"], {}),
        (NAMES, {"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}),
        (["host", "x-amz-target", "x-amz-date"], {}),
        (["host", "host", "x-amz-date", "x-amz-target"], {}),
        (["host", "x%d", "x-amz-date", "x-amz-target"], {"x%d": "1"}),
    ],
)
def test_host_and_amazons_headers_must_be_signed(codec: Codec, names: list[str], more: dict[str, str]) -> None:
    for _ in range(2):
        assert code_of(decode(codec, raw_sign(names, PLAIN | more))) == "SignatureDoesNotMatch"


def test_an_unsigned_payload_is_not_taken(codec: Codec) -> None:
    headers = {**PLAIN, "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
    names = ["host", "x-amz-content-sha256", "x-amz-date", "x-amz-target"]
    assert code_of(decode(codec, raw_sign(names, headers, payload="UNSIGNED-PAYLOAD"))) == "SignatureDoesNotMatch"
    digest = hashlib.sha256(BODY).hexdigest()
    assert code_of(decode(codec, raw_sign(names, PLAIN | {"x-amz-content-sha256": digest}))) == "ok"


def test_an_unsigned_amz_header_is_refused_after_requests_without_it(codec: Codec) -> None:
    request = raw_sign(NAMES, PLAIN)
    assert code_of(decode(codec, request)) == "ok"
    assert code_of(decode(codec, with_header(request, b"x-amz-meta", b"1"))) == "SignatureDoesNotMatch"
    assert code_of(decode(codec, with_header(request, b"x-amzn-trace-id", b"Root=1"))) == "ok"


def test_blanks_within_values_are_normalised(codec: Codec) -> None:
    headers = {**PLAIN, "content-type": "application/x-amz-json-1.0;   charset=utf-8"}
    assert code_of(decode(codec, raw_sign(["content-type", *NAMES], headers))) == "ok"


def test_repeated_headers_are_joined_as_the_specification_has_it(codec: Codec) -> None:
    signed = raw_sign(["accept", *NAMES], {**PLAIN, "accept": "a,b"})
    joined = changed(with_header(signed, b"accept", b"a, b"), duplicates=frozenset({b"accept"}))
    assert code_of(decode(codec, joined)) == "ok"


@pytest.mark.parametrize("more", [{"scope_day": "20260130"}, {"term": "aws4"}])
def test_a_scope_must_be_right_in_all_parts(codec: Codec, more: dict[str, str]) -> None:
    assert code_of(decode(codec, raw_sign(NAMES, PLAIN, **more))) == "SignatureDoesNotMatch"


def test_yesterdays_scope_is_refused_with_a_right_signature_before_it(codec: Codec) -> None:
    request = raw_sign(NAMES, {**PLAIN, "x-amz-date": "20260131T235959Z"})
    assert code_of(decode(codec, request)) == "ok"
    # With yesterday's key, over today's date: right but for the day.
    late = raw_sign(NAMES, {**PLAIN, "x-amz-date": "20260201T000000Z"}, scope_day="20260131")
    assert late.headers[b"authorization"][:-64] == request.headers[b"authorization"][:-64]
    assert code_of(decode(codec, late)) == "SignatureDoesNotMatch"


@for_each(
    ("authorization", "code"),
    [
        (None, "AccessDenied"),
        (b"", "IncompleteSignature"),
        (b"Basic YTpi", "IncompleteSignature"),
        (b"hush", "IncompleteSignature"),
        (b"AKID:hush x", "IncompleteSignature"),
        (b"AWS AKID:c2lnbmF0dXJl", "InvalidSecurity"),
        (b"AWS4-HMAC-SHA256", "IncompleteSignature"),
        (b"AWS4-HMAC-SHA256 Credential=a/b/c/d/e", "IncompleteSignature"),
        (b"AWS4-HMAC-SHA256 Credential=a, SignedHeaders=host, Signature=00", "IncompleteSignature"),
        (b"AWS4-HMAC-SHA256 Credential=a, Credential=a, SignedHeaders=host, Signature=00", "IncompleteSignature"),
        (b"AWS4-HMAC-SHA256 Credential=\xff/1/2/3/4, SignedHeaders=\xfe, Signature=\xfd", "SignatureDoesNotMatch"),
        (
            b"AWS4-HMAC-SHA256 Credential=a/20260131/us-east-1/sqs/aws4_request, SignedHeaders=host;%b, Signature=0",
            "SignatureDoesNotMatch",
        ),
        (b"AWS4-ECDSA-P256-SHA256 Credential=a/b/c/d/e, SignedHeaders=host, Signature=00", "IncompleteSignature"),
    ],
)
def test_what_is_no_signature_is_told_apart(codec: Codec, authorization: bytes | None, code: str) -> None:
    headers = {name.encode(): value.encode() for name, value in PLAIN.items()}
    if authorization is not None:
        headers[b"authorization"] = authorization
    request = Request("POST", b"/", headers, BODY, "::1", False, "0" * 36)
    answer = decode(codec, request)
    assert code_of(answer) == code
    if authorization is None:
        long = decode(codec, changed(request, target=b"/" + b"q" * 1_000))
        assert isinstance(long, Response)
        shown = f"http://{PLAIN['host']}/{'q' * 1_000}"[:256]
        assert f"Access to the resource {shown}... is denied." in long.body.decode()
    assert isinstance(answer, Response)
    assert b"hush" not in answer.body


@for_each("stamp", [b"", b"2026", b"20260131120000", b"20261331T000000Z", b"20260131T250000Z", b"\xff" * 16])
def test_a_date_must_be_one(codec: Codec, stamp: bytes) -> None:
    request = with_header(raw_sign(NAMES, PLAIN), b"x-amz-date", stamp)
    assert code_of(codec.decode(request, Instant(1_769_860_800 * SECOND_US), Instant(0))) == "IncompleteSignature"


def test_the_http_date_serves_where_amazons_is_missing(codec: Codec) -> None:
    # botocore signs by the Date header if a request has one.
    request = sign(headers={**JSON_HEADERS, "Date": "Sat, 31 Jan 2026 12:00:00 GMT"})
    assert b"x-amz-date" not in request.headers
    moment = email.utils.parsedate_to_datetime(request.headers[b"date"].decode())
    wall = Instant(int(moment.timestamp()) * SECOND_US)
    assert code_of(codec.decode(request, wall, Instant(0))) == "ok"
    assert code_of(codec.decode(request, Instant(wall + 901 * SECOND_US), Instant(0))) == "SignatureDoesNotMatch"
    for date in (b"Sat, 31 Jan 2026 12:00:00 -0000", b"Sat, 31 Jan 2026 14:00:00 +0200", b"30 Jan 2026 22:00:00 -1400"):
        assert signed_at({b"date": date}) == b"20260131T120000Z"


def test_a_key_that_was_taken_away_is_unknown_at_once(ring: Ring, codec: Codec) -> None:
    request = sign()
    assert code_of(decode(codec, request)) == "ok"
    del ring.keys[KEY.id]
    assert code_of(decode(codec, request)) == "InvalidClientTokenId"
    ring.keys[KEY.id] = with_values(KEY, secret="new secret")
    assert code_of(decode(codec, request)) == "SignatureDoesNotMatch"
    ring.keys[KEY.id] = with_values(KEY, account="777788889999")
    assert code_of(foreign(codec, request)) == "AccessDenied"


def foreign(codec: Codec, request: Request) -> Response:
    """The answer to a request for another account's queue, of which there is none."""
    call = decode(codec, request)
    assert isinstance(call, Call)
    assert [type(command) for command in call.commands] == [DescribeQueue]
    answer = codec.encode(call, [QueueMissing(queue="jobs")])
    assert isinstance(answer, Response)
    return answer


def test_another_accounts_queue_is_denied(codec: Codec) -> None:
    answer = foreign(codec, sign(OTHER))
    assert (code_of(answer), answer.status) == ("AccessDenied", 403)


def test_the_host_may_name_the_region(ring: Ring) -> None:
    codec = Codec(ring, Endpoint(base_domain="queues.test"))
    inside = {**PLAIN, "host": "sqs.us-east-1.queues.test:9324"}
    assert code_of(decode(codec, raw_sign(NAMES, inside))) == "ok"
    other = {**PLAIN, "host": "sqs.eu-west-1.queues.test:9324"}
    assert code_of(decode(codec, raw_sign(NAMES, other))) == "SignatureDoesNotMatch"
    shouted = {**PLAIN, "host": "SQS.EU-WEST-1.Queues.Test"}
    assert code_of(decode(codec, raw_sign(NAMES, shouted))) == "SignatureDoesNotMatch"
    for host in ("eu-west-1.queues.test", "sqs.eu-west-1.another.tst", "sqs.eu_west_1.queues.test"):
        assert code_of(decode(codec, raw_sign(NAMES, {**PLAIN, "host": host}))) == "ok", host


def test_a_signed_host_is_the_one_that_decides(ring: Ring) -> None:
    codec = Codec(ring, Endpoint(base_domain="queues.test"))
    request = raw_sign(NAMES, {**PLAIN, "host": "sqs.us-east-1.queues.test"})
    for authority, code in (
        (b"SQS.us-east-1.queues.test", "ok"),
        (b"sqs.eu-west-1.queues.test", "SignatureDoesNotMatch"),
        (b"queues.test", "SignatureDoesNotMatch"),
    ):
        assert code_of(decode(codec, msgspec.structs.replace(request, authority=authority))) == code


@for_each("path", ["/sqs", "/sqs/", "/sqs/111122223333/jobs"])
@for_each("auth", [SigV4Auth, SigV4QueryAuth])
def test_a_proxy_may_strip_the_path_of_the_external_url(ring: Ring, path: str, auth: Any) -> None:
    behind, plain = Codec(ring, Endpoint(external_url="https://queues.test/sqs/")), Codec(ring, Endpoint())
    if auth is SigV4Auth:
        signed = sign(path=path)
    else:
        action = "ListQueues" if len(path) < 6 else "ReceiveMessage"
        signed = sign(method="GET", path=f"{path}?Action={action}", headers={}, body=b"", auth=auth, expires=60)
    assert code_of(decode(plain, signed)) == code_of(decode(behind, signed)) == "ok"  # it was left where it was
    stripped = msgspec.structs.replace(signed, target=b"/" + signed.target[4:].lstrip(b"/"))
    assert code_of(decode(plain, stripped)) == "SignatureDoesNotMatch"
    for _ in range(2):
        assert code_of(decode(behind, stripped)) == "ok"
    for prefix in (b"/other", b"/sqs/sqs"):
        wrong = msgspec.structs.replace(signed, target=prefix + signed.target[4:])
        assert code_of(decode(behind, wrong)) == "SignatureDoesNotMatch"
    changed = msgspec.structs.replace(stripped, body=stripped.body + b" ")
    assert code_of(decode(behind, changed)) == "SignatureDoesNotMatch"


def test_a_stripped_path_and_blanks_in_a_header_may_come_together(ring: Ring) -> None:
    codec = Codec(ring, Endpoint(external_url="https://queues.test/sqs"))
    signed = sign(path="/sqs/", headers={**JSON_HEADERS, "X-Amz-Note": "a  b"})
    assert code_of(decode(codec, msgspec.structs.replace(signed, target=b"/"))) == "ok"


def test_a_key_that_is_unknown_is_told_no_more_behind_a_proxy(ring: Ring) -> None:
    codec = Codec(ring, Endpoint(external_url="https://queues.test/sqs"))
    stranger = AccessKey("AKIDSTRANGER", SECRET, "111122223333")
    assert code_of(decode(codec, sign(stranger, path="/sqs/"))) == "InvalidClientTokenId"


def test_a_long_user_agent_is_cut(codec: Codec) -> None:
    request = with_header(sign(), b"user-agent", b"x" * 300)
    call = decode(codec, request)
    assert isinstance(call, Call)
    assert call.commands[0].origin.client == "x" * 256


def test_what_is_remembered_of_one_key_does_not_grow_with_its_ways_to_sign(codec: Codec) -> None:
    for number in range(3):
        url = f"http://{number}.example/111122223333/jobs".encode()
        request = sign(headers={**JSON_HEADERS, f"X-Amz-{number}": ""}, body=BODY.replace(URL.encode(), url))
        assert code_of(decode(codec, request)) == "ok"
        assert code_of(decode(codec, with_header(request, b"x" * 3_000, b""))) == "ok"
    schemes = list(codec._verifier._schemes.values())
    assert [len(scheme.shapes) for scheme in schemes] == [1, 1, 1]
    assert {id(scheme.queues) for scheme in schemes} == {id(schemes[0].queues)}
    assert len(schemes[0].queues) == 3
    for number in range(300):
        assert code_of(decode(codec, sign(region=f"eu-west-{number}"))) == "ok"
    rooms = {id(scheme.queues): scheme.queues._entries_max for scheme in codec._verifier._schemes.values()}
    assert sum(rooms.values()) < 300_000


class Later(SigV4Auth):
    """Signs some seconds later than now."""

    seconds = 0

    def _modify_request_before_signing(self, request: Any) -> None:
        stamp = calendar.timegm(time.strptime(request.context["timestamp"], "%Y%m%dT%H%M%SZ")) + self.seconds
        request.context["timestamp"] = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(stamp))
        super()._modify_request_before_signing(request)


def test_what_a_verifier_remembers_has_bounds(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = {"_SCHEMES_MAX": 5, "_SIGNING_KEYS_MAX": 4, "_STAMPS_MAX": 3, "_QUEUES_MAX": 6, "_CALLERS_MAX": 7}
    bounds |= {"_PLACES_MAX": 2, "_SHAPES_MAX": 3}
    for name, bound in bounds.items():
        monkeypatch.setattr(auth, name, bound)
    codec = Codec(ring, Endpoint())
    verifier = codec._verifier
    seen: dict[str, set[int]] = {name: set() for name in bounds}

    def send(request: Request) -> None:
        for _ in range(2):  # the first one makes the scheme known
            assert code_of(decode(codec, request)) == "ok"
        schemes = list(verifier._schemes.values())
        seen["_SCHEMES_MAX"].add(len(schemes))
        seen["_SIGNING_KEYS_MAX"].add(len(verifier._signing_keys))
        seen["_STAMPS_MAX"].add(len(verifier._stamps))
        seen["_PLACES_MAX"].add(len(verifier._queues))
        seen["_QUEUES_MAX"].add(max(len(each.queues) for each in schemes))
        seen["_CALLERS_MAX"].add(max(len(each.callers) for each in schemes))
        seen["_SHAPES_MAX"].add(max(len(each.shapes) for each in schemes))

    for number in range(20):
        monkeypatch.setattr(Later, "seconds", number)
        request = sign(body=BODY.replace(b"/jobs", b"/jobs-%d" % number), auth=Later)
        send(with_header(with_header(request, b"user-agent", b"client-%d" % number), b"x-%d" % number, b""))
    for number in range(20):
        send(sign(region=f"eu-west-{number}"))
        send(sign(headers=JSON_HEADERS | {f"X-Amz-{number}": ""}))
    assert {name: max(sizes) for name, sizes in seen.items()} == bounds


def test_secrets_stay_out_of_reprs(codec: Codec) -> None:
    call = decode(codec, sign(TEMPORARY))
    assert isinstance(call, Call)
    assert SECRET not in repr(call.key)


@given(st.lists(st.sampled_from(["a", "b.c", "..", ".", "", "%20", "~x"]), max_size=6), st.booleans())
def test_paths_are_made_canonical_as_botocore_does(segments: list[str], slash: bool) -> None:
    path = "/" + "/".join(segments) + ("/" if slash else "")
    if path.startswith("//"):  # an absolute URL would have no such path
        return
    request = botocore.awsrequest.AWSRequest("GET", f"http://{HOST}{path}", {}, b"")
    wanted = SigV4Auth(Credentials("a", "b"), "sqs", "us-east-1")._normalize_url_path(path)
    assert request.url.endswith(path)
    assert canonical_path(path.encode()).decode() == wanted
