"""Messages: send, receive, peek, delete, change of visibility, their batches, properties, and what is refused."""

from hashlib import md5
from typing import Any

from tests.support.contract.stage import TESTER

from veilmq.model.commands import Receive, Send, StartMove
from veilmq.model.errors import DiskLow
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.messages import Attribute, Extras
from veilmq.model.outcomes import Received, Sent
from veilmq.model.settings.queue import QueueKey, XmlBody
from veilmq.testing.for_each import for_each

QUEUE = "/queues/jobs"
MESSAGES = f"{QUEUE}/messages"
KEY = QueueKey("000000000000", "us-east-1", "jobs")
RECEIVED = ["MessageId", "ReceiptHandle", "MessageBodyMD5", "MessageBody", "EnqueueTime", "NextVisibleTime",
            "FirstDequeueTime", "DequeueCount", "Priority"]  # fmt: skip
GARBAGE = "8-0zxjHBaWtzPz8zphz0z6OGz5yWWidU1fJM"


def md5_of(text: str) -> str:
    return md5(text.encode(), usedforsecurity=False).hexdigest().upper()


def batch(*messages: str) -> str:
    return f"<Messages>{''.join(f'<Message>{each}</Message>' for each in messages)}</Messages>"


def handles(*given: str) -> str:
    return f"<ReceiptHandles>{''.join(f'<ReceiptHandle>{each}</ReceiptHandle>' for each in given)}</ReceiptHandles>"


def commands(wire: Any, method: str, target: str, body: str = "") -> Any:
    """What the codec asks of the engine."""
    return wire.codec.decode(wire.request(method, target, body), wire.wall, wire.wall).commands


def test_the_life_of_a_message(wire: Any) -> None:
    sent = wire.put("hello &amp; &lt;b&gt;\u00fc")
    assert sent.status == 201
    assert sent.xml.tag.endswith("}Message")
    assert list(sent.fields()) == ["MessageId", "MessageBodyMD5"]
    at = wire.wall // 1000
    wire.stage.later(5 * SECOND_US)
    peeked = wire.ask("GET", f"{MESSAGES}?peekonly=true").fields()
    assert list(peeked) == [name for name in RECEIVED if name not in ("ReceiptHandle", "NextVisibleTime")]
    assert (peeked["DequeueCount"], peeked["FirstDequeueTime"]) == ("0", str(at))
    got = wire.get().fields()
    assert list(got) == RECEIVED
    assert got["MessageBody"] == "hello & <b>\u00fc"
    assert got["MessageBodyMD5"] == sent.text("MessageBodyMD5") == md5_of("hello & <b>\u00fc")
    assert got["MessageId"] == sent.text("MessageId")
    assert (got["DequeueCount"], got["Priority"]) == ("1", "8")
    assert (int(got["EnqueueTime"]), int(got["FirstDequeueTime"])) == (at, at + 5000)
    assert int(got["NextVisibleTime"]) == at + 35_000
    assert wire.get().code == "MessageNotExist"
    changed = wire.ask("PUT", f"{MESSAGES}?ReceiptHandle={got['ReceiptHandle']}&VisibilityTimeout=100")
    assert (changed.status, changed.xml.tag.rpartition("}")[2]) == (200, "ChangeVisibility")
    assert int(changed.text("NextVisibleTime") or 0) == at + 105_000
    # The old handle is dead at once.
    assert wire.ask("DELETE", f"{MESSAGES}?ReceiptHandle={got['ReceiptHandle']}").code == "MessageNotExist"
    new = changed.text("ReceiptHandle")
    deleted = wire.ask("DELETE", f"{MESSAGES}?ReceiptHandle={new}")
    assert (deleted.status, deleted.response.body, deleted.response.content_type) == (204, b"", None)
    again = wire.ask("DELETE", f"{MESSAGES}?ReceiptHandle={new}")
    assert (again.code, again.status) == ("MessageNotExist", 404)


