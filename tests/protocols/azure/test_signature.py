"""SharedKey and SharedKeyLite: both keys, every order of headers, fresh dates, and nothing else."""

import base64
from typing import Any
from urllib.parse import quote

from veilmq.model.settings.access import NamedAccount
from veilmq.protocols.azure import addresses, call, fields
from veilmq.testing.for_each import for_each

SECOND_SECRET = b"the second key of the account"
LIST = "/?comp=list&prefix=a%20b%2Bc&include=metadata&timeout=30"


@for_each("auth", ["SharedKey", "SharedKeyLite"])
@for_each("path_style", [True, False])
def test_a_right_signature(wire: Any, auth: str, path_style: bool) -> None:
    for secret in (b"the first key of the account", SECOND_SECRET):
        assert wire.ask("GET", LIST, auth=auth, path_style=path_style, secret=secret).status == 200
        put = wire.ask("PUT", "/orders", headers={"x-ms-meta-a": "1"}, auth=auth, path_style=path_style, secret=secret)
        assert put.status in {201, 204}
        assert wire.put("/orders", auth=auth, path_style=path_style, secret=secret).status == 201


@for_each("auth", ["SharedKey", "SharedKeyLite"], fresh="wire")
def test_a_wrong_key(wire: Any, auth: str) -> None:
    """In the words of Azure/azure-storage-python #254, which prints the text to sign in lines."""
    refused = wire.ask("GET", LIST, auth=auth, secret=b"another")
    assert (refused.status, refused.code) == (403, "AuthenticationFailed")
    detail = refused.text("AuthenticationErrorDetail")
    assert detail.startswith("The MAC signature found in the HTTP request '")
    assert "=' is not the same as any computed signature. Server used following string to sign: 'GET\n" in detail


@for_each(
    "change",
    [
        lambda request: setattr(request, "method", "PUT"),
        lambda request: setattr(request, "target", request.target.replace(b"prefix=a", b"prefix=b")),
        lambda request: setattr(request, "target", request.target + b"&more=1"),
        lambda request: setattr(request, "target", request.target.replace(b"examplename", b"examplename/orders", 1)),
        lambda request: request.headers.update({b"x-ms-meta-extra": b"1"}),
        lambda request: request.headers.update({b"x-ms-version": b"2026-10-05"}),
        lambda request: (
            request.headers.pop(b"x-ms-version") and request.headers.update({b"x-ms-version": b"2025-01-05"})
        ),
        lambda request: request.headers.update({b"content-type": b"text/plain"}),
        lambda request: request.headers.update({b"content-length": b"7"}),
        lambda request: request.headers.update({b"if-match": b"*"}),
        lambda request: request.headers.update({b"range": b"bytes=0-1"}),
        lambda request: request.headers.update({b"content-md5": b"x"}),
    ],
)
def test_whatever_is_signed_cannot_be_changed(wire: Any, change: Any) -> None:
    request = wire.request("GET", LIST)
    change(request)
    assert wire.send(request).code == "AuthenticationFailed"
    assert not wire.calls


def test_headers_may_be_signed_in_the_services_own_order(wire: Any) -> None:
    headers = {"x-ms-meta-a_b": "1", "x-ms-meta-a1": "2", "x-ms-meta-ab": "3"}
    request = wire.request("PUT", "/orders", headers=headers)
    assert wire.send(request).status == 201
    text = wire.text("SharedKey", "PUT", request.target.decode(), _texts(request.headers))
    # The service puts punctuation before digits and letters: a_b, a1, ab.
    lines = "x-ms-meta-a1:2\nx-ms-meta-a_b:1\nx-ms-meta-ab:3\n"
    assert lines in text
    ordered = text.replace(lines, "x-ms-meta-a_b:1\nx-ms-meta-a1:2\nx-ms-meta-ab:3\n")
    request.headers[b"authorization"] = f"SharedKey examplename:{_sign(ordered)}".encode()
    assert wire.send(request).status == 204
    wrong = text.replace(lines, "x-ms-meta-ab:3\nx-ms-meta-a_b:1\nx-ms-meta-a1:2\n")
    request.headers[b"authorization"] = f"SharedKey examplename:{_sign(wrong)}".encode()
    assert wire.send(request).code == "AuthenticationFailed"


