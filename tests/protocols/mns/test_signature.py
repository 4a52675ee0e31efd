"""Signatures V2 and V4 against the published vectors, and every way to be refused (mns.md, section 2)."""

import hmac
from base64 import b64decode, b64encode
from hashlib import md5
from typing import Any
from urllib.parse import quote

import pytest

from veilmq.protocols import Bounded, Keyed
from veilmq.protocols.mns import addresses, signature
from veilmq.protocols.mns.signature import compact, read_date, signature_v4, signing_key_v4
from veilmq.testing.for_each import for_each

KEY_ID, SECRET = "AKIDTESTS", "a secret of the tests"
QUEUE = "/queues/jobs"
MESSAGES = f"{QUEUE}/messages"
JUNE = "Tue, 03 Jun 2025 11:23:48 GMT"
BODY = (
    b'<?xml version="1.0" encoding="utf-8"?><Message xmlns="http://mns.aliyuncs.com/doc/v1/">'
    b"<MessageBody>aGVsbG8=</MessageBody><Priority>8</Priority></Message>"
)
NOVEMBER = "Fri, 20 Nov 2026 10:00:00 GMT"

V2 = [
    ("POST", {"x-mns-abcdef": "abcDEF"}, JUNE, "/queues/TestQueue", "sk1", "cAThPWnbphg3hDe3ZHDADTgkgyE="),
    (
        "GET",
        {"x-mns-abcdef": "KKKkkk"},
        "Wed, 03 Dec 2025 11:23:48 GMT",
        "/queues/TestQueue123456",
        "sk-kkkkkk1111111111",
        "lPxnfNA+Qo/aj18MYJUnRMqa84I=",
    ),
    ("GET", {}, JUNE, "/queues/TestQueue", "testSk", "uDJQXbk2xOhH95MDXmgbAGdtyE4="),
    (
        "POST",
        {"content-type": "application/json"},
        JUNE,
        "/queues/Test Queue@123",
        "testSk",
        "GZ/I9UgZsqvbzfzjd0GmA6VHOx4=",
    ),
    (
        "PUT",
        {
            "content-md5": "574683b3684e3cff610afa155cc2506d",
            "content-type": "text/xml",
            "x-mns-version": "2015-06-06",
        },
        "Tue, 11 Apr 2017 10:09:19 GMT",
        "/",
        "ACCESS_KEY_SECRET",
        "A9zehggaYHHujmuRMxGIDrhWwx8=",
    ),
    (
        "POST",
        {
            "content-md5": "MTAwMDNlMTIyODQ5YzY4NzgzYmUwZWRkZDNlZDUzYzU=",
            "content-type": "text/xml;charset=UTF-8",
            "x-mns-version": "2015-06-06",
        },
        NOVEMBER,
        "/queues/demo/messages",
        "testSecret",
        "LJdsMfo7cjHNynVp1h4T33MesvE=",
    ),
    (
        "PUT",
        {"x-mns-version": "2015-06-06", "x-mns-user-request-id": "r-1"},
        NOVEMBER,
        "/queues/demo/messages?ReceiptHandle=8-AbC_d-e&VisibilityTimeout=30",
        "testSecret",
        "OCpScEkni8+KVMZl4sbyMdGSBHw=",
    ),
]


def octets(headers: dict[str, str]) -> dict[bytes, bytes]:
    return {name.encode(): value.encode() for name, value in headers.items()}


@for_each(("method", "headers", "date", "target", "secret", "expected"), V2)
def test_v2_vectors(method: str, headers: dict[str, str], date: str, target: str, secret: str, expected: str) -> None:
    # Other headers are not signed, whatever they are.
    given = octets(headers | {"host": "h", "user-agent": "u", "security-token": "t"})
    text = signature.string_v2(method.encode(), given, date.encode(), target.encode())
    assert b64encode(hmac.digest(secret.encode(), text, "sha1")).decode() == expected