def test_a_handle_is_worth_one_lease(wire: Any) -> None:
    wire.put()
    first = wire.take()
    wire.stage.later(31 * SECOND_US)
    for method, more in (("DELETE", ""), ("PUT", "&VisibilityTimeout=10")):
        assert wire.ask(method, f"{MESSAGES}?ReceiptHandle={first}{more}").code == "MessageNotExist"
    second = wire.get().fields()
    assert second["DequeueCount"] == "2"
    assert int(second["FirstDequeueTime"]) == int(second["NextVisibleTime"]) - 30_000 - 31_000
    assert wire.ask("DELETE", f"{MESSAGES}?ReceiptHandle={first}").code == "MessageNotExist"
    assert wire.ask("DELETE", f"{MESSAGES}?ReceiptHandle={second['ReceiptHandle']}").status == 204


def test_the_most_urgent_first(wire: Any) -> None:
    for priority in (16, 8, 1, 8, 2):
        wire.put(f"p{priority}", Priority=priority)
    wire.put("usual")
    answer = wire.get("?numOfMessages=16")
    assert answer.texts("Message/MessageBody") == ["p1", "p2", "p8", "p8", "usual", "p16"]
    assert answer.texts("Message/Priority") == ["1", "2", "8", "8", "8", "16"]


def test_a_delayed_message_can_be_deleted_and_moved_by_its_sender(wire: Any) -> None:
    rollback = wire.put("no", DelaySeconds=100).text("ReceiptHandle")
    commit = wire.put("yes", DelaySeconds=100).text("ReceiptHandle")
    assert wire.get().code == "MessageNotExist"
    assert wire.ask("DELETE", f"{MESSAGES}?ReceiptHandle={rollback}").status == 204
    moved = wire.ask("PUT", f"{MESSAGES}?ReceiptHandle={commit}&VisibilityTimeout=1")
    assert moved.status == 200
    assert wire.ask("PUT", f"{MESSAGES}?ReceiptHandle={commit}&VisibilityTimeout=1").code == "MessageNotExist"
    wire.stage.later(SECOND_US)
    assert wire.get().text("MessageBody") == "yes"
    wire.stage.later(101 * SECOND_US)
    assert wire.get().text("MessageBody") == "yes"
    assert wire.get().code == "MessageNotExist"


def test_only_a_delayed_message_comes_with_a_handle(wire: Any) -> None:
    queue = wire.queue("late", DelaySeconds=5)
    assert wire.put(queue=queue).text("ReceiptHandle")
    assert wire.put(queue=queue, DelaySeconds=0).text("ReceiptHandle") is None
    assert wire.get(queue=queue).status == 200


def test_retention_may_be_shorter_than_the_delay(wire: Any) -> None:
    queue = wire.queue("half", MessageRetentionPeriod=60)
    handle = wire.put("half", queue=queue, DelaySeconds=100).text("ReceiptHandle")
    wire.stage.later(61 * SECOND_US)
    assert wire.ask("PUT", f"{queue}/messages?ReceiptHandle={handle}&VisibilityTimeout=1").code == "MessageNotExist"
    wire.stage.later(60 * SECOND_US)
    assert wire.get(queue=queue).code == "MessageNotExist"


@for_each(("query", "wait_us"), [("", None), ("?waitseconds=0", 0), ("?WaitSeconds=30", 30 * SECOND_US)])
def test_no_wait_is_not_a_wait_of_zero(wire: Any, query: str, wait_us: int | None) -> None:
    (receive,) = commands(wire, "GET", MESSAGES + query)
    assert isinstance(receive, Receive)
    assert receive.wait_us == wait_us


