"""The data path: put, get, peek, clear, delete, update; ranges, times, receipts."""

from typing import Any

from tests.support.contract.stage import TESTER

from veilmq.model.commands import StartMove
from veilmq.model.instant import DAY_US, SECOND_US
from veilmq.model.settings.queue import QueueKey, RedrivePolicy, XmlBody
from veilmq.testing.for_each import for_each

NEVER = "Fri, 31 Dec 9999 23:59:59 GMT"
ORDERS = QueueKey("000000000000", "us-east-1", "orders")


def test_a_message_goes_round(wire: Any) -> None:
    queue = wire.queue()
    put = wire.put(queue, "a &lt;b&gt; &amp;&#13;\n\u00e9 \U0001f600")
    assert put.status == 201
    assert put.response.content_type == b"application/xml"
    (message,) = put.texts("QueueMessage/MessageId")
    got = wire.get(queue)
    assert got.texts("QueueMessage/MessageText") == ["a <b> &\r\n\u00e9 \U0001f600"]
    assert got.texts("QueueMessage/MessageId") == [message]
    assert got.texts("QueueMessage/DequeueCount") == ["1"]
    assert got.headers["cache-control"] == "no-cache"
    assert "cache-control" not in put.headers
    (receipt,) = got.texts("QueueMessage/PopReceipt")
    assert wire.ask("DELETE", f"{queue}/messages/{message}?popreceipt={receipt}").status == 204
    again = wire.ask("DELETE", f"{queue}/messages/{message}?popreceipt={receipt}")
    assert (again.status, again.code) == (404, "MessageNotFound")
    assert wire.get(queue).texts("QueueMessage") == []


def test_a_delete_with_an_empty_id_clears_no_queue(wire: Any) -> None:
    """azure-storage-queue sends `delete_message("", receipt)` so."""
    queue = wire.queue()
    wire.put(queue)
    for receipt in ("x", ""):
        refused = wire.ask("DELETE", f"{queue}/messages/?popreceipt={receipt}")
        assert (refused.status, refused.code) == (400, "InvalidQueryParameterValue")
    assert len(wire.get(queue).texts("QueueMessage")) == 1
    assert wire.ask("DELETE", f"{queue}/messages/").status == 204


def test_times_are_said_as_they_are(wire: Any) -> None:
    queue = wire.queue()
    put = wire.put(queue, query="?visibilitytimeout=90&messagettl=600")
    assert put.texts("QueueMessage/InsertionTime") == [wire.date()]
    assert put.texts("QueueMessage/ExpirationTime") == [wire.date(600)]
    assert put.texts("QueueMessage/TimeNextVisible") == [wire.date(90)]
    assert wire.put(queue).texts("QueueMessage/ExpirationTime") == [wire.date(7 * 86_400)]
    assert wire.put(queue, query="?messagettl=-1").texts("QueueMessage/ExpirationTime") == [NEVER]
    # .NET's TimeSpan.MaxValue, which programs took for "never" before there was -1 (Azure/azure-sdk-for-net #15158).
    assert wire.put(queue, query="?messagettl=922337203685").texts("QueueMessage/ExpirationTime") == [NEVER]
    got = wire.get(queue, "?visibilitytimeout=45")
    assert got.texts("QueueMessage/TimeNextVisible") == [wire.date(45)]
    assert wire.get(queue).texts("QueueMessage/TimeNextVisible") == [wire.date(30)]


def test_each_message_of_one_get_has_its_own_receipt(wire: Any) -> None:
    queue = wire.queue()
    for number in range(40):
        wire.put(queue, str(number))
    got = wire.get(queue, "?numofmessages=32")
    assert got.texts("QueueMessage/MessageText") == [str(number) for number in range(32)]
    assert len(set(got.texts("QueueMessage/PopReceipt"))) == 32
    assert len(wire.get(queue).texts("QueueMessage")) == 1


@for_each("later_s", [0, 29, 31, 3600], fresh="wire")
@for_each("updated", [False, True], fresh="wire")
def test_an_old_receipt_counts_until_somebody_else_has_the_message(wire: Any, later_s: int, updated: bool) -> None:
    queue = wire.queue()
    wire.put(queue)
    message, receipt = wire.take(queue)
    wire.stage.later(later_s * SECOND_US)
    if updated:
        answer = wire.ask("PUT", f"{queue}/messages/{message}?popreceipt={receipt}&visibilitytimeout=9")
        assert answer.status == 204
        assert wire.get(queue).texts("QueueMessage") == []
        receipt = answer.headers["x-ms-popreceipt"]
    assert wire.ask("DELETE", f"{queue}/messages/{message}?popreceipt={receipt}").status == 204