ODD = [("param1", "abc"), ("PARAM2", "d  ef"), ("PARAM3", "[def]#bbb"), ("PARAM4", "中文参数")]
CUSTOM = {"x-mns-abc": "kkk", "x-mns-sss": "2015-06-06xFFF", "x-kkk-def": "lll"}
USUAL = {
    "x-mns-version": "2015-06-30",
    "x-mns-ttt": "1",
    "x-mns-uuuuu": "FALse",
    "bb-mns-uuuuu": "abcdddDDD",
    "content-type": "application/json",
    "content-md5": "0d9d2ce750000593eb34f00",
}
V4 = [
    ("POST", "/queues/TestQueue/", ODD, {}, "20250603T105235Z", "region1", "sk1",
     "1fc6013f158d4c3aba09570895a2a93c8445c2c5213d82a1463baf602cf0d945"),
    ("PUT", "/queues/TestQueue123456", [], CUSTOM, "20251203T112348Z", "region2", "skkkkkkk1111111111",
     "04f1e5f929b5aaac3af6a54970f591581ecd2aade2562f926c5f2ec5d5c8cfad"),
    ("GET", "/queues", [], USUAL, "20251204T063235Z", "eu-west-1", "skkkkkk2222222222",
     "294f776a2d5726df679b54b081ab8126a199a2545c8c8a7a875adff0b386e458"),
    ("GET", "/", [], {}, "20250603T105235Z", "testRegion", "testSk",
     "63f78964dcd1132bab91b9c38ceebdfb59509149b34874c5b2c9dfc2b12e7291"),
    ("POST", "/queues/Test Queue@123", [], {}, "20250603T105235Z", "testRegion", "testSk",
     "87de7499365a31e767cdc0c726a893c72c860e415876f7f92914197ac3795833"),
    ("POST", "/queues/TestQueue", [("num", "10"), ("paramx", "100"), *ODD], {}, "20250603T105235Z", "region1", "sk1",
     "8d555514e749185d3e6d68df416692e6cc960ba85a089c9d69a2f4d7bb607560"),
    ("POST", "/queues/demo/messages", [], {"content-type": "text/xml;charset=UTF-8", "x-mns-version": "2015-06-06"},
     "20261120T100000Z", "cn-hangzhou", "testSecret",
     "fee96c694c41af204f9546a0467c23ca7fbbea854f289528c56b98be951246a4"),
]  # fmt: skip
V4_PRIVATE = [
    ("POST", "/queues/TestQueue", ODD, {}, "20250603T105235Z", "region1", "sk1",
     "51269315dedfd0f0252cbca05356c85f5005077796a1e8463c54d6716f331389"),
    ("PUT", "/queues/TestQueue123456", [], CUSTOM, "20251203T112348Z", "region2", "skkkkkkk1111111111",
     "5bddaa9d4931254d477cc601836e6c2477bb793c499ac3d17a9493cf98786c51"),
    ("GET", "/queues", [], USUAL, "20251204T063235Z", "eu-west-1", "skkkkkk2222222222",
     "b0f49b3575379975f04f728ba9f6771dfd451c226d16924d42938953396c9e8f"),
]  # fmt: skip


@for_each(
    ("form", "vector"),
    [*((signature.PUBLIC, each) for each in V4), *((signature.PRIVATE, each) for each in V4_PRIVATE)],
)
def test_v4_vectors(form: signature.Form, vector: Any) -> None:
    method, path, pairs, headers, stamp, region, secret, expected = vector
    encoded = "&".join(f"{quote(name)}={quote(value)}" for name, value in pairs)
    raw = "&".join(f"{name}={value}" for name, value in pairs).replace("#", "%23")
    key = signing_key_v4(form, secret.encode(), stamp[:8].encode(), region.encode())
    found = []
    for query in {each for sent in (encoded, raw) for each in signature.queries(sent.encode())}:
        text = signature.request_v4(
            method.encode(), signature.path_v4(path.encode()), query, octets(headers | {"host": "h"})
        )
        found.append(signature_v4(form, key, stamp.encode(), region.encode(), text).decode())
    assert expected in found


def test_a_published_string_of_v4() -> None:
    key = Keyed(b64decode("2HhAzNXcwZJs3dhqkYg7yqkUjS3so+UdhbUR+eKEgtQ="))
    headers = {b"content-type": b"text/xml;charset=UTF-8", b"x-mns-version": b"2015-06-06"}
    text = signature.request_v4(b"PUT", b"/queues/queue-auto-25112417-l0PHHVTHYv", b"", headers)
    assert (
        signature_v4(signature.PUBLIC, key, b"20251124T091359Z", b"eu-west-1", text)
        == b"63ebcf43397e672c47d48ca5d9ef7245e59626da7a3d58d37c75cde993429e98"
    )


