"""Queues and the account: create, attributes, delete, lists and their markers, policies, names, addresses."""

from typing import Any

from veilmq.model.instant import SECOND_US
from veilmq.model.settings.queue import QueueKey, RedrivePolicy
from veilmq.server.port import call_by_own_names
from veilmq.testing.for_each import for_each

QUEUE = "/queues/jobs"
ATTRIBUTES = ["QueueName", "CreateTime", "LastModifyTime", "DelaySeconds", "MaximumMessageSize",
              "MessageRetentionPeriod", "VisibilityTimeout", "PollingWaitSeconds", "ActiveMessages",
              "InactiveMessages", "DelayMessages", "LoggingEnabled"]  # fmt: skip


def queue(**fields: object) -> str:
    return f"<Queue>{''.join(f'<{name}>{value}</{name}>' for name, value in fields.items())}</Queue>"


@for_each("body", ["", "<Queue/>", "<Queue></Queue>", '<Queue xmlns="x"><Other/></Queue>'], fresh="wire")
def test_a_new_queue_has_the_defaults(wire: Any, body: str) -> None:
    made = wire.ask("PUT", "/queues/new", body)
    assert (made.status, made.headers["Location"]) == (201, "http://127.0.0.1:9326/queues/new")
    wire.stage.later(10 * SECOND_US)
    answer = wire.ask("GET", "/queues/new")
    fields = answer.fields()
    assert list(fields) == ATTRIBUTES
    now = wire.wall // SECOND_US
    assert fields == {
        "QueueName": "new",
        "CreateTime": str(now - 10),
        "LastModifyTime": str(now - 10),
        "DelaySeconds": "0",
        "MaximumMessageSize": "65536",
        "MessageRetentionPeriod": "345600",
        "VisibilityTimeout": "30",
        "PollingWaitSeconds": "0",
        "ActiveMessages": "0",
        "InactiveMessages": "0",
        "DelayMessages": "0",
        "LoggingEnabled": "False",
    }


def test_creating_twice(wire: Any) -> None:
    body = queue(DelaySeconds=5, LoggingEnabled="true")
    assert wire.ask("PUT", "/queues/new", body).status == 201
    again = wire.ask("PUT", "/queues/new", body)
    assert (again.status, again.response.body) == (204, b"")
    assert again.headers["Location"].endswith("/queues/new")
    for other in (queue(), queue(DelaySeconds=5), queue(DelaySeconds=6, LoggingEnabled="True")):
        refused = wire.ask("PUT", "/queues/new", other)
        assert (refused.code, refused.status) == ("QueueAlreadyExist", 409)


def test_what_other_protocols_keep_is_not_compared(wire: Any) -> None:
    key = QueueKey("000000000000", "us-east-1", "jobs")
    wire.stage.change(key, labels={"azure.metadata": "x"}, tags={"team": "shop"})
    assert wire.ask("PUT", QUEUE).status == 204


def test_attributes_change_one_by_one(wire: Any) -> None:
    wire.stage.later(10 * SECOND_US)
    changed = wire.ask("PUT", f"{QUEUE}?metaoverride=true", queue(VisibilityTimeout=99, LoggingEnabled="True"))
    assert (changed.status, changed.response.body) == (204, b"")
    fields = wire.ask("GET", QUEUE).fields()
    assert (fields["VisibilityTimeout"], fields["LoggingEnabled"], fields["DelaySeconds"]) == ("99", "True", "0")
    assert int(fields["LastModifyTime"]) == int(fields["CreateTime"]) + 10
    assert wire.ask("PUT", f"{QUEUE}?MetaOverride=TRUE", queue(LoggingEnabled="false")).status == 204
    assert wire.ask("GET", QUEUE).text("LoggingEnabled") == "False"
    assert wire.ask("PUT", "/queues/none?metaoverride=true", queue()).code == "QueueNotExist"


def test_counts(wire: Any) -> None:
    for delay_s in (0, 0, 100):
        wire.put(DelaySeconds=delay_s)
    wire.take()
    fields = wire.ask("GET", QUEUE).fields()
    assert [fields[f"{state}Messages"] for state in ("Active", "Inactive", "Delay")] == ["1", "1", "1"]


