"""FIFO queues at depth: CPU of a message's life with 200,000 others, in one group and in 200,000, against an empty
queue.

Strategy: the path of a request (signature, codec, engine, store, commit, answer; one process, one thread) for FIFO
requests: send, receive, delete, `--batch` messages per request. A shallow queue and a deep one alternate, each in its
own directory, and the CPU time of the process is compared, because other load on the machine affects it less. The deep
queue is filled less than five minutes before the measurement, so that the deduplication window is as deep as the queue.

    python bench/fifo.py [--depth 200000] [--batch 10]
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from stages import URL, Stages, signed

from veilmq.engine import Limits
from veilmq.model.commands import Send
from veilmq.model.instant import Instant
from veilmq.protocols.sqs.operations.message_attributes import body_md5

FIFO_URL = URL + ".fifo"
TEXT = "x" * 200


class Queue:
    """One queue in a directory of its own, and the requests of a message's life on it."""

    def __init__(self, directory: Path, fifo: bool, group_of: Callable[[int], str]) -> None:
        self.stages = Stages(directory)
        self.url = FIFO_URL if fifo else URL
        self.fifo = fifo
        self.group_of = group_of
        self.count = 0
        attributes = {"Attributes": {"FifoQueue": "true"}} if fifo else {}
        self.stages.run("create", [signed("CreateQueue", {"QueueName": self.url.rsplit("/", 1)[1]} | attributes)])

    def message(self) -> dict[str, Any]:
        self.count += 1
        if not self.fifo:
            return {"MessageBody": TEXT}
        return {
            "MessageBody": TEXT,
            "MessageGroupId": self.group_of(self.count),
            "MessageDeduplicationId": f"id-{self.count}",
        }

    def fill(self, depth: int) -> None:
        """Send that many messages in the store's own batches, without the wire's limits."""
        now = Instant(time.time_ns() // 1000)
        sample: Any = self.stages.codec.decode(signed("SendMessage", {"QueueUrl": self.url} | self.message()), now, now)
        (command,) = sample.commands
        assert isinstance(command, Send)
        step = Limits().batch_messages_max
        for start in range(0, depth, step):
            commands = []
            for _ in range(min(step, depth - start)):
                given = self.message()
                extras = command.extras
                if self.fifo:
                    extras = type(extras)((), given["MessageGroupId"], given["MessageDeduplicationId"])
                commands.append(
                    Send(
                        queue=command.queue,
                        origin=command.origin,
                        body=TEXT,
                        md5=body_md5(TEXT.encode()),
                        size_bytes=len(TEXT),
                        extras=extras,
                    )
                )
            self.stages.store.apply(commands, Instant(time.time_ns() // 1000))
            self.stages.store.commit()

    def requests(self, batch: int, commands: int) -> list[Any]:
        """Sends, signed in advance."""
        if batch == 1:
            return [signed("SendMessage", {"QueueUrl": self.url} | self.message()) for _ in range(commands)]
        return [
            signed(
                "SendMessageBatch",
                {"QueueUrl": self.url, "Entries": [{"Id": str(i)} | self.message() for i in range(batch)]},
            )
            for _ in range(commands)
        ]

    def lives(self, batch: int, commands: int, receives: int) -> float:
        """CPU seconds of `commands` sends, and of as many receives and deletes, `receives` of them a store batch."""
        spent = self.timed("send", self.requests(batch, commands))[1]
        for _ in range(commands // receives):
            receive = signed("ReceiveMessage", {"QueueUrl": self.url, "MaxNumberOfMessages": batch})
            answers, cpu = self.timed("receive", [receive] * receives)
            spent += cpu
            deletes = []
            for answer in answers:
                messages = json.loads(answer)["Messages"]
                assert len(messages) == batch, "a group is locked that should not be"
                named = [{"Id": str(i), "ReceiptHandle": one["ReceiptHandle"]} for i, one in enumerate(messages)]
                if batch == 1:
                    handle = messages[0]["ReceiptHandle"]
                    deletes.append(signed("DeleteMessage", {"QueueUrl": self.url, "ReceiptHandle": handle}))
                else:
                    deletes.append(signed("DeleteMessageBatch", {"QueueUrl": self.url, "Entries": named}))
            spent += self.timed("delete", deletes)[1]
        return spent

    def timed(self, operation: str, requests: list[Any]) -> tuple[list[bytes], float]:
        started = time.process_time()
        answers = self.stages.run(operation, requests)
        return answers, time.process_time() - started


SHAPES: dict[str, tuple[bool, Callable[[int], str], int]] = {
    "one group": (True, lambda number: "g", 1),
    "a group each": (True, lambda number: f"g-{number}", 8),
    "standard": (False, lambda number: "", 8),
}
"""FIFO, the group of a message by its number, receives in one store batch (a group gives one receive at a time)."""


def compare(shape: str, depth: int, batch: int, rounds: int, here: Path) -> None:
    fifo, group_of, receives = SHAPES[shape]
    directories = [Path(tempfile.mkdtemp(dir=here)) for _ in range(2)]
    try:
        for directory in directories:
            directory.chmod(0o700)
        shallow, deep = (Queue(directory, fifo, group_of) for directory in directories)
        deep.fill(depth)
        times: list[tuple[float, float]] = []
        for _ in range(rounds):
            times.append((shallow.lives(batch, 8, receives), deep.lives(batch, 8, receives)))
        messages = 8 * batch
        one, two = (median(each) / messages * 1e6 for each in zip(*times, strict=True))
        ratios = sorted(first / second for first, second in times)
        low, high = ratios[len(ratios) // 10], ratios[-len(ratios) // 10]
        print(f"{shape:14}{one:14.1f}{two:14.1f}{median(ratios):10.2f}   {low:.2f} to {high:.2f}", flush=True)
        for queue in (shallow, deep):
            queue.stages.store.close()
    finally:
        for directory in directories:
            shutil.rmtree(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--depth", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=10, help="messages a request")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    options = parser.parse_args()
    here = Path(__file__).parent / ".data"
    here.mkdir(exist_ok=True)
    print(f"CPU us of a message's life, {options.batch} messages a request, median of {options.rounds} turns")
    print(f"{'':14}{'shallow':>14}{f'{options.depth} deep':>14}{'speed':>10}   80 % of the turns")
    for shape in options.shapes.split(","):
        compare(shape, options.depth, options.batch, options.rounds, here)


if __name__ == "__main__":
    main()
