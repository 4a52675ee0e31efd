"""How long one client waits for answers while others run the heaviest operations.

    .venv/bin/python bench/stalls.py [--turns 3] [--depth 200000] [--only NAME ...] [--loop]

One probe, a process of its own, sends, receives and deletes a message in a queue of its own, a request every 2 ms over
one connection, and records how long each took. Meanwhile one heavy operation runs, and the probe goes on for a while
after it, because much of the work follows in steps. Everything is done `--turns` times. A delay caused by the server
comes back in every turn, one caused by another program on the machine does not. So the result is the smallest of the
turns' longest answers, compared with the same for turns without a heavy operation. Goal: 50 ms. Exit code 0 if all meet
it, 1 if not.

With `--loop` the server runs on asyncio's own loop, each turn of which is timed (`loop_turns`): the longest ones beside
each operation are shown with what stands behind them. Goal: none with more than 5 ms of CPU.
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import install
import report
import soak_memory
from measure import Load, Target, load_1min, machine, percentile
from peers import DATA

from veilmq.testing.local import VEILMQ, ServerProcess

GOAL_MS, TURN_GOAL_MS = 50, 5
RECORDED = 3
"""Of the longest turns of the loop, in the record."""
EVERY_S = 0.002
BEFORE_S, AFTER_S = 0.5, 4.0
BODY = "x" * 200
QUEUES, SUBSCRIBERS = 2_000, 100
_XML = '<?xml version="1.0"?>'
_IDLE_S = 30
"""A connection that was idle for longer is reopened: the server ends it after 75 s."""


class Caller:
    """One connection to one port, in development mode: nothing is signed."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
        self._asked = time.monotonic()

    def ask(self, method: str, target: str, body: bytes = b"", **headers: str) -> bytes:
        """Raises RuntimeError for an error."""
        if time.monotonic() - self._asked > _IDLE_S:
            self._connection.close()
        self._asked = time.monotonic()
        self._connection.request(method, target, body, {name.replace("_", "-"): text for name, text in headers.items()})
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {target}: {answer.status} {text[:300]!r}")
        return text

    def sqs(self, action: str, **parameters: object) -> dict[str, Any]:
        """A call in SQS's JSON form."""
        target = f"AmazonSQS.{action}"
        kind = "application/x-amz-json-1.0"
        text = self.ask("POST", "/", json.dumps(parameters).encode(), X_Amz_Target=target, Content_Type=kind)
        return json.loads(text) if text else {}

    def queue(self, name: str, **attributes: str) -> str:
        """A new queue's URL."""
        return str(self.sqs("CreateQueue", QueueName=name, Attributes=attributes)["QueueUrl"])


