"""What belongs to no operation: where we are reached, from which pages, and what is no request of SQS at all."""

import json

from veilmq.model.instant import Instant
from veilmq.model.outcomes import QueueCreated, QueueDescribed
from veilmq.model.settings.access import EVERYTHING, AccessKey
from veilmq.model.settings.queue import QueueCounts, QueueInfo, QueueKey, QueueSettings
from veilmq.protocols import Request, Response
from veilmq.protocols.sqs import limits
from veilmq.protocols.sqs.codec import Call, Codec, Endpoint
from veilmq.testing.for_each import for_each


class Ring:
    """Development mode."""

    checks = False

    def find(self, key_id: str) -> AccessKey:
        return AccessKey(key_id, "", "000000000000", grants=EVERYTHING)


def request(
    method: str = "POST",
    target: bytes = b"/",
    body: bytes = b"",
    secure: bool = False,
    authority: bytes | None = None,
    **headers: str,
) -> Request:
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return Request(method, target, named, body, "::1", secure, "the-id", authority)


def decode(asked: Request, endpoint: Endpoint | None = None) -> Call | Response:
    return Codec(Ring(), endpoint or Endpoint()).decode(asked, Instant(0), Instant(0))


def code_of(answer: Call | Response) -> tuple[int, str]:
    assert isinstance(answer, Response)
    for name, value in answer.headers:
        if name == b"x-amzn-query-error":
            return answer.status, value.decode().partition(";")[0]
    return answer.status, answer.body.decode().partition("<Code>")[2].partition("</Code>")[0]


INFO = QueueInfo(QueueKey("000000000000", "us-east-1", "q"), 1, Instant(0), Instant(0), QueueSettings(), QueueCounts())


@for_each(
    ("asked", "endpoint", "url"),
    [
        (request(host="localhost:9324"), Endpoint(), "http://localhost:9324"),
        (request(host="sqs.example.test"), Endpoint(), "http://sqs.example.test"),
        (request(host="a", secure=True), Endpoint(), "https://a"),
        (request(host="a", authority=b"b:1"), Endpoint(), "http://b:1"),
        (request(), Endpoint(), "http://localhost"),
        (request(host="a"), Endpoint(external_url="https://q.example/sqs/"), "https://q.example/sqs"),
        (request(host="a", x_forwarded_proto="https", x_forwarded_host="b"), Endpoint(), "http://a"),
        (
            request(host="a", x_forwarded_proto="https, http", x_forwarded_host="b, c"),
            Endpoint(trusted_proxy=True),
            "https://b",
        ),
        (request(host="a"), Endpoint(trusted_proxy=True), "http://a"),
    ],
)
def test_queue_urls_are_as_the_client_reaches_us(asked: Request, endpoint: Endpoint, url: str) -> None:
    codec = Codec(Ring(), endpoint)
    asked.headers[b"x-amz-target"] = b"AmazonSQS.CreateQueue"
    asked.body = b'{"QueueName":"q"}'
    call = codec.decode(asked, Instant(0), Instant(0))
    assert isinstance(call, Call)
    assert json.loads(codec.encode(call, [QueueCreated(INFO, True)]).body) == {"QueueUrl": f"{url}/000000000000/q"}


@for_each(
    "url",
    [
        "http://localhost:9324/000000000000/q",
        "https://sqs.us-east-1.amazonaws.com/000000000000/q",
        "https://q.example/some/prefix/000000000000/q",
        "/000000000000/q",
        "000000000000/q",
    ],
)
def test_any_url_that_ends_in_account_and_name_is_understood(url: str) -> None:
    asked = request(x_amz_target="AmazonSQS.PurgeQueue", body=json.dumps({"QueueUrl": url}).encode())
    for _ in range(2):
        call = decode(asked)
        assert isinstance(call, Call)
        assert call.commands[0].queue == QueueKey("000000000000", "us-east-1", "q")  # type: ignore[union-attr]


@for_each(
    "url",
    ["q q", "q/", "http://localhost", "http://localhost/q", "http://h/queues/q", "http://h/1234/q", "//queue/", "//"],
)
def test_other_urls_name_no_queue(url: str) -> None:
    """Whatever their host: getmoto/moto #1251, #3657."""
    asked = request(x_amz_target="AmazonSQS.PurgeQueue", body=json.dumps({"QueueUrl": url}).encode())
    assert code_of(decode(asked)) == (400, "AWS.SimpleQueueService.NonExistentQueue")


