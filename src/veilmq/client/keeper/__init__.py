"""The lease keeper (the documents' "Manager"): extends the leases of messages while their handlers work.

Strategy: pure code decides (decisions.py, over the states in lease.py), a thin shell of threads carries the decisions
out (keeper.py). docs/patterns/lease-keeper.md shows a lease's life.
"""

from veilmq.client.keeper.keeper import LeaseKeeper
from veilmq.client.keeper.lease import KeeperStats, Lease, Loss, Plan, Reason, State

__all__ = ["KeeperStats", "Lease", "LeaseKeeper", "Loss", "Plan", "Reason", "State"]
