"""The lease keeper (the documents' "Manager"): extends the leases of messages while their handlers work.

Strategy: a pure table decides (table.py, schedule.py, states.py), a thin shell of threads carries it out (keeper.py,
sending.py, telling.py). docs/patterns/lease-keeper.md shows a lease's life.
"""

from veilmq.client.keeper.keeper import LeaseKeeper
from veilmq.client.keeper.lease import Lease, Loss
from veilmq.client.keeper.states import KeeperStats, Plan, Reason, State

__all__ = ["KeeperStats", "Lease", "LeaseKeeper", "Loss", "Plan", "Reason", "State"]