def v4(
    wire: Any, method: str, target: str, body: str = "", signed: str | None = None, region: str = "cn-hangzhou",
    **change: str,
) -> Any:  # fmt: skip
    """An answer to a request that is signed with V4, over another target if `signed` names one."""
    form = signature.PRIVATE if change.get("algorithm", "").startswith("APSARA") else signature.PUBLIC
    headers = {"content-type": "text/xml"} if body else {}
    plain = wire.request(method, target, body, headers, without=("authorization",))
    stamp = compact(wire.date().encode())
    path, _, query = (signed or target).partition("?")
    canonical_query = signature.query_v4(
        [
            (name.encode(), value.encode())
            for name, _, value in (part.partition("=") for part in query.split("&") if part)
        ]
    )
    text = signature.request_v4(method.encode(), signature.path_v4(path.encode()), canonical_query, plain.headers)
    key = signing_key_v4(form, change.get("secret", SECRET).encode(), stamp[:8], region.encode())
    signed_text = signature_v4(form, key, stamp, region.encode(), text).decode()
    scope = signature.scope_v4(form, change.get("day", stamp[:8].decode()).encode(), region.encode()).decode()
    value = f"{form.algorithm.decode()} Credential={change.get('key', KEY_ID)}/{scope},Signature={signed_text}"
    plain.headers[b"authorization"] = value.encode()
    return wire.send(plain)


@for_each("algorithm", ["", "APSARA"], fresh="wire")
def test_v4_signs_requests(wire: Any, algorithm: str) -> None:
    assert (
        v4(wire, "POST", MESSAGES, "<Message><MessageBody>x</MessageBody></Message>", algorithm=algorithm).status == 201
    )
    answer = v4(wire, "GET", f"{MESSAGES}?waitseconds=0&numOfMessages=16", algorithm=algorithm)
    assert answer.texts("Message/MessageBody") == ["x"]


def test_v4_takes_what_the_client_signed_before_it_encoded(wire: Any) -> None:
    sent, signed = f"{MESSAGES}?ReceiptHandle=a%2Bb%3D&VisibilityTimeout=30", f"{MESSAGES}?ReceiptHandle=a+b%3D"
    assert v4(wire, "PUT", sent).code == "ReceiptHandleError"
    assert (
        v4(wire, "PUT", sent, signed=f"{MESSAGES}?ReceiptHandle=a+b=&VisibilityTimeout=30").code == "ReceiptHandleError"
    )
    assert v4(wire, "PUT", sent, signed=signed).code == "SignatureDoesNotMatch"


@for_each("second", ["receipthandle%20=good", "%20ReceiptHandle=good", "receipthandle+=good"])
def test_v4_signs_every_parameter(wire: Any, second: str) -> None:
    signed = f"{MESSAGES}?ReceiptHandle=good"
    assert v4(wire, "DELETE", signed).code == "ReceiptHandleError"
    assert v4(wire, "DELETE", f"{MESSAGES}?ReceiptHandle=evil&{second}", signed=signed).code == "SignatureDoesNotMatch"


@for_each(
    ("change", "code"),
    [
        ({"secret": "another"}, "SignatureDoesNotMatch"),
        ({"day": "20200101"}, "SignatureDoesNotMatch"),
        ({"key": "AKIDNOBODY"}, "InvalidAccessKeyId"),
    ],
)
def test_v4_refusals(wire: Any, change: dict[str, str], code: str) -> None:
    assert v4(wire, "GET", QUEUE, **change).code == code


