"""The store contract: a store is what passes these cases.

Strategy: one file a noun, one class a file, every case on a `Stage` with a manual clock. A store's tests import `SUITE`
and `stage`, and bring a fixture `store_factory` (`StoreFactory`):

    from veilmq.testing import contract
    from veilmq.testing.contract import stage

    for cases in contract.SUITE:
        globals()[cases.__name__] = cases

A fix to one store starts as a new case here.
"""

from veilmq.testing.contract.accounts import TestAccounts
from veilmq.testing.contract.aliases import TestAliases
from veilmq.testing.contract.batches import TestBatches
from veilmq.testing.contract.claims import TestClaims
from veilmq.testing.contract.damage import TestDamage
from veilmq.testing.contract.dead_letters import TestDeadLetters
from veilmq.testing.contract.delays import TestDelays
from veilmq.testing.contract.expiry import TestExpiry
from veilmq.testing.contract.fair import TestFair
from veilmq.testing.contract.fifo import TestFifo, TestFifoWaking
from veilmq.testing.contract.fifo_attempts import TestFifoAttempts
from veilmq.testing.contract.fifo_dead_letters import TestFifoDeadLetters
from veilmq.testing.contract.fifo_deduplication import TestFifoDeduplication
from veilmq.testing.contract.fifo_delays import TestFifoDelay
from veilmq.testing.contract.handles import TestHandles
from veilmq.testing.contract.history import TestHistory
from veilmq.testing.contract.interleaving import TestInterleaving
from veilmq.testing.contract.leases import TestLeases
from veilmq.testing.contract.many_handles import TestManyHandles
from veilmq.testing.contract.moves import TestMoves
from veilmq.testing.contract.peek import TestPeek
from veilmq.testing.contract.plans import TestPlans
from veilmq.testing.contract.priority import TestPriority
from veilmq.testing.contract.purge import TestPurge
from veilmq.testing.contract.queues import TestQueues
from veilmq.testing.contract.rates import TestRates
from veilmq.testing.contract.recovery import TestRecovery
from veilmq.testing.contract.retries import TestLastErrors, TestRetries
from veilmq.testing.contract.sends import TestSends
from veilmq.testing.contract.snapshots import TestSnapshots
from veilmq.testing.contract.stage import Stage, StoreFactory, stage
from veilmq.testing.contract.topics import TestTopics
from veilmq.testing.contract.turns import TestGroupTurns, TestTurns
from veilmq.testing.contract.xml_bodies import TestXmlBodies

SUITE = (
    TestAccounts,
    TestAliases,
    TestBatches,
    TestClaims,
    TestDamage,
    TestDeadLetters,
    TestDelays,
    TestExpiry,
    TestFair,
    TestFifo,
    TestFifoAttempts,
    TestFifoDeadLetters,
    TestFifoDeduplication,
    TestFifoDelay,
    TestFifoWaking,
    TestGroupTurns,
    TestHandles,
    TestHistory,
    TestInterleaving,
    TestLastErrors,
    TestLeases,
    TestManyHandles,
    TestMoves,
    TestPeek,
    TestPlans,
    TestPriority,
    TestPurge,
    TestQueues,
    TestRates,
    TestRecovery,
    TestRetries,
    TestSends,
    TestSnapshots,
    TestTopics,
    TestTurns,
    TestXmlBodies,
)

__all__ = ["SUITE", "Stage", "StoreFactory", "stage"]
