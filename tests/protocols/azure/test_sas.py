"""Shared access signatures: exactly what they say, when, from where and by which key."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from veilmq.model.instant import SECOND_US
from veilmq.model.settings.access import AccessKey, NamedAccount
from veilmq.protocols.azure.auth import sas
from veilmq.testing.for_each import for_each

MESSAGE = "<QueueMessage><MessageText>x</MessageText></QueueMessage>"
ACL = "<SignedIdentifiers>{}</SignedIdentifiers>"
POLICY = "<SignedIdentifier><Id>{}</Id><AccessPolicy>{}</AccessPolicy></SignedIdentifier>"

Ask = tuple[str, str, str]
OPERATIONS: dict[str, Callable[[Any], Ask]] = {
    "List Queues": lambda wire: ("GET", "/?comp=list", ""),
    "Get Queue Service Properties": lambda wire: ("GET", "/?restype=service&comp=properties", ""),
    "Set Queue Service Properties": lambda wire: (
        "PUT", "/?restype=service&comp=properties", "<StorageServiceProperties/>",
    ),
    "Get Queue Service Stats": lambda wire: ("GET", "/examplename-secondary?restype=service&comp=stats", ""),
    "Create Queue": lambda wire: ("PUT", "/fresh", ""),
    "Delete Queue": lambda wire: ("DELETE", "/doomed", ""),
    "Get Queue Metadata": lambda wire: ("GET", "/orders?comp=metadata", ""),
    "Set Queue Metadata": lambda wire: ("PUT", "/orders?comp=metadata", ""),
    "Get Queue ACL": lambda wire: ("GET", "/orders?comp=acl", ""),
    "Set Queue ACL": lambda wire: ("PUT", "/orders?comp=acl", ""),
    "Put Message": lambda wire: ("POST", "/orders/messages", MESSAGE),
    "Get Messages": lambda wire: ("GET", "/orders/messages", ""),
    "Peek Messages": lambda wire: ("GET", "/orders/messages?peekonly=true", ""),
    "Clear Messages": lambda wire: ("DELETE", "/orders/messages", ""),
    "Delete Message": lambda wire: ("DELETE", _held(wire), ""),
    "Update Message": lambda wire: ("PUT", f"{_held(wire)}&visibilitytimeout=1", ""),
}  # fmt: skip

ACCOUNT = {
    "List Queues": "s l", "Get Queue Service Properties": "s r", "Set Queue Service Properties": "s w",
    "Get Queue Service Stats": "s r", "Create Queue": "c cw", "Delete Queue": "c d", "Get Queue Metadata": "c r",
    "Set Queue Metadata": "c w", "Put Message": "o a", "Get Messages": "o p", "Peek Messages": "o r",
    "Delete Message": "o p", "Clear Messages": "o d", "Update Message": "o u",
}  # fmt: skip
"""Resource type and permissions, by the table of "Create an account SAS". What is missing no account SAS reaches."""

QUEUE = {
    "Get Queue Metadata": "r", "Put Message": "a", "Get Messages": "p", "Peek Messages": "r", "Delete Message": "p",
    "Update Message": "u",
}  # fmt: skip
"""Permission, by "Create a service SAS", which says too that no such SAS clears a queue."""


def _held(wire: Any) -> str:
    wire.put("/orders")
    message, receipt = wire.take("/orders")
    return f"/orders/messages/{message}?popreceipt={receipt}"


def _prepare(wire: Any) -> None:
    for name in ("orders", "doomed"):
        wire.queue(name)
    wire.put("/orders")


def _with(wire: Any, ask: Ask, sas: str, **how: Any) -> Any:
    method, target, body = ask
    return wire.ask(method, f"{target}{'&' if '?' in target else '?'}{sas}", body, auth=None, **how)


@for_each("name", OPERATIONS, fresh="wire")
def test_an_account_sas_reaches_exactly_what_is_documented(wire: Any, name: str) -> None:
    _prepare(wire)
    ask = OPERATIONS[name](wire)
    if name not in ACCOUNT:
        refused = _with(wire, ask, wire.account_sas())
        assert (refused.status, refused.code) == (403, "AuthorizationFailure")
        return
    kind, permissions = ACCOUNT[name].split()
    others = "".join(letter for letter in "sco" if letter != kind)
    assert _with(wire, ask, wire.account_sas(srt=others)).code == "AuthorizationResourceTypeMismatch"
    lacking = "".join(letter for letter in "rwdlacup" if letter not in permissions)
    assert _with(wire, ask, wire.account_sas(sp=lacking)).code == "AuthorizationPermissionMismatch"
    for secret in (b"the first key of the account", b"the second key of the account"):
        for permission in permissions:
            answer = _with(wire, OPERATIONS[name](wire), wire.account_sas(secret, srt=kind, sp=permission))
            assert answer.code in {None, "QueueNotFound"}, answer.response.body


@for_each("name", OPERATIONS, fresh="wire")
def test_a_queue_sas_reaches_exactly_what_is_documented(wire: Any, name: str) -> None:
    _prepare(wire)
    ask = OPERATIONS[name](wire)
    queue = "/" + ask[1].lstrip("/").partition("/")[0].partition("?")[0]
    if name not in QUEUE:
        refused = _with(wire, ask, wire.queue_sas(queue))
        assert refused.status == 403
        assert refused.code in {"AuthorizationFailure", "AuthenticationFailed"}
        return
    assert _with(wire, ask, wire.queue_sas("/doomed")).code == "AuthenticationFailed", "it is of another queue"
    lacking = "raup".replace(QUEUE[name], "")
    assert _with(wire, ask, wire.queue_sas("/orders", sp=lacking)).code == "AuthorizationPermissionMismatch"
    answer = _with(wire, OPERATIONS[name](wire), wire.queue_sas("/orders", sp=QUEUE[name]))
    assert answer.code is None, answer.response.body


@for_each("sp", ["pu", "ar", "rr", "raupp", "rd", "R"], fresh="wire")
def test_the_letters_of_a_queue_sas_have_an_order(wire: Any, sp: str) -> None:
    _prepare(wire)
    refused = _with(wire, PEEK, wire.queue_sas("/orders", sp=sp))
    assert (refused.status, refused.code) == (403, "AuthenticationFailed")
    assert "raup" in refused.text("AuthenticationErrorDetail")


PEEK: Ask = ("GET", "/orders/messages?peekonly=true", "")


@for_each("kind", ["account", "queue"], fresh="wire")
@for_each(
    ("fields", "how", "code"),
    [
        ({"se": -1}, {}, "AuthenticationFailed"),
        ({"se": 0}, {}, "AuthenticationFailed"),
        ({"se": 1}, {}, None),
        ({"st": 1}, {}, "AuthenticationFailed"),
        ({"st": 0}, {}, None),
        ({"sip": "127.0.0.1"}, {}, None),
        ({"sip": "127.0.0.0-127.0.0.9"}, {}, None),
        ({"sip": "127.0.0.2-127.0.0.9"}, {}, "AuthorizationSourceIPMismatch"),
        ({"sip": "127.0.0.2-127.0.0.9"}, {"peer": "127.0.0.10"}, "AuthorizationSourceIPMismatch"),
        ({"sip": "10.0.0.1"}, {"peer": "10.0.0.1"}, None),
        ({"sip": "10.0.0.1"}, {"peer": "::ffff:10.0.0.1"}, None),
        ({"sip": "10.0.0.1"}, {"peer": "::1"}, "AuthorizationSourceIPMismatch"),
        ({"sip": "10.0.0.9-10.0.0.1"}, {"peer": "10.0.0.1"}, "AuthenticationFailed"),
        ({"sip": "here"}, {}, "AuthenticationFailed"),
        ({"spr": "https"}, {}, "AuthorizationProtocolMismatch"),
        ({"spr": "https"}, {"secure": True}, None),
        ({"spr": "https,http"}, {}, None),
        ({"spr": "gopher"}, {}, "AuthenticationFailed"),
        ({"se": "soon"}, {}, "AuthenticationFailed"),
        ({"st": "2026-02-30"}, {}, "AuthenticationFailed"),
        ({"se": ""}, {}, "AuthenticationFailed"),
        ({"sp": ""}, {}, "AuthenticationFailed"),
        ({"sv": "2031-01-01"}, {}, None),
        ({"sv": "2011-08-18"}, {}, "AuthenticationFailed"),
        ({"sv": "new"}, {"version": "2026-10-06"}, "AuthenticationFailed"),
    ],
    fresh="wire",
)
def test_when_and_whence(wire: Any, kind: str, fields: dict[str, Any], how: dict[str, Any], code: str | None) -> None:
    wire.stage.clock.now -= wire.stage.now % SECOND_US
    _prepare(wire)
    said = {name: wire.iso(value) if isinstance(value, int) else value for name, value in fields.items()}
    sas = wire.account_sas(**said) if kind == "account" else wire.queue_sas("/orders", **said)
    answer = _with(wire, PEEK, sas, **how)
    assert answer.code == code
    assert answer.status == (200 if code is None else 403)


@for_each(
    ("fields", "code"),
    [
        ({"ss": "b"}, "AuthorizationServiceMismatch"),
        ({"ss": "bqtf"}, None),
        ({"ss": "x"}, "AuthenticationFailed"),
        ({"ss": "qx"}, "AuthenticationFailed"),
        ({"srt": "z"}, "AuthenticationFailed"),
        ({"srt": "oz"}, "AuthenticationFailed"),
        ({"sp": ""}, "AuthenticationFailed"),
        ({"sv": "2019-02-02"}, None),
        ({"sv": "2015-02-21"}, "AuthenticationFailed"),
    ],
    fresh="wire",
)
def test_services_types_and_versions(wire: Any, fields: dict[str, str], code: str | None) -> None:
    _prepare(wire)
    sas = wire.account_sas(**fields)
    if fields.get("sv") == "2019-02-02":
        sas = _old_account_sas(wire)
    answer = _with(wire, PEEK, sas)
    assert answer.code == code
    if fields == {"sp": ""}:  # as public logs of the service have it, without a full stop
        assert answer.text("AuthenticationErrorDetail") == "sp is mandatory. Cannot be empty"


def _old_account_sas(wire: Any) -> str:
    """Before 2020-12-06 there was no line for the encryption scope."""
    from urllib.parse import quote

    given = {"sp": "r", "ss": "q", "srt": "o", "st": "", "se": wire.iso(60), "sip": "", "spr": "", "sv": "2019-02-02"}
    text = "".join(f"{each}\n" for each in ("examplename", *given.values()))
    given = {name: value for name, value in given.items() if value} | {"sig": _sign(text)}
    return "&".join(f"{name}={quote(value, safe='')}" for name, value in given.items())


@for_each(
    ("version", "resource", "lines"),
    [("2012-02-12", "/examplename/orders", 5), ("2014-02-14", "/examplename/orders", 5),
     ("2015-02-21", "/queue/examplename/orders", 5), ("2015-04-05", "/queue/examplename/orders", 7)],
fresh="wire")  # fmt: skip
def test_queue_sas_of_old_versions(wire: Any, version: str, resource: str, lines: int) -> None:
    from urllib.parse import quote

    _prepare(wire)
    expiry = wire.iso(60)
    text = "\n".join([*(["r", "", expiry, resource, "", "", ""][:lines]), version])
    sas = f"sv={version}&sp=r&se={quote(expiry)}&sig={quote(_sign(text), safe='')}"
    assert _with(wire, PEEK, sas, version="2026-10-06").code is None


@for_each("name", ["sp", "se", "sv", "srt", "ss", "sig"], fresh="wire")
def test_a_sas_cannot_be_changed(wire: Any, name: str) -> None:
    _prepare(wire)
    sas = wire.account_sas(sp="r")
    changed = {"sp": "rp", "se": "2099-01-01", "sv": "2026-02-06", "srt": "so", "ss": "bq", "sig": "A" * 43 + "%3D"}
    parts = [part if not part.startswith(f"{name}=") else f"{name}={changed[name]}" for part in sas.split("&")]
    assert parts != sas.split("&")
    refused = _with(wire, PEEK, "&".join(parts))
    assert (refused.status, refused.code) == (403, "AuthenticationFailed")
    assert _with(wire, PEEK, f"{sas}&st=2001-01-01").code == "AuthenticationFailed", "a field that was not signed"
    assert _with(wire, PEEK, f"{sas}&sp=r").code == "InvalidQueryParameterValue"
    assert _with(wire, PEEK, sas).code is None


def test_a_sas_ends_with_its_key_though_it_was_seen_before(wire: Any) -> None:
    _prepare(wire)
    sas = wire.account_sas()
    assert _with(wire, PEEK, sas).code is None
    wire.ring.named["examplename"] = NamedAccount("examplename", wire.key, (b"other keys", b"by now"))
    assert _with(wire, PEEK, sas).code == "AuthenticationFailed"


def test_a_sas_that_was_seen_before_still_expires(wire: Any) -> None:
    _prepare(wire)
    sas = wire.account_sas(se=wire.iso(60))
    assert _with(wire, PEEK, sas).code is None
    wire.stage.later(61 * SECOND_US)
    assert _with(wire, PEEK, sas).code == "AuthenticationFailed"


class TestStoredPolicies:
    """A SAS that names a policy of the queue."""

    def policy(self, wire: Any, inside: str) -> None:
        body = ACL.format(POLICY.format("mine", inside))
        assert wire.ask("PUT", "/orders?comp=acl", body).status == 204

    def test_the_policy_says_what_the_sas_does_not(self, wire: Any) -> None:
        _prepare(wire)
        sas = wire.queue_sas("/orders", si="mine", sp="", se="")
        assert _with(wire, PEEK, sas).code == "AuthenticationFailed", "there is no such policy"
        self.policy(wire, f"<Expiry>{wire.iso(60)}</Expiry><Permission>r</Permission>")
        assert _with(wire, PEEK, sas).code is None
        refused = _with(wire, ("GET", "/orders/messages", ""), sas)
        assert refused.code == "AuthorizationPermissionMismatch"
        self.policy(wire, f"<Expiry>{wire.iso(60)}</Expiry><Permission>p</Permission>")
        assert _with(wire, PEEK, sas).code == "AuthorizationPermissionMismatch", "a change counts at once"
        wire.stage.later(60 * SECOND_US)
        assert _with(wire, ("GET", "/orders/messages", ""), sas).code == "AuthenticationFailed"
        assert wire.ask("PUT", "/orders?comp=acl").status == 204
        assert _with(wire, PEEK, sas).code == "AuthenticationFailed", "the policy was revoked"

    def test_a_field_may_not_be_in_both(self, wire: Any) -> None:
        _prepare(wire)
        whole = f"<Start>{wire.iso(-60)}</Start><Expiry>{wire.iso(60)}</Expiry><Permission>r</Permission>"
        self.policy(wire, whole)
        bare = {"si": "mine", "sp": "", "se": ""}
        assert _with(wire, PEEK, wire.queue_sas("/orders", **bare)).code is None
        for field in ({"sp": "r"}, {"se": wire.iso(30)}, {"st": wire.iso(-30)}):
            refused = _with(wire, PEEK, wire.queue_sas("/orders", **(bare | field)))
            assert refused.code == "AuthenticationFailed"
            assert "not both" in refused.text("AuthenticationErrorDetail")

    def test_each_field_must_be_in_one(self, wire: Any) -> None:
        _prepare(wire)
        self.policy(wire, "")
        for fields, code in (
            ({"sp": "r", "se": ""}, "AuthenticationFailed"),
            ({"sp": "", "se": wire.iso(30)}, "AuthenticationFailed"),
            ({"sp": "r", "se": wire.iso(30)}, None),
        ):
            assert _with(wire, PEEK, wire.queue_sas("/orders", si="mine", **fields)).code == code
        assert wire.calls[-1].commands[0].origin.principal == "examplename/sas/mine"

    def test_a_start_in_the_policy_counts(self, wire: Any) -> None:
        _prepare(wire)
        self.policy(wire, f"<Start>{wire.iso(60)}</Start><Expiry>{wire.iso(90)}</Expiry><Permission>r</Permission>")
        sas = wire.queue_sas("/orders", si="mine", sp="", se="")
        assert _with(wire, PEEK, sas).code == "AuthenticationFailed"
        wire.stage.later(61 * SECOND_US)
        assert _with(wire, PEEK, sas).code is None

    def test_a_stranger_makes_nobody_look_at_a_queue(self, wire: Any) -> None:
        _prepare(wire)
        before = len(wire.calls)
        assert _with(wire, PEEK, wire.queue_sas("/orders", b"guess", si="mine")).code == "AuthenticationFailed"
        assert len(wire.calls) == before


class TestUserDelegation:
    """Keys for whoever bears a token, and what they sign."""

    TARGET = "/?restype=service&comp=userdelegationkey"

    def key(self, wire: Any, more: str = "", start: int = 0, expiry: int = 3600, **claims: Any) -> Any:
        body = f"<KeyInfo><Start>{wire.iso(start)}</Start><Expiry>{wire.iso(expiry)}</Expiry>{more}</KeyInfo>"
        return wire.ask("POST", self.TARGET, body, wire.token(**claims), auth=None, secure=True)

    def test_a_key_signs_for_its_owner(self, wire: Any) -> None:
        _prepare(wire)
        key = self.key(wire)
        assert key.status == 200
        assert key.text("SignedOid") == "person"
        assert key.text("SignedTid") == "tenant"
        assert (key.text("SignedService"), key.text("SignedVersion")) == ("q", "2026-10-06")
        sas = wire.delegation_sas("/orders", key)
        assert _with(wire, PEEK, sas).code is None
        assert wire.calls[-1].commands[0].origin.principal == "examplename/person/sas"
        assert _with(wire, PEEK, wire.delegation_sas("/doomed", key)).code == "AuthenticationFailed"
        assert _with(wire, PEEK, wire.delegation_sas("/orders", key, sp="a")).code == "AuthorizationPermissionMismatch"
        assert _with(wire, PEEK, sas.replace("skoid=person", "skoid=reader")).code == "AuthenticationFailed"
        assert _with(wire, ("GET", "/?comp=list", ""), sas).status == 403
        wire.stage.later(3601 * SECOND_US)
        assert _with(wire, PEEK, sas).code == "AuthenticationFailed"

    def test_a_sas_ends_with_its_key(self, wire: Any) -> None:
        _prepare(wire)
        sas = wire.delegation_sas("/orders", self.key(wire, expiry=60), se=wire.iso(3600))
        assert _with(wire, PEEK, sas).code is None
        wire.stage.later(61 * SECOND_US)
        assert _with(wire, PEEK, sas).code == "AuthenticationFailed"

    @for_each(
        ("fields", "code"),
        [
            ({"sp": ""}, "AuthenticationFailed"),
            ({"se": ""}, "AuthenticationFailed"),
            ({"sp": "pu"}, "AuthenticationFailed"),
            ({"se": 0}, "AuthenticationFailed"),
            ({"se": 1}, None),
            ({"st": 60}, "AuthenticationFailed"),
            ({"st": 0}, None),
            ({"st": -60}, None),
            ({"sip": "10.0.0.1"}, "AuthorizationSourceIPMismatch"),
            ({"spr": "https"}, "AuthorizationProtocolMismatch"),
        ],
        fresh="wire",
    )
    def test_its_own_limits(self, wire: Any, fields: dict[str, Any], code: str | None) -> None:
        wire.stage.clock.now -= wire.stage.now % SECOND_US
        _prepare(wire)
        said = {name: wire.iso(value) if isinstance(value, int) else value for name, value in fields.items()}
        answer = _with(wire, PEEK, wire.delegation_sas("/orders", self.key(wire), **said))
        assert (answer.status, answer.code) == (200 if code is None else 403, code)

    def test_a_sas_begins_with_its_key(self, wire: Any) -> None:
        _prepare(wire)
        sas = wire.delegation_sas("/orders", self.key(wire, start=60), st=wire.iso(0))
        assert _with(wire, PEEK, sas).code == "AuthenticationFailed"
        wire.stage.later(61 * SECOND_US)
        assert _with(wire, PEEK, sas).code is None

    def test_a_key_reaches_no_further_than_its_owner(self, wire: Any) -> None:
        _prepare(wire)
        key = self.key(wire, oid="reader")
        assert key.status == 200
        refused = _with(wire, PEEK, wire.delegation_sas("/orders", key))
        assert (refused.status, refused.code) == (403, "AuthorizationPermissionMismatch")

    def test_who_left_signs_no_more(self, wire: Any) -> None:
        _prepare(wire)
        sas = wire.delegation_sas("/orders", self.key(wire))
        assert _with(wire, PEEK, sas).code is None
        wire.ring.named["examplename"] = NamedAccount("examplename", wire.key, wire.account.secrets, {})
        assert _with(wire, PEEK, sas).code == "AuthorizationPermissionMismatch"

    def test_a_sas_for_a_certain_user_needs_their_token(self, wire: Any) -> None:
        _prepare(wire)
        key = self.key(wire, "<DelegatedUserTid>home</DelegatedUserTid>")
        assert key.text("SignedDelegatedUserTid") == "home"
        sas = wire.delegation_sas("/orders", key, sduoid="person")
        assert _with(wire, PEEK, sas).code == "AuthenticationFailed"
        for claims, code in (
            ({"oid": "person", "tid": "home"}, None),
            ({"oid": "person", "tid": "away"}, "AuthenticationFailed"),
            ({"oid": "reader", "tid": "home"}, "AuthenticationFailed"),
        ):
            answer = _with(wire, PEEK, sas, headers=wire.token(**claims), secure=True)
            assert answer.code == code, claims

    @for_each(
        ("body", "code"),
        [
            ("", "InvalidXmlDocument"),
            ("<KeyInfo/>", "MissingRequiredXmlNode"),
            ("<KeyInfo><Expiry>soon</Expiry></KeyInfo>", "InvalidXmlNodeValue"),
            ("<KeyInfo><Expiry>2001-01-01</Expiry></KeyInfo>", "InvalidXmlNodeValue"),
            ("<KeyInfo><Expiry>2999-01-01</Expiry></KeyInfo>", "InvalidXmlNodeValue"),
            ("<KeyInfo><Owner/></KeyInfo>", "UnsupportedXmlNode"),
        ],
    )
    def test_bad_requests_for_a_key(self, wire: Any, body: str, code: str) -> None:
        refused = wire.ask("POST", self.TARGET, body, wire.token(), auth=None, secure=True)
        assert (refused.status, refused.code) == (400, code)

    def test_a_key_lasts_seven_days_at_most(self, wire: Any) -> None:
        assert self.key(wire, expiry=7 * 86_400).status == 200
        assert self.key(wire, expiry=7 * 86_400 + 1).code == "InvalidXmlNodeValue"
        assert self.key(wire, start=8 * 86_400, expiry=9 * 86_400).code == "InvalidXmlNodeValue"
        assert self.key(wire, start=6 * 86_400, expiry=7 * 86_400).status == 200
        late = self.key(wire, start=6 * 86_400, expiry=7 * 86_400 + 1)
        assert late.code == "InvalidXmlNodeValue", "it must be within seven days of the current time"

    def test_nobody_else_gets_a_key(self, wire: Any) -> None:
        body = f"<KeyInfo><Expiry>{wire.iso(60)}</Expiry></KeyInfo>"
        for refused in (
            wire.ask("POST", self.TARGET, body),
            _with(wire, ("POST", self.TARGET, body), wire.account_sas()),
        ):
            assert (refused.status, refused.code) == (403, "AuthenticationFailed")
            assert refused.text("AuthenticationErrorDetail") == "Only authentication scheme Bearer is supported"
        refused = wire.ask("POST", self.TARGET, body, wire.token(), auth=None, secure=True, version="2025-01-05")
        assert refused.code == "FeatureVersionMismatch"

    def test_a_sas_of_an_older_version_is_not_by_such_a_key(self, wire: Any) -> None:
        _prepare(wire)
        sas = wire.delegation_sas("/orders", self.key(wire), sv="2025-11-05")
        assert _with(wire, PEEK, sas).code == "AuthenticationFailed"


class TestBearer:
    """OAuth tokens."""

    def ask(self, wire: Any, method: str = "GET", target: str = "/?comp=list", **claims: Any) -> Any:
        return wire.ask(method, target, "", wire.token(**claims), auth=None, secure=True)

    def test_a_good_token(self, wire: Any) -> None:
        assert self.ask(wire).status == 200
        assert self.ask(wire, aud=["https://elsewhere", "https://storage.azure.com/"]).status == 200
        assert self.ask(wire, aud="https://examplename.queue.core.windows.net").status == 200
        assert self.ask(wire, "PUT", "/orders").status == 201
        assert wire.calls[-1].commands[0].origin.principal == "examplename/person"

    @for_each(
        "claims",
        [
            {"aud": "https://management.azure.com"},
            {"aud": None},
            {"aud": 7},
            {"aud": "https://other.queue.core.windows.net"},
            {"exp": 0},
            {"exp": None},
            {"exp": "tomorrow"},
            {"exp": True},
            {"exp": float("inf")},
            {"nbf": 2**39},
            {"oid": None},
            {"oid": 7},
            {"tid": "a b/c"},
        ],
    )
    def test_a_bad_token_is_challenged(self, wire: Any, claims: dict[str, Any]) -> None:
        refused = self.ask(wire, **claims)
        assert (refused.status, refused.code) == (401, "InvalidAuthenticationInfo")
        assert "resource_id=https://storage.azure.com" in refused.headers["www-authenticate"]
        assert "authorization_uri=https://login.microsoftonline.com/" in refused.headers["www-authenticate"]

    def test_a_token_that_is_not_genuine(self, wire: Any) -> None:
        for token in ("forged", "", "\u00e9", "x" * 20_000):
            refused = wire.ask(
                "GET", "/?comp=list", headers={"Authorization": f"Bearer {token}"}, auth=None, secure=True
            )
            assert (refused.status, refused.code) == (401, "InvalidAuthenticationInfo")

    def test_when_a_token_counts(self, wire: Any) -> None:
        """Another's clock may be five minutes ahead of ours."""
        wire.stage.clock.now -= wire.stage.now % SECOND_US
        now = wire.wall // SECOND_US
        for claims, status in (({"exp": now}, 401), ({"exp": now + 1}, 200), ({"nbf": now + 300}, 200)):
            assert self.ask(wire, **claims).status == status, claims
        assert self.ask(wire, nbf=now + 301).status == 401

    def test_the_audiences_of_azure_storage(self, wire: Any) -> None:
        application = "e406a681-f3d4-42a8-90b6-c2b029497af1"
        for audience in ("https://storage.azure.com/", application, "https://examplename.queue.core.windows.net"):
            assert self.ask(wire, aud=audience).status == 200, audience

    def test_an_account_that_nobody_knows(self, wire: Any) -> None:
        for audience, code in (
            ("https://storage.azure.com", "AuthorizationPermissionMismatch"),
            ("https://management.azure.com", "InvalidAuthenticationInfo"),
        ):
            request = wire.request("GET", "/", headers=wire.token(aud=audience), auth=None, secure=True)
            request.target = b"/nosuchnames?comp=list"
            assert wire.send(request).code == code

    def test_only_over_https(self, wire: Any) -> None:
        refused = wire.ask("GET", "/?comp=list", headers=wire.token(), auth=None)
        assert (refused.status, refused.code) == (403, "AuthenticationFailed")
        wire.configure(trusted_proxy=True)
        headers = wire.token() | {"x-forwarded-proto": "https"}
        assert wire.ask("GET", "/?comp=list", headers=headers, auth=None).status == 200

    def test_only_those_whom_the_account_knows(self, wire: Any) -> None:
        assert self.ask(wire, oid="stranger").code == "AuthorizationPermissionMismatch"
        assert self.ask(wire, oid="reader").code == "AuthorizationPermissionMismatch"
        wire.account.identities["lister"] = AccessKey("lister", "", "000000000000", grants=wire.key.grants)
        assert self.ask(wire, oid="lister").status == 200

    def test_in_development_mode_a_token_need_not_name_anybody(self, wire: Any) -> None:
        wire.ring.named[wire.account.name] = msgspec.structs.replace(wire.account, any_identity=True)
        assert self.ask(wire, oid=None).status == 200
        assert wire.calls[-1].commands[0].origin.principal == "examplename/00000000-0000-0000-0000-000000000000"
        assert self.ask(wire, oid=None, sub="somebody").status == 200
        assert wire.calls[-1].commands[0].origin.principal == "examplename/somebody"
        assert self.ask(wire, oid=None, aud="https://elsewhere").status == 401

    def test_policies_from_their_version_on(self, wire: Any) -> None:
        wire.queue()
        assert self.ask(wire, target="/orders?comp=acl").status == 200
        refused = wire.ask("GET", "/orders?comp=acl", "", wire.token(), auth=None, secure=True, version="2025-05-05")
        assert (refused.status, refused.code) == (409, "FeatureVersionMismatch")
        refused = wire.ask("GET", "/?comp=list", "", wire.token(), auth=None, secure=True, version="2016-05-31")
        assert refused.code == "AuthenticationFailed"


