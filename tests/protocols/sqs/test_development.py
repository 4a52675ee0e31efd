"""Development mode: any credentials, or none; what can be read of them names the key and the region."""

from veilmq.model.commands import DescribeQueue
from veilmq.model.instant import Instant
from veilmq.model.settings.access import AccessKey
from veilmq.protocols import Request
from veilmq.protocols.sqs.codec import Call, Codec, Endpoint
from veilmq.testing.for_each import for_each

HOST = "127.0.0.1:9324"


class Ring:
    """Any key id stands for an account."""

    checks = False

    def find(self, key_id: str) -> AccessKey:
        return AccessKey(key_id, "", key_id if key_id.isdigit() else "000000000000")


def development(headers: dict[bytes, bytes], endpoint: Endpoint | None = None, target: bytes = b"/") -> Call:
    """What development mode makes of a request."""
    codec = Codec(Ring(), endpoint or Endpoint())
    request = Request(
        "POST",
        target,
        {b"host": HOST.encode(), b"x-amz-target": b"AmazonSQS.GetQueueUrl", **headers},
        b'{"QueueName":"jobs"}',
        "::1",
        False,
        "0" * 36,
    )
    for _ in range(2):
        call = codec.decode(request, Instant(0), Instant(0))
        assert isinstance(call, Call), call
    assert isinstance(call.commands[0], DescribeQueue)
    return call


CLAIM = (
    b"AWS4-HMAC-SHA256 Credential=%b/20260131/eu-west-1/sqs/aws4_request, SignedHeaders=host, Signature=" + b"0" * 64
)


@for_each(
    ("headers", "principal", "account", "region"),
    [
        ({}, "anonymous", "000000000000", "us-east-1"),
        ({b"authorization": b""}, "anonymous", "000000000000", "us-east-1"),
        ({b"authorization": b"nonsense"}, "anonymous", "000000000000", "us-east-1"),
        ({b"authorization": CLAIM % b"test"}, "test", "000000000000", "eu-west-1"),
        ({b"authorization": CLAIM % b"123456789012"}, "123456789012", "123456789012", "eu-west-1"),
        ({b"authorization": (CLAIM % b"short")[:-60]}, "short", "000000000000", "eu-west-1"),
        ({b"authorization": CLAIM % (b"k" * 60_000)}, "k" * 128, "000000000000", "eu-west-1"),
        ({b"authorization": CLAIM % b"\xff\xfe\x01"}, "???", "000000000000", "eu-west-1"),
    ],
)
def test_development_mode_takes_any_credentials(
    headers: dict[bytes, bytes], principal: str, account: str, region: str
) -> None:
    call = development(headers)
    command = call.commands[0]
    assert (command.origin.principal, command.queue.account, command.queue.region) == (principal, account, region)


def test_short_headers_are_not_mixed_up_in_development_mode() -> None:
    codec = Codec(Ring(), Endpoint())
    for key_id, region in (("a", "eu-west-1"), ("b", "us-west-2"), ("a", "eu-west-1")):
        headers = {
            b"host": HOST.encode(),
            b"x-amz-target": b"AmazonSQS.GetQueueUrl",
            b"authorization": f"AWS4-HMAC-SHA256 Credential={key_id}/1/{region}/sqs/aws4_request".encode(),
        }
        request = Request("POST", b"/", headers, b'{"QueueName":"jobs"}', "::1", False, "0" * 36)
        call = codec.decode(request, Instant(0), Instant(0))
        assert isinstance(call, Call)
        assert (call.key.id, call.commands[0].queue.region) == (key_id, region)


def test_the_host_names_the_region_of_an_unsigned_request() -> None:
    endpoint = Endpoint(base_domain="queues.test")
    host = {b"host": b"sqs.ap-south-1.queues.test"}
    assert development(host, endpoint).commands[0].queue.region == "ap-south-1"
    signed = {**host, b"authorization": CLAIM % b"test"}
    assert development(signed, endpoint).commands[0].queue.region == "eu-west-1"
