"""Topics, subscriptions, publish."""

import json
from hashlib import md5
from typing import Any

import msgspec
import pytest

from veilmq.model.instant import SECOND_US
from veilmq.model.messages import Attribute
from veilmq.model.settings.access import Action, Grant
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import SETTINGS_QUEUES, TopicKey, hidden_queue
from veilmq.protocols.mns.operations import ACCOUNT_QUEUE
from veilmq.testing.for_each import for_each

TOPIC = "/topics/news"
KEY = TopicKey("000000000000", "us-east-1", "news")
JOBS = QueueKey("000000000000", "us-east-1", "jobs")
ATTRIBUTES = ["TopicName", "CreateTime", "LastModifyTime", "MaximumMessageSize", "MessageRetentionPeriod",
              "MessageCount", "LoggingEnabled"]  # fmt: skip
TO_JOBS = "acs:mns:cn-hangzhou:127:queues/jobs"


@pytest.fixture
def topic(wire: Any) -> Any:
    """The client, with the topic `news`."""
    assert wire.ask("PUT", TOPIC).status == 201
    return wire


def subscription(endpoint: str = TO_JOBS, **fields: str) -> str:
    inside = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
    return f"<Subscription><Endpoint>{endpoint}</Endpoint>{inside}</Subscription>"


def subscribe(wire: Any, name: str = "s", endpoint: str = TO_JOBS, **fields: str) -> Any:
    return wire.ask("PUT", f"{TOPIC}/subscriptions/{name}", subscription(endpoint, **fields))


def publish(wire: Any, body: str = "hello", inside: str = "") -> Any:
    return wire.ask("POST", f"{TOPIC}/messages", f"<Message><MessageBody>{body}</MessageBody>{inside}</Message>")


def test_the_life_of_a_topic(wire: Any) -> None:
    made = wire.ask("PUT", TOPIC, "<Topic><MaximumMessageSize>2048</MaximumMessageSize></Topic>")
    assert (made.status, made.headers["Location"]) == (201, "http://127.0.0.1:9326/topics/news")
    again = wire.ask("PUT", TOPIC, "<Topic><MaximumMessageSize>2048</MaximumMessageSize></Topic>")
    assert (again.status, again.headers["Location"]) == (204, "http://127.0.0.1:9326/topics/news")
    refused = wire.ask("PUT", TOPIC, "<Topic/>")
    assert (refused.code, refused.status) == ("TopicAlreadyExist", 409)
    changed = wire.ask("PUT", f"{TOPIC}?metaoverride=true", "<Topic><LoggingEnabled>True</LoggingEnabled></Topic>")
    assert changed.status == 204
    answer = wire.ask("GET", TOPIC)
    fields = answer.fields()
    assert list(fields) == ATTRIBUTES
    assert (fields["MaximumMessageSize"], fields["LoggingEnabled"]) == ("2048", "True")
    assert (fields["MessageRetentionPeriod"], fields["MessageCount"]) == ("86400", "0")
    for _ in range(2):
        assert wire.ask("DELETE", TOPIC).status == 204
    for method, path, body in (
        ("GET", TOPIC, ""),
        ("PUT", f"{TOPIC}?metaoverride=true", "<Topic/>"),
        ("POST", f"{TOPIC}/messages", "<Message><MessageBody>x</MessageBody></Message>"),
        ("GET", f"{TOPIC}/subscriptions", ""),
        ("PUT", f"{TOPIC}/subscriptions/s", subscription()),
        ("GET", f"{TOPIC}/subscriptions/s", ""),
        ("DELETE", f"{TOPIC}/subscriptions/s", ""),
    ):
        missing = wire.ask(method, path, body)
        assert (missing.code, missing.status) == ("TopicNotExist", 404)


@for_each(("size", "status"), [(1023, 400), (1024, 201), (65_536, 201), (65_537, 400)], fresh="wire")
def test_sizes_of_topics(wire: Any, size: int, status: int) -> None:
    body = f"<Topic><MaximumMessageSize>{size}</MaximumMessageSize></Topic>"
    assert wire.ask("PUT", TOPIC, body).status == status