def test_a_stale_receipt_changes_nothing(wire: Any) -> None:
    queue = wire.queue()
    wire.put(queue)
    message, stale = wire.take(queue, "?visibilitytimeout=1")
    wire.stage.later(SECOND_US)
    again, receipt = wire.take(queue)
    assert again == message
    for method, query in (("DELETE", ""), ("PUT", "&visibilitytimeout=5")):
        refused = wire.ask(method, f"{queue}/messages/{message}?popreceipt={stale}{query}")
        assert (refused.status, refused.code) == (404, "MessageNotFound")
    assert wire.ask("DELETE", f"{queue}/messages/{message}?popreceipt={receipt}").status == 204


@for_each("receipt", ["x", "0" * 65, "G" * 66, "AgAAAAMAAAAAAAAA4sB2l%2FTe2QE%3D"], fresh="wire")
def test_a_receipt_that_is_none_has_the_wrong_form(wire: Any, receipt: str) -> None:
    queue = wire.queue()
    wire.put(queue)
    message, _ = wire.take(queue)
    for method, query in (("DELETE", ""), ("PUT", "&visibilitytimeout=5")):
        refused = wire.ask(method, f"{queue}/messages/{message}?popreceipt={receipt}{query}")
        assert (refused.status, refused.code) == (400, "InvalidQueryParameterValue")
        assert refused.text("QueryParameterName") == "popreceipt"
        assert refused.text("Reason") == "Invalid pop receipt format."


def test_a_receipt_of_another_message_finds_none(wire: Any) -> None:
    queue = wire.queue()
    wire.put(queue)
    wire.put(queue)
    (first, _), (second, receipt) = wire.take(queue), wire.take(queue)
    for message in (first, "no-id", "00000000-0000-0000-0000-000000000000", "%2e%2e"):
        refused = wire.ask("DELETE", f"{queue}/messages/{message}?popreceipt={receipt}")
        assert (refused.status, refused.code) == (404, "MessageNotFound"), message
        refused = wire.ask("PUT", f"{queue}/messages/{message}?popreceipt={receipt}&visibilitytimeout=0")
        assert (refused.status, refused.code) == (404, "MessageNotFound"), message
    assert wire.ask("DELETE", f"{queue}/messages/no-id?popreceipt=x").code == "MessageNotFound"
    assert wire.ask("DELETE", f"{queue}/messages/{second}?popreceipt={receipt}").status == 204


def test_the_receipt_of_a_put_updates_and_deletes(wire: Any) -> None:
    queue = wire.queue()
    put = wire.put(queue)
    (message,), (receipt,) = put.texts("QueueMessage/MessageId"), put.texts("QueueMessage/PopReceipt")
    updated = wire.ask("PUT", f"{queue}/messages/{message}?popreceipt={receipt}&visibilitytimeout=60")
    assert updated.status == 204
    assert wire.get(queue).texts("QueueMessage") == []
    newer = updated.headers["x-ms-popreceipt"]
    assert wire.ask("DELETE", f"{queue}/messages/{message}?popreceipt={receipt}").code == "MessageNotFound"
    assert wire.ask("DELETE", f"{queue}/messages/{message}?popreceipt={newer}").status == 204


def test_an_update_moves_the_lease_and_gives_a_new_receipt_each_time(wire: Any) -> None:
    queue = wire.queue()
    wire.put(queue, "old")
    message, receipt = wire.take(queue, "?visibilitytimeout=10")
    receipts = {receipt}
    for _ in range(5):
        wire.stage.later(8 * SECOND_US)
        answer = wire.ask("PUT", f"{queue}/messages/{message}?popreceipt={receipt}&visibilitytimeout=10")
        assert answer.status == 204
        assert answer.headers["x-ms-time-next-visible"] == wire.date(10)
        receipt = answer.headers["x-ms-popreceipt"]
        receipts.add(receipt)
        assert wire.get(queue).texts("QueueMessage") == []
    assert len(receipts) == 6
    answer = wire.ask(
        "PUT",
        f"{queue}/messages/{message}?popreceipt={receipt}&visibilitytimeout=0",
        "<QueueMessage><MessageText>new</MessageText></QueueMessage>",
    )
    assert answer.status == 204
    got = wire.get(queue)
    assert got.texts("QueueMessage/MessageText") == ["new"]
    assert got.texts("QueueMessage/DequeueCount") == ["2"], "an update is no delivery"


