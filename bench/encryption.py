"""The cost of encryption: microseconds of CPU per message, by algorithm and size, and for the whole way through a
queue.

    python bench/encryption.py [--rounds N]

Strategy: bodies of JSON-like ASCII text; the best of several rounds, because the machine has other work. `encrypt` and
`decrypt` are the calls that a send and a receive make, key look-up and queue check included. The last lines send,
receive and delete in batches of 10 on an embedded queue, plain and encrypted: the difference is the cost for an
application.
"""

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable

from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.encrypted import ALGORITHMS, Cipher, EncryptedQueue, Keys, new_key
from veilmq.client.queue import Queue
from veilmq.client.unreadable import keep

SIZES = {"1 KiB": 1024, "64 KiB": 65_536}


def body_of(size_bytes: int) -> str:
    text = '{"order": 123456, "lines": ["a plain line of text", 42, true]} '
    return (text * (size_bytes // len(text) + 1))[:size_bytes]


def best(rounds: int, count: int, call: Callable[[], object]) -> float:
    """Microseconds of CPU a call."""
    found = []
    for _ in range(rounds):
        before = time.process_time()
        for _ in range(count):
            call()
        found.append((time.process_time() - before) / count * 1e6)
    return min(found)


def through(queue: Queue, body: str, count: int) -> None:
    """That many messages in batches of 10."""
    for _ in range(count // 10):
        queue.send_batch([body] * 10)
        came = queue.receive(10)
        assert [message.body for message in came] == [body] * 10
        queue.delete_batch([message.handle for message in came])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    logging.disable()
    print("| algorithm | body | encrypt | decrypt | size on the way |\n|---|---:|---:|---:|---:|")
    for algorithm in ALGORITHMS:
        cipher = Cipher(Keys(new_key(algorithm)), [algorithm], "orders", ())
        for name, size_bytes in SIZES.items():
            raw = body_of(size_bytes).encode()
            encrypted = cipher.encrypt(raw)
            count = max(50, 2_000_000 // size_bytes)
            encrypt = best(rounds, count, lambda cipher=cipher, raw=raw: cipher.encrypt(raw))
            decrypt = best(rounds, count, lambda cipher=cipher, it=encrypted: cipher.decrypt(it, "m"))
            growth = len(encrypted) / size_bytes
            print(f"| {algorithm} | {name} | {encrypt:.0f} us | {decrypt:.0f} us | {growth:.2f} times |")
    print("\n| send + receive + delete | plain | encrypted | difference |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as directory, EmbeddedAccount(os.path.join(directory, "data")) as account:
        account.create("orders")
        plain = account.queue("orders")
        queue = EncryptedQueue(plain, Keys(new_key()), unreadable=keep)
        for name, size_bytes in SIZES.items():
            body = body_of(size_bytes)
            count = 200
            costs = [
                best(rounds, 1, lambda it=it, body=body, count=count: through(it, body, count)) / count
                for it in (plain, queue)
            ]
            print(f"| {name} | {costs[0]:.0f} us | {costs[1]:.0f} us | {costs[1] - costs[0]:.0f} us |")


if __name__ == "__main__":
    main()