def test_lists_of_topics(wire: Any) -> None:
    for number in range(3):
        wire.ask("PUT", f"/topics/t{number}")
    first = wire.ask("GET", "/topics", headers={"x-mns-ret-number": "2", "x-mns-with-meta": "true"})
    assert first.texts("Topic/TopicURL") == [f"http://127.0.0.1:9326/topics/t{number}" for number in range(2)]
    assert list(first.fields("Topic")) == ["TopicURL", *ATTRIBUTES]
    last = wire.ask("GET", "/topics", headers={"x-mns-marker": first.text("NextMarker")})
    assert last.texts("Topic/TopicName") == ["t2"]
    assert last.text("NextMarker") is None
    assert len(wire.ask("GET", "/topics", headers={"x-mns-prefix": "none"}).xml) == 0


def test_the_life_of_a_subscription(topic: Any) -> None:
    made = subscribe(topic, FilterTag="red", NotifyContentFormat="SIMPLIFIED")
    assert (made.status, made.headers["Location"]) == (201, "http://127.0.0.1:9326/topics/news/subscriptions/s")
    again = subscribe(topic, FilterTag="red", NotifyContentFormat="SIMPLIFIED")
    assert (again.status, again.headers["Location"]) == (204, made.headers["Location"])
    refused = subscribe(topic)
    assert (refused.code, refused.status) == ("SubscriptionAlreadyExist", 409)
    path = f"{TOPIC}/subscriptions/s"
    topic.stage.later(5 * SECOND_US)
    change = "<Subscription><NotifyStrategy>EXPONENTIAL_DECAY_RETRY</NotifyStrategy></Subscription>"
    assert topic.ask("PUT", f"{path}?metaoverride=true", change).status == 204
    fields = topic.ask("GET", path).fields()
    assert int(fields["LastModifyTime"]) == int(fields["CreateTime"]) + 5
    del fields["CreateTime"], fields["LastModifyTime"]
    assert fields == {
        "TopicOwner": "000000000000",
        "TopicName": "news",
        "Subscriber": "000000000000",
        "SubscriptionName": "s",
        "Endpoint": TO_JOBS,
        "NotifyStrategy": "EXPONENTIAL_DECAY_RETRY",
        "NotifyContentFormat": "SIMPLIFIED",
        "FilterTag": "red",
    }
    for _ in range(2):
        assert topic.ask("DELETE", path).status == 204
    missing = topic.ask("GET", path)
    assert (missing.code, missing.status) == ("SubscriptionNotExist", 404)


def test_lists_of_subscriptions(topic: Any) -> None:
    for number in range(3):
        subscribe(topic, f"s{number}")
    path = f"{TOPIC}/subscriptions"
    first = topic.ask("GET", path, headers={"x-mns-ret-number": "2"})
    start = "http://127.0.0.1:9326/topics/news/subscriptions/"
    assert first.texts("Subscription/SubscriptionURL") == [f"{start}s0", f"{start}s1"]
    last = topic.ask("GET", path, headers={"x-mns-marker": first.text("NextMarker")})
    assert last.texts("Subscription/SubscriptionURL") == [f"{start}s2"]
    assert last.text("NextMarker") is None
    detailed = topic.ask("GET", path, headers={"x-mns-prefix": "s1", "x-mns-with-meta": "true"})
    shown = topic.ask("GET", f"{path}/s1").fields()
    assert detailed.fields("Subscription") == {"SubscriptionURL": f"{start}s1"} | shown


def test_no_more_than_100_subscriptions(topic: Any) -> None:
    for number in range(100):
        assert subscribe(topic, f"s{number}", "http://h/").status == 201
    assert subscribe(topic, "more", "http://h/").code == "InvalidArgument"


@for_each(
    "endpoint",
    ["http://127.0.0.1:8080/notifications", "https://example.com", "http://[::1]:80/a?b=c", "HTTP://h",
     "http://h.example./", "http://a_b.example/", f"http://{'a' * 63}.example/", "http://[::ffff:203.0.113.7]/",
     TO_JOBS, "acs:mns:cn-hangzhou:127:/queues/jobs", "acs:mns:::queues/jobs"],
)  # fmt: skip
def test_endpoints_that_are_taken(topic: Any, endpoint: str) -> None:
    assert subscribe(topic, endpoint=endpoint).status == 201
    assert topic.ask("GET", f"{TOPIC}/subscriptions/s").text("Endpoint") == endpoint
    assert topic.ask("DELETE", f"{TOPIC}/subscriptions/s").status == 204