@for_each(
    ("name", "value"),
    [
        ("DelaySeconds", -1), ("DelaySeconds", 604_801), ("MaximumMessageSize", 1023), ("MaximumMessageSize", 65_537),
        ("MessageRetentionPeriod", 59), ("MessageRetentionPeriod", 1_296_001), ("VisibilityTimeout", 0),
        ("VisibilityTimeout", 43_201), ("PollingWaitSeconds", 31), ("PollingWaitSeconds", "long"),
        ("DelaySeconds", ""), ("LoggingEnabled", "yes"), ("LoggingEnabled", ""),
    ],
    fresh="wire",
)  # fmt: skip
def test_values_out_of_their_limits(wire: Any, name: str, value: object) -> None:
    answer = wire.ask("PUT", "/queues/new", queue(**{name: value}))
    assert (answer.code, answer.status) == ("InvalidArgument", 400)
    assert name in (answer.text("Message") or "")
    assert wire.ask("GET", "/queues/new").code == "QueueNotExist"


@for_each(
    ("name", "value"),
    [
        ("DelaySeconds", 604_800), ("MaximumMessageSize", 1024), ("MessageRetentionPeriod", 60),
        ("MessageRetentionPeriod", 1_296_000), ("VisibilityTimeout", 1), ("VisibilityTimeout", 43_200),
        ("PollingWaitSeconds", 30),
    ],
fresh="wire")  # fmt: skip
def test_values_at_their_limits(wire: Any, name: str, value: int) -> None:
    assert wire.ask("PUT", "/queues/new", queue(**{name: value})).status == 201
    assert wire.ask("GET", "/queues/new").text(name) == str(value)


@for_each("body", ["<Topic/>", "<Queue>", "<Queue><DelaySeconds>1</DelaySeconds>" * 2])
def test_documents_of_another_kind(wire: Any, body: str) -> None:
    assert wire.ask("PUT", "/queues/new", body).code == "MalformedXML"


@for_each("name", ["a", "0", "A-b", "a--", "a" * 120])
def test_names_that_are_allowed(wire: Any, name: str) -> None:
    assert wire.ask("PUT", f"/queues/{name}").status == 201
    assert wire.ask("GET", f"/queues/{name}/").text("QueueName") == name


@for_each(
    ("path", "code"),
    [
        ("/queues/-a", "InvalidQueueName"),
        ("/queues/a_b", "InvalidQueueName"),
        ("/queues/a.fifo", "InvalidQueueName"),
        ("/queues/%C3%A9", "InvalidQueueName"),
        ("/queues/a%0A", "InvalidQueueName"),
        (f"/queues/{'a' * 121}", "QueueNameLengthError"),
        ("/topics/a_b", "TopicNameInvalid"),
        (f"/topics/{'a' * 121}", "TopicNameLengthError"),
        ("/topics/a/subscriptions/a_b", "SubscriptionNameInvalid"),
        (f"/topics/a/subscriptions/{'a' * 256}", "SubscriptionNameLengthError"),
        ("/", "InvalidRequestURL"),
        ("/nothing", "InvalidRequestURL"),
        ("/queues/a/b", "InvalidRequestURL"),
        ("/queues/a/messages/b", "InvalidRequestURL"),
        ("/queues//messages", "InvalidRequestURL"),
        ("/%ff", "InvalidRequestURL"),
        ("/queues", "InvalidRequestURL"),
    ],
)
def test_paths_that_are_refused(wire: Any, path: str, code: str) -> None:
    body = "<Subscription><Endpoint>http://h/</Endpoint></Subscription>" if "subscriptions" in path else ""
    assert wire.ask("PUT", path, body).code == code


def test_delete_a_queue(wire: Any) -> None:
    for _ in range(2):
        assert wire.ask("DELETE", QUEUE).status == 204
    assert wire.ask("GET", QUEUE).code == "QueueNotExist"
    assert wire.put().code == "QueueNotExist"
    assert wire.get().code == "QueueNotExist"
    assert wire.ask("GET", f"{QUEUE}/messages?peekonly=true").code == "QueueNotExist"
    assert wire.ask("DELETE", f"{QUEUE}/messages?ReceiptHandle=x").code == "QueueNotExist"
    handle = "<ReceiptHandles><ReceiptHandle>x</ReceiptHandle></ReceiptHandles>"
    assert wire.ask("DELETE", f"{QUEUE}/messages", handle).code == "QueueNotExist"
    assert wire.ask("PUT", QUEUE).status == 201


def pages(wire: Any, path: str, url: str, count: int, **headers: str) -> list[list[str]]:
    """All pages of a list."""
    found = []
    marker: str | None = ""
    while marker is not None:
        given = {"x-mns-ret-number": str(count)} | ({"x-mns-marker": marker} if marker else {})
        answer = wire.ask("GET", path, headers=given | headers)
        assert answer.status == 200
        assert b"/>" not in answer.response.body
        found.append([each.rpartition("/")[2] for each in answer.texts(url)])
        marker = answer.text("NextMarker")
    return found