def test_a_lease_may_outlast_the_message_which_is_gone_all_the_same(wire: Any) -> None:
    queue = wire.queue()
    wire.put(queue, query="?messagettl=60")
    message, receipt = wire.take(queue, "?visibilitytimeout=604800")
    answer = wire.ask("PUT", f"{queue}/messages/{message}?popreceipt={receipt}&visibilitytimeout=604800")
    assert answer.status == 204
    assert answer.headers["x-ms-time-next-visible"] == wire.date(604_800)
    wire.stage.later(60 * SECOND_US)
    receipt = answer.headers["x-ms-popreceipt"]
    assert wire.ask("DELETE", f"{queue}/messages/{message}?popreceipt={receipt}").code == "MessageNotFound"
    wire.stage.later(8 * DAY_US)
    assert wire.get(queue).texts("QueueMessage") == []


def test_a_peek_changes_nothing_and_gives_no_receipt(wire: Any) -> None:
    queue = wire.queue()
    wire.put(queue, "one")
    wire.put(queue, "later", "?visibilitytimeout=60")
    for _ in range(3):
        seen = wire.get(queue, "?peekonly=true&numofmessages=32")
        assert seen.texts("QueueMessage/MessageText") == ["one"]
        assert seen.texts("QueueMessage/DequeueCount") == ["0"]
        assert seen.texts("QueueMessage/PopReceipt") == seen.texts("QueueMessage/TimeNextVisible") == []
    assert wire.get(queue, "?peekonly=false").texts("QueueMessage/DequeueCount") == ["1"]


def test_clear_takes_everything(wire: Any) -> None:
    queue = wire.queue()
    for query in ("", "", "?visibilitytimeout=60"):
        wire.put(queue, query=query)
    message, receipt = wire.take(queue)
    for _ in range(2):
        assert wire.ask("DELETE", f"{queue}/messages").status == 204
    assert wire.ask("DELETE", f"{queue}/messages/{message}?popreceipt={receipt}").code == "MessageNotFound"
    assert wire.ask("GET", f"{queue}?comp=metadata").headers["x-ms-approximate-messages-count"] == "0"


RANGES = [
    ("POST", "visibilitytimeout", (-1, 604_801), (0, 604_799)),
    ("POST", "messagettl", (0, -2, 10**18, -(10**18), 10**30), (1, 604_801, 2**31 - 1, 2**31, 10**18 - 1, -1)),
    ("GET", "visibilitytimeout", (0, -1, 604_801), (1, 604_800)),
    ("GET", "numofmessages", (0, -1, 33, 10**18, 10**200), (1, 32)),
    ("GET", "peekonly=true&numofmessages", (0, 33), (1, 32)),
]


@for_each(("method", "name", "bad", "good"), RANGES, fresh="wire")
def test_ranges(wire: Any, method: str, name: str, bad: tuple[int, ...], good: tuple[int, ...]) -> None:
    queue = wire.queue()
    body = "<QueueMessage><MessageText/></QueueMessage>" if method == "POST" else ""
    parameter = name.rpartition("&")[2]
    for value in bad:
        refused = wire.ask(method, f"{queue}/messages?{name}={value}", body)
        assert (refused.status, refused.code) == (400, "OutOfRangeQueryParameterValue"), value
        assert refused.text("QueryParameterName") == parameter
        assert refused.text("QueryParameterValue") == str(value)
        assert int(refused.text("MinimumAllowed")) > value or int(refused.text("MaximumAllowed")) < value
    for value in good:
        assert wire.ask(method, f"{queue}/messages?{name}={value}", body).status in {200, 201}, value
    for text in ("", "x", "1.5", "1e3", "%20", "0x1", "%D9%A1"):
        refused = wire.ask(method, f"{queue}/messages?{name}={text}", body)
        assert (refused.status, refused.code) == (400, "InvalidQueryParameterValue"), text
    twice = wire.ask(method, f"{queue}/messages?{name}={good[0]}&{parameter}={good[0]}", body)
    assert (twice.status, twice.code) == (400, "InvalidQueryParameterValue")


def test_a_message_is_not_put_to_be_dead_before_it_is_visible(wire: Any) -> None:
    queue = wire.queue()
    for query in (
        "?visibilitytimeout=604800",
        "?visibilitytimeout=10&messagettl=10",
        "?visibilitytimeout=11&messagettl=10",
    ):
        assert wire.put(queue, query=query).code == "InvalidQueryParameterValue"
    assert wire.put(queue, query="?visibilitytimeout=604800&messagettl=-1").status == 201
    assert wire.put(queue, query="?visibilitytimeout=9&messagettl=10").status == 201


