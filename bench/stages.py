"""Where the microseconds of a request go: each stage alone, in one process, on real bytes and a real data directory.

Strategy: the life cycle of bench/lifecycle.lua (send, receive, delete; 200-byte bodies; every request signed) is cut
into the stages that the server runs on its loop thread. Each stage is timed over a store batch of `--commands`
requests, and the fastest of many rounds counts, so that a busy machine blurs less.

    python bench/stages.py [--batch 10]
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from veilmq.engine import open_directory
from veilmq.model.access import EVERYTHING, AccessKey
from veilmq.model.instant import Instant
from veilmq.protocols.http import Request
from veilmq.protocols.sqs.codec import Codec, Endpoint

URL = "http://127.0.0.1:9324/111111111111/q"
KEY = AccessKey("AKIDBENCH0000000001", "secret", "111111111111", grants=EVERYTHING)


class Keys:
    """One key."""

    checks = True

    def find(self, key_id: str) -> AccessKey | None:
        return KEY if key_id == KEY.id else None


def signed(operation: str, given: dict[str, Any]) -> Request:
    """The bytes that botocore would send."""
    aws = AWSRequest(
        "POST",
        "http://127.0.0.1:9324/",
        headers={"Content-Type": "application/x-amz-json-1.0", "X-Amz-Target": f"AmazonSQS.{operation}"},
        data=json.dumps(given),
    )
    SigV4Auth(Credentials(KEY.id, KEY.secret), "sqs", "us-east-1").add_auth(aws)
    headers = {name.lower().encode(): value.encode() for name, value in aws.headers.items()}
    headers |= {b"host": b"127.0.0.1:9324", b"user-agent": b"Boto3/1.43 md/Botocore"}
    return Request("POST", b"/", headers, aws.data.encode(), "127.0.0.1", False, "0" * 36)


class Stages:
    """Codec, engine and store in one thread, with a stopwatch around each."""

    def __init__(self, directory: Path) -> None:
        self.engine, self.store = open_directory(directory)
        self.codec = Codec(Keys(), Endpoint())
        self.best: dict[tuple[str, str], float] = {}

    def _note(self, operation: str, stage: str, started: float, count: int) -> None:
        spent = (time.perf_counter() - started) / count * 1e6
        self.best[operation, stage] = min(spent, self.best.get((operation, stage), 1e9))

    def run(self, operation: str, requests: list[Request]) -> list[bytes]:
        """One store batch of requests, stage by stage; returns the answers' bodies."""
        count, clock = len(requests), time.perf_counter
        now = Instant(time.time_ns() // 1000)
        started = clock()
        calls: list[Any] = [self.codec.decode(request, now, now) for request in requests]
        self._note(operation, "decode", started, count)
        started = clock()
        for call in calls:
            self.engine.submit(call.request.request_id + str(id(call)), call.commands, now)
        batch = self.engine.take_batch(now)
        assert batch is not None
        self._note(operation, "gather", started, count)
        started = clock()
        applied = self.store.apply(batch.commands, now)
        self._note(operation, "apply", started, count)
        started = clock()
        self.store.commit()
        self._note(operation, "commit", started, count)
        started = clock()
        answers = self.engine.committed(batch, applied)
        self._note(operation, "hand back", started, count)
        outcomes = [answer.outcomes for answer in answers][:count]
        started = clock()
        bodies = [self.codec.encode(call, mine).body for call, mine in zip(calls, outcomes, strict=True)]
        self._note(operation, "encode", started, count)
        return bodies


def lives(stages: Stages, commands: int, batch: int) -> None:
    """`commands` sends, receives and deletes, `batch` messages each."""
    text = "x" * 200
    entries = [{"Id": str(i), "MessageBody": text} for i in range(batch)]
    if batch == 1:
        stages.run("send", [signed("SendMessage", {"QueueUrl": URL, "MessageBody": text})] * commands)
    else:
        stages.run("send", [signed("SendMessageBatch", {"QueueUrl": URL, "Entries": entries})] * commands)
    receive = {"QueueUrl": URL, "MaxNumberOfMessages": batch, "VisibilityTimeout": 300}
    answers = stages.run("receive", [signed("ReceiveMessage", receive)] * commands)
    deletes = []
    for answer in answers:
        handles = [message["ReceiptHandle"] for message in json.loads(answer)["Messages"]]
        if batch == 1:
            deletes.append(signed("DeleteMessage", {"QueueUrl": URL, "ReceiptHandle": handles[0]}))
        else:
            named = [{"Id": str(i), "ReceiptHandle": handle} for i, handle in enumerate(handles)]
            deletes.append(signed("DeleteMessageBatch", {"QueueUrl": URL, "Entries": named}))
    stages.run("delete", deletes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--batch", type=int, default=1, help="messages a request")
    parser.add_argument("--commands", type=int, default=8, help="requests a store batch")
    parser.add_argument("--rounds", type=int, default=150)
    options = parser.parse_args()
    here = Path(__file__).parent / ".data"
    here.mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(dir=here))
    directory.chmod(0o700)
    try:
        stages = Stages(directory)
        stages.run("create", [signed("CreateQueue", {"QueueName": "q"})])
        for _ in range(options.rounds):
            lives(stages, options.commands, options.batch)
        stages.store.close()
    finally:
        shutil.rmtree(directory)
    names = ["decode", "gather", "apply", "commit", "hand back", "encode"]
    print(
        f"us a request, best of {options.rounds} rounds, {options.commands} requests a store batch of {options.batch}"
    )
    print(f"{'':10}" + "".join(f"{name:>11}" for name in names) + f"{'sum':>11}")
    for operation in ("send", "receive", "delete"):
        row = [stages.best[operation, name] for name in names]
        print(f"{operation:10}" + "".join(f"{value:11.1f}" for value in row) + f"{sum(row):11.1f}")


if __name__ == "__main__":
    main()