@for_each(
    ("said", "endpoints"),
    [
        ("Endpoint is required", ["", "<b/>"]),
        ("at most 1024 characters", [f"http://h/{'a' * 2000}"]),
        (
            "is not a URL for pushes",
            ["http://", "http://user@h/", "http://h:99999/", "http://h:0/", "http://h/#a", "http://h/ a",
             "http://a..b/", "http://.a/", "HTTPS://./", f"http://{'a' * 64}/", f"http://{'a.' * 127}b/",
             "http://[1.2.3.4]/", "http://[::::]/", "http://[12345::]/", "http://h/\u00e9"],
        ),
        (
            "is neither acs:mns:",
            ["nothing", "ftp://h/", "acs:mns:r:1:topics/jobs", "acs:mns:r:1:queues/", "acs:mns:r:1:queues/a_b"],
        ),
        ("neither mail nor", ["mail:directmail:a@b.example", "sms:directsms:anonymous"]),
    ],
)  # fmt: skip
def test_endpoints_that_are_refused(topic: Any, said: str, endpoints: list[str]) -> None:
    for endpoint in endpoints:
        answer = subscribe(topic, endpoint=endpoint)
        assert (answer.code, answer.status) == ("EndpointInvalid", 400)
        assert said in answer.text("Message"), endpoint


@for_each(
    ("fields", "code"),
    [
        ({"NotifyStrategy": "NEVER"}, "InvalidArgument"),
        ({"NotifyStrategy": ""}, "InvalidArgument"),
        ({"NotifyContentFormat": "STREAM"}, "InvalidArgument"),
        ({"FilterTag": "x" * 17}, "InvalidArgument"),
        ({"FilterTag": ""}, "InvalidArgument"),
        ({"DlqPolicy": "<Enabled>true</Enabled>"}, "InvalidArgument"),
        ({"TenantRateLimitPolicy": "<Enabled>true</Enabled>"}, "InvalidArgument"),
        ({"TenantRateLimitPolicy": "<MaxReceivesPerSecond>0</MaxReceivesPerSecond>"}, "InvalidArgument"),
        ({"TenantRateLimitPolicy": "<MaxReceivesPerSecond>9</MaxReceivesPerSecond>"}, "InvalidArgument"),
    ],
)
def test_subscriptions_that_are_refused(topic: Any, fields: dict[str, str], code: str) -> None:
    assert subscribe(topic, **fields).code == code


def test_a_queue_must_be_there_and_take_what_the_topic_takes(topic: Any) -> None:
    missing = "<DeadLetterTargetQueue>none</DeadLetterTargetQueue>"
    for fields in ({"endpoint": "acs:mns:r:1:queues/none"}, {"DlqPolicy": missing}):
        answer = subscribe(topic, **fields)
        assert answer.code == "QueueNotExist"
        assert "000000000000/us-east-1/none" in answer.text("Message"), "two queues may be in a request"
    topic.queue("small", MaximumMessageSize=1024)
    assert subscribe(topic, endpoint="acs:mns:r:1:queues/small").code == "InvalidArgument"


def test_what_a_subscription_cannot_change(topic: Any) -> None:
    subscribe(topic)
    path = f"{TOPIC}/subscriptions/s?metaoverride=true"
    assert topic.ask("PUT", path, subscription()).code == "InvalidArgument"
    assert topic.ask("PUT", f"{TOPIC}/subscriptions/none?metaoverride=true", "").code == "SubscriptionNotExist"
    assert topic.ask("PUT", path, "<Subscription><FilterTag>blue</FilterTag></Subscription>").status == 204
    assert topic.ask("GET", f"{TOPIC}/subscriptions/s").text("FilterTag") == "blue"
    assert topic.ask("PUT", path, "<Subscription><FilterTag><b/></FilterTag></Subscription>").code == "MalformedXML"
    assert topic.ask("PUT", path, "<Subscription><FilterTag/></Subscription>").status == 204
    assert topic.ask("GET", f"{TOPIC}/subscriptions/s").text("FilterTag") is None
    assert publish(topic, "untagged").status == 201
    assert topic.get().status == 200


