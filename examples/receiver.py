"""Fifty threads wait for work, and the server sees one long poll (document 002, "LongPolling")."""

import threading
import urllib.request
from collections import Counter

from veilmq.client.receiver import Receiver
from veilmq.testing.local import LocalServer


def parked(server: LocalServer) -> str:
    """How many receives wait at the server."""
    with urllib.request.urlopen(f"{server.admin_url}/metrics", timeout=10) as answer:
        lines: list[str] = answer.read().decode().splitlines()
    return next(line.split()[-1] for line in lines if line.startswith("veilmq_waiters "))


def work(receiver: Receiver, done: Counter[str]) -> None:
    while (message := receiver.receive(timeout=3)) is not None:
        done[message.body] += 1
        receiver.queue.delete(message.handle)


with LocalServer.temporary() as server, server.connect("jobs") as queue, Receiver(queue, lease=30) as receiver:
    done: Counter[str] = Counter()
    threads = [threading.Thread(target=work, args=(receiver, done)) for _ in range(50)]
    for thread in threads:
        thread.start()
    while parked(server) == "0.0":
        pass
    print("fifty threads wait; polls at the server:", parked(server))
    queue.send_batch([f"job {number}" for number in range(500)])
    for thread in threads:
        thread.join()
    print("jobs done:", len(done), "each once:", set(done.values()) == {1})