@for_each(
    ("settings", "query", "status"),
    [
        ({"retention_us": 60 * SECOND_US}, "?visibilitytimeout=62", 400),
        ({"retention_us": 60 * SECOND_US}, "?visibilitytimeout=59", 201),
        ({"retention_us": 120 * SECOND_US, "delay_us": 900 * SECOND_US}, "", 400),
        ({"delay_us": 900 * SECOND_US}, "?messagettl=900", 400),
        ({"delay_us": 900 * SECOND_US}, "?messagettl=901", 201),
        ({"retention_us": 1_209_600 * SECOND_US}, "?visibilitytimeout=604800", 201),
    ],
    fresh="wire",
)
def test_what_a_put_does_not_say_the_queue_does(wire: Any, settings: dict[str, Any], query: str, status: int) -> None:
    """Another protocol can set them."""
    queue = wire.queue()
    key = wire.calls[-1].commands[0].queue
    wire.stage.change(key, **settings)
    answer = wire.put(queue, query=query)
    assert answer.status == status
    if status == 400:
        assert answer.code == "InvalidQueryParameterValue"
        assert answer.text("QueryParameterName") == "visibilitytimeout"
        assert sum(wire.stage.counts(key)) == 0


def test_update_needs_both_its_parameters(wire: Any) -> None:
    queue = wire.queue()
    wire.put(queue)
    message, receipt = wire.take(queue)
    for query, name in ((f"popreceipt={receipt}", "visibilitytimeout"), ("visibilitytimeout=1", "popreceipt")):
        refused = wire.ask("PUT", f"{queue}/messages/{message}?{query}")
        assert (refused.code, refused.text("QueryParameterName")) == ("MissingRequiredQueryParameter", name)
    assert wire.ask("DELETE", f"{queue}/messages/{message}").code == "MissingRequiredQueryParameter"
    refused = wire.ask("PUT", f"{queue}/messages/{message}?popreceipt={receipt}&visibilitytimeout=604801")
    assert refused.code == "OutOfRangeQueryParameterValue"