def test_a_dead_letter_queue_of_a_push(topic: Any) -> None:
    topic.queue("dead")
    policy = "<Enabled>true</Enabled><DeadLetterTargetQueue>dead</DeadLetterTargetQueue>"
    assert subscribe(topic, endpoint="http://h/", DlqPolicy=policy).status == 201
    answer = topic.ask("GET", f"{TOPIC}/subscriptions/s")
    assert answer.fields("DlqPolicy")["DeadLetterTargetQueue"] == "acs:mns:us-east-1:000000000000:queues/dead"


def system_properties(answer: Any) -> dict[str, str]:
    names = answer.texts("SystemProperties/SystemPropertyValue/Name")
    return dict(zip(names, answer.texts("SystemProperties/SystemPropertyValue/Value"), strict=True))


def test_a_push_that_is_a_dead_letter_names_its_subscription_and_what_was_published(topic: Any) -> None:
    topic.queue("dead")
    policy = "<DeadLetterTargetQueue>dead</DeadLetterTargetQueue>"
    assert subscribe(topic, endpoint="http://h/", DlqPolicy=policy).status == 201
    published = publish(topic)
    topic.stage.later(86_401 * SECOND_US)
    topic.stage.sweep()
    assert system_properties(topic.get(queue="/queues/dead")) == {
        "DLQSourceArn": "acs:mns:us-east-1:000000000000:/topics/news/subscriptions/s",
        "DLQOriginMessageId": published.text("MessageId"),
    }


def test_what_a_queue_cannot_take_goes_to_the_dead_letters(topic: Any) -> None:
    topic.queue("dead")
    topic.queue("gone")
    policy = "<DeadLetterTargetQueue>{}</DeadLetterTargetQueue>"
    to_gone = "acs:mns:r:1:queues/gone"
    itself = subscribe(topic, endpoint=to_gone, DlqPolicy=policy.format("gone"))
    same = "DlqPolicy: it must be another queue than the endpoint."
    assert (itself.code, itself.text("Message")) == ("InvalidArgument", same)
    assert subscribe(topic, endpoint=to_gone, DlqPolicy=policy.format("dead")).status == 201
    itself = topic.ask("PUT", f"{TOPIC}/subscriptions/s?metaoverride=true", dead_letters("gone"))
    assert itself.code == "InvalidArgument"
    assert topic.ask("DELETE", "/queues/gone").status == 204
    published = publish(topic)
    answer = topic.get(queue="/queues/dead")
    assert f"<MessageId>{published.text('MessageId')}</MessageId>" in answer.text("MessageBody")
    assert system_properties(answer) == {
        "DLQSourceArn": "acs:mns:us-east-1:000000000000:queues/gone",
        "DLQOriginMessageId": published.text("MessageId"),
    }


def dead_letters(target: str, enabled: str = "true") -> str:
    inside = f"<Enabled>{enabled}</Enabled><DeadLetterTargetQueue>{target}</DeadLetterTargetQueue>"
    return f"<Subscription><DlqPolicy>{inside}</DlqPolicy></Subscription>"


def test_a_push_may_get_and_lose_its_dead_letter_queue(topic: Any) -> None:
    topic.queue("dead")
    subscribe(topic, endpoint="http://h/")
    path = f"{TOPIC}/subscriptions/s"
    hidden = hidden_queue(KEY, "s")
    refused = topic.ask("PUT", f"{path}?metaoverride=true", dead_letters("none"))
    assert (refused.status, refused.code) == (404, "QueueNotExist")
    assert "DlqPolicy" not in topic.ask("GET", path).fields(), "a refusal changes nothing"
    assert topic.ask("PUT", f"{path}?metaoverride=true", dead_letters("dead")).status == 204
    redrive = topic.stage.describe(hidden).settings.redrive
    assert (redrive.target.name, redrive.receive_count_max) == ("dead", 4)
    strategy = "<Subscription><NotifyStrategy>EXPONENTIAL_DECAY_RETRY</NotifyStrategy></Subscription>"
    assert topic.ask("PUT", f"{path}?metaoverride=true", strategy).status == 204
    assert topic.stage.describe(hidden).settings.redrive.receive_count_max == 177
    assert topic.ask("PUT", f"{path}?metaoverride=true", dead_letters("dead", "false")).status == 204
    assert "DlqPolicy" not in topic.ask("GET", path).fields()
    assert topic.stage.describe(hidden).settings.redrive is None, "what expires is not kept either"


def rate(count: int, enabled: str = "True") -> str:
    return f"<Enabled>{enabled}</Enabled><MaxReceivesPerSecond>{count}</MaxReceivesPerSecond>"


