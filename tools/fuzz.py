"""Coverage-guided fuzzing of the code that untrusted bytes reach first: the HTTP intake and the three codecs.

Strategy: each input is the stream of one connection. Its first byte selects the protocol, and whether the stream is
sent as it is or gets the Content-Length of what follows its first blank line (so that a mutated body is read at all).
The intake's requests go through the codec in development mode, so that no signature is needed, to a real SQLite store
and back. An exception, an answer of 500 or more, or a line break in a header is a finding; so is a request that
read_plain reads in another way than llhttp, or that the accelerator reads, plans or answers in another way than Python,
or whose signature it judges in another way: the one that it has, and a right one.
libFuzzer keeps the input. `make fuzz` runs it.

    python tools/fuzz.py CORPUS_DIRECTORY [libFuzzer's flags, e.g. -max_total_time=600]
"""

import base64
import hashlib
import hmac
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import atheris

with atheris.instrument_imports(include=["veilmq"]):
    from tests.support.twins import NAMES, WALL, Ring, both, read_by_both, signed

    from veilmq.accelerator import TWINS
    from veilmq.model.instant import Instant
    from veilmq.model.outcomes import Applied
    from veilmq.protocols import Request, Response, azure, mns
    from veilmq.protocols.sqs import codec as sqs
    from veilmq.protocols.sqs.auth import Caller, Verifier
    from veilmq.server.auth import DevelopmentKeyring
    from veilmq.server.http import Limits
    from veilmq.server.http.intake import HeaderCaseIntake, Intake
    from veilmq.store import Options
    from veilmq.store.sqlite.store import SqliteStore

NOW: Final = Instant(1_795_000_000_000_000)
LIMITS: Final = Limits(header_bytes_max=32_768, body_bytes_max=65_536)
RAW: Final = 128
"""From this first byte on, the stream is read as it is."""
AZURE_ACCOUNT: Final = "devstoreaccount1"


class NoTokens:
    """A codec's tokens in development mode: claims only."""

    tenant = None
    audiences: frozenset[str] = frozenset()

    def claims(self, token: str) -> dict[str, Any]:
        return {"oid": token, "tid": "t"}


def parsed(intake_type: type[Intake]) -> type[Intake]:
    """The same intake, but llhttp reads every request."""
    return type(f"Parsed{intake_type.__name__}", (intake_type,), {"read_plain": lambda self, data: None})


def codecs() -> list[tuple[Any, type[Intake]]]:
    """Each protocol's codec and intake."""
    keyring = DevelopmentKeyring()
    return [
        (sqs.Codec(keyring, sqs.Endpoint(base_domain="test", cors_origins=("https://a.example",))), Intake),
        (azure.Codec(keyring, azure.Endpoint(), NoTokens()), HeaderCaseIntake),
        (mns.Codec(keyring, mns.Endpoint()), Intake),
    ]


def answered(store: SqliteStore, codec: Any, request: Request) -> Response:
    """The answer to the request, through as many calls as it takes."""
    compared = both if isinstance(codec, sqs.Codec) else lambda work: work()  # the accelerator is in no other codec
    call = compared(lambda: codec.decode(request, NOW, NOW))
    while not isinstance(call, Response):
        applied: Applied = store.apply(call.commands, NOW)
        if applied.wrote:
            store.commit()
        call = compared(lambda call=call, applied=applied: codec.encode(call, applied.outcomes))
    return call


def verified(verifier: Verifier, request: Request) -> None:
    """Raises AssertionError if the accelerator and Python disagree on the signature."""
    both(lambda: verifier.verify(request, WALL))
    right = signed(request.body, (request.headers.get(b"host", b"h"), request.headers.get(NAMES[2], b"t")))
    unsigned = {name: value for name, value in request.headers.items() if not name.startswith((b"x-amz-", b":"))}
    right.headers = unsigned | right.headers
    for _ in range(2):  # what it has not seen before, it leaves to Python
        assert isinstance(both(lambda: verifier.verify(right, WALL)), Caller), "a right signature is refused"


