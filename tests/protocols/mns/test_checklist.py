"""The checklist of mns.md, section 10: each line broke, or would break, a real client. One test a line, in order."""

import base64
from hashlib import md5
from typing import Any

from veilmq.protocols.mns import Call
from veilmq.testing.for_each import for_each

JOBS, MESSAGES, NEWS = "/queues/jobs", "/queues/jobs/messages", "/topics/news"
SUB = "<Subscription><Endpoint>http://host.example/</Endpoint></Subscription>"


def every_element(wire: Any, answer: Any) -> list[Any]:
    return [each for each in answer.xml.iter() if not len(each)]


def test_1_lists_have_no_empty_elements_and_no_marker_at_the_end(wire: Any) -> None:
    wire.ask("PUT", NEWS, "<Topic/>")
    wire.ask("PUT", f"{NEWS}/subscriptions/s", SUB)
    wire.queue("other")
    for path in ("/queues", "/topics", f"{NEWS}/subscriptions"):
        for headers in ({}, {"x-mns-with-meta": "true"}):
            answer = wire.ask("GET", path, headers=headers)
            assert all(each.text for each in every_element(wire, answer)), answer.response.body
            assert answer.text("NextMarker") is None
    page = wire.ask("GET", "/queues", headers={"x-mns-ret-number": "1"})
    assert page.text("NextMarker")
    rest = wire.ask("GET", "/queues", headers={"x-mns-marker": page.text("NextMarker")})
    assert rest.text("NextMarker") is None
    nothing = wire.ask("GET", "/queues", headers={"x-mns-prefix": "none"})
    assert list(nothing.xml) == []


@for_each(("path", "document"), [("/queues/new", "<Queue/>"), (NEWS, "<Topic/>"), (f"{NEWS}/subscriptions/s", SUB)])
def test_2_creating_says_where_also_the_second_time(wire: Any, path: str, document: str) -> None:
    if "subscriptions" in path:
        wire.ask("PUT", NEWS, "<Topic/>")
    for status in (201, 204):
        answer = wire.ask("PUT", path, document)
        assert (answer.status, answer.headers["Location"]) == (status, f"http://127.0.0.1:9326{path}")


def test_3_an_error_has_four_children_and_is_xml(wire: Any) -> None:
    for answer in (
        wire.ask("GET", "/queues/none"),
        wire.ask("GET", "/nothing"),
        wire.ask("GET", JOBS, key="AKIDNOBODY"),
        wire.read(wire.codec.refuse(413, "too large", None, "01234567-89ab-cdef-0123-456789abcdef")),
        wire.read(wire.codec.failure(wire.request("GET", JOBS))),
    ):
        assert answer.status >= 400
        assert list(answer.fields()) == ["Code", "Message", "RequestId", "HostId"]
        assert all(answer.fields().values())
        assert answer.response.content_type.startswith(b"text/xml")


def test_4_attributes_are_all_there(wire: Any) -> None:
    wire.ask("PUT", NEWS, "<Topic/>")
    wire.ask("PUT", f"{NEWS}/subscriptions/s", SUB)
    wire.put()
    queue = "QueueName CreateTime LastModifyTime DelaySeconds MaximumMessageSize MessageRetentionPeriod "
    queue += "VisibilityTimeout PollingWaitSeconds ActiveMessages InactiveMessages DelayMessages LoggingEnabled"
    topic = "TopicName CreateTime LastModifyTime MaximumMessageSize MessageRetentionPeriod MessageCount LoggingEnabled"
    subscription = "TopicOwner TopicName SubscriptionName Endpoint NotifyStrategy NotifyContentFormat CreateTime "
    subscription += "LastModifyTime"
    message = "MessageId ReceiptHandle MessageBodyMD5 MessageBody EnqueueTime NextVisibleTime FirstDequeueTime "
    message += "DequeueCount Priority"
    for path, names in ((JOBS, queue), (NEWS, topic), (f"{NEWS}/subscriptions/s", subscription), (MESSAGES, message)):
        assert set(names.split()) <= wire.ask("GET", path).fields().keys(), path


def test_5_what_failed_of_a_batch_has_exactly_its_children(wire: Any) -> None:
    good, bad = "<Message><MessageBody>x</MessageBody></Message>", "<Message><MessageBody></MessageBody></Message>"
    sent = wire.ask("POST", MESSAGES, f"<Messages>{good}{bad}</Messages>")
    assert sent.status >= 400
    names = [[child.tag.rpartition("}")[2] for child in entry] for entry in sent.xml]
    assert names == [["MessageId", "MessageBodyMD5"], ["ErrorCode", "ErrorMessage"]]
    handles = f"<ReceiptHandle>{wire.take()}</ReceiptHandle><ReceiptHandle>garbage</ReceiptHandle>"
    deleted = wire.ask("DELETE", MESSAGES, f"<ReceiptHandles>{handles}</ReceiptHandles>")
    assert deleted.status >= 400
    names = [[child.tag.rpartition("}")[2] for child in entry] for entry in deleted.xml]
    assert names == [["ErrorCode", "ErrorMessage", "ReceiptHandle"]]