def test_behind_a_trusted_proxy_its_word_counts(wire: Any) -> None:
    _prepare(wire)
    sas = wire.queue_sas("/orders", sip="192.0.2.7", spr="https")
    headers = {"x-forwarded-for": "198.51.100.1, 192.0.2.7", "x-forwarded-proto": "https"}
    assert _with(wire, PEEK, sas, headers=headers).status == 403
    wire.configure(trusted_proxy=True)
    assert _with(wire, PEEK, sas, headers=headers).status == 200
    headers["x-forwarded-for"] = "192.0.2.7, 198.51.100.1"
    assert _with(wire, PEEK, sas, headers=headers).code == "AuthorizationSourceIPMismatch"


def _sign(text: str) -> str:
    import base64
    import hashlib
    import hmac

    return base64.b64encode(hmac.new(b"the first key of the account", text.encode(), hashlib.sha256).digest()).decode()


def test_what_a_reader_remembers_has_a_bound(wire: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sas, "_KNOWN_MAX", 5)
    known = wire.codec._verifier._sas._known
    sizes = []
    for number in range(12):
        answer = wire.ask("GET", f"/missing-{number}/messages?{wire.account_sas()}", auth=None)
        assert answer.code == "QueueNotFound"
        sizes.append(len(known))
    assert max(sizes) == 5