def test_batches_have_a_root_of_their_own(wire: Any) -> None:
    sent = wire.ask("POST", MESSAGES, batch(*(f"<MessageBody>m{number}</MessageBody>" for number in range(3))))
    assert sent.status == 201
    assert sent.texts("Message/MessageBodyMD5") == [md5_of(f"m{number}") for number in range(3)]
    peeked = wire.ask("GET", f"{MESSAGES}?peekonly=true&numOfMessages=16")
    assert peeked.texts("Message/MessageBody") == ["m0", "m1", "m2"]
    assert wire.ask("GET", f"{MESSAGES}?peekonly=true&numOfMessages=1").texts("Message/MessageBody") == ["m0"]
    one = wire.get("?numOfMessages=1")
    assert one.xml.tag.endswith("}Messages")
    assert list(one.fields("Message")) == RECEIVED
    assert wire.get("?NumOfMessages=16").texts("Message/MessageBody") == ["m1", "m2"]
    assert wire.get("?numOfMessages=16").code == "MessageNotExist"


def test_a_batch_of_which_some_are_sent(wire: Any) -> None:
    good = "<MessageBody>good</MessageBody><MessageGroupId>g</MessageGroupId>"
    answer = wire.ask("POST", MESSAGES, batch(good, "<MessageBody>x</MessageBody><Priority>17</Priority>", "", good))
    assert answer.status == 500
    kinds = [[child.tag.rpartition("}")[2] for child in message] for message in answer.xml]
    done, failed = ["MessageId", "MessageBodyMD5"], ["ErrorCode", "ErrorMessage"]
    assert kinds == [done, failed, failed, done]
    assert answer.texts("Message/ErrorCode") == ["InvalidArgument"] * 2
    assert len(wire.get("?numOfMessages=16").texts("Message/MessageBody")) == 2


def test_a_batch_of_which_none_is_sent_is_one_error(wire: Any) -> None:
    answer = wire.ask("POST", MESSAGES, batch("<Other/>", "<Other/>"))
    assert (answer.code, answer.status) == ("InvalidArgument", 400)
    good = "<MessageBody>x</MessageBody>"
    for sent in (batch(good, "<Other/>"), batch("<Other/>", good), batch(good)):
        answer = wire.ask("POST", "/queues/nowhere/messages", sent)
        assert (answer.code, answer.status) == ("QueueNotExist", 404)


def test_a_batch_of_which_none_is_sent_says_of_each_why(wire: Any) -> None:
    """Else one message that can never be sent hid that the others may be tried again."""
    good, bad = "<MessageBody>x</MessageBody>", "<MessageBody>x</MessageBody><Priority>99</Priority>"
    call = wire.codec.decode(wire.request("POST", MESSAGES, batch(bad, good, good)), wire.wall, wire.wall)
    answer = wire.codec.encode(call, [DiskLow(free_bytes=5)] * 2)
    codes = [answer.body.count(b"<ErrorCode>%b<" % code) for code in (b"InvalidArgument", b"InternalServerError")]
    assert (answer.status, codes) == (500, [1, 2])
    answer = wire.ask("POST", MESSAGES, batch("<MessageBody>x</MessageBody><Priority>0</Priority>", "<Other/>"))
    assert answer.status == 400
    assert [child.text for message in answer.xml for child in message] == [
        "InvalidArgument", "The value of Priority should between 1 and 16.",
        "InvalidArgument", "MessageBody: it is required.",
    ]  # fmt: skip


def test_a_delayed_duplicate_has_no_handle_to_tell(wire: Any) -> None:
    """Of a FIFO queue, which is called by its alias here."""
    message = "<Message><MessageBody>x</MessageBody><DelaySeconds>9</DelaySeconds></Message>"
    call = wire.codec.decode(wire.request("POST", MESSAGES, message), wire.wall, wire.wall)
    sent = Sent(b"i" * 16, 1, Instant(5), Instant(9), Instant(99), duplicate=True)
    assert b"ReceiptHandle" not in wire.codec.encode(call, [sent]).body