def cpu_ms(pid: int) -> float:
    """CPU of the server's loop, its first thread. Excludes CPU time stolen from the machine."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e6


def probe(url: str, pid: int) -> None:
    """The probe's process: prints a line for each answer with its milliseconds and the loop's CPU meanwhile."""
    caller = Caller(url)
    queue = caller.queue("probe")
    os.set_blocking(sys.stdin.fileno(), False)
    print("ready", flush=True)
    due = time.monotonic()
    handle = ""
    taken: list[str] = []
    while sys.stdin.buffer.read(1) is None:
        for action in ("SendMessage", "ReceiveMessage", "DeleteMessage"):
            due = max(due + EVERY_S, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            given: dict[str, object] = {"QueueUrl": queue}
            if action == "SendMessage":
                given["MessageBody"] = BODY
            elif action == "DeleteMessage":
                given["ReceiptHandle"] = handle
            begun, spent = time.monotonic(), cpu_ms(pid)
            answer = caller.sqs(action, **given)
            taken.append(f"{(time.monotonic() - begun) * 1e3} {cpu_ms(pid) - spent}")
            if action == "ReceiveMessage":
                handle = answer["Messages"][0]["ReceiptHandle"]
    print("\n".join(taken))


@contextmanager
def probing(server: ServerProcess, answers: list[list[float]]) -> Iterator[None]:
    """Run the probe during the block and a little before and after it; then `answers` has its output."""
    command = [sys.executable, __file__, "--probe", server.sqs, str(server.process.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(BEFORE_S)
        yield
        time.sleep(AFTER_S)
        told, _ = process.communicate("")
    answers += [[float(value) for value in line.split()] for line in told.splitlines()]


@dataclass
class Ground:
    """The server, and how many messages go into a queue."""

    server: ServerProcess
    depth: int
    made: int = 0
    sqs: Caller = field(init=False)
    mns: Caller = field(init=False)

    def __post_init__(self) -> None:
        self.sqs, self.mns = Caller(self.server.sqs), Caller(self.server.mns)

    def command(self, *words: str) -> None:
        """`veilmq` beside the server."""
        subprocess.run([*VEILMQ, *words, "--data", str(self.server.data)], check=True, stdout=subprocess.DEVNULL)

    def name(self, ending: str = "") -> str:
        """A new name for a queue or topic."""
        self.made += 1
        return f"heavy-{self.made}{ending}"

    def filled(self, count: int, body: str = BODY, fifo: bool = False, **attributes: str) -> str:
        """A new queue with that many messages; returns its URL."""
        if fifo:
            attributes |= {"FifoQueue": "true", "ContentBasedDeduplication": "false"}
        url = self.sqs.queue(self.name(".fifo" if fifo else ""), **attributes)

        def send(part: range) -> None:
            caller = Caller(self.server.sqs)
            for first in part:
                entries = [{"Id": str(n), "MessageBody": body} for n in range(10)]
                if fifo:
                    for n, entry in enumerate(entries):
                        entry |= {"MessageGroupId": "one", "MessageDeduplicationId": f"{first}-{n}"}
                if caller.sqs("SendMessageBatch", QueueUrl=url, Entries=entries).get("Failed"):
                    raise RuntimeError("a message was refused")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(send, [range(start, count // 10, 4) for start in range(4)]))
        return url


Heavy = Callable[[Ground], Callable[[], object]]
"""Prepares, and returns the action to run beside the probe."""


def nothing(ground: Ground) -> Callable[[], object]:
    return lambda: time.sleep(1)


def lives(ground: Ground, batch: int = 1) -> Callable[[], object]:
    """The life-cycle load of `bench/run.py` for 10 s."""
    url = ground.sqs.queue(ground.name())
    target = Target("json", urlsplit(url).netloc, "/", url, "AKTEST", "secret")
    command, environment = target.wrk_command(install.wrk(), Load(10, 32, batch))
    return lambda: subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


def lives_of_ten(ground: Ground) -> Callable[[], object]:
    return lives(ground, 10)


def purge(ground: Ground) -> Callable[[], object]:
    url = ground.filled(ground.depth)
    return lambda: ground.sqs.sqs("PurgeQueue", QueueUrl=url)


def delete_queue(ground: Ground) -> Callable[[], object]:
    url = ground.filled(ground.depth)
    return lambda: ground.sqs.sqs("DeleteQueue", QueueUrl=url)


def fifo_delay(ground: Ground) -> Callable[[], object]:
    url = ground.filled(ground.depth // 2, fifo=True)
    return lambda: ground.sqs.sqs("SetQueueAttributes", QueueUrl=url, Attributes={"DelaySeconds": "600"})


def leases_end(ground: Ground) -> Callable[[], object]:
    """All leases of a queue end at the same moment."""
    count = min(ground.depth, 50_000)
    url = ground.filled(count)
    clock = time.monotonic()
    for done in range(0, count, 10):
        left = max(1, 60 - int(time.monotonic() - clock))
        given = {"QueueUrl": url, "MaxNumberOfMessages": 10, "VisibilityTimeout": left}
        if not ground.sqs.sqs("ReceiveMessage", **given).get("Messages"):
            raise RuntimeError(f"{done} of {count} messages received")
    return lambda: time.sleep(max(0.0, 62 - (time.monotonic() - clock)))


def dead_letters(ground: Ground) -> Callable[[], object]:
    """Receives that move a whole queue, received once before, to its dead-letter queue."""
    count = min(ground.depth, 20_000)
    target = ground.sqs.queue(ground.name())
    arn = ground.sqs.sqs("GetQueueAttributes", QueueUrl=target, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    url = ground.filled(count)
    for _ in range(0, count, 10):
        ground.sqs.sqs("ReceiveMessage", QueueUrl=url, MaxNumberOfMessages=10, VisibilityTimeout=0)
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": "1"})
    ground.sqs.sqs("SetQueueAttributes", QueueUrl=url, Attributes={"RedrivePolicy": policy})

    def receive() -> None:
        for _ in range(20):
            ground.sqs.sqs("ReceiveMessage", QueueUrl=url, MaxNumberOfMessages=10)

    return receive


def move_task(ground: Ground) -> Callable[[], object]:
    target, back = ground.sqs.queue(ground.name()), ground.sqs.queue(ground.name())
    arns = [
        ground.sqs.sqs("GetQueueAttributes", QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        for url in (target, back)
    ]
    policy = json.dumps({"deadLetterTargetArn": arns[0], "maxReceiveCount": "1"})
    url = ground.filled(min(ground.depth, 20_000), RedrivePolicy=policy)
    for _ in range(2 * min(ground.depth, 20_000) // 10):
        ground.sqs.sqs("ReceiveMessage", QueueUrl=url, MaxNumberOfMessages=10, VisibilityTimeout=0)
    return lambda: ground.sqs.sqs("StartMessageMoveTask", SourceArn=arns[0], DestinationArn=arns[1])


def large_sends(ground: Ground) -> Callable[[], object]:
    """Twenty batches of ten messages of 100 KB each."""
    url = ground.sqs.queue(ground.name())
    entries = [{"Id": str(n), "MessageBody": "y" * 100_000} for n in range(10)]
    return lambda: [ground.sqs.sqs("SendMessageBatch", QueueUrl=url, Entries=entries) for _ in range(20)]


def publishes(ground: Ground) -> Callable[[], object]:
    """Ten messages of 60 KB to a topic with a hundred queues."""
    topic, prefix = ground.name(), ground.name()
    ground.mns.ask("PUT", f"/topics/{topic}", f"{_XML}<Topic/>".encode())
    for n in range(SUBSCRIBERS):
        ground.mns.ask("PUT", f"/queues/{prefix}-{n}", f"{_XML}<Queue/>".encode())
        endpoint = f"acs:mns:us-east-1:000000000000:queues/{prefix}-{n}"
        body = f"{_XML}<Subscription><Endpoint>{endpoint}</Endpoint></Subscription>"
        ground.mns.ask("PUT", f"/topics/{topic}/subscriptions/s{n}", body.encode())
    message = f"{_XML}<Message><MessageBody>{'z' * 60_000}</MessageBody></Message>".encode()
    return lambda: [ground.mns.ask("POST", f"/topics/{topic}/messages", message) for _ in range(10)]


def many_queues(ground: Ground) -> Callable[[], object]:
    """Queues created, listed and scraped."""
    prefix = ground.name()

    def act() -> None:
        for n in range(QUEUES):
            ground.sqs.queue(f"{prefix}-{n}")
        ground.sqs.sqs("ListQueues")
        ground.command("queues", "list")

    return act


def copied(ground: Ground) -> Callable[[], object]:
    """A backup, as `veilmq backup` has it made."""
    copy = ground.server.data.parent / ground.name()
    return lambda: ground.command("backup", str(copy))


def checked(ground: Ground) -> Callable[[], object]:
    return lambda: ground.command("check")


def history(ground: Ground) -> Callable[[], object]:
    """The newest half a million events, as JSON lines."""
    return lambda: ground.command("events", "--last", "500000", "--json")


def connections(ground: Ground) -> Callable[[], object]:
    """Two thousand new connections, a request on each."""

    def act() -> None:
        for _ in range(2_000):
            Caller(ground.server.sqs).sqs("ListQueues", MaxResults=1)

    return act


HEAVY: dict[str, Heavy] = {
    make.__name__: make
    for make in (
        nothing, lives, lives_of_ten, purge, delete_queue, fifo_delay, leases_end, dead_letters, move_task,
        large_sends, publishes, many_queues, copied, checked, history, connections,
    )
}  # fmt: skip


@dataclass
class Row:
    """What the probe saw beside one thing, a value for each turn, in milliseconds."""

    name: str
    longest: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """The most CPU that the loop used during one answer."""
    took_s: list[float] = field(default_factory=list)
    answers: int = 0
    loops: list[dict[str, Any]] = field(default_factory=list)
    """What the loop's turns were, with `--loop`."""

    def told(self) -> str:
        each = " ".join(f"{value:.1f}" for value in self.longest)
        best = f"{min(self.longest):.1f} | {each} | {min(self.cpu):.1f} | {min(self.p99):.1f}"
        return f"| {self.name} | {best} | {min(self.took_s):.2f} |"

    def told_turns(self) -> list[str]:
        """A line for each kind of long turn: the one with the most CPU, and how often there was one like it."""
        kinds: dict[str, list[dict[str, Any]]] = {}
        for each in (each for loop in self.loops for each in loop["longest"]):
            kinds.setdefault(" ".join(each["batch"]) or "no batch", []).append(each)
        count = sum(loop["count"] for loop in self.loops)
        over = sum(loop["cpu_over"].get(str(TURN_GOAL_MS), 0) for loop in self.loops)
        lines = [f"| {self.name} | {over} of {count:,} | | | | |"]
        for alike in kinds.values():
            most = max(alike, key=lambda turn: turn["cpu_ms"])
            parts = ", ".join(f"{name} {cpu:.1f}" for name, (_, cpu) in most["parts"].items() if cpu > 0.3)
            batch = ", ".join(f"{count} {name}" for name, count in most["batch"].items())
            lines.append(
                f"| | {len(alike)} alike | {most['cpu_ms']:.1f} | {max(turn['wall_ms'] for turn in alike):.1f} "
                f"| {batch} | {parts} |"
            )
        return lines