@for_each("auth", ["SharedKey", "SharedKeyLite"], fresh="wire")
@for_each(
    ("value", "signed"),
    [("a   b\t c", "a b c"), ("a\tb", "a b"), ('say  "a   b"  twice', 'say "a   b" twice'), ('"  ', '" ')],
    fresh="wire",
)
def test_blanks_in_a_header_are_signed_as_they_are_or_as_one_space(
    wire: Any, auth: str, value: str, signed: str
) -> None:
    headers = {"x-ms-client-request-id": value}
    assert wire.ask("PUT", "/orders", headers=headers, auth=auth).status == 201
    request = wire.request("PUT", "/orders", headers=headers, auth=auth)
    text = wire.text(auth, "PUT", request.target.decode(), _texts(request.headers) | {next(iter(headers)): signed})
    request.headers[b"authorization"] = f"{auth} examplename:{_sign(text)}".encode()
    assert wire.send(request).status == 204
    text = text.replace(signed, signed.replace(" ", ""))
    request.headers[b"authorization"] = f"{auth} examplename:{_sign(text)}".encode()
    assert wire.send(request).code == "AuthenticationFailed"


@for_each(
    ("name", "code"),
    [
        ("content-type", "InvalidHeaderValue"),
        ("if-match", "InvalidHeaderValue"),
        ("content-language", "InvalidHeaderValue"),
        ("x-ms-client-request-id", "InvalidHeaderValue"),
        ("x-ms-meta-a", "InvalidMetadata"),
        ("accept", None),
    ],
)
def test_a_signed_header_is_given_once(wire: Any, name: str, code: str | None) -> None:
    request = wire.request("PUT", "/orders", headers={name: "one, two"})
    request.duplicates = frozenset({name.encode()})
    assert wire.send(request).code == code
    request.headers[b"authorization"] = f"SharedKey examplename:{_sign('something else')}".encode()
    assert wire.send(request).code == (code or "AuthenticationFailed"), "400 also where the signature cannot fit"


@for_each(("version", "status"), [("2015-12-11", 201), ("2016-05-31", 403)], fresh="wire")
def test_empty_headers_are_left_out_before_their_version(wire: Any, version: str, status: int) -> None:
    request = wire.request("PUT", "/orders", headers={"x-ms-meta-a": "", "x-ms-meta-b": "1"}, version=version)
    said = _texts(request.headers)
    del said["x-ms-meta-a"]
    text = wire.text("SharedKey", "PUT", request.target.decode(), said)
    request.headers[b"authorization"] = f"SharedKey examplename:{_sign(text)}".encode()
    assert wire.send(request).status == status
    assert wire.ask("PUT", "/two", headers={"x-ms-meta-a": ""}, version="2016-05-31").status == 201


@for_each("auth", ["SharedKey", "SharedKeyLite"], fresh="wire")
def test_the_secondary_is_signed_with_or_without_its_suffix(wire: Any, auth: str) -> None:
    target = "/examplename-secondary/?comp=list"
    assert wire.ask("GET", target, auth=auth).status == 200, "as it is sent"
    request = wire.request("GET", target, auth=auth)
    text = wire.text(auth, "GET", "/examplename/?comp=list", _texts(request.headers))
    request.headers[b"authorization"] = f"{auth} examplename:{_sign(text)}".encode()
    assert wire.send(request).status == 200, "as the primary, which the documentation has"
    request = wire.request("GET", "/examplename/?comp=list", auth=auth)
    text = wire.text(auth, "GET", target, _texts(request.headers))
    request.headers[b"authorization"] = f"{auth} examplename:{_sign(text)}".encode()
    assert wire.send(request).code == "AuthenticationFailed", "not the other way round"


@for_each("auth", ["SharedKey", "SharedKeyLite"], fresh="wire")
def test_a_queue_named_like_a_secondary_is_signed_with_its_whole_name(wire: Any, auth: str) -> None:
    request = wire.request("PUT", "/orders", auth=auth)
    request.target = request.target.replace(b"/orders", b"/orders-secondary")
    assert wire.send(request).code == "AuthenticationFailed"
    assert wire.ask("PUT", "/orders-secondary", auth=auth).status == 201