def test_a_batch_is_bounded(wire: Any) -> None:
    one = "<MessageBody>x</MessageBody>"
    assert wire.ask("POST", MESSAGES, batch(*[one] * 16)).status == 201
    for body in (batch(*[one] * 17), "<Messages/>", batch(*[f"<MessageBody>{'x' * 40_000}</MessageBody>"] * 2)):
        assert wire.ask("POST", MESSAGES, body).code == "InvalidArgument"


def test_a_batch_deletes_what_it_can(wire: Any) -> None:
    for number in range(3):
        wire.put(str(number))
    given = wire.get("?numOfMessages=16").texts("Message/ReceiptHandle")
    assert wire.ask("DELETE", MESSAGES, handles(given[0])).status == 204
    answer = wire.ask("DELETE", MESSAGES, handles(*given, GARBAGE))
    assert answer.status == 404
    assert [[child.tag.rpartition("}")[2] for child in error] for error in answer.xml] == [
        ["ErrorCode", "ErrorMessage", "ReceiptHandle"]
    ] * 2
    assert answer.texts("Error/ErrorCode") == ["MessageNotExist", "ReceiptHandleError"]
    assert answer.texts("Error/ReceiptHandle") == [given[0], GARBAGE]
    assert wire.ask("GET", QUEUE).text("InactiveMessages") == "0"


@for_each(
    ("body", "code"),
    [
        ("<ReceiptHandles/>", "InvalidArgument"),
        (handles(*["x"] * 17), "InvalidArgument"),
        (handles(""), "MissingReceiptHandle"),
        (handles("<ReceiptHandle>x</ReceiptHandle>"), "MalformedXML"),
        ("<Handles/>", "MalformedXML"),
        ("", "MissingReceiptHandle"),
    ],
)
def test_batch_deletes_that_are_refused(wire: Any, body: str, code: str) -> None:
    assert wire.ask("DELETE", MESSAGES, body).code == code


def test_handles_pasted_as_they_are(wire: Any) -> None:
    for handle in ("a+b", "a%2Bb", "1-ODU4OTkzNDU5My0xNTI0MTIzMzQ4LTEtOA=="):
        (delete,) = commands(wire, "DELETE", f"{MESSAGES}?ReceiptHandle={handle}")
        assert delete.handle == handle.replace("%2B", "+")
        (extend,) = commands(wire, "PUT", f"{MESSAGES}?receiptHandle={handle}&visibilityTimeout=5")
        assert (extend.handle, extend.lease_us, extend.rotate) == (delete.handle, 5 * SECOND_US, True)
    wire.put()
    handle = wire.take()
    assert not handle.strip("0123456789abcdefABCDEFGHIJKLMNOPQRSTUVWXYZ-_.")
    assert wire.ask("DELETE", f"{MESSAGES}?RECEIPTHANDLE={handle}").status == 204


@for_each(
    ("method", "query", "code"),
    [
        ("DELETE", "?ReceiptHandle=", "MissingReceiptHandle"),
        ("DELETE", f"?ReceiptHandle={GARBAGE}", "ReceiptHandleError"),
        ("DELETE", f"?ReceiptHandle={'x' * 2000}", "ReceiptHandleError"),
        ("PUT", "?VisibilityTimeout=30", "MissingReceiptHandle"),
        ("PUT", f"?ReceiptHandle={GARBAGE}", "MissingVisibilityTimeout"),
        ("PUT", f"?ReceiptHandle={GARBAGE}&VisibilityTimeout=30", "ReceiptHandleError"),
        ("PUT", f"?ReceiptHandle={GARBAGE}&VisibilityTimeout=0", "InvalidArgument"),
        ("PUT", f"?ReceiptHandle={GARBAGE}&VisibilityTimeout=43201", "InvalidArgument"),
        ("PUT", f"?ReceiptHandle={GARBAGE}&VisibilityTimeout=soon", "InvalidQueryString"),
        ("GET", "?waitseconds=31", "InvalidArgument"),
        ("GET", "?waitseconds=-1", "InvalidArgument"),
        ("GET", f"?waitseconds={10**30}", "InvalidArgument"),
        ("GET", "?waitseconds=", "InvalidQueryString"),
        ("GET", "?numOfMessages=0", "InvalidArgument"),
        ("GET", "?numOfMessages=17", "InvalidArgument"),
        ("GET", "?peekonly=maybe", "InvalidQueryString"),
        ("GET", "?peekonly=true&numOfMessages=17", "InvalidArgument"),
        ("GET", "?peekonly=true", "MessageNotExist"),
        ("GET", "?waitseconds=1&WaitSeconds=2", "InvalidQueryString"),
        ("GET", "?x=%ff", "InvalidQueryString"),
        ("GET", "?" + "&".join(f"a{number}=1" for number in range(40)), "InvalidQueryString"),
        ("PATCH", "", "InvalidRequestURL"),
        ("HEAD", "", "InvalidRequestURL"),
    ],
)
def test_queries_that_are_refused(wire: Any, method: str, query: str, code: str) -> None:
    assert wire.ask(method, MESSAGES + query).code == code