def turn(ground: Ground, row: Row, memory: Path | None = None) -> None:
    act = HEAVY[row.name](ground)
    answers: list[list[float]] = []
    if memory is not None:
        soak_memory.ask(memory, "turns")
    with probing(ground.server, answers):
        begun = time.monotonic()
        act()
        row.took_s.append(time.monotonic() - begun)
    taken, spent = ([each[place] for each in answers] for place in (0, 1))
    row.longest.append(max(taken))
    row.p99.append(percentile(taken, 99))
    row.cpu.append(max(spent))
    row.answers += len(answers)
    if memory is not None:
        found = soak_memory.ask(memory, "turns")
        found["longest"] = [each for each in found["longest"] if each["cpu_ms"] > TURN_GOAL_MS / 2]
        row.loops.append(found)
    print(
        f"  {row.name:<13} longest of {len(answers)}: {max(taken):.1f} ms, CPU of the loop {max(spent):.1f} ms, "
        f"load {load_1min():.2f}",
        flush=True,
    )


def text_of(record: dict[str, Any], rows: list[Row]) -> str:
    """Markdown."""
    head = "| beside | longest answer of the best turn, ms | of each turn | most CPU of the loop in one answer, ms "
    head += "| p99, ms | what was done took s |"
    missed = [row.name for row in rows if min(row.longest) > GOAL_MS]
    verdict = f"missed: {', '.join(missed)}" if missed else "met"
    turns: list[str] = []
    if rows[0].loops:
        turns = ["", f"Turns of the loop; goal: at most {TURN_GOAL_MS} ms of CPU.", ""]
        turns += [
            "| beside | turns over the goal | CPU of the longest, ms | clock, ms | its batch | CPU of its parts, ms |"
        ]
        turns += ["|---|---|---|---|---|---|", *(line for row in rows for line in row.told_turns())]
    return "\n".join(
        [
            f"# stalls, {record['at']}",
            "",
            f"{record['depth']:,} messages deep, a request every {EVERY_S * 1e3:.0f} ms. Goal {GOAL_MS} ms: {verdict}.",
            "",
            head,
            "|---|---|---|---|---|---|",
            *(row.told() for row in rows),
            *turns,
            "",
            f"Load before {record['load_at_start']:.2f}.",
            "",
            "; ".join(f"{key}: {value}" for key, value in machine().items()),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/stalls.py", description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--depth", type=int, default=200_000, help="messages in the deep queues")
    parser.add_argument("--only", nargs="*", choices=list(HEAVY), default=list(HEAVY))
    parser.add_argument("--loop", action="store_true", help="time each turn of the loop")
    parser.add_argument("--probe", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        probe(options.probe[0], int(options.probe[1]))
        return 0
    load = load_1min()
    rows = [Row(name) for name in options.only]
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stalls-", dir=DATA) as directory:
        memory = Path(directory, "memory") if options.loop else None
        with soak_memory.watched(memory, "loop_turns") if memory else nullcontext():
            server = ServerProcess(Path(directory), "--no-cooldowns").start()
        try:
            ground = Ground(server, options.depth)
            for _ in range(options.turns):
                for row in rows:
                    turn(ground, row, memory)
        finally:
            server.stop()
    record: dict[str, Any] = {
        "scenario": "stalls", "at": time.strftime("%Y-%m-%dT%H%MZ", time.gmtime()), "load_at_start": load,
        "depth": options.depth, "machine": machine(), "rows": [asdict(row) for row in rows], "goal_ms": GOAL_MS,
    }  # fmt: skip
    text = text_of(record, rows)
    for loop in (loop for row in record["rows"] for loop in row["loops"]):
        loop["longest"] = sorted(loop["longest"], key=lambda each: -each["cpu_ms"])[:RECORDED]
    print("\n" + report.save("stalls-loop" if options.loop else "stalls", text, record))
    return 0 if all(min(row.longest) <= GOAL_MS for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
