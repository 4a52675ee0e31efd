"""Whatever comes, `decode` returns: a call, or a refusal with a 4xx. So does `encode` for any outcome."""

import gzip
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus
from xml.etree import ElementTree

import botocore
from hypothesis import example, given, settings
from hypothesis import strategies as st

from veilmq.model.errors import leaves
from veilmq.model.instant import Instant
from veilmq.model.messages import Attribute, Delivery, Extras
from veilmq.model.outcomes import Received
from veilmq.model.settings.access import EVERYTHING, AccessKey
from veilmq.protocols import Request, Response
from veilmq.protocols.sqs.codec import Call, Codec, Endpoint

MODEL = json.loads(
    gzip.decompress((Path(botocore.__file__).parent / "data/sqs/2012-11-05/service-2.json.gz").read_bytes())
)
OPERATIONS = sorted(MODEL["operations"])
URLS = ["http://localhost:9324/000000000000/q", "http://localhost:9324/000000000000/q.fifo", "q"]
KEY = AccessKey("AKID", "secret", "000000000000", grants=EVERYTHING)


class Ring:
    """One key, or in development mode any."""

    def __init__(self, checks: bool) -> None:
        self.checks = checks

    def find(self, key_id: str) -> AccessKey | None:
        return KEY if not self.checks or key_id == KEY.id else None


CODEC = Codec(Ring(False), Endpoint(base_domain="test", trusted_proxy=True, cors_origins=("https://a",)))
STRICT = Codec(Ring(True), Endpoint())
ERRORS = [leaf(**{name: 7 if leaf.__annotations__[name] is int else "t" for name in leaf.fields}) for leaf in leaves()]


def check(codec: Codec, request: Request) -> Call | None:
    answer = codec.decode(request, Instant(1_769_860_800_000_000), Instant(0))
    if isinstance(answer, Call):
        assert answer.commands
        for error in ERRORS:
            refused = codec.encode(answer, [error] * len(answer.commands))
            well_formed(refused)
        return answer
    assert answer.status == 200 or 400 <= answer.status < 500, answer
    well_formed(answer)
    return None


def well_formed(answer: Response) -> None:
    if answer.content_type == b"text/xml":
        ElementTree.fromstring(answer.body)
    elif answer.body or answer.status != 200:  # what succeeded may have nothing to say
        json.loads(answer.body)
    for name, value in answer.headers:
        assert not {b"\r", b"\n"} & {(name + value)[i : i + 1] for i in range(len(name + value))}


def json_request(operation: str, body: bytes) -> Request:
    headers = {b"host": b"h", b"x-amz-target": f"AmazonSQS.{operation}".encode()}
    return Request("POST", b"/", headers, body, "::1", False, "the-id")


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=8), inside, max_size=4),
    max_leaves=8,
)
TEXTS = (
    st.text(max_size=30)
    | st.text(st.characters(codec="ascii"), max_size=300)
    | st.sampled_from(
        [
            "",
            "0",
            "1",
            "true",
            "All",
            ".*",
            "a.*",
            "Policy",
            "RedrivePolicy",
            "{}",
            "String",
            "Number",
            "AWSTraceHeader",
        ]
    )
)
INTEGERS = st.sampled_from([-1, 0, 1, 10, 20, 43_200, 2**31, 2**63, -(2**63), 10**40]) | st.integers()


def of_shape(name: str, depth: int = 0) -> st.SearchStrategy[Any]:
    """Values that fit the shape of the service model, or nearly."""
    shape = MODEL["shapes"][name]
    kind = shape["type"]
    if kind == "structure":
        members = {
            member: st.sampled_from(URLS) if member == "QueueUrl" else of_shape(what["shape"], depth + 1)
            for member, what in shape["members"].items()
        }
        fitting: st.SearchStrategy[Any] = st.fixed_dictionaries({}, optional=members)
    elif kind == "list":
        fitting = st.lists(of_shape(shape["member"]["shape"], depth + 1), max_size=3)
    elif kind == "map":
        fitting = st.dictionaries(TEXTS, of_shape(shape["value"]["shape"], depth + 1), max_size=3)
    elif kind in {"integer", "long"}:
        fitting = INTEGERS
    elif kind == "boolean":
        fitting = st.booleans()
    else:
        fitting = TEXTS
    return fitting | ANY if depth else fitting


