"""Regions in queue URLs: which URL a queue gets, and which queue a URL means."""

import json
from typing import Any

from veilmq.model.instant import Instant
from veilmq.model.outcomes import QueueCreated, QueuesListed
from veilmq.model.settings.access import EVERYTHING, AccessKey
from veilmq.model.settings.queue import QueueCounts, QueueInfo, QueueKey, QueueSettings
from veilmq.protocols import Request
from veilmq.protocols.sqs.addresses import PATH, STANDARD
from veilmq.protocols.sqs.codec import Call, Codec, Endpoint
from veilmq.testing.for_each import for_each

ACCOUNT = "000000000000"
DYNAMIC = Endpoint(base_domain="queues.test")
FORM = b"application/x-www-form-urlencoded"


class Ring:
    """Development mode."""

    checks = False

    def find(self, key_id: str) -> AccessKey:
        return AccessKey(key_id, "", ACCOUNT, grants=EVERYTHING)


def claim(region: str) -> bytes:
    return f"AWS4-HMAC-SHA256 Credential=test/20260131/{region}/sqs/aws4_request, Signature=00".encode()


def ask(endpoint: Endpoint, operation: str, given: dict[str, Any], region: str, **headers: str) -> tuple[Codec, Call]:
    """What a client in that region asks in the JSON form."""
    codec = Codec(Ring(), endpoint)
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    named |= {b"authorization": claim(region), b"x-amz-target": f"AmazonSQS.{operation}".encode()}
    call = codec.decode(Request("POST", b"/", named, json.dumps(given).encode(), "::1", False, "id"), NOW, NOW)
    assert isinstance(call, Call), call
    return codec, call


NOW = Instant(0)


def info(queue: QueueKey) -> QueueInfo:
    return QueueInfo(queue, 1, NOW, NOW, QueueSettings(), QueueCounts())


@for_each(
    ("endpoint", "host", "url"),
    [
        (DYNAMIC, "queues.test:9324", "http://sqs.eu-west-1.queues.test:9324/000000000000/q"),
        (DYNAMIC, "sqs.queues.test", "http://sqs.eu-west-1.queues.test/000000000000/q"),
        (DYNAMIC, "SQS.Queues.Test:1", "http://sqs.eu-west-1.queues.test:1/000000000000/q"),
        # Development mode takes the signature's word: the URL is the queue's, not that of the host it was asked at.
        (DYNAMIC, "sqs.us-east-1.queues.test:1", "http://sqs.eu-west-1.queues.test:1/000000000000/q"),
        (DYNAMIC, "other.queues.test:1", "http://other.queues.test:1/000000000000/q"),
        (DYNAMIC, "127.0.0.1:9324", "http://127.0.0.1:9324/000000000000/q"),
        (DYNAMIC, "no]host", "http://no]host/000000000000/q"),
        (
            Endpoint(base_domain="queues.test", external_url="https://queues.test/a/"),
            "queues.test",
            "https://queues.test/a/000000000000/q",
        ),
        (
            Endpoint(base_domain="localhost", strategy=STANDARD),
            "127.0.0.1:9324",
            "http://sqs.eu-west-1.localhost:9324/000000000000/q",
        ),
        (
            Endpoint(base_domain="localhost", strategy=STANDARD),
            "[::1]",
            "http://sqs.eu-west-1.localhost/000000000000/q",
        ),
        (
            Endpoint(base_domain="queues.test", strategy=STANDARD, external_url="https://edge.example:8443/sqs"),
            "127.0.0.1:9324",
            "https://sqs.eu-west-1.queues.test:8443/sqs/000000000000/q",
        ),
        (
            Endpoint(strategy=PATH),
            "127.0.0.1:9324",
            "http://127.0.0.1:9324/queue/eu-west-1/000000000000/q",
        ),
        (
            Endpoint(strategy=PATH, external_url="https://edge.example/sqs"),
            "127.0.0.1:9324",
            "https://edge.example/sqs/queue/eu-west-1/000000000000/q",
        ),
    ],
)
def test_a_url_that_a_queue_is_given_is_understood_anywhere(endpoint: Endpoint, host: str, url: str) -> None:
    codec, call = ask(endpoint, "CreateQueue", {"QueueName": "q"}, "eu-west-1", host=host)
    queue = QueueKey(ACCOUNT, "eu-west-1", "q")
    assert call.commands[0].queue == queue  # type: ignore[union-attr]
    assert json.loads(codec.encode(call, [QueueCreated(info(queue), True)]).body) == {"QueueUrl": url}
    codec, call = ask(endpoint, "ListQueues", {}, "eu-west-1", host=host)
    assert json.loads(codec.encode(call, [QueuesListed([info(queue)], False)]).body) == {"QueueUrls": [url]}
    if "eu-west-1" in url:
        for asked in (url, url + "/"):
            _, call = ask(endpoint, "PurgeQueue", {"QueueUrl": asked}, "us-east-1", host="192.0.2.1")
            assert call.commands[0].queue == queue, asked  # type: ignore[union-attr]


