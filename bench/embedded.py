"""CPU of the embedded adapter's extend_batch, as a keeper of many leases uses it.

    .venv/bin/python bench/embedded.py [HELD ...]

Holds that many messages (by default 1,000 and 100,000), extends all of them in batches of 1,000, fenced and in the
history, and prints the process's CPU per message: the least and the median over rounds; then the wall time of one batch
of 1,000 while another thread computes in Python.
"""

import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from veilmq.client.adapters.embedded import EmbeddedAccount, EmbeddedQueue
from veilmq.client.messages import Extension

BATCH = 1_000
ROUNDS = 9
EXTENDED_MIN = 20_000
"""Messages extended in a round, at least."""


def held(queue: EmbeddedQueue, count: int) -> list[Extension]:
    found: list[Extension] = []
    while len(found) < count:
        queue.send_batch([f"message {number}" * 8 for number in range(BATCH)])
        found += [Extension(message.handle, 3_600.0) for message in queue.receive(BATCH, lease=3_600)]
    return found[:count]


def extend_all(queue: EmbeddedQueue, extensions: list[Extension]) -> None:
    for start in range(0, len(extensions), BATCH):
        results = queue.extend_batch(extensions[start : start + BATCH])
        assert all(isinstance(result, str) for result in results)


def cpu_us(queue: EmbeddedQueue, extensions: list[Extension]) -> list[float]:
    times = max(1, EXTENDED_MIN // len(extensions))
    found = []
    for _ in range(ROUNDS):
        before = time.process_time()
        for _ in range(times):
            extend_all(queue, extensions)
        found.append((time.process_time() - before) / times / len(extensions) * 1e6)
    return sorted(found)


def beside_a_busy_thread(queue: EmbeddedQueue, extensions: list[Extension]) -> float:
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            sum(range(1_000))

    burning = threading.Thread(target=burn)
    burning.start()
    before = time.perf_counter()
    queue.extend_batch(extensions[:BATCH])
    elapsed = time.perf_counter() - before
    stop.set()
    burning.join()
    return elapsed * 1e3


def main() -> None:
    for count in [int(word) for word in sys.argv[1:]] or [1_000, 100_000]:
        with tempfile.TemporaryDirectory() as directory, EmbeddedAccount(Path(directory) / "data") as account:
            account.create("bench")
            queue = account.queue("bench")
            extensions = held(queue, count)
            extend_all(queue, extensions)
            found = cpu_us(queue, extensions)
            busy = beside_a_busy_thread(queue, extensions)
            print(
                f"{count} held: {found[0]:.1f} us CPU a message at least, {statistics.median(found):.1f} in the median;"
                f" a batch of {min(BATCH, count)} beside a busy thread: {busy:.0f} ms"
            )


if __name__ == "__main__":
    main()