INPUTS = {name: of_shape(operation["input"]["shape"]) for name, operation in MODEL["operations"].items()}
ASKED = st.sampled_from(OPERATIONS).flatmap(lambda name: st.tuples(st.just(name), INPUTS[name]))


@settings(max_examples=600)
@given(ASKED)
def test_any_json_value_for_any_member(asked: tuple[str, Any]) -> None:
    operation, given_input = asked
    check(CODEC, json_request(operation, json.dumps(given_input).encode()))


@given(st.sampled_from(OPERATIONS), st.binary(max_size=200))
@example("SendMessage", b"\xef\xbb\xbf{}")
@example("SendMessage", b'{"MessageBody":"\\udc00"}')
@example("CreateQueue", b'{"QueueName":"q","QueueName":7}')
@example("ReceiveMessage", b'{"MaxNumberOfMessages":-' + b"9" * 4000 + b"}")
def test_any_bytes_as_json(operation: str, body: bytes) -> None:
    check(CODEC, json_request(operation, body))


def flattened(value: Any, prefix: str) -> list[tuple[str, str]]:
    """A JSON value as the Query form would name its parts, roughly."""
    if isinstance(value, dict):
        pairs = []
        for number, (name, inside) in enumerate(value.items(), 1):
            if prefix.endswith(("Attributes", "tags")):
                base = prefix.removesuffix("s")
                pairs += [(f"{base}.{number}.Name", name), *flattened(inside, f"{base}.{number}.Value")]
            else:
                pairs += flattened(inside, f"{prefix}.{name}" if prefix else name)
        return pairs
    if isinstance(value, list):
        return [
            pair
            for number, inside in enumerate(value, 1)
            for pair in flattened(inside, f"{prefix.removesuffix('s')}.{number}")
        ]
    return [(prefix, "" if value is None else str(value))]


def form_request(method: str, target: bytes, form: bytes, accept: bytes = b"") -> Request:
    return Request(method, target, {b"host": b"h", b"accept": accept}, form, "::1", False, "the-id")


@settings(max_examples=400)
@given(ASKED, st.sampled_from([quote, quote_plus]), st.sampled_from([b"", b"application/json"]), st.booleans())
def test_any_value_for_any_member_of_a_form(asked: tuple[str, Any], encode: Any, accept: bytes, get: bool) -> None:
    operation, given_input = asked
    pairs = [("Action", operation), *flattened(given_input, "")]
    pairs = [(name.replace("Entrie.", f"{operation}RequestEntry."), value) for name, value in pairs]
    form = "&".join(f"{encode(name)}={encode(value)}" for name, value in pairs if name.isprintable()).encode()
    if get:
        check(CODEC, form_request("GET", b"/000000000000/q?" + form, b"", accept))
    else:
        check(CODEC, form_request("POST", b"/000000000000/q", form, accept))


PIECES = st.sampled_from(
    [
        b"Action=",
        b"SendMessage",
        b"SendMessageBatch",
        b"CreateQueue",
        b"&",
        b"=",
        b".",
        b"1",
        b"2",
        b"Name",
        b"Value",
        b"Key",
        b"Attribute",
        b"MessageAttribute",
        b"SendMessageBatchRequestEntry",
        b"Tag",
        b"%",
        b"%41",
        b"%ff",
        b"+",
        b"StringListValue",
        b"AttributeName",
        b"DataType",
        b"StringValue",
        b"Entries",
        b"Id",
        b"999999999999",
        b"-1",
        b"Attributes",
        b"QueueName=q",
    ]
)


