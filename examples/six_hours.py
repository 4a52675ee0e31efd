"""A six-hour visibility timeout, tested in milliseconds: the server's own clock moves, nothing is mocked."""

import time

from veilmq.testing.local import LocalServer

with LocalServer.temporary() as server, server.connect("nightly") as queue:
    queue.send("the nightly job")
    queue.receive(lease=6 * 3600)
    begun = time.perf_counter()
    server.advance(hours=5, minutes=59)
    print("after 5 h 59 min others see:", len(queue.receive()))
    server.advance(minutes=1)
    print("after 6 h others see:", len(queue.receive()))
    print("it took", "less than a second" if time.perf_counter() - begun < 1 else "long")
