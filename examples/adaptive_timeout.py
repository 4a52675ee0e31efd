"""Leases learnt from the work: short ones for thumbnails, longer ones for films, without a number from you."""

import time

from veilmq.client.keeper import LeaseKeeper
from veilmq.client.messages import Message
from veilmq.client.timeouts import AdaptiveTimeout
from veilmq.testing.local import LocalServer

SECONDS = {"thumbnail": 0.01, "film": 1.5}
THUMBNAILS, FILMS = 150, 12

plan = AdaptiveTimeout(shortest=2)
with LocalServer.temporary() as server, server.connect("pictures") as queue:
    print(f"before anything was seen: {plan.schedule_of(None).first:.0f} s for everything")
    queue.send_batch([Message("work", type="film") for _ in range(FILMS)])
    queue.send_batch([Message("work", type="thumbnail") for _ in range(THUMBNAILS)])
    with LeaseKeeper(queue, plan=plan) as keeper:
        held = []
        while messages := queue.receive(64, lease=30):
            held += [(keeper.register(message), SECONDS[str(message.type)]) for message in messages]
        begun = time.monotonic()
        # All at once, as so many workers would: each message is done when its time is over.
        for lease, seconds in sorted(held, key=lambda each: each[1]):
            time.sleep(max(0.0, begun + seconds - time.monotonic()))
            lease.delete()
    print("left:", queue.stats().in_flight)

for kind in SECONDS:
    schedule = plan.schedule_of(kind)
    print(f"{kind}: first lease {schedule.first:.0f} s, extended {schedule.margin:.0f} s before its end")