@for_each("more", [b"", b"&QueueUrl="])
def test_the_query_form_takes_the_address_for_the_queues(more: bytes) -> None:
    """jegesh/python-sqs-listener #30, aws/aws-sdk-net #437."""
    headers = {"host": "localhost:9324", "content_type": "application/x-www-form-urlencoded"}
    answer = decode(request(body=b"Action=PurgeQueue" + more, **headers))
    assert code_of(answer) == (404, "InvalidAddress")
    assert b"<Message>The address http://localhost:9324/ is not valid for this endpoint.</Message>" in answer.body  # type: ignore[union-attr]
    assert isinstance(decode(request(body=b"Action=ListQueues" + more, **headers)), Call)


def test_cooldowns_can_be_ended() -> None:
    asked = request(x_amz_target="AmazonSQS.PurgeQueue", body=b'{"QueueUrl":"/000000000000/q"}')
    call = decode(asked, Endpoint(cooldowns=False))
    assert isinstance(call, Call)
    assert call.commands[0].cooldown_us == 0  # type: ignore[union-attr]


PREFLIGHT = request("OPTIONS", b"/", origin="https://app.example", access_control_request_method="POST")


def test_pages_may_call_only_if_they_are_listed() -> None:
    assert code_of(decode(PREFLIGHT)) == (403, "AccessDenied")
    assert code_of(decode(PREFLIGHT, Endpoint(cors_origins=("https://other.example",)))) == (403, "AccessDenied")
    assert code_of(decode(request("OPTIONS"), Endpoint(cors_origins=("*",)))) == (403, "AccessDenied")
    for listed in ("https://app.example", "*"):
        answer = decode(PREFLIGHT, Endpoint(cors_origins=(listed,)))
        assert isinstance(answer, Response)
        headers = dict(answer.headers)
        assert answer.status == 204
        assert headers[b"access-control-allow-origin"] == b"https://app.example"
        assert b"x-amz-target" in headers[b"access-control-allow-headers"]
        assert b"POST" in headers[b"access-control-allow-methods"]


def test_answers_to_pages_name_the_origin() -> None:
    codec = Codec(Ring(), Endpoint(cors_origins=("https://app.example",)))
    asked = request(x_amz_target="AmazonSQS.GetQueueUrl", body=b'{"QueueName":"q"}', origin="https://app.example")
    call = codec.decode(asked, Instant(0), Instant(0))
    assert isinstance(call, Call)
    headers = dict(codec.encode(call, [QueueDescribed(INFO)]).headers)
    assert headers[b"access-control-allow-origin"] == b"https://app.example"
    assert b"x-amzn-RequestId" in headers[b"access-control-expose-headers"]
    assert headers[b"vary"] == b"Origin"
    asked.headers[b"origin"] = b"https://evil.example"
    assert b"access-control-allow-origin" not in dict(codec.encode(call, [QueueDescribed(INFO)]).headers)


@for_each(
    ("asked", "expected"),
    [
        (request("PUT"), (405, "UnsupportedHttpVerb")),
        (request("HEAD"), (405, "UnsupportedHttpVerb")),
        (request(body=b"Version=2012-11-05"), (400, "MissingAction")),
        (request("GET", b"/000000000000/q?Action=ListQueues"), (400, "InvalidAction")),
        (request("GET", b"/000000000000/q?Version=2012-11-05&X-Amz-Date=x"), (404, "")),
        (request(target=b"/000000000000/q", body=b"Action=CreateQueue&QueueName=q"), (400, "InvalidAction")),
        (request(body=b"Action=Nonsense"), (400, "InvalidAction")),
        (request("GET", b"/?Action=ListQueues&Version=1999-01-01"), (400, "NoSuchVersion")),
        (request(body=b"Action=ListQueues&Action=ListQueues"), (400, "MalformedQueryString")),
        (request(body=b"Action=ListQueues&QueueNamePrefix=%ff"), (400, "InvalidParameterValue")),
        (request(body=b"Action=ListQueues&MaxResults=many"), (400, "InvalidParameterValue")),
        (request(body=b"a=1&" * 5000), (400, "MalformedQueryString")),
        (request(body=b"Action=SendMessage&Attribute.1.Name=a&Attribute.1.Name=b"), (400, "MalformedQueryString")),
        (request(body=b"Action=CreateQueue&QueueName=q&Attribute.1.Value=a"), (400, "InvalidAttributeName")),
        (
            request(body=b"Action=CreateQueue&QueueName=q&Attribute.1.Name=&Attribute.1.Value=a"),
            (400, "InvalidAttributeName"),
        ),
        (request(body=b"Action=CreateQueue&" + b"Attribute.1.Value." * 20_000 + b"=a"), (400, "InvalidParameterValue")),
        (
            request(body=b"Action=CreateQueue&" + b"SendMessageBatchRequestEntry.1." * 10_000),
            (400, "InvalidParameterValue"),
        ),
        (request(body=b"Action=CreateQueue&Tag.1.Key=a&Tag.2.Key=a"), (400, "InvalidParameterValue")),
        (request(body=b"Action=CreateQueue&Attributes=x&Attribute.1.Name=a"), (400, "MalformedQueryString")),
        (request(x_amz_target="AmazonSQS.Nonsense"), (400, "InvalidAction")),
        (request(x_amz_target="SendMessage"), (400, "InvalidAction")),
        (request(content_type="application/x-amz-json-1.0"), (400, "InvalidAction")),
        (request(x_amz_target="AmazonSQS.SendMessage", body=b"{"), (400, "MalformedInput")),
        (request(x_amz_target="AmazonSQS.SendMessage", body=b"[]"), (400, "MalformedInput")),
        (request(x_amz_target="AmazonSQS.SendMessage", body=b'{"MessageBody":"\xff"}'), (400, "MalformedInput")),
        (request(x_amz_target="AmazonSQS.SendMessage", body=b'{"MessageBody":"\\ud800'), (400, "MalformedInput")),
        (
            request(x_amz_target="AmazonSQS.SendMessage", body=b'{"QueueUrl":"q","MessageBody":"\\uD800"}'),
            (400, "InvalidMessageContents"),
        ),
        (request(x_amz_target="AmazonSQS.SendMessage", body=b'{"a":' + b"[" * 100_000), (400, "MalformedInput")),
        # yavosh/pail, sqs-edge-cases
        (request(x_amz_target="AmazonSQS.SendMessage"), (400, "AWS.SimpleQueueService.NonExistentQueue")),
    ],
)
def test_what_is_no_request_is_refused(asked: Request, expected: tuple[int, str]) -> None:
    answer = decode(asked)
    assert code_of(answer) == expected
    assert dict(answer.headers).get(b"allow") == (b"GET, POST, OPTIONS" if expected[0] == 405 else None)