def one_input(store: SqliteStore) -> Callable[[bytes], None]:
    """What libFuzzer calls."""
    kinds = [(codec, intake_type, parsed(intake_type)) for codec, intake_type in codecs()]
    verifier = Verifier(Ring(), None, "stand-in")

    def run(data: bytes) -> None:
        if not data:
            return
        codec, intake_type, parsing_type = kinds[data[0] % len(kinds)]
        stream = framed(data[1:]) if data[0] < RAW else data[1:]
        if "read_plain" in TWINS:
            read_by_both(stream, LIMITS)
        intake = intake_type(LIMITS, "127.0.0.1", False, lambda: "00000000-0000-4000-8000-000000000000")
        parsing = parsing_type(LIMITS, "127.0.0.1", False, lambda: "00000000-0000-4000-8000-000000000000")
        requests = read(intake, stream)
        assert requests == read(parsing, stream), "two readers disagree"
        for request, _ in requests:
            if isinstance(codec, sqs.Codec):
                verified(verifier, request)
            check(answered(store, codec, request))
        if intake.refusal is not None:
            check(codec.refuse(intake.refusal.status, intake.refusal.reason))

    return run


def read(intake: Intake, rest: bytes) -> list[tuple[Request, int]]:
    """The requests of a stream, each with the flags of its answer."""
    requests = []
    while rest and intake.refusal is None:
        rest = intake.feed(rest)
        while intake.ready:
            requests.append(intake.ready.popleft())
    return requests


def framed(data: bytes) -> bytes:
    """The stream as one request with the length of its body."""
    head, _, body = data.partition(b"\r\n\r\n")
    return b"%b\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body)


def check(answer: Response) -> None:
    """Raises AssertionError for an answer that no request may get."""
    assert answer.status < 500 or answer.status in {501, 505}, answer
    for name, value in answer.headers:
        assert b"\n" not in name + value, answer
        assert b"\r" not in name + value, answer


def stream(method: str, target: str, body: str = "", *headers: str) -> bytes:
    """A request as a client writes it, without the length of its body."""
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *headers]
    return "\r\n".join([*lines, "", body]).encode()


def azure_sas() -> str:
    """An account SAS of the well-known key, for everything and for years ("Create an account SAS")."""
    key = DevelopmentKeyring().find_account(AZURE_ACCOUNT)
    assert key is not None
    fields = {"sv": "2018-11-09", "ss": "q", "srt": "sco", "sp": "rwdlacup", "se": "2099-01-01T00:00:00Z"}
    text = "\n".join(
        [AZURE_ACCOUNT, fields["sp"], fields["ss"], fields["srt"], "", fields["se"], "", "", fields["sv"], ""]
    )
    signature = base64.b64encode(hmac.new(key.secrets[0], text.encode(), hashlib.sha256).digest()).decode()
    return "&".join([*(f"{name}={quote(value)}" for name, value in fields.items()), f"sig={quote(signature, safe='')}"])