def test_an_empty_body_is_signed_by_version(wire: Any) -> None:
    assert wire.ask("PUT", "/one", headers={"content-length": "0"}, version="2014-02-14").status == 201
    request = wire.request("PUT", "/two", headers={"content-length": "0"})
    assert wire.send(request).code == "AuthenticationFailed", "from 2015-02-21 on the signed length is empty"
    del request.headers[b"content-length"]
    text = wire.text("SharedKey", "PUT", request.target.decode(), _texts(request.headers))
    request.headers |= {b"content-length": b"0", b"authorization": f"SharedKey examplename:{_sign(text)}".encode()}
    assert wire.send(request).status == 201


def test_the_date_header_serves_too(wire: Any) -> None:
    request = wire.request("GET", LIST)
    del request.headers[b"x-ms-date"]
    request.headers[b"date"] = wire.date().encode()
    text = wire.text("SharedKey", "GET", request.target.decode(), _texts(request.headers))
    lines = text.split("\n")
    lines[6] = wire.date()
    request.headers[b"authorization"] = f"SharedKey examplename:{_sign(chr(10).join(lines))}".encode()
    assert wire.send(request).status == 200


@for_each(("shift_s", "status"), [(-900, 200), (-901, 403), (900, 200), (901, 403), (-3_600, 403)])
def test_a_request_is_fresh_for_fifteen_minutes(wire: Any, shift_s: int, status: int) -> None:
    wire.stage.clock.now -= wire.stage.now % 1_000_000
    answer = wire.ask("GET", LIST, headers={"x-ms-date": wire.date(shift_s)})
    assert answer.status == status
    if status == 403:
        assert answer.code == "AuthenticationFailed"
        detail = f"Request date header too {'old' if shift_s < 0 else 'early'}: '{wire.date(shift_s)}'"
        assert answer.text("AuthenticationErrorDetail") == detail


@for_each("date", ["", "yesterday", "2026-11-21T00:00:00Z", "Thu, 99 Nov 2026 03:37:00 GMT", "\u00e9"])
def test_a_date_that_is_none(wire: Any, date: str) -> None:
    assert wire.ask("GET", LIST, headers={"x-ms-date": date}).code == "AuthenticationFailed"


@for_each(
    ("authorization", "status", "code"),
    [
        (None, 401, "NoAuthenticationInformation"),
        ("", 400, "InvalidAuthenticationInfo"),
        ("SharedKey", 400, "InvalidAuthenticationInfo"),
        ("SharedKey examplename", 400, "InvalidAuthenticationInfo"),
        ("SharedKey :x", 400, "InvalidAuthenticationInfo"),
        ("Basic dXNlcjpwYXNz", 400, "InvalidAuthenticationInfo"),
        ("SharedKey examplename:", 403, "AuthenticationFailed"),
        ("SharedKey examplename:not-base64", 403, "AuthenticationFailed"),
        ("SharedKey examplename:" + "A" * 44, 403, "AuthenticationFailed"),
        ("SharedKey other:" + "A" * 43 + "=", 403, "AuthenticationFailed"),
    ],
)
def test_an_authorization_that_is_none(wire: Any, authorization: str | None, status: int, code: str) -> None:
    headers = {"x-ms-date": wire.date()} | ({} if authorization is None else {"authorization": authorization})
    refused = wire.ask("GET", LIST, headers=headers, auth=None)
    assert (refused.status, refused.code) == (status, code)
    if status == 401:
        assert refused.headers["www-authenticate"] == (
            "Bearer authorization_uri=https://login.microsoftonline.com/common/oauth2/authorize "
            "resource_id=https://storage.azure.com"
        )


def test_an_unknown_account_is_a_wrong_key(wire: Any) -> None:
    request = wire.request("GET", "/stranger/orders?comp=metadata", host="127.0.0.1")
    request.target = b"/stranger/orders?comp=metadata"
    request.headers[b"authorization"] = request.headers[b"authorization"].replace(b"examplename", b"stranger")
    assert wire.send(request).code == "AuthenticationFailed"
    wire.account_sas()
    request = wire.request("GET", "/x", auth=None)
    request.target = f"/stranger?comp=list&{wire.account_sas()}".encode()
    assert wire.send(request).code == "AuthenticationFailed"
    wire.ring.checks = False  # development mode: its account is no secret, and clients forget it in the path
    for auth in ("SharedKey", None):
        request = wire.request("PUT", "http://127.0.0.1:10001/orders", auth=auth)
        request.target = b"/orders"
        refused = wire.send(request)
        assert refused.code == "AuthenticationFailed"
        assert "no account 'orders'" in (refused.text("AuthenticationErrorDetail") or "")


