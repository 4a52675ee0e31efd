"""Requests of clients that no other test runs, as they write them: what is odd in them is taken, as AWS takes it."""

import hashlib
import hmac
import json
from urllib.parse import quote

from veilmq.model.commands import CreateQueue, ListQueues
from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.settings.access import EVERYTHING, AccessKey
from veilmq.protocols import Request, Response
from veilmq.protocols.sqs.codec import Call, Codec, Endpoint
from veilmq.testing.for_each import for_each

KEY = AccessKey("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "111122223333", grants=EVERYTHING)
SIGNED_AT_S = 1_792_065_600  # 2026-10-15T12:00:00Z
STAMP = "20261015T120000Z"
SCOPE = f"{STAMP[:8]}/us-east-1/sqs/aws4_request"
FORM = "application/x-www-form-urlencoded;charset=utf-8"


class Ring:
    """One key."""

    checks = True

    def find(self, key_id: str) -> AccessKey | None:
        return KEY if key_id == KEY.id else None


def signature(canonical: str) -> str:
    """Of a canonical request, by hand."""
    key = b"AWS4" + KEY.secret.encode()
    for part in SCOPE.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    text = f"AWS4-HMAC-SHA256\n{STAMP}\n{SCOPE}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    return hmac.digest(key, text.encode(), "sha256").hex()


def decode(request: Request, later_s: int = 0) -> Call | Response:
    return Codec(Ring(), Endpoint()).decode(request, Instant((SIGNED_AT_S + later_s) * SECOND_US), Instant(0))


def code_of(answer: Call | Response) -> str:
    return "ok" if isinstance(answer, Call) else answer.body.decode().partition("<Code>")[2].partition("</Code>")[0]


def posted(body: str, **named: str) -> Request:
    """A signed POST, every header of which is signed."""
    headers = {"host": "127.0.0.1:9324", "x-amz-date": STAMP} | {
        name.replace("_", "-"): value for name, value in named.items()
    }
    names = sorted(headers)
    lines = "".join(f"{name}:{headers[name]}\n" for name in names)
    digest = hashlib.sha256(body.encode()).hexdigest()
    mac = signature(f"POST\n/\n\n{lines}\n{';'.join(names)}\n{digest}")
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={KEY.id}/{SCOPE}, SignedHeaders={';'.join(names)}, Signature={mac}"
    )
    raw = {name.encode(): value.encode() for name, value in headers.items()}
    return Request("POST", b"/", raw, body.encode(), "127.0.0.1", False, "0" * 36)


def test_perls_target_beside_a_query_body_is_not_the_json_form() -> None:
    """Amazon::SQS::Simple 2.07 sends one with every request, with the API's version in it."""
    body = "Action=CreateQueue&QueueName=jobs&Version=2012-11-05"
    answer = decode(posted(body, content_type=FORM, x_amz_target="AmazonSQSv20121105.CreateQueue"))
    assert isinstance(answer, Call)
    (command,) = answer.commands
    assert isinstance(command, CreateQueue)
    refused = decode(posted("Action=Nothing", content_type=FORM, x_amz_target="AmazonSQSv20121105.Nothing"))
    assert isinstance(refused, Response)
    assert (code_of(refused), refused.content_type) == ("InvalidAction", b"text/xml")


@for_each("kind", ["application/x-amz-json-1.0", "application/json", FORM])
def test_a_target_of_sqs_is_the_json_form_whatever_the_content_type(kind: str) -> None:
    """curl adds that of a form by itself."""
    answer = decode(posted("{}", content_type=kind, x_amz_target="AmazonSQS.ListQueues"))
    assert isinstance(answer, Call)
    assert isinstance(answer.commands[0], ListQueues)


@for_each(
    ("later_s", "text"),
    [
        (901, "Signature expired: 20261015T120000Z is now earlier than 20261015T120001Z (20261015T121501Z - 15 min.)"),
        (
            -901,
            "Signature not yet current: 20261015T120000Z is still later than 20261015T115959Z "
            "(20261015T114459Z + 15 min.)",
        ),
    ],
)
def test_a_wrong_clock_is_told_as_sqs_tells_it(later_s: int, text: str) -> None:
    """Code and words: aws/aws-sdk-php #642. npm's aws-sdk 2 and @aws-sdk correct their clock at this `__type`."""
    query = decode(posted("Action=ListQueues", content_type=FORM), later_s)
    assert isinstance(query, Response)
    assert (query.status, code_of(query)) == (403, "SignatureDoesNotMatch")
    assert f"<Message>{text}</Message>" in query.body.decode()
    answer = decode(
        posted("{}", content_type="application/x-amz-json-1.0", x_amz_target="AmazonSQS.ListQueues"), later_s
    )
    assert isinstance(answer, Response)
    assert (b"x-amzn-query-error", b"SignatureDoesNotMatch;Sender") in answer.headers
    said = json.loads(answer.body)
    assert (said["__type"].partition("#")[2], said["message"]) == ("InvalidSignatureException", text)


def test_boto3s_ordinary_retries_know_who_is_throttled() -> None:
    """botocore's _retry.json: RequestThrottled of SQS is tried again if it comes with 403, in whichever form."""
    codec = Codec(Ring(), Endpoint(requests_per_second_max=1))
    json_form = posted("{}", content_type="application/x-amz-json-1.0", x_amz_target="AmazonSQS.ListQueues")
    asked = (json_form, json_form, posted("Action=ListQueues", content_type=FORM))
    wall = Instant(SIGNED_AT_S * SECOND_US)
    first, *refused = (codec.decode(request, wall, wall) for request in asked)
    assert isinstance(first, Call)
    assert [each.status for each in refused if isinstance(each, Response)] == [403, 403]
    assert all(b"RequestThrottled" in each.body for each in refused if isinstance(each, Response))


@for_each(
    ("later_s", "code"),
    [
        (-901, "SignatureDoesNotMatch"),
        (-900, "ok"),
        (-899, "ok"),
        (899, "ok"),
        (900, "ok"),
        (901, "SignatureDoesNotMatch"),
    ],
)
def test_a_presigned_url_without_a_term_is_good_for_15_minutes(later_s: int, code: str) -> None:
    """npm's aws4 and aws4fetch write X-Amz-Expires for S3 only; aws4's own trial against AWS has this very URL."""
    query = "&".join(
        f"{name}={quote(value, safe='')}"
        for name, value in (
            ("Action", "ListQueues"),
            ("X-Amz-Algorithm", "AWS4-HMAC-SHA256"),
            ("X-Amz-Credential", f"{KEY.id}/{SCOPE}"),
            ("X-Amz-Date", STAMP),
            ("X-Amz-SignedHeaders", "host"),
        )
    )
    empty = hashlib.sha256(b"").hexdigest()
    mac = signature(f"GET\n/\n{query}\nhost:127.0.0.1:9324\n\nhost\n{empty}")
    target = f"/?{query}&X-Amz-Signature={mac}".encode()
    answer = decode(Request("GET", target, {b"host": b"127.0.0.1:9324"}, b"", "127.0.0.1", False, "0" * 36), later_s)
    assert code_of(answer) == code
