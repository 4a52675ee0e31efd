"""How long a lease should be: learnt from what processing takes.

Strategy: `Survival` is what is known of processing times, `plan_of` the cheapest schedule of leases for it,
`AdaptiveTimeout` the two together, message type by message type, as a plan for a LeaseKeeper. `ThresholdTimeout` is the
document's own counter rule (document 003). Source: documents 003 and 004; docs/patterns/adaptive-timeout.md.
"""

from veilmq.client.timeouts.adaptive import AdaptiveTimeout, PublishedPlan
from veilmq.client.timeouts.schedule import Costs, Schedule, Survival, plan_of
from veilmq.client.timeouts.threshold import ThresholdTimeout

__all__ = [
    "AdaptiveTimeout",
    "Costs",
    "PublishedPlan",
    "Schedule",
    "Survival",
    "ThresholdTimeout",
    "plan_of",
]