def test_the_region_of_the_host_that_the_query_form_is_sent_to_decides() -> None:
    headers = {b"host": b"sqs.eu-west-1.queues.test:9324", b"content-type": FORM, b"authorization": claim("us-east-1")}
    request = Request("POST", b"/000000000000/q", headers, b"Action=PurgeQueue", "::1", False, "id")
    for _ in range(2):
        call = Codec(Ring(), DYNAMIC).decode(request, NOW, NOW)
        assert isinstance(call, Call)
        assert call.commands[0].queue == QueueKey(ACCOUNT, "eu-west-1", "q")  # type: ignore[union-attr]
    request.target = b"/queue/ap-south-1/000000000000/q"
    headers[b"host"] = b"127.0.0.1:9324"
    call = Codec(Ring(), Endpoint()).decode(request, NOW, NOW)
    assert isinstance(call, Call)
    assert call.commands[0].queue == QueueKey(ACCOUNT, "ap-south-1", "q")  # type: ignore[union-attr]


@for_each(
    "url",
    [
        "http://sqs.eu-west-1.other.test/000000000000/q",
        "http://eu-west-1.queues.test/000000000000/q",
        "http://sqs.eu_west_1.queues.test/000000000000/q",
        "https://sqs.eu-west-1.amazonaws.com/000000000000/q",
        "http://h/queue/eu_west_1/000000000000/q",
        "/000000000000/q",
        "q",
        "http://h/queue/q",
    ],
)
def test_of_any_other_url_the_signature_says_the_region(url: str) -> None:
    _, call = ask(DYNAMIC, "PurgeQueue", {"QueueUrl": url}, "us-west-2", host="127.0.0.1")
    assert call.commands[0].queue == QueueKey(ACCOUNT, "us-west-2", "q")  # type: ignore[union-attr]


def test_two_queues_of_one_name_have_two_urls(served: Any) -> None:
    """A real key, and a store: each URL means its queue, by whichever region's client it is sent."""
    served.configure(base_domain="127.0.0.1", strategy=STANDARD)
    east, west = (served.connect("json", region=region) for region in ("us-east-1", "eu-west-1"))
    urls = [client.create_queue(QueueName="jobs")["QueueUrl"] for client in (east, west)]
    assert urls == [f"http://sqs.{region}.127.0.0.1:9324/111122223333/jobs" for region in ("us-east-1", "eu-west-1")]
    for sender, url, body in ((west, urls[0], "east"), (east, urls[1], "west")):
        sender.send_message(QueueUrl=url, MessageBody=body)
    for receiver, url, body in ((east, urls[0], "east"), (west, urls[1], "west")):
        (message,) = receiver.receive_message(QueueUrl=url)["Messages"]
        assert message["Body"] == body
        shown = receiver.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]
        assert shown["QueueArn"].split(":")[3] in url
