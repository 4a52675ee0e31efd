"""The lease keeper (the documents' "Manager"): extends the leases of messages while their handlers work.

Strategy: pure code decides (decisions.py, states.py), a thin shell of threads carries the decisions out (keeper.py,
sending.py). docs/patterns/lease-keeper.md shows a lease's life.
"""

from veilmq.client.keeper.keeper import LeaseKeeper
from veilmq.client.keeper.lease import Lease, Loss
from veilmq.client.keeper.states import KeeperStats, Plan, Reason, State

__all__ = ["KeeperStats", "Lease", "LeaseKeeper", "Loss", "Plan", "Reason", "State"]