@for_each(
    "sas",
    [
        "/orders?comp=metadata&sp=r&se=2030-01-01&sv=2020-12-06",
        "?comp=list&ss=q&srt=s&sp=l&se=2030-01-01&sv=2020-12-06",
        "/orders?comp=metadata&sp=r&se=2030-01-01&sv=2026-02-06&skoid=a&sktid=b&skt=2026-01-01&ske=2030-01-01&sks=q"
        "&skv=2026-02-06",
    ],
)
def test_a_refused_sas_does_not_tell_whether_there_is_such_an_account(wire: Any, sas: str) -> None:
    said = []
    for name in ("examplename", "nosuchnames"):
        request = wire.request("GET", "/x", auth=None)
        request.target = f"/{name}{sas}&sig={quote(base64.b64encode(bytes(32)))}".encode()
        answer = wire.send(request)
        assert answer.code == "AuthenticationFailed"
        said.append((answer.text("AuthenticationErrorDetail") or "").replace(name, "NAME"))
    assert said[0] == said[1]
    assert said[0].startswith("Signature did not match. String to sign used was ")
    assert "\n2030-01-01\n" in said[0]


def test_what_strangers_send_at_length_is_not_remembered(wire: Any) -> None:
    """64 KiB of headers in each of 4,096 places are 256 MiB."""
    readers: tuple[Any, ...] = (fields.read_rfc1123, fields.read_iso)
    caches = (addresses._known_place, addresses._known_account, *(reader.__wrapped__ for reader in readers))
    wire.ask("GET", LIST)
    before = [cache.cache_info().currsize for cache in caches]
    for number in range(3):
        long = f"{number}{'x' * 1_000}"
        assert wire.ask("GET", LIST, host=f"{long}.example").status == 200  # no signature covers it
        assert wire.ask("GET", LIST, headers={"x-ms-date": long}).code == "AuthenticationFailed"
        assert wire.ask("GET", f"{LIST}&sig=x&sp=l&ss=q&srt=s&sv=2020-12-06&se={long}", auth=None).code
    assert [cache.cache_info().currsize for cache in caches] == before
    assert call.origin_of("a", b"x" * 999 + b"1") is call.origin_of("a", b"x" * 999 + b"2")


def test_an_account_reaches_its_own_queues_alone(wire: Any) -> None:
    other = NamedAccount("other", wire.key.__class__("other", "", "222222222222", grants=wire.key.grants), (b"x",))
    wire.ring.named["other"] = other
    wire.queue()
    request = wire.request("GET", LIST)
    request.target = request.target.replace(b"examplename", b"other", 1)
    assert wire.send(request).code == "AuthenticationFailed"


def test_the_name_in_the_header_is_that_of_the_address(wire: Any) -> None:
    request = wire.request("GET", LIST)
    text = wire.text("SharedKey", "GET", request.target.decode(), _texts(request.headers))
    for name, status in (("examplename", 200), ("other", 403), ("EXAMPLENAME", 403), ("", 400)):
        signature = _sign(text.replace("\n/examplename/", f"\n/{name}/", 1))
        request.headers[b"authorization"] = f"SharedKey {name}:{signature}".encode()
        assert wire.send(request).status == status, name


def test_an_empty_secret_signs_for_nobody(wire: Any) -> None:
    """A stand-in secret is used for accounts that are not there: it must open nothing."""
    request = wire.request("GET", "/stranger?comp=list", secret=b"")
    request.target = b"/stranger?comp=list"
    assert wire.send(request).code == "AuthenticationFailed"


def _texts(headers: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers.items() if name != b"authorization"}


def _sign(text: str) -> str:
    import base64
    import hashlib
    import hmac

    return base64.b64encode(hmac.new(b"the first key of the account", text.encode(), hashlib.sha256).digest()).decode()