def seeds() -> list[bytes]:
    """One valid request of each kind, from which the fuzzer starts."""
    json, form = "Content-Type: application/x-amz-json-1.0", "Content-Type: application/x-www-form-urlencoded"
    url = '"QueueUrl":"http://localhost/000000000000/q"'
    number = '{"DataType":"Number.x","StringValue":"1"}'
    calls = {
        "CreateQueue": '{"QueueName":"q","Attributes":{"DelaySeconds":"0"},"tags":{"a":"b"}}',
        "SendMessage": f'{{{url},"MessageBody":"x","MessageAttributes":{{"a":{number}}}}}',
        "SendMessageBatch": f'{{{url},"Entries":[{{"Id":"1","MessageBody":"x","DelaySeconds":1}}]}}',
        "ReceiveMessage": f'{{{url},"MaxNumberOfMessages":9,"AttributeNames":["All"],"MessageAttributeNames":["a.*"]}}',
        "SetQueueAttributes": f'{{{url},"Attributes":{{"RedrivePolicy":"{{\\"maxReceiveCount\\":1}}"}}}}',
        "GetQueueAttributes": f'{{{url},"AttributeNames":["All"]}}',
        "ListQueues": '{"QueueNamePrefix":"q","MaxResults":10,"NextToken":"x"}',
        "AddPermission": f'{{{url},"Label":"l","AWSAccountIds":["111111111111"],"Actions":["*"]}}',
        "StartMessageMoveTask": '{"SourceArn":"arn:aws:sqs:us-east-1:000000000000:q"}',
    }
    of_sqs = [stream("POST", "/", body, json, f"X-Amz-Target: AmazonSQS.{name}") for name, body in calls.items()]
    right = signed(b"{}", (b"localhost", b"AmazonSQS.ListQueues")).headers
    of_sqs.append(stream("POST", "/", "{}", *(f"{name.decode()}: {value.decode()}" for name, value in right.items())))
    batch = "Action=SendMessageBatch&SendMessageBatchRequestEntry.1.Id=1&SendMessageBatchRequestEntry.1.MessageBody=x"
    of_sqs += [stream("POST", "/000000000000/q", batch, form), stream("GET", "/?Action=ListQueues&Version=2012-11-05")]
    sas, at = azure_sas(), f"/{AZURE_ACCOUNT}"
    message = "<QueueMessage><MessageText>x</MessageText></QueueMessage>"
    rules = "<SignedIdentifiers><SignedIdentifier><Id>i</Id></SignedIdentifier></SignedIdentifiers>"
    rule = "<CorsRule><AllowedOrigins>*</AllowedOrigins></CorsRule>"
    cors = f"<StorageServiceProperties><Cors>{rule}</Cors></StorageServiceProperties>"
    version, nobody = "x-ms-version: 2026-10-06", "00000000-0000-0000-0000-000000000000"
    of_azure = [
        stream("PUT", f"{at}/queue?{sas}", "", version, "x-ms-meta-Name: v"),
        stream("POST", f"{at}/queue/messages?visibilitytimeout=0&messagettl=-1&{sas}", message, version),
        stream("GET", f"{at}/queue/messages?numofmessages=32&visibilitytimeout=30&{sas}", "", version),
        stream("PUT", f"{at}/queue/messages/{nobody}?popreceipt=x&visibilitytimeout=1&{sas}", message),
        stream("GET", f"{at}?comp=list&include=metadata&maxresults=1&prefix=q&{sas}", "", version),
        stream("PUT", f"{at}/queue?comp=acl&{sas}", rules),
        stream("PUT", f"{at}?restype=service&comp=properties&{sas}", cors),
        stream("OPTIONS", f"{at}/queue", "", "Origin: https://a.example", "Access-Control-Request-Method: PUT"),
    ]
    usual = ("x-mns-version: 2015-06-06", "Authorization: MNS id:c2lnbmF0dXJl", "Date: Thu, 19 Nov 2026 10:13:20 GMT")
    queue = "<Queue><VisibilityTimeout>30</VisibilityTimeout><DelaySeconds>0</DelaySeconds></Queue>"
    sent = "<Message><MessageBody>x</MessageBody><Priority>1</Priority><DelaySeconds>0</DelaySeconds></Message>"
    endpoint = "<Endpoint>acs:mns:us-east-1:000000000000:queues/q</Endpoint>"
    topic = f"<Subscription>{endpoint}<FilterTag>t</FilterTag></Subscription>"
    published = sent.replace("<Priority>1</Priority>", "<MessageTag>t</MessageTag>")
    of_mns = [
        stream("PUT", "/queues/q", queue, *usual),
        stream("POST", "/queues/q/messages", sent, *usual),
        stream("POST", "/queues/q/messages", f"<Messages>{sent}</Messages>", *usual),
        stream("GET", "/queues/q/messages?numOfMessages=16&waitseconds=0", "", *usual),
        stream("GET", "/queues", "", "x-mns-prefix: q", "x-mns-ret-number: 10", *usual),
        stream("PUT", "/topics/t", "<Topic/>", *usual),
        stream("PUT", "/topics/t/subscriptions/s", topic, *usual),
        stream("POST", "/topics/t/messages", published, *usual),
    ]
    streams = zip((b"\0", b"\1", b"\2"), (of_sqs, of_azure, of_mns), strict=True)
    return [kind + each for kind, requests in streams for each in requests]


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    corpus = Path(sys.argv[1])
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number:02}").write_bytes(seed)
    data = corpus.parent / "data"  # libFuzzer ends the process without cleanup, so the last run's is removed here
    shutil.rmtree(data, ignore_errors=True)
    run = one_input(SqliteStore(data, Options()))
    for seed in seeds():
        run(seed)
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