@for_each(
    ("body", "code"),
    [
        ("", "MalformedXML"),
        ("hello", "MalformedXML"),
        ("<Message>", "MalformedXML"),
        ("<Message><MessageBody>&#1;</MessageBody></Message>", "MalformedXML"),
        ("<Message><MessageBody>\ufffe</MessageBody></Message>", "MalformedXML"),
        (b"<Message><MessageBody>\xff</MessageBody></Message>", "MalformedXML"),
        (b'<?xml version="1.0" encoding="x-none"?><Message/>', "MalformedXML"),
        ("<!DOCTYPE Message><Message><MessageBody>x</MessageBody></Message>", "MalformedXML"),
        ('<!DOCTYPE M [<!ENTITY a "b">]><Message><MessageBody>&a;</MessageBody></Message>', "MalformedXML"),
        ("<a>" * 50 + "</a>" * 50, "MalformedXML"),
        (f"<Message>{'<a/>' * 9000}</Message>", "MalformedXML"),
        ("<Queue/>", "MalformedXML"),
        ("<Message><MessageBody>a</MessageBody><MessageBody>b</MessageBody></Message>", "MalformedXML"),
        ("<Message><MessageBody><b>a</b></MessageBody></Message>", "MalformedXML"),
        ("<Message/>", "InvalidArgument"),
        ("<Message><MessageBody/></Message>", "InvalidArgument"),
        ("<Message><MessageBody>x</MessageBody><Priority/></Message>", "InvalidArgument"),
        ("<Message><MessageBody>x</MessageBody><Priority>0</Priority></Message>", "InvalidArgument"),
        ("<Message><MessageBody>x</MessageBody><Priority><a/></Priority></Message>", "InvalidArgument"),
        ("<Message><MessageBody>x</MessageBody><DelaySeconds>604801</DelaySeconds></Message>", "InvalidArgument"),
        ("<Message><MessageBody>x</MessageBody><MessageGroupId/></Message>", "InvalidArgument"),
        (f"<Message><MessageBody>{'x' * 65_537}</MessageBody></Message>", "InvalidArgument"),
        (f"<Message><MessageBody>x</MessageBody><!--{'x' * 500_000}--></Message>", "InvalidArgument"),
    ],
)
def test_documents_that_are_refused(wire: Any, body: str | bytes, code: str) -> None:
    assert wire.ask("POST", MESSAGES, body).code == code
    assert wire.ask("GET", QUEUE).text("ActiveMessages") == "0"


@for_each(
    "body",
    [
        "<Message><MessageBody>x</MessageBody></Message>",
        '<Message xmlns="http://mns.aliyuncs.com/doc/v1"><MessageBody>x</MessageBody></Message>',
        '<m:Message xmlns:m="urn:else"><m:MessageBody>x</m:MessageBody></m:Message>',
        "<Message><Unknown><a/></Unknown><MessageBody><![CDATA[x]]></MessageBody></Message>",
        b"\xff\xfe" + "<Message><MessageBody>x</MessageBody></Message>".encode("utf-16-le"),
    ],
)
def test_documents_of_any_namespace_are_taken(wire: Any, body: str | bytes) -> None:
    assert wire.ask("POST", MESSAGES, body).status == 201
    assert wire.get().text("MessageBody") == "x"


