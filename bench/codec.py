"""The cost of the SQS codec: microseconds of CPU for decode and encode, by operation and wire form.

    python bench/codec.py [--rounds N]

Strategy: real signed requests, as the listener passes them on, and outcomes as the engine returns them; the best of
several rounds, because the machine has other work. `unsigned` is the same in development mode; the difference is the
cost of the signature check. The last lines compare ways to compute the HMAC with the standard library.
"""

import argparse
import hashlib
import hmac
import timeit
from urllib.parse import quote

from veilmq.model.instant import Instant
from veilmq.model.messages import NO_EXTRAS, Delivery
from veilmq.model.outcomes import Deleted, Extended, Outcome, Received, Sent
from veilmq.model.settings.access import EVERYTHING, AccessKey
from veilmq.protocols import Request
from veilmq.protocols.sqs.codec import Call, Codec, Endpoint

KEY = AccessKey("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "111122223333", grants=EVERYTHING)
HOST = "127.0.0.1:9324"
URL = f"http://{HOST}/{KEY.account}/jobs"
STAMP = "20260131T120000Z"
WALL = Instant(1_769_860_800_000_000)
BODY = "x" * 200
HANDLE = "0f" * 33


class Ring:
    """One key."""

    def __init__(self, checks: bool) -> None:
        self.checks = checks

    def find(self, key_id: str) -> AccessKey | None:
        return KEY if key_id == KEY.id else None


def signed(headers: dict[str, str], body: bytes) -> Request:
    """A POST to `/` with an ordinary signature."""
    headers = {"host": HOST, "x-amz-date": STAMP, "user-agent": "Boto3/1.43 md/Botocore", **headers}
    names = sorted(set(headers) - {"user-agent"})
    scope = f"{STAMP[:8]}/us-east-1/sqs/aws4_request"
    lines = "".join(f"{name}:{headers[name]}\n" for name in names)
    canonical = f"POST\n/\n\n{lines}\n{';'.join(names)}\n{hashlib.sha256(body).hexdigest()}"
    key = b"AWS4" + KEY.secret.encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    text = f"AWS4-HMAC-SHA256\n{STAMP}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={KEY.id}/{scope}, SignedHeaders={';'.join(names)}, Signature={signature}"
    )
    headers["content-length"] = str(len(body))
    raw = {name.encode(): value.encode() for name, value in headers.items()}
    return Request("POST", b"/", raw, body, "127.0.0.1", False, "00000000-0000-4000-8000-000000000000")


def json_request(operation: str, body: str) -> Request:
    """In the JSON form."""
    return signed(
        {"content-type": "application/x-amz-json-1.0", "x-amz-target": f"AmazonSQS.{operation}"}, body.encode()
    )


def query_request(operation: str, form: str) -> Request:
    """In the Query form."""
    body = f"Action={operation}&Version=2012-11-05&QueueUrl={quote(URL, safe='')}&{form}"
    return signed({"content-type": "application/x-www-form-urlencoded; charset=utf-8"}, body.encode())


