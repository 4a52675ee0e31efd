"""The lease keeper (the documents' "Manager"): extends the leases of messages while their handlers work.

Strategy: pure code decides (decisions.py, over the states in lease.py), a thin shell of threads carries the decisions
out (keeper.py), and the user's code learns of losses (reports.py). docs/patterns/lease-keeper.md shows a lease's life.
"""

from veilmq.client.keeper.keeper import LeaseKeeper
from veilmq.client.keeper.lease import KeeperStats, Lease, Loss, Plan, Reason, State
from veilmq.client.queue import Queue, identity_of
from veilmq.client.wrapping import handles_of, innermost
from veilmq.model.errors import ParameterInvalid

__all__ = ["KeeperStats", "Lease", "LeaseKeeper", "Loss", "Plan", "Reason", "State", "check_keeps"]


def check_keeps(keeper: LeaseKeeper, queue: Queue) -> None:
    """Raises ParameterInvalid unless it is a keeper that is open and extends leases of this queue."""
    if not isinstance(keeper, LeaseKeeper):
        raise ParameterInvalid(parameter="keeper", reason=f"must be a LeaseKeeper, not {type(keeper).__name__}")
    keeper.check_open()
    if keeper.queue.name != queue.name:
        reason = f"it keeps leases of queue {keeper.queue.name}, not of {queue.name}"
        raise ParameterInvalid(parameter="keeper", reason=reason)
    if identity_of(innermost(keeper.queue)) != identity_of(innermost(queue)):
        reason = f"it keeps leases of another queue {queue.name}: make it with this queue object"
        raise ParameterInvalid(parameter="keeper", reason=reason)
    if handles_of(keeper.queue) != handles_of(queue):
        reason = f"queue {queue.name} has other handles there: make it with this queue object, patterns included"
        raise ParameterInvalid(parameter="keeper", reason=reason)