def test_the_largest_body_and_the_queues_own_limit(wire: Any) -> None:
    assert wire.put("x" * 65_536).status == 201
    small = wire.queue("small", MaximumMessageSize=1024)
    assert wire.put("x" * 1024, queue=small).status == 201
    refused = wire.put("x" * 1025, queue=small)
    assert refused.code == "InvalidArgument"
    assert "1024 bytes" in (refused.text("Message") or "")


def test_bodies_come_back_exactly(wire: Any) -> None:
    body = 'a\r\nb\rc\td & <e> "f" ]]> \U0001f600'
    escaped = body.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\r", "&#13;")
    wire.put(escaped)
    got = wire.get().fields()
    assert got["MessageBody"] == body
    assert got["MessageBodyMD5"] == md5_of(body)


def test_a_queue_that_decodes_base64(wire: Any) -> None:
    wire.stage.change(KEY, xml_body=XmlBody.BASE64)
    assert wire.put("aGVsbG8=").text("MessageBodyMD5") == md5_of("aGVsbG8=")
    assert wire.put("not base64!").code == "InvalidArgument"
    (message,) = wire.stage.receive(KEY)
    assert message.body == "hello"
    wire.stage.later(60 * SECOND_US)
    got = wire.get().fields()
    assert (got["MessageBody"], got["MessageBodyMD5"]) == ("aGVsbG8=", md5_of("aGVsbG8="))


PROPERTIES = """<UserProperties>
<PropertyValue><Name>text</Name><Value>a &lt; b</Value><Type>STRING</Type></PropertyValue>
<PropertyValue><Name>number</Name><Value>-1.5e3</Value><Type>NUMBER</Type></PropertyValue>
<PropertyValue><Name>truth</Name><Value>true</Value><Type>BOOLEAN</Type></PropertyValue>
<PropertyValue><Name>raw</Name><Value>AAH/</Value><Type>BINARY</Type></PropertyValue></UserProperties>
<SystemProperties><SystemPropertyValue><Name>traceparent</Name><Value>00-0af7-b7ad-01</Value><Type>STRING</Type>
</SystemPropertyValue></SystemProperties>"""


def test_properties_are_attributes(wire: Any) -> None:
    body = f"<Message><MessageBody>x</MessageBody><MessageGroupId>g</MessageGroupId>{PROPERTIES}</Message>"
    sent = wire.ask("POST", MESSAGES, body)
    assert sent.text("MessageGroupId") == "g"
    (message,) = wire.stage.receive(KEY)
    assert message.extras.group == "g"
    assert message.extras.attributes == (
        Attribute("text", "String", "a < b"),
        Attribute("number", "Number", "-1.5e3"),
        Attribute("truth", "String.Boolean", "true"),
        Attribute("raw", "Binary", b"\x00\x01\xff"),
        Attribute("traceparent", "String", "00-0af7-b7ad-01"),
    )
    wire.stage.later(60 * SECOND_US)
    for answer, path in (
        (wire.ask("GET", f"{MESSAGES}?peekonly=true"), ""),
        (wire.get("?numOfMessages=1"), "Message/"),
    ):
        assert answer.texts(f"{path}UserProperties/PropertyValue/Name") == ["text", "number", "truth", "raw"]
        assert answer.texts(f"{path}UserProperties/PropertyValue/Value") == ["a < b", "-1.5e3", "true", "AAH/"]
        kinds = answer.texts(f"{path}UserProperties/PropertyValue/Type")
        assert kinds == ["STRING", "NUMBER", "BOOLEAN", "BINARY"]
        assert answer.texts(f"{path}SystemProperties/SystemPropertyValue/Name") == ["traceparent"]
        assert answer.text(f"{path}MessageGroupId") == "g"