def test_a_rate_of_pushes(topic: Any) -> None:
    made = subscribe(topic, endpoint="http://h/", TenantRateLimitPolicy=rate(2))
    assert made.status == 201
    path = f"{TOPIC}/subscriptions/s"
    answer = topic.ask("GET", path)
    assert answer.fields("TenantRateLimitPolicy") == {"Enabled": "True", "MaxReceivesPerSecond": "2"}
    hidden = hidden_queue(KEY, "s")
    for text in "abc":
        publish(topic, text)
    assert len(topic.stage.receive(hidden, 10)) == 2
    for change, bound in ((rate(5), 5), (rate(5, "false"), None)):
        inside = f"<Subscription><TenantRateLimitPolicy>{change}</TenantRateLimitPolicy></Subscription>"
        assert topic.ask("PUT", f"{path}?metaoverride=true", inside).status == 204
        assert topic.stage.describe(hidden).settings.receives_per_second_max == bound
    assert "TenantRateLimitPolicy" not in topic.ask("GET", path).fields()


def test_copies_for_a_queue_have_no_rate(topic: Any) -> None:
    refused = subscribe(topic, TenantRateLimitPolicy=rate(2))
    assert (refused.status, refused.code) == (400, "InvalidArgument")
    assert refused.text("Message").startswith("TenantRateLimitPolicy: ")
    assert subscribe(topic, TenantRateLimitPolicy=rate(2, "false")).status == 201
    change = f"<Subscription><TenantRateLimitPolicy>{rate(2)}</TenantRateLimitPolicy></Subscription>"
    assert topic.ask("PUT", f"{TOPIC}/subscriptions/s?metaoverride=true", change).code == "InvalidArgument"


def test_a_publish_reaches_queues_in_every_form(topic: Any) -> None:
    for form in ("XML", "JSON", "SIMPLIFIED"):
        topic.queue(form.lower())
        subscribe(topic, form.lower(), f"acs:mns:r:1:queues/{form.lower()}", NotifyContentFormat=form)
    published = publish(topic, "a &lt; b", "<MessageTag>red</MessageTag>")
    assert published.status == 201
    message_id, digest = published.text("MessageId"), md5(b"a < b", usedforsecurity=False).hexdigest().upper()
    assert list(published.fields()) == ["MessageId", "MessageBodyMD5"]
    assert published.text("MessageBodyMD5") == digest
    assert topic.get(queue="/queues/simplified").text("MessageBody") == "a < b"
    said = json.loads(topic.get(queue="/queues/json").text("MessageBody"))
    assert (said["MessageId"], said["MessageMD5"], said["MessageTag"]) == (message_id, digest, "red")
    assert f"<MessageId>{message_id}</MessageId>" in topic.get(queue="/queues/xml").text("MessageBody")


def test_tags_choose(topic: Any) -> None:
    subscribe(topic, FilterTag="red", NotifyContentFormat="SIMPLIFIED")
    assert publish(topic, "none").status == 201
    for tag in ("blue", "red"):
        assert publish(topic, tag, f"<MessageTag>{tag}</MessageTag>").status == 201
    assert topic.get("?numOfMessages=16").texts("Message/MessageBody") == ["red"]


def test_properties_and_group_travel_with_the_copies(topic: Any) -> None:
    subscribe(topic, NotifyContentFormat="SIMPLIFIED")
    properties = (
        "<UserProperties><PropertyValue><Name>a</Name><Value>1</Value><Type>NUMBER</Type></PropertyValue>"
        "</UserProperties><MessageGroupId>g</MessageGroupId>"
        "<MessageAttributes><DirectSMS>{}</DirectSMS></MessageAttributes>"
    )
    assert publish(topic, "x", properties).text("MessageGroupId") == "g"
    (message,) = topic.stage.receive(JOBS)
    assert message.extras.attributes == (Attribute("a", "Number", "1"),)
    assert message.extras.group == "g"


def test_a_push_waits_and_is_counted(topic: Any) -> None:
    subscribe(topic, "push", "http://h/")
    publish(topic)
    assert topic.ask("GET", TOPIC).text("MessageCount") == "1"
    assert topic.stage.take(hidden_queue(KEY, "push")).body == "hello"
    assert topic.ask("GET", "/queues/news%2Fpush").code == "InvalidRequestURL"