@for_each(
    ("how", "code", "status"),
    [
        ({"without": ("authorization",)}, "MissingAuthorizationHeader", 400),
        ({"headers": {"authorization": "MNS nothing"}}, "InvalidAuthorizationHeader", 400),
        ({"headers": {"authorization": "AWS4-HMAC-SHA256 Credential=a"}}, "InvalidAuthorizationHeader", 400),
        ({"headers": {"authorization": "MNS4-HMAC-SHA256 Credential=a/20261120/r/mns/x,Signature=" + "0" * 64}},
         "InvalidAuthorizationHeader", 400),
        ({"without": ("date",)}, "MissingDateHeader", 400),
        ({"headers": {"date": "yesterday"}}, "InvalidDateHeader", 400),
        ({"headers": {"date": "Fri, 31 Feb 2026 10:00:00 GMT"}}, "InvalidDateHeader", 400),
        ({"without": ("x-mns-version",)}, "MissingVersionHeader", 400),
        ({"headers": {"x-mns-version": "2014-07-08"}}, "InvalidVersionHeader", 400),
        ({"key": "AKIDNOBODY"}, "InvalidAccessKeyId", 403),
        ({"secret": "another"}, "SignatureDoesNotMatch", 403),
        ({"key": "AKIDTOKEN"}, "AccessDenied", 403),
        ({"key": "AKIDTOKEN", "headers": {"security-token": "other"}}, "AccessDenied", 403),
        ({"key": "AKIDTOKEN", "headers": {"x-mns-security-token": "other"}}, "AccessDenied", 403),
        ({"key": "AKIDREADER"}, "AccessDenied", 403),
    ],
)  # fmt: skip
def test_refusals(wire: Any, how: dict[str, Any], code: str, status: int) -> None:
    answer = wire.ask("GET", QUEUE, **how)
    assert (answer.code, answer.status) == (code, status)


@for_each(("shift_s", "code"), [(-899, None), (899, None), (-902, "TimeExpired"), (902, "TimeExpired")])
@for_each("header", ["date", "x-mns-date"])
def test_a_date_may_be_15_minutes_off(wire: Any, header: str, shift_s: int, code: str | None) -> None:
    answer = wire.ask("GET", QUEUE, headers={header: wire.date(shift_s)})
    assert answer.code == code
    assert answer.status == (408 if code else 200)


def test_x_mns_date_replaces_date(wire: Any) -> None:
    assert wire.ask("GET", QUEUE, headers={"x-mns-date": wire.date(), "date": "long ago"}).status == 200
    assert wire.ask("GET", QUEUE, headers={"x-mns-date": wire.date()}, without=("date",)).status == 200


def test_a_proxy_may_strip_the_path_of_the_external_url(wire: Any) -> None:
    outside = f"/mns{QUEUE}"
    signed = wire.request("GET", outside)
    signed.target = QUEUE.encode()
    assert wire.send(signed).code == v4(wire, "GET", QUEUE, signed=outside).code == "SignatureDoesNotMatch"
    wire.configure(external_url="https://queues.example/mns/")
    assert wire.send(signed).status == v4(wire, "GET", QUEUE, signed=outside).status == 200
    assert wire.ask("GET", QUEUE).status == v4(wire, "GET", QUEUE).status == 200
    signed.target = f"{QUEUE}s".encode()
    assert wire.send(signed).code == v4(wire, "GET", f"{QUEUE}s", signed=outside).code == "SignatureDoesNotMatch"


def test_the_signature_covers_the_target_as_sent(wire: Any) -> None:
    request = wire.request("GET", f"{QUEUE}?a=%41")
    request.target = f"{QUEUE}?a=A".encode()
    assert wire.send(request).code == "SignatureDoesNotMatch"
    assert wire.ask("GET", "/queues/%6Aobs").status == 200


def test_a_session_token_is_not_signed_but_compared(wire: Any) -> None:
    request = wire.request("GET", QUEUE, key="AKIDTOKEN")
    request.headers[b"security-token"] = b"sts"
    assert wire.send(request).status == 200


def test_the_android_sdk_signs_the_session_token(wire: Any) -> None:
    assert wire.ask("GET", QUEUE, key="AKIDTOKEN", headers={"x-mns-security-token": "sts"}).status == 200


def test_a_key_that_was_replaced_counts_at_once(wire: Any) -> None:
    import msgspec

    assert wire.ask("GET", QUEUE).status == 200
    wire.ring.keys[KEY_ID] = msgspec.structs.replace(wire.ring.keys[KEY_ID], secret="new")
    assert wire.ask("GET", QUEUE).code == "SignatureDoesNotMatch"
    assert wire.ask("GET", QUEUE, secret="new").status == 200
    del wire.ring.keys[KEY_ID]
    assert wire.ask("GET", QUEUE, secret="new").code == "InvalidAccessKeyId"


