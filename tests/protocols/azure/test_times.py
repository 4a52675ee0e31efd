"""The forms of time that a SAS and a stored policy may have."""

import time
from typing import Any

from veilmq.model.instant import SECOND_US
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols.azure.auth.sas import Policy, policies_label
from veilmq.testing.for_each import for_each

ORDERS = QueueKey("000000000000", "us-east-1", "orders")
ACL = "<SignedIdentifiers>{}</SignedIdentifiers>"
POLICY = "<SignedIdentifier><Id>{}</Id><AccessPolicy>{}</AccessPolicy></SignedIdentifier>"


def _peek(wire: Any, sas: str) -> Any:
    return wire.ask("GET", f"/orders/messages?peekonly=true&{sas}", "", auth=None)


@for_each(
    ("ending", "ahead_s"),
    [("Z", 0), ("", 0), (".0000000Z", 0), (".5Z", 0), ("-05:00", -18_000), (".5+05:30", 19_800), ("+23:59", 86_340),
     ("-23:59", -86_340)],
fresh="wire")  # fmt: skip
def test_a_sas_takes_every_form(wire: Any, ending: str, ahead_s: int) -> None:
    """ "Formatting DateTime values": Z, nothing, or an offset from -23:59 to +23:59."""
    wire.queue("orders")
    for shift_s, code in ((60, None), (-60, "AuthenticationFailed")):
        moment = time.gmtime(wire.wall // SECOND_US + shift_s + ahead_s)
        text = time.strftime("%Y-%m-%dT%H:%M:%S", moment) + ending
        assert _peek(wire, wire.account_sas(se=text)).code == code
        assert _peek(wire, wire.queue_sas("/orders", se=text)).code == code


@for_each("text", ["+24:00", "-05:60", "+5:00", "+0500", "Z+00:00", " -05:00"], fresh="wire")
def test_offsets_that_are_none(wire: Any, text: str) -> None:
    wire.queue("orders")
    refused = _peek(wire, wire.account_sas(se=f"2999-01-01T00:00:00{text}"))
    assert refused.code == "AuthenticationFailed"
    assert "ISO 8601" in refused.text("AuthenticationErrorDetail")
    early = _peek(wire, wire.account_sas(st="0001-01-01T00:00:00+23:59"))
    assert early.code == "AuthenticationFailed", "there is no year 0"


@for_each("ending", ["Z", "", ".0000000Z", ".1234567Z"], fresh="wire")
def test_a_policy_takes_utc(wire: Any, ending: str) -> None:
    """What is refused is in test_queues, as users saw it: azure-sdk-for-net 23976, azure-rest-api-specs 41338."""
    wire.queue("orders")
    for shift_s, code in ((60, None), (-60, "AuthenticationFailed")):
        moment = time.gmtime(wire.wall // SECOND_US + shift_s)
        text = time.strftime("%Y-%m-%dT%H:%M:%S", moment) + ending
        policy = ACL.format(POLICY.format("p", f"<Expiry>{text}</Expiry>"))
        assert wire.ask("PUT", "/orders?comp=acl", policy).status == 204
        whole = text.removesuffix("Z") if "." in ending else text.removesuffix("Z") + ".0000000"
        assert wire.ask("GET", "/orders?comp=acl").texts("SignedIdentifier/AccessPolicy/Expiry") == [f"{whole}Z"]
        assert _peek(wire, wire.queue_sas("/orders", se="", si="p")).code == code


@for_each(
    ("ending", "midnight"),
    [("-05:00", "T05:00:00.0000000Z"), (".5Z", "T00:00:00.5000000Z"), ("+00:00", "T00:00:00.0000000Z")],
    fresh="wire",
)
def test_a_policy_kept_from_before_still_ends(wire: Any, ending: str, midnight: str) -> None:
    """Set Queue ACL once took these forms of a time: what it stored goes on to count."""
    wire.queue("orders")
    for start, code in (("0001-01-01", None), ("2999-01-01", "AuthenticationFailed")):
        policy = Policy("old", f"{start}T00:00:00{ending}", f"2999-12-31T00:00:00{ending}", "r")
        wire.stage.change(ORDERS, labels=policies_label((policy,)))
        shown = wire.ask("GET", "/orders?comp=acl").texts("SignedIdentifier/AccessPolicy/Start")
        assert shown == [start + midnight]
        assert _peek(wire, wire.queue_sas("/orders", si="old", sp="", se="")).code == code