def test_lists_of_queues(wire: Any) -> None:
    for number in range(5):
        wire.queue(f"q{number}")
    wire.stage.create("not_for_mns")
    wire.stage.create("elsewhere", region="eu-west-1")
    wire.stage.create("foreign", account="111111111111")
    assert pages(wire, "/queues", "Queue/QueueURL", 2) == [["jobs", "q0"], ["q1", "q2"], ["q3", "q4"]]
    prefix = {"x-mns-prefix": "q"}
    assert pages(wire, "/queues", "Queue/QueueURL", 1000, **prefix) == [["q0", "q1", "q2", "q3", "q4"]]
    bare = wire.ask("GET", "/queues/", headers=prefix | {"x-mns-ret-number": "1"})
    assert bare.fields("Queue") == {"QueueURL": "http://127.0.0.1:9326/queues/q0", "QueueName": "q0"}
    full = wire.ask("GET", "/queues", headers=prefix | {"x-mns-with-meta": "true"})
    assert list(full.fields("Queue")) == ["QueueURL", *ATTRIBUTES]
    none = wire.ask("GET", "/queues", headers={"x-mns-prefix": "nothing"})
    assert (none.status, len(none.xml)) == (200, 0)


@for_each(
    "headers",
    [{"x-mns-ret-number": "0"}, {"x-mns-ret-number": "1001"}, {"x-mns-ret-number": "x"}, {"x-mns-marker": "\u00e9!"},
     {"x-mns-marker": "gggg"}, {"x-mns-marker": "!!"}, {"x-mns-marker": "YQ==!"}, {"x-mns-with-meta": "perhaps"}],
)  # fmt: skip
@for_each("path", ["/queues", "/topics", "/topics/t/subscriptions"])
def test_pages_that_cannot_be(wire: Any, path: str, headers: dict[str, str]) -> None:
    assert wire.ask("GET", path, headers=headers).code == "InvalidArgument"


DEAD = QueueKey("000000000000", "us-east-1", "dead")


def policy(target: str = "dead", enabled: str = "true", count: object = 3) -> str:
    return (
        f"<DlqPolicy><Enabled>{enabled}</Enabled><DeadLetterTargetQueue>{target}</DeadLetterTargetQueue>"
        f"<MaxReceiveCount>{count}</MaxReceiveCount></DlqPolicy>"
    )


def rate(count: object, enabled: str = "True") -> str:
    inside = f"<Enabled>{enabled}</Enabled><MaxReceivesPerSecond>{count}</MaxReceivesPerSecond>"
    return f"<TenantRateLimitPolicy>{inside}</TenantRateLimitPolicy>"


def test_rate_policies(wire: Any) -> None:
    assert wire.ask("PUT", f"{QUEUE}?metaoverride=true", f"<Queue>{rate(2)}</Queue>").status == 204
    assert wire.ask("GET", QUEUE).fields("TenantRateLimitPolicy") == {"Enabled": "True", "MaxReceivesPerSecond": "2"}
    for text in "abc":
        wire.put(text)
    assert wire.get("?numOfMessages=16").status == 200
    answer = wire.get()
    assert (answer.status, answer.code) == (429, "TooManyRequests")
    assert wire.ask("PUT", f"{QUEUE}?metaoverride=true", f"<Queue>{rate(2, 'false')}</Queue>").status == 204
    assert wire.get().status == 200
    assert wire.ask("GET", QUEUE).text("TenantRateLimitPolicy") is None


@for_each("count", [1, 1_000_000], fresh="wire")
def test_rates_up_to_the_limit(wire: Any, count: int) -> None:
    assert wire.ask("PUT", "/queues/new", f"<Queue>{rate(count)}</Queue>").status == 201


