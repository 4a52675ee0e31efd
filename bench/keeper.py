"""The cost of the lease keeper and the receiver, on a real queue in a data directory.

    python bench/keeper.py hold [--messages 100000] [--seconds 60]    100,000 held messages, 30 s leases, 10 s interval
    python bench/keeper.py line [--messages 2000] [--seconds 300]     no batches, 50 ms a round trip
    python bench/keeper.py receive [--rounds 20]                      200 threads, 1,000 messages arrive

Strategy: CPU by thread (pthread clocks), memory as resident size before and after, everything through the public
interface; the bodies are small, so that memory growth comes from the keeper.
"""

import argparse
import contextlib
import gc
import os
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.keeper import LeaseKeeper
from veilmq.client.messages import Received
from veilmq.client.queue import Capabilities, Queue
from veilmq.client.receiver import Receiver
from veilmq.client.wrapping import Wrapping


class Distant(Wrapping):
    """Each extend takes a round trip; there are no batches."""

    round_trip = 0.05

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(self.inner.capabilities, batch_extend=False)

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        time.sleep(self.round_trip)
        return self.inner.extend(handle, lease, body=body)


class Timed(Wrapping):
    """CPU of the sender threads inside extend_batch, which is the queue's, not the keeper's."""

    seconds = 0.0

    def extend_batch(self, extensions: Any) -> Any:
        started = time.thread_time()
        try:
            return self.inner.extend_batch(extensions)
        finally:
            self.seconds += time.thread_time() - started


def cpu_by_thread() -> dict[str, float]:
    """CPU seconds of each live thread, by its name without a number."""
    used: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.ident is not None:
            name = thread.name.rstrip("0123456789 ")
            with contextlib.suppress(OSError):
                used[name] = used.get(name, 0) + time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return used


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def receive_all(queue: Queue, count: int, lease: float) -> list[Received]:
    for first in range(0, count, 1_000):
        queue.send_batch([f"body {number}" for number in range(first, min(first + 1_000, count))])
    messages: list[Received] = []
    while len(messages) < count:
        messages += queue.receive(queue.capabilities.receive_messages_max, lease=lease)
    return messages


def hold(account: EmbeddedAccount, count: int, seconds: float) -> None:
    queue = Timed(account.queue("jobs"))
    messages = receive_all(queue, count, 600)
    gc.collect()
    before = resident_bytes()
    keeper = LeaseKeeper(queue, visibility_timeout=30, interval=10, minimal_life=5)
    started = time.perf_counter()
    # Replaces the lease of 600 s by 30 s at once, as if the receive had asked for 30 s.
    leases = [keeper.register(message, lease=30) for message in messages]
    registering = time.perf_counter() - started
    registered = resident_bytes()
    time.sleep(5)
    at_start, counted, inside = cpu_by_thread(), keeper.stats, queue.seconds
    started = time.perf_counter()
    memory = 0
    while time.perf_counter() - started < seconds:
        time.sleep(1)
        memory = max(memory, resident_bytes())
    passed = time.perf_counter() - started
    used = {name: value - at_start.get(name, 0) for name, value in cpu_by_thread().items()}
    stats = keeper.stats
    extensions = stats.extensions - counted.extensions
    print(f"{count} messages held for {passed:.0f} s, {extensions} extensions, lost {stats.losses or 'none'}")
    print(f"register: {registering / count * 1e6:.1f} us a message")
    for name, value in sorted(used.items()):
        print(f"  {name:32} {value / passed:7.2%} of a core  {value / extensions * 1e6:6.2f} us an extension")
    inside = queue.seconds - inside
    print(f"  senders, inside extend_batch     {inside / passed:7.2%} of a core  {inside / extensions * 1e6:6.2f} us")
    own, grown = (registered - before) / 1e6, (memory - before) / 1e6
    print(f"memory: {own:.0f} MB of keeper and leases; {grown:.0f} MB at most with what the store cached since")
    print(f"lateness: mean {stats.late_seconds / stats.extensions:.3f} s, max {stats.late_seconds_max:.2f} s")
    assert len(leases) == stats.leases


def line(account: EmbeddedAccount, count: int, seconds: float) -> None:
    queue = account.queue("jobs")
    with LeaseKeeper(Distant(queue)) as keeper:
        for message in receive_all(queue, count, 30):
            keeper.register(message)
        started = time.perf_counter()
        seen = 0
        while time.perf_counter() - started < seconds:
            seen += len(queue.receive(10, wait=1))
        stats = keeper.stats
        print(f"{count} messages over {Distant.round_trip * 1e3:.0f} ms, {seconds:.0f} s: {stats}")
        print(f"seen twice: {seen}, in flight: {queue.stats().in_flight}")


def receive(account: EmbeddedAccount, rounds: int) -> None:
    queue = account.queue("jobs")
    firsts, alls = [], []
    with Receiver(queue) as receiver:
        got: list[float] = []

        def work() -> None:
            while (message := receiver.receive()) is not None:
                got.append(time.perf_counter())
                queue.delete(message.handle)

        threads = [threading.Thread(target=work) for _ in range(200)]
        for thread in threads:
            thread.start()
        for _ in range(rounds):
            while receiver.waiting < len(threads):
                time.sleep(0.01)
            time.sleep(0.2)
            got.clear()
            started = time.perf_counter()
            queue.send_batch([str(number) for number in range(1_000)])
            sent = time.perf_counter()
            while len(got) < 1_000:
                time.sleep(0.01)
            firsts.append(min(got) - sent)
            alls.append(max(got) - started)
    queue.close()
    first = [seconds * 1e3 for seconds in firsts]
    print(f"first message after its send returned: median {median(first):.1f} ms, worst {max(first):.1f} ms")
    print(f"all 1,000 received and deleted by 200 threads: median {median(alls):.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["hold", "line", "receive"])
    parser.add_argument("--messages", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, EmbeddedAccount(Path(directory) / "data") as account:
        account.create("jobs")
        if given.what == "hold":
            hold(account, given.messages or 100_000, given.seconds or 60)
        elif given.what == "line":
            line(account, given.messages or 2_000, given.seconds or 300)
        else:
            receive(account, given.rounds)


if __name__ == "__main__":
    main()
