"""Leases learnt from the work: short ones for thumbnails, longer ones for films, without a number from you."""

from veilmq.client.messages import Received
from veilmq.client.timeouts import AdaptiveTimeout

plan = AdaptiveTimeout()


def message(kind: str) -> Received:
    return Received(id="1", body="", handle="", lease_end=0.0, type=kind)


print(f"before anything was seen: {plan.first_lease(message('film')):.0f} s")
# What a LeaseKeeper(queue, plan=plan) tells it of each message that was deleted, here at once:
for number in range(200):
    plan.finished(message("thumbnail"), 1 + number % 3 / 10)
    plan.finished(message("film"), 240 + number % 60)
for kind in ("thumbnail", "film"):
    schedule = plan.schedule_of(kind)
    later = ", ".join(f"{schedule.lease_at(age):.0f} s at {age} s" for age in (60, 240, 600))
    print(f"{kind}: first lease {schedule.first:.0f} s, then {later}; extended {schedule.margin:.0f} s before its end")