@settings(max_examples=400)
@given(st.lists(PIECES | st.binary(max_size=4), max_size=40).map(b"".join), st.binary(max_size=12), st.booleans())
def test_any_bytes_as_a_form(form: bytes, path: bytes, as_query: bool) -> None:
    form = b"Action=SendMessageBatch&" + form
    if as_query:
        check(CODEC, form_request("GET", b"/" + path + b"?" + form, b""))
    else:
        check(CODEC, form_request("POST", b"/" + path, form))


HEADERS = st.dictionaries(
    st.sampled_from(
        [
            b"host",
            b"authorization",
            b"x-amz-date",
            b"date",
            b"x-amz-target",
            b"x-amz-security-token",
            b"user-agent",
            b"accept",
            b"content-type",
            b"origin",
            b"x-forwarded-proto",
            b"x-forwarded-host",
            b"x-amzn-trace-id",
            b"x-amz-content-sha256",
        ]
    ),
    st.binary(max_size=40).map(lambda value: value.replace(b"\r", b"").replace(b"\n", b""))
    | st.sampled_from(
        [
            b"AmazonSQS.ListQueues",
            b"20260131T120000Z",
            b"application/json",
            b"https://a",
            b"h",
            b"AWS4-HMAC-SHA256 Credential=AKID/20260131/us-east-1/sqs/aws4_request, SignedHeaders=host, Signature="
            + b"0" * 64,
        ]
    ),
)


@settings(max_examples=400)
@given(
    st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"]),
    st.binary(max_size=60)
    | st.sampled_from(
        [
            b"/",
            b"*",
            b"/?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKID/20260131/us-east-1/sqs/aws4_request"
            b"&X-Amz-Date=20260131T120000Z&X-Amz-Expires=60&X-Amz-SignedHeaders=host&X-Amz-Signature=00",
        ]
    ),
    HEADERS,
    st.binary(max_size=60),
    st.booleans(),
)
def test_any_headers_and_target(
    method: str, target: bytes, headers: dict[bytes, bytes], body: bytes, strict: bool
) -> None:
    codec = STRICT if strict else CODEC
    request = Request(method, target, headers, body, "::1", False, "the-id")
    answer = codec.decode(request, Instant(1_769_860_800_000_000), Instant(0))
    if strict:
        assert isinstance(answer, Response)
        assert 400 <= answer.status < 500
    codec.failure(request)
    codec.refuse(400, "reason", request, "the-id")


XML_TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\ufffe\uffff").filter(
        lambda character: character in "\t\n\r" or character >= " "
    )
)


@given(XML_TEXT, XML_TEXT, st.binary(min_size=1))
def test_bodies_arrive_exactly_in_both_forms(body: str, text: str, raw: bytes) -> None:
    extras = Extras((Attribute("s", "String", text), Attribute("b", "Binary", raw)))
    delivery = Delivery(bytes(16), 1, body, bytes(16), extras, "me", 8, Instant(0), Instant(0), 1, None, "h", None)
    form = b"Action=ReceiveMessage&MessageAttributeName.1=All"
    call = check(CODEC, form_request("POST", b"/000000000000/q", form))
    assert call is not None
    tree = ElementTree.fromstring(CODEC.encode(call, [Received([delivery])]).body)
    assert (tree.findtext(".//{*}Body") or "") == body
    assert (tree.findtext(".//{*}StringValue") or "") == text
    asked = json.dumps({"QueueUrl": URLS[0], "MessageAttributeNames": ["All"]}).encode()
    call = check(CODEC, json_request("ReceiveMessage", asked))
    assert call is not None
    (message,) = json.loads(CODEC.encode(call, [Received([delivery])]).body)["Messages"]
    assert (message["Body"], message["MessageAttributes"]["s"]["StringValue"]) == (body, text)