def test_accounts_see_their_own_queues(wire: Any) -> None:
    assert wire.ask("GET", QUEUE, key="AKIDOTHER").code == "QueueNotExist"


@for_each(
    "authorization", [None, "MNS anybody:whatever", "MNS 123456789012:x", "MNS4-HMAC-SHA256 Credential=k/1", "nonsense"]
)
def test_development_mode_takes_anybody_as_one_account(wire: Any, authorization: str | None) -> None:
    wire.ring.checks = False
    headers = {} if authorization is None else {"authorization": authorization}
    without = ("authorization", "date", "x-mns-version") if authorization is None else ()
    assert wire.ask("GET", QUEUE, headers=headers, without=without).status == 200


def test_dates() -> None:
    assert read_date(b"Thu, 01 Jan 1970 00:00:01 GMT") == 1_000_000
    assert compact(b"Fri, 20 Nov 2026 10:00:00 GMT") == b"20261120T100000Z"
    for text in (b"", b"20 Nov 2026", b"Fri, 20 Xyz 2026 10:00:00 GMT", b"Fri, 20 Nov 2026 10:00:00 +0100"):
        assert read_date(text) is None


def test_what_is_sent_at_length_is_not_remembered(wire: Any) -> None:
    """64 KiB in each of 4,096 places are 256 MiB."""
    wire.ask("GET", QUEUE)
    known: Any = read_date
    before = (known.__wrapped__.cache_info().currsize, len(addresses._places))
    for number in range(3):
        long = f"{number}{'x' * 1_000}"
        assert wire.ask("GET", f"/queues/{long}").code == "QueueNameLengthError"
        assert wire.ask("GET", QUEUE, headers={"date": long}).code == "InvalidDateHeader"
    assert (known.__wrapped__.cache_info().currsize, len(addresses._places)) == before


@for_each("form", ["hex", "raw", "bare", "bad", "badraw"])
def test_content_md5_in_every_encoding(wire: Any, form: str) -> None:
    digest = md5(BODY, usedforsecurity=False)
    value = {
        "hex": b64encode(digest.hexdigest().encode()),
        "raw": b64encode(digest.digest()),
        "bare": digest.hexdigest().encode(),
        "bad": b64encode(b"0" * 32),
        "badraw": b64encode(b"0" * 16),
    }[form]
    answer = wire.ask("POST", MESSAGES, BODY, {"content-md5": value.decode()})
    assert answer.code == ("InvalidDegist" if form.startswith("bad") else None)


def test_a_checksum_of_no_body_is_checked_too(wire: Any) -> None:
    value = b64encode(md5(b"", usedforsecurity=False).hexdigest().encode()).decode()
    headers = {"content-md5": value, "content-type": "application/xml"}
    assert wire.ask("GET", QUEUE, headers=headers).status == 200
    assert wire.ask("GET", QUEUE, headers=headers | {"content-md5": "x"}).code == "InvalidDegist"


def test_no_content_type_is_refused(wire: Any) -> None:
    for kind in ("", "application/xml", "text/xml", "image/png"):
        assert wire.ask("POST", MESSAGES, BODY, {"content-type": kind}).status == 201
    assert wire.ask("POST", MESSAGES, BODY, without=("content-type",)).status == 201


def test_what_a_verifier_remembers_has_bounds(wire: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signature, "_CALLERS_MAX", 4)
    monkeypatch.setattr(signature, "_SCHEMES_MAX", 3)
    monkeypatch.setattr(addresses, "_places", Bounded(5))
    for checks in (True, False):
        wire.ring.checks = checks
        wire.configure()
        verifier, sizes = wire.codec._verifier, []
        for number in range(12):
            key = KEY_ID if checks else f"AK{number}"
            agent = {"user-agent": f"client-{number}"}
            wire.ask("GET", f"/queues/missing-{number}", headers=agent, key=key)
            if checks:
                v4(wire, "GET", QUEUE, region=f"region-{number}")
            schemes = list(verifier._schemes.values())
            kept = (max(len(each.callers) for each in schemes), max(len(each.signing_keys) for each in schemes))
            sizes.append((len(schemes), *kept, len(addresses._places)))
        most = tuple(map(max, zip(*sizes, strict=True)))
        assert most == ((1, 4, 4, 5) if checks else (3, 1, 0, 5))