def cases() -> dict[str, tuple[Request, list[Outcome]]]:
    """Name, request, outcomes."""
    sent = Sent(b"0123456789abcdef", 1, WALL, WALL, WALL)
    delivery = Delivery(
        b"0123456789abcdef", 1, BODY, b"0123456789abcdef", NO_EXTRAS, "me", 8, WALL, WALL, 1, WALL, HANDLE
    )
    ten = range(1, 11)
    start = f'{{"QueueUrl":"{URL}",'
    sends = ",".join(f'{{"Id":"{n}","MessageBody":"{BODY}"}}' for n in ten)
    deletes = ",".join(f'{{"Id":"{n}","ReceiptHandle":"{HANDLE}"}}' for n in ten)
    form_sends = "&".join(
        f"SendMessageBatchRequestEntry.{n}.Id={n}&SendMessageBatchRequestEntry.{n}.MessageBody={BODY}" for n in ten
    )
    form_deletes = "&".join(
        f"DeleteMessageBatchRequestEntry.{n}.Id={n}&DeleteMessageBatchRequestEntry.{n}.ReceiptHandle={HANDLE}"
        for n in ten
    )
    visibility = f'{start}"ReceiptHandle":"{HANDLE}","VisibilityTimeout":60}}'
    return {
        "json  send": (json_request("SendMessage", f'{start}"MessageBody":"{BODY}"}}'), [sent]),
        "json  receive": (
            json_request("ReceiveMessage", f'{start}"MaxNumberOfMessages":1,"VisibilityTimeout":60}}'),
            [Received([delivery])],
        ),
        "json  delete": (json_request("DeleteMessage", f'{start}"ReceiptHandle":"{HANDLE}"}}'), [Deleted()]),
        "json  extend": (json_request("ChangeMessageVisibility", visibility), [Extended(HANDLE, WALL)]),
        "json  send 10": (json_request("SendMessageBatch", f'{start}"Entries":[{sends}]}}'), [sent] * 10),
        "json  receive 10": (
            json_request("ReceiveMessage", f'{start}"MaxNumberOfMessages":10,"VisibilityTimeout":60}}'),
            [Received([delivery] * 10)],
        ),
        "json  delete 10": (json_request("DeleteMessageBatch", f'{start}"Entries":[{deletes}]}}'), [Deleted()] * 10),
        "query send": (query_request("SendMessage", f"MessageBody={BODY}"), [sent]),
        "query receive": (
            query_request("ReceiveMessage", "MaxNumberOfMessages=1&VisibilityTimeout=60"),
            [Received([delivery])],
        ),
        "query delete": (query_request("DeleteMessage", f"ReceiptHandle={HANDLE}"), [Deleted()]),
        "query send 10": (query_request("SendMessageBatch", form_sends), [sent] * 10),
        "query receive 10": (
            query_request("ReceiveMessage", "MaxNumberOfMessages=10&VisibilityTimeout=60"),
            [Received([delivery] * 10)],
        ),
        "query delete 10": (query_request("DeleteMessageBatch", form_deletes), [Deleted()] * 10),
    }


def cost_us(rounds: int, number: int, work: object) -> float:
    """The best round's microseconds for one call."""
    return min(timeit.repeat(work, number=number, repeat=rounds)) / number * 1e6  # type: ignore[arg-type]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    checked, unchecked = Codec(Ring(True), Endpoint()), Codec(Ring(False), Endpoint())
    print(f"{'us a request':<18}{'decode':>8}{'unsigned':>10}{'encode':>8}{'both':>8}")
    for name, (request, outcomes) in cases().items():
        call = checked.decode(request, WALL, WALL)
        assert isinstance(call, Call), call
        number = 2_000 if name.endswith("10") else 8_000
        decode = cost_us(rounds, number, lambda request=request: checked.decode(request, WALL, WALL))
        unsigned = cost_us(rounds, number, lambda request=request: unchecked.decode(request, WALL, WALL))
        encode = cost_us(rounds, number, lambda call=call, outcomes=outcomes: checked.encode(call, outcomes))
        print(f"{name:<18}{decode:>8.2f}{unsigned:>10.2f}{encode:>8.2f}{decode + encode:>8.2f}")
    print()
    for name, cost in hmac_costs(rounds):
        print(f"{name:<42}{cost:>8.2f}")


def hmac_costs(rounds: int) -> list[tuple[str, float]]:
    """Ways to compute the HMAC-SHA256 of a string to sign with an already known key."""
    key, text = b"k" * 32, b"t" * 137
    whole = hmac.new(key, digestmod="sha256")
    block = key.ljust(64, b"\0")
    inner_pad, outer_pad = bytes(byte ^ 0x36 for byte in block), bytes(byte ^ 0x5C for byte in block)
    inner, outer = hashlib.sha256(inner_pad), hashlib.sha256(outer_pad)

    def copied() -> str:
        state = whole.copy()
        state.update(text)
        return state.hexdigest()

    def two_states() -> str:
        first, second = inner.copy(), outer.copy()
        first.update(text)
        second.update(first.digest())
        return second.hexdigest()

    def two_hashes() -> str:
        return hashlib.sha256(outer_pad + hashlib.sha256(inner_pad + text).digest()).hexdigest()

    ways = {
        "hmac.digest": lambda: hmac.digest(key, text, "sha256").hex(),
        "copy of an hmac object": copied,
        "copies of two prepared SHA-256 states": two_states,
        "two SHA-256 over pad and text": two_hashes,
    }
    assert len({way() for way in ways.values()}) == 1
    return [(name, cost_us(rounds, 20_000, way)) for name, way in ways.items()]


if __name__ == "__main__":
    main()