def test_6_handles_are_safe_in_a_url_a_plus_stays_and_names_count_in_any_case(wire: Any) -> None:
    wire.put()
    handle = wire.take()
    assert set(handle) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")
    changed = wire.ask("PUT", f"{MESSAGES}?receiptHandle={handle}&visibilityTimeout=9").text("ReceiptHandle")
    assert wire.ask("DELETE", f"{MESSAGES}?RECEIPTHANDLE=a+b").code == "ReceiptHandleError"
    call = wire.codec.decode(wire.request("DELETE", f"{MESSAGES}?ReceiptHandle=a+b%2Bc"), wire.wall, wire.wall)
    assert isinstance(call, Call)
    assert call.commands[0].handle == "a+b+c"  # type: ignore[union-attr]
    # npm's aliyun-mns writes the elements so, too.
    body = f"<ReceiptHandles><receiptHandle>{changed}</receiptHandle></ReceiptHandles>"
    assert wire.ask("DELETE", MESSAGES, body).status == 204


def test_7_the_signature_is_over_the_raw_target_and_no_type_is_needed(wire: Any) -> None:
    wire.put()
    assert wire.ask("GET", f"{MESSAGES}?peekonly=true&x=%7e+%2F").status == 200
    absolute = wire.request("GET", JOBS, authority="123.mns.cn-hangzhou.aliyuncs.com")
    assert wire.send(absolute).status == 200
    document = "<Message><MessageBody>x</MessageBody></Message>"
    assert wire.ask("POST", MESSAGES, document, {"Content-Type": ""}).status == 201
    untyped = wire.request("POST", MESSAGES, document, headers={"Content-Type": ""})
    del untyped.headers[b"content-type"]
    assert wire.send(untyped).status == 201


def test_8_no_body_with_204_a_body_with_delete_and_types_with_get(wire: Any) -> None:
    wire.put()
    done = wire.ask("DELETE", f"{MESSAGES}?ReceiptHandle={wire.take()}")
    assert (done.status, done.response.body) == (204, b"")
    wire.put()
    body = f"<ReceiptHandles><ReceiptHandle>{wire.take()}</ReceiptHandle></ReceiptHandles>"
    assert wire.ask("DELETE", MESSAGES, body).status == 204
    empty = base64.b64encode(md5(b"").hexdigest().encode()).decode()  # Go sends it with every GET
    assert wire.ask("GET", JOBS, headers={"Content-Type": "application/xml", "Content-MD5": empty}).status == 200


def test_9_a_checksum_of_the_digits_or_of_the_bytes(wire: Any) -> None:
    body = b"<Queue/>"
    digest = md5(body)
    for given in (base64.b64encode(digest.hexdigest().encode()), base64.b64encode(digest.digest())):
        assert wire.ask("PUT", JOBS, body, {"Content-MD5": given.decode()}).status == 204
    assert wire.ask("PUT", JOBS, body, {"Content-MD5": base64.b64encode(b"x" * 16).decode()}).code == "InvalidDegist"


@for_each(
    "document",
    [
        "",
        "<Queue/>",
        "<Queue></Queue>",
        '<Queue xmlns="http://mns.aliyuncs.com/doc/v1"><Odd><Deep/></Odd></Queue>',
        '<m:Queue xmlns:m="urn:another"><m:VisibilityTimeout>30</m:VisibilityTimeout></m:Queue>',
    ],
    fresh="wire",
)
def test_10_namespaces_and_unknown_children_do_not_matter(wire: Any, document: str) -> None:
    assert wire.ask("PUT", "/queues/new", document).status == 201


def test_11_booleans_of_python_and_of_java(wire: Any) -> None:
    for given, shown in (("True", "True"), ("true", "True"), ("False", "False"), ("false", "False")):
        document = f"<Queue><LoggingEnabled>{given}</LoggingEnabled></Queue>"
        assert wire.ask("PUT", f"{JOBS}?metaoverride=true", document).status == 204
        assert wire.ask("GET", JOBS).text("LoggingEnabled") == shown


def test_12_a_delayed_send_has_a_handle_that_is_good_while_it_is_delayed(wire: Any) -> None:
    first, second = (wire.put(DelaySeconds=60).text("ReceiptHandle") for _ in range(2))
    assert wire.put().text("ReceiptHandle") is None
    assert wire.ask("DELETE", f"{MESSAGES}?ReceiptHandle={first}").status == 204
    assert wire.ask("PUT", f"{MESSAGES}?ReceiptHandle={second}&VisibilityTimeout=1").status == 200


@for_each(
    "document",
    [
        '<!DOCTYPE Queue [<!ENTITY a "b">]><Queue><VisibilityTimeout>&a;</VisibilityTimeout></Queue>',
        '<!DOCTYPE Queue SYSTEM "file:///etc/passwd"><Queue/>',
        "<Queue><VisibilityTimeout>30</Queue>",
        "<Queue>" + "<a>" * 50 + "</a>" * 50 + "</Queue>",
        "<Queue/><Queue/>",
        "\x00",
        '<?xml version="1.0" encoding="utf-16"?><Queue/>',
    ],
)
def test_hostile_documents_are_malformed(wire: Any, document: str) -> None:
    assert wire.ask("PUT", "/queues/new", document).code == "MalformedXML"
    assert wire.ask("GET", "/queues/new").code == "QueueNotExist"