@for_each("first", ["subscription", "settings"], fresh="wire")
def test_a_push_does_not_wait_where_the_account_keeps_its_settings(wire: Any, first: str) -> None:
    bucket = "<Account><LoggingBucket>mine</LoggingBucket></Account>"
    assert ACCOUNT_QUEUE in SETTINGS_QUEUES
    assert wire.ask("PUT", "/topics/mns").status == 201
    if first == "settings":
        assert wire.ask("PUT", "/?accountmeta=true", bucket).status == 204
    assert wire.ask("PUT", "/topics/mns/subscriptions/account", subscription("http://h/")).status == 201
    if first == "subscription":
        assert wire.ask("PUT", "/?accountmeta=true", bucket).status == 204
    assert wire.ask("POST", "/topics/mns/messages", "<Message><MessageBody>a</MessageBody></Message>").status == 201
    assert wire.ask("GET", "/topics/mns").text("MessageCount") == "1"
    assert wire.ask("DELETE", "/topics/mns/subscriptions/account").status == 204
    assert wire.ask("GET", "/?accountmeta=true").text("LoggingBucket") == "mine"


@for_each(
    ("body", "code"),
    [
        ("", "MalformedXML"),
        ("<Messages/>", "MalformedXML"),
        ("<Message/>", "InvalidArgument"),
        ("<Message><MessageBody>x</MessageBody><MessageTag/></Message>", "InvalidArgument"),
        (f"<Message><MessageBody>x</MessageBody><MessageTag>{'x' * 17}</MessageTag></Message>", "InvalidArgument"),
        (f"<Message><MessageBody>{'x' * 65_537}</MessageBody></Message>", "InvalidArgument"),
    ],
)
def test_publishes_that_are_refused(topic: Any, body: str, code: str) -> None:
    assert topic.ask("POST", f"{TOPIC}/messages", body).code == code


def test_a_topic_has_its_own_limit(wire: Any) -> None:
    wire.ask("PUT", TOPIC, "<Topic><MaximumMessageSize>1024</MaximumMessageSize></Topic>")
    assert publish(wire, "x" * 1024).status == 201
    assert publish(wire, "x" * 1025).code == "InvalidArgument"


def test_a_key_lets_a_topic_lead_only_where_it_may_send_or_to_its_own(topic: Any) -> None:
    own = Grant(frozenset({Action.MANAGE_TOPICS}), ("news*",))
    send = Grant(frozenset({Action.SEND}), ("jobs",))
    for name, grants in (("OWNER", (own,)), ("SENDER", (own, send))):
        topic.ring.keys[name] = msgspec.structs.replace(topic.ring.keys["AKIDTESTS"], id=name, grants=grants)
    topic.queue("news-dead")
    dead = "<DlqPolicy><Enabled>True</Enabled><DeadLetterTargetQueue>{}</DeadLetterTargetQueue></DlqPolicy>"
    where = f"{TOPIC}/subscriptions/s"
    to_url = "<Subscription><Endpoint>http://a.example</Endpoint>{}</Subscription>"
    for body in (subscription(), to_url.format(dead.format("jobs"))):
        refused = topic.ask("PUT", where, body, key="OWNER")
        assert (refused.code, refused.status) == ("AccessDenied", 403)
    assert topic.ask("PUT", where, to_url.format(dead.format("news-dead")), key="OWNER").status == 201
    change = f"<Subscription>{dead.format('jobs')}</Subscription>"
    assert topic.ask("PUT", f"{where}?metaoverride=true", change, key="OWNER").code == "AccessDenied"
    assert topic.ask("PUT", f"{where}?metaoverride=true", change, key="SENDER").status == 204
    assert topic.ask("PUT", f"{TOPIC}/subscriptions/t", subscription(), key="SENDER").status == 201


@for_each("tag", ["a\nb", "a\tb", "a&#13;b", "a&#127;b"])
def test_a_tag_has_nothing_that_no_header_can_bear(topic: Any, tag: str) -> None:
    for refused in (
        subscribe(topic, endpoint="http://203.0.113.7/", FilterTag=tag),
        publish(topic, inside=f"<MessageTag>{tag}</MessageTag>"),
    ):
        assert (refused.status, refused.code) == (400, "InvalidArgument")
        assert "no line breaks, tabs or other control characters" in refused.fields()["Message"]