def test_attributes_of_other_protocols_are_properties(wire: Any) -> None:
    attributes = (
        Attribute("a", "String.custom", "x"),
        Attribute("b", "Number.int", "7"),
        Attribute("c", "Binary.png", b"\x89"),
        Attribute("d", "Number", "1e126"),
    )
    wire.stage.send(KEY, extras=Extras(attributes=attributes))
    answer = wire.get()
    assert answer.texts("UserProperties/PropertyValue/Type") == ["STRING", "NUMBER", "BINARY", "NUMBER"]


def prop(name: str, value: str, kind: str, element: str = "PropertyValue") -> str:
    return f"<{element}><Name>{name}</Name><Value>{value}</Value><Type>{kind}</Type></{element}>"


@for_each(
    ("properties", "code"),
    [
        (prop("", "x", "STRING"), "InvalidArgument"),
        (prop("a b", "x", "STRING"), "InvalidArgument"),
        (prop("AWS.x", "x", "STRING"), "InvalidArgument"),
        (prop("a..b", "x", "STRING"), "InvalidArgument"),
        (prop("traceparent", "x", "STRING"), "InvalidArgument"),
        (prop("a", "", "STRING"), "InvalidArgument"),
        (prop("a", "x", "LIST"), "InvalidArgument"),
        (prop("a", "x", "NUMBER"), "InvalidArgument"),
        (prop("a", "x", "BOOLEAN"), "InvalidArgument"),
        (prop("a", "x", "BINARY"), "InvalidArgument"),
        (prop("a", "x", "STRING") * 2, "InvalidArgument"),
        ("".join(prop(f"a{number}", "x", "STRING") for number in range(51)), "InvalidArgument"),
        (prop("a", "x" * 4_097, "STRING"), "InvalidArgument"),
        (prop("a", "AAAA" * 1_025, "BINARY"), "InvalidArgument"),
        ("<PropertyValue><Name>a</Name></PropertyValue>", "MalformedXML"),
        (prop("<b/>", "x", "STRING"), "MalformedXML"),
    ],
)
def test_properties_that_are_refused(wire: Any, properties: str, code: str) -> None:
    body = f"<Message><MessageBody>x</MessageBody><UserProperties>{properties}</UserProperties></Message>"
    answer = wire.ask("POST", MESSAGES, body)
    assert answer.code == code
    if "AWS." in properties or ".." in properties:
        assert "does not begin with AWS. or Amazon., and no dot is first" in answer.text("Message")


def test_properties_at_their_limits(wire: Any) -> None:
    """ "Message attributes": 50 of them, values of 4,096 characters, BINARY counted in base64."""
    fifty = "".join(prop(f"{'n' * 254}{number:02}", "\u00e9", "STRING") for number in range(50))
    traced = prop("baggage", "b" * 5_000, "STRING", "SystemPropertyValue")
    wide = prop("a", "\u00e9" * 4_096, "STRING") + prop("b", "AAAA" * 1_024, "BINARY")
    for user, count, system in ((fifty, 50, traced), (wide, 2, "")):
        inside = f"<UserProperties>{user}</UserProperties><SystemProperties>{system}</SystemProperties>"
        body = f"<Message><MessageBody>x</MessageBody>{inside}</Message>"
        assert wire.ask("POST", MESSAGES, body).status == 201
        got = wire.get()
        assert len(got.texts("UserProperties/PropertyValue/Name")) == count
        assert wire.ask("DELETE", f"{MESSAGES}?ReceiptHandle={got.text('ReceiptHandle')}").status == 204