@for_each(("version", "limit"), [("2026-10-06", 65_536), ("2011-08-18", 65_536), ("2009-09-19", 8_192)], fresh="wire")
def test_how_long_a_message_may_be(wire: Any, version: str, limit: int) -> None:
    queue = wire.queue()
    assert wire.put(queue, "\u00e9" * (limit // 2), version=version).status == 201
    refused = wire.put(queue, "\u00e9" * (limit // 2) + "x", version=version)
    assert (refused.status, refused.code) == (413, "RequestBodyTooLarge")
    assert refused.text("MaxLimit") == str(limit)
    assert wire.put(queue, "&lt;" * limit, version=version).status == 201, "what is counted is the text, not its XML"


@for_each("character", ["&#1;", "&#xFFFE;", "\x01", "&#xD800;", "&#0;", "\ufffe"], fresh="wire")
def test_what_xml_cannot_carry_is_refused_at_the_door(wire: Any, character: str) -> None:
    queue = wire.queue()
    refused = wire.put(queue, f"a{character}b")
    assert refused.status == 400
    assert refused.code in {"InvalidXmlDocument", "InvalidXmlNodeValue"}
    wire.put(queue, "good")
    assert wire.get(queue, "?numofmessages=32").texts("QueueMessage/MessageText") == ["good"]


def test_before_their_versions(wire: Any) -> None:
    queue = wire.queue()
    refused = wire.put(queue, query="?visibilitytimeout=1", version="2009-09-19")
    assert (refused.code, refused.text("QueryParameterName")) == ("UnsupportedQueryParameter", "visibilitytimeout")
    assert wire.put(queue, query="?visibilitytimeout=1", version="2011-08-18").status == 201
    for ttl in ("-1", "604801"):
        assert wire.put(queue, query=f"?messagettl={ttl}", version="2016-05-31").code == "OutOfRangeQueryParameterValue"
    assert wire.get(queue, "?visibilitytimeout=7201", version="2009-09-19").code == "OutOfRangeQueryParameterValue"
    put = wire.put(queue, version="2015-12-11")
    assert (put.status, put.response.body) == (201, b"")
    message, receipt = wire.take(queue)
    target = f"{queue}/messages/{message}?popreceipt={receipt}&visibilitytimeout=1"
    assert wire.ask("PUT", target, version="2009-09-19").code == "FeatureVersionMismatch"


def test_a_get_never_waits(wire: Any) -> None:
    queue = wire.queue()
    wire.stage.change(ORDERS, wait_us=20 * SECOND_US)
    assert wire.get(queue).texts("QueueMessage") == []
    assert wire.calls[-1].commands[0].wait_us == 0


def test_the_queues_own_settings_decide_what_is_left_out(wire: Any) -> None:
    queue = wire.queue()
    wire.stage.change(ORDERS, visibility_timeout_us=77 * SECOND_US, retention_us=99 * SECOND_US, delay_us=5 * SECOND_US)
    put = wire.put(queue)
    assert put.texts("QueueMessage/ExpirationTime") == [wire.date(99)]
    assert put.texts("QueueMessage/TimeNextVisible") == [wire.date(5)]
    wire.stage.later(5 * SECOND_US)
    assert wire.get(queue).texts("QueueMessage/TimeNextVisible") == [wire.date(77)]


def test_bodies_of_a_base64_queue_are_stored_decoded(wire: Any) -> None:
    queue = wire.queue()
    wire.stage.change(ORDERS, xml_body=XmlBody.BASE64)
    assert wire.put(queue, "aGVsbG8gw6k=").status == 201
    for text in ("hello!", "aGVsbG8", "/w==", "AQ==", "aGVs\nbG8="):
        refused = wire.put(queue, text)
        assert (refused.status, refused.code) == (400, "InvalidXmlNodeValue"), text
    assert [message.body for message in wire.stage.peek(ORDERS)] == ["hello \u00e9"]
    assert wire.get(queue, "?peekonly=true").texts("QueueMessage/MessageText") == ["aGVsbG8gw6k="]
    got = wire.get(queue)
    assert got.texts("QueueMessage/MessageText") == ["aGVsbG8gw6k="]
    (message,), (receipt,) = got.texts("QueueMessage/MessageId"), got.texts("QueueMessage/PopReceipt")
    target = f"{queue}/messages/{message}?popreceipt={receipt}&visibilitytimeout=0"
    assert wire.ask("PUT", target, "<QueueMessage><MessageText>?</MessageText></QueueMessage>").status == 400
    assert wire.ask("PUT", target, "<QueueMessage><MessageText>bmV3</MessageText></QueueMessage>").status == 204
    assert [message.body for message in wire.stage.peek(ORDERS)] == ["new"]


def test_a_queue_that_is_not_there(wire: Any) -> None:
    body = "<QueueMessage><MessageText/></QueueMessage>"
    message = "11111111-2222-3333-4444-555555555555"
    for method, target in (
        ("POST", "/none/messages"),
        ("GET", "/none/messages"),
        ("GET", "/none/messages?peekonly=true"),
        ("DELETE", "/none/messages"),
        ("DELETE", f"/none/messages/{message}?popreceipt=x"),
        ("PUT", f"/none/messages/{message}?popreceipt=x&visibilitytimeout=1"),
        ("DELETE", "/none/messages/no-id?popreceipt=x"),
        ("PUT", "/none/messages/no-id?popreceipt=x&visibilitytimeout=1"),
        ("DELETE", "/none"),
        ("GET", "/none?comp=metadata"),
        ("PUT", "/none?comp=metadata"),
        ("GET", "/none?comp=acl"),
        ("PUT", "/none?comp=acl"),
    ):
        refused = wire.ask(method, target, body if method == "POST" else b"")
        assert (refused.status, refused.code) == (404, "QueueNotFound"), target


def test_dequeue_counts_across_dead_letters(wire: Any) -> None:
    """docs/azure.md: DequeueCount is that of the queue at hand."""
    dead, orders = wire.queue("dead"), wire.queue()
    target = QueueKey("000000000000", "us-east-1", "dead")
    wire.stage.change(ORDERS, redrive=RedrivePolicy(target, 2))
    wire.put(orders)

    def counts(queue: str) -> list[str]:
        found: list[str] = wire.get(queue, "?visibilitytimeout=1").texts("QueueMessage/DequeueCount")
        wire.stage.later(SECOND_US)
        return found

    for _ in range(2):
        assert [counts(orders), counts(orders), counts(orders)] == [["1"], ["2"], []]
        assert wire.get(dead, "?peekonly=true").texts("QueueMessage/DequeueCount") == ["0"]
        assert [counts(dead), counts(dead)] == [["1"], ["2"]]
        wire.stage.do(StartMove(queue=target, origin=TESTER))
        wire.stage.sweep()
