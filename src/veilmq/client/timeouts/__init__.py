"""How long a lease should be: learnt from processing times.

Strategy: `Survival` holds what is known of processing times, and `plan_of` computes the cheapest schedule of leases for
it. `AdaptiveTimeout` combines the two for each message type, as a plan for a LeaseKeeper. `ThresholdTimeout` is
document 003's own rule of counting failed deletes. Source: documents 003 and 004; docs/patterns/adaptive-timeout.md.
"""

from veilmq.client.timeouts.adaptive import AdaptiveTimeout, PublishedPlan, ThresholdTimeout
from veilmq.client.timeouts.schedule import Costs, Schedule, Survival, plan_of

__all__ = [
    "AdaptiveTimeout",
    "Costs",
    "PublishedPlan",
    "Schedule",
    "Survival",
    "ThresholdTimeout",
    "plan_of",
]