@for_each("value", ["inf", "-Infinity", "nan", "1" * 40, "1_000", " 7 ", "1e9999"], fresh="wire")
def test_numbers_that_only_python_reads_come_back(wire: Any, value: str) -> None:
    """The service checks no NUMBER; what the official SDK sends as one, it must read as one."""
    properties = f"<UserProperties>{prop('a', value, 'NUMBER')}</UserProperties>"
    assert wire.ask("POST", MESSAGES, f"<Message><MessageBody>x</MessageBody>{properties}</Message>").status == 201
    (attribute,) = wire.stage.receive(KEY)[0].extras.attributes
    assert attribute == Attribute("a", "String.Number", value), "SQS's Number has 38 digits and no inf"
    wire.stage.later(60 * SECOND_US)
    got = wire.get()
    assert (got.text("UserProperties/PropertyValue/Type"), got.text("UserProperties/PropertyValue/Value")) == (
        "NUMBER", value,
    )  # fmt: skip


def test_system_properties_are_a_closed_set(wire: Any) -> None:
    for name, kind in (("mine", "STRING"), ("baggage", "NUMBER")):
        inside = prop(name, "x", kind, "SystemPropertyValue")
        body = f"<Message><MessageBody>x</MessageBody><SystemProperties>{inside}</SystemProperties></Message>"
        assert wire.ask("POST", MESSAGES, body).code == "InvalidArgument"


def test_a_dead_letter_says_where_it_comes_from(wire: Any) -> None:
    wire.queue("dead")
    source = wire.queue(
        "source", DlqPolicy="<DeadLetterTargetQueue>dead</DeadLetterTargetQueue><MaxReceiveCount>1</MaxReceiveCount>"
    )
    sent = wire.put(queue=source)
    wire.take(queue=source)
    wire.stage.later(31 * SECOND_US)
    assert wire.get(queue=source).code == "MessageNotExist"
    answer = wire.get(queue="/queues/dead")
    names = answer.texts("SystemProperties/SystemPropertyValue/Name")
    values = answer.texts("SystemProperties/SystemPropertyValue/Value")
    assert dict(zip(names, values, strict=True)) == {
        "DLQSourceArn": "acs:mns:us-east-1:000000000000:queues/source",
        "DLQOriginMessageId": sent.text("MessageId"),
    }


def test_an_empty_receive_is_an_error_of_its_own(wire: Any) -> None:
    call = wire.codec.decode(wire.request("GET", f"{MESSAGES}?waitseconds=30"), wire.wall, wire.wall)
    # What the engine answers at once when too many receives are parked.
    refused = wire.codec.encode(call, [Received([])])
    assert (refused.status, b"MessageNotExist" in refused.body) == (404, True)


def test_a_send_asks_for_what_it_needs(wire: Any) -> None:
    (send,) = commands(wire, "POST", MESSAGES, "<Message><MessageBody>x</MessageBody></Message>")
    assert isinstance(send, Send)
    assert send.origin.protocol == "mns"
    assert (send.delay_us, send.ttl_us, send.from_xml, send.wants_handle) == (None, None, True, True)
    assert TESTER.protocol == "sqs"


def test_dequeue_counts_across_dead_letters(wire: Any) -> None:
    """docs/mns.md: DequeueCount is that of the queue at hand."""
    dead = wire.queue("dead")
    policy = "<DeadLetterTargetQueue>dead</DeadLetterTargetQueue><MaxReceiveCount>2</MaxReceiveCount>"
    source = wire.queue("source", DlqPolicy=policy)
    wire.put(queue=source)

    def count(queue: str) -> str | None:
        found: str | None = wire.get(queue=queue).text("DequeueCount")
        wire.stage.later(31 * SECOND_US)
        return found

    for _ in range(2):
        assert [count(source), count(source), count(source)] == ["1", "2", None]
        assert wire.get("?peekonly=true", queue=dead).text("DequeueCount") == "0"
        assert [count(dead), count(dead)] == ["1", "2"]
        wire.stage.do(StartMove(queue=QueueKey("000000000000", "us-east-1", "dead"), origin=TESTER))
        wire.stage.sweep()
