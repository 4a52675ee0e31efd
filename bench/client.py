"""CPU per message of the client: the veil adapter against boto3, full message lives, on one signed server.

Strategy: one real server process with a credentials file; the two clients alternate in this process, so that other load
on the machine affects both; `time.process_time` counts only this process's CPU (user and system, all threads). A life
is send, receive, delete of 200-byte bodies, at batch 1 (SendMessage ...) and batch 10 (SendMessageBatch ...). Every
message is checked: what was sent is received, and nothing is left in the queue. The result is the median of the rounds.

    python bench/client.py [--rounds 7] [--messages 400]
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3

from veilmq.client.adapters.sqs import SqsAccount
from veilmq.client.adapters.veil import VeilAccount
from veilmq.testing.local import ServerProcess

KEY, SECRET, ACCOUNT = "AKIDBENCH00000000001", "a secret of the benchmark", "111111111111"
BODY = "x" * 200
WANTED = 5.0
Phases = dict[str, float]


@contextmanager
def signed_server() -> Iterator[ServerProcess]:
    """A server that checks signatures."""
    with tempfile.TemporaryDirectory() as directory:
        credentials = Path(directory) / "credentials.toml"
        credentials.write_text(f'[[account]]\nid = "{ACCOUNT}"\n[[account.key]]\nid = "{KEY}"\nsecret = "{SECRET}"\n')
        credentials.chmod(0o600)
        server = ServerProcess(Path(directory), "--credentials", str(credentials)).start()
        try:
            yield server
        finally:
            server.kill()


def timed(phases: Phases, name: str, work: Callable[[], Any]) -> Any:
    """Run the work, and record its CPU seconds."""
    started = time.process_time()
    result = work()
    phases[name] = time.process_time() - started
    return result


def boto3_life(client: Any, url: str, messages: int, batch: int) -> Phases:
    """With plain boto3, as in its documentation."""
    phases: Phases = {}
    requests = range(messages // batch)
    if batch == 1:
        timed(phases, "send", lambda: [client.send_message(QueueUrl=url, MessageBody=BODY) for _ in requests])
    else:
        entries = [{"Id": str(number), "MessageBody": BODY} for number in range(batch)]
        timed(phases, "send", lambda: [client.send_message_batch(QueueUrl=url, Entries=entries) for _ in requests])
    answers = timed(
        phases,
        "receive",
        lambda: [
            client.receive_message(QueueUrl=url, MaxNumberOfMessages=batch, VisibilityTimeout=300) for _ in requests
        ],
    )
    received = [answer["Messages"] for answer in answers]
    assert sum(len(each) for each in received) == messages
    assert all(message["Body"] == BODY for each in received for message in each)

    def delete() -> None:
        for each in received:
            if batch == 1:
                client.delete_message(QueueUrl=url, ReceiptHandle=each[0]["ReceiptHandle"])
                continue
            entries = [{"Id": str(number), "ReceiptHandle": m["ReceiptHandle"]} for number, m in enumerate(each)]
            assert not client.delete_message_batch(QueueUrl=url, Entries=entries).get("Failed")

    timed(phases, "delete", delete)
    return phases


def port_life(queue: Any, messages: int, batch: int) -> Phases:
    """Through the port: the veil adapter, or the sqs one."""
    phases: Phases = {}
    requests = range(messages // batch)
    if batch == 1:
        timed(phases, "send", lambda: [queue.send(BODY) for _ in requests])
    else:
        bodies = [BODY] * batch
        timed(phases, "send", lambda: [queue.send_batch(bodies) for _ in requests])
    received = timed(phases, "receive", lambda: [queue.receive(batch, lease=300) for _ in requests])
    assert sum(len(each) for each in received) == messages
    assert all(message.body == BODY for each in received for message in each)

    def delete() -> None:
        for each in received:
            if batch == 1:
                queue.delete(each[0].handle)
            else:
                assert not any(queue.delete_batch([message.handle for message in each]))

    timed(phases, "delete", delete)
    return phases


def measure(server: ServerProcess, rounds: int, messages: int, batch: int) -> dict[str, list[Phases]]:
    """Phases of every round, by client."""
    client = boto3.client(
        "sqs", endpoint_url=server.sqs, region_name="us-east-1", aws_access_key_id=KEY, aws_secret_access_key=SECRET
    )
    address = urlsplit(server.sqs)
    account = VeilAccount(address.hostname or "", address.port, KEY, SECRET)
    name = f"bench-{batch}"
    account.create(name)
    veil, sqs = account.queue(name), SqsAccount(client).queue(name)
    lives: dict[str, Callable[[int], Phases]] = {
        "boto3": lambda count: boto3_life(client, sqs.url, count, batch),
        "veil": lambda count: port_life(veil, count, batch),
        "sqs adapter": lambda count: port_life(sqs, count, batch),
    }
    for life in lives.values():
        life(10 * batch)
    results: dict[str, list[Phases]] = {who: [] for who in lives}
    for _ in range(rounds):
        for who, life in lives.items():
            gc.collect()
            results[who].append(life(messages))
    stats = veil.stats()
    assert stats.visible == stats.in_flight == 0, stats
    account.close()
    return results


def show(results: dict[str, list[Phases]], messages: int, batch: int) -> float:
    """Prints the table; returns boto3's time over the veil adapter's."""
    print(
        f"\nbatch {batch}: microseconds of client CPU a message, median of {len(results['veil'])} rounds (least-most)\n"
    )
    print("| client | send | receive | delete | life | messages / CPU s | times boto3 |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    lives = {who: [sum(phases.values()) / messages * 1e6 for phases in rounds] for who, rounds in results.items()}
    boto3_us = statistics.median(lives["boto3"])
    for who, rounds in results.items():
        cells = [f"{statistics.median(phases[name] for phases in rounds) / messages * 1e6:.1f}" for name in rounds[0]]
        life_us = statistics.median(lives[who])
        print(
            f"| {who} | {' | '.join(cells)} | {life_us:.1f} ({min(lives[who]):.1f}-{max(lives[who]):.1f}) "
            f"| {1e6 / life_us:,.0f} | {boto3_us / life_us:.2f} |"
        )
    return boto3_us / statistics.median(lives["veil"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--messages", type=int, default=400, help="a round and client; a multiple of ten")
    options = parser.parse_args()
    ratios = {}
    with signed_server() as server:
        for batch in (1, 10):
            messages = options.messages * batch
            ratios[batch] = show(measure(server, options.rounds, messages, batch), messages, batch)
    print(
        f"\nat least {WANTED:g} wanted: " + ", ".join(f"batch {batch}: {ratio:.2f}" for batch, ratio in ratios.items())
    )
    raise SystemExit(min(ratios.values()) < WANTED)


if __name__ == "__main__":
    main()