class Checking(Ring):
    """A server that checks signatures."""

    checks = True


@for_each(
    ("asked", "ring"),
    [
        (request("GET"), Ring()),
        (request("GET", b"/health"), Checking()),
        (request("GET", b"/000000000000/q"), Checking()),
        (request("GET", b"/000000000000/q", accept="application/json"), Ring()),
        (request(target=b"/000000000000/q"), Ring()),
    ],
)
def test_a_request_for_nothing_is_an_unknown_operation(asked: Request, ring: Ring) -> None:
    """What a browser sees that opens a queue's URL."""
    answer = Codec(ring, Endpoint()).decode(asked, Instant(0), Instant(0))
    assert isinstance(answer, Response)
    assert (answer.status, answer.content_type) == (404, b"text/xml")
    assert answer.body == b"<UnknownOperationException/>\n"


def test_the_same_in_the_json_form() -> None:
    asked = request("GET", b"/000000000000/q", content_type="application/x-amz-json-1.0")
    answer = Codec(Checking(), Endpoint()).decode(asked, Instant(0), Instant(0))
    assert isinstance(answer, Response)
    assert code_of(answer) == (404, "UnknownOperationException")
    assert answer.content_type == b"application/x-amz-json-1.0"


def test_a_json_request_without_its_target_is_told_which_header_is_missing() -> None:
    """Proxies drop the header, and programs written by hand forget it: elasticmq #898, floci #3908."""
    answer = decode(request(body=b'{"QueueNamePrefix":"a"}', content_type="application/x-amz-json-1.0"))
    assert isinstance(answer, Response)
    assert code_of(answer) == (400, "InvalidAction")
    assert b"The request must name its action in the header X-Amz-Target." in answer.body


def test_the_member_that_does_not_fit_is_named() -> None:
    body = b'{"QueueUrl":"/000000000000/q","Entries":[{"Id":"1","MessageBody":"x","DelaySeconds":"5"}]}'
    answer = decode(request(x_amz_target="AmazonSQS.SendMessageBatch", body=body))
    assert isinstance(answer, Response)
    assert "$.Entries[0].DelaySeconds" in json.loads(answer.body)["message"]
    answer = decode(request(target=b"/000000000000/q", body=b"Action=ReceiveMessage&WaitTimeSeconds=1.5"))
    assert isinstance(answer, Response)
    assert b"Value 1.5 for parameter WaitTimeSeconds is invalid. Reason: Must be an integer." in answer.body


@for_each("count", [limits.FORM_PAIRS_MAX + step for step in (-1, 0, 1)])
def test_a_form_has_so_many_parameters(count: int) -> None:
    form = b"Action=ListQueues" + b"".join(b"&x%d=y" % number for number in range(count - 1))
    for asked in (
        request(body=form, content_type="application/x-www-form-urlencoded"),
        request("GET", b"/?" + form),
    ):
        answer = decode(asked)
        if count <= limits.FORM_PAIRS_MAX:
            assert isinstance(answer, Call)
        else:
            assert code_of(answer) == (400, "MalformedQueryString")