@for_each("target", ["dead", "acs:mns:cn-hangzhou:127:queues/dead", "acs:mns:cn-hangzhou:1:/queues/dead"], fresh="wire")
def test_dead_letter_policies(wire: Any, target: str) -> None:
    wire.queue("dead")
    assert wire.ask("PUT", "/queues/new", f"<Queue>{policy(target)}</Queue>").status == 201
    new = QueueKey("000000000000", "us-east-1", "new")
    assert wire.stage.describe(new).settings.redrive == RedrivePolicy(DEAD, 3)
    answer = wire.ask("GET", "/queues/new")
    # The Python SDK takes the first child of every element for text.
    assert b"<DlqPolicy>\n<" in answer.response.body
    assert answer.fields("DlqPolicy") == {
        "Enabled": "True",
        "DeadLetterTargetQueue": "acs:mns:us-east-1:000000000000:queues/dead",
        "MaxReceiveCount": "3",
    }
    off = "<Queue><DlqPolicy><Enabled>false</Enabled></DlqPolicy></Queue>"
    assert wire.ask("PUT", "/queues/new?metaoverride=true", off).status == 204
    assert wire.ask("GET", "/queues/new").text("DlqPolicy") is None
    change = wire.request("PUT", "/queues/new?metaoverride=true", f"<Queue>{policy('its-alias')}</Queue>")
    call = wire.codec.decode(change, wire.wall, wire.wall)
    call_by_own_names(call.commands, {QueueKey(new.account, new.region, "its-alias"): new})
    answer = wire.read(wire.codec.encode(call, wire.stage.batch(call.commands).outcomes))
    assert (answer.code, "it is the queue itself" in answer.text("Message")) == ("InvalidArgument", True)


@for_each(
    "inside",
    [
        policy("nowhere"),
        policy("jobs"),
        policy("a_b"),
        policy(count=0),
        policy(count=1001),
        policy(enabled="x"),
        "<DlqPolicy><DeadLetterTargetQueue>dead</DeadLetterTargetQueue></DlqPolicy>",
        "<DlqPolicy/>",
        "<TenantRateLimitPolicy><Enabled>true</Enabled></TenantRateLimitPolicy>",
        "<TenantRateLimitPolicy/>",
        *(rate(count) for count in ("0", "-1", "x", "1000001")),
    ],
    fresh="wire",
)
def test_policies_that_are_refused(wire: Any, inside: str) -> None:
    wire.queue("dead")
    answer = wire.ask("PUT", f"{QUEUE}?metaoverride=true", f"<Queue>{inside}</Queue>")
    assert answer.code == "InvalidArgument"
    assert ("cannot be its own dead-letter queue" in answer.text("Message")) is (inside == policy("jobs"))


def test_a_rate_limit_that_is_off_is_taken(wire: Any) -> None:
    off = "<Queue><TenantRateLimitPolicy><Enabled>False</Enabled></TenantRateLimitPolicy></Queue>"
    assert wire.ask("PUT", "/queues/new", off).status == 201


def test_account_attributes_last(wire: Any) -> None:
    assert wire.ask("GET", "/?accountmeta=true").fields() == {"LoggingBucket": ""}
    for bucket in ("logs", "other", ""):
        body = f"<Account><LoggingBucket>{bucket}</LoggingBucket></Account>"
        assert wire.ask("PUT", "/?accountmeta=true", body).status == 204
        wire.stage.reopen()
        assert wire.ask("GET", "/?AccountMeta=true").fields() == {"LoggingBucket": bucket}
    assert wire.ask("PUT", "/?accountmeta=true", "<Account/>").status == 204
    long = f"<Account><LoggingBucket>{'x' * 257}</LoggingBucket></Account>"
    assert wire.ask("PUT", "/?accountmeta=true", long).code == "InvalidArgument"
    assert pages(wire, "/queues", "Queue/QueueURL", 1000) == [["jobs"]]


def test_the_account_and_the_service(wire: Any) -> None:
    assert wire.ask("GET", "/?account").fields() == {"AccountId": "000000000000"}
    assert wire.ask("POST", "/commonbuy/openservice").fields() == {"OrderId": "0"}


@for_each(
    ("how", "start"),
    [
        ({}, "http://127.0.0.1:9326"),
        ({"authority": "123.mns.cn-hangzhou.aliyuncs.com"}, "http://123.mns.cn-hangzhou.aliyuncs.com"),
        ({"headers": {"x-forwarded-host": "mns.example", "x-forwarded-proto": "https"}}, "https://mns.example"),
    ],
)
def test_urls_are_those_of_the_client(wire: Any, how: dict[str, Any], start: str) -> None:
    wire.configure(trusted_proxy="headers" in how)
    assert wire.ask("PUT", "/queues/new", **how).headers["Location"] == f"{start}/queues/new"
    wire.configure(external_url="https://queues.example/mns/")
    assert wire.ask("PUT", "/queues/new", **how).headers["Location"] == "https://queues.example/mns/queues/new"


def test_every_answer_names_its_request_and_the_version(wire: Any) -> None:
    for answer in (wire.ask("GET", QUEUE), wire.ask("GET", "/nothing"), wire.ask("DELETE", QUEUE)):
        assert answer.headers["x-mns-version"] == "2015-06-06"
        request_id = answer.headers["x-mns-request-id"]
        assert len(request_id) == 24
        assert request_id == request_id.upper()
