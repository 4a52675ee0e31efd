"""Work that takes much longer than its lease: the keeper extends it, and nobody else sees the message meanwhile."""

import time

from veilmq.client.keeper import LeaseKeeper
from veilmq.testing.local import LocalServer

with LocalServer.temporary() as server, server.connect("jobs") as queue:
    queue.send("a long job")
    with LeaseKeeper(queue, visibility_timeout=3, interval=1, minimal_life=1) as keeper:
        (message,) = queue.receive(lease=3)
        lease = keeper.register(message)
        for second in range(8):
            time.sleep(1)  # the work
            others = queue.receive()
            print(f"after {second + 1} s: others see {len(others)} messages, lost: {lease.lost.is_set()}")
        lease.delete()
    print("done once, left:", queue.stats().visible + (queue.stats().in_flight or 0))
