"""The store contract: a store is what passes these cases.

Strategy: one file a noun, one class a file, every case on a `Stage` with a manual clock. A store's tests import `SUITE`
and `stage`, and bring a fixture `store_factory` (`StoreFactory`):

    from tests.support import contract
    from tests.support.contract import stage

    for cases in contract.SUITE:
        globals()[cases.__name__] = cases

A fix to one store starts as a new case here.
"""

from tests.support.contract.accounts import TestAccounts
from tests.support.contract.aliases import TestAliases
from tests.support.contract.batches import TestBatches
from tests.support.contract.claims import TestClaims
from tests.support.contract.clock_steps import TestClockSteps
from tests.support.contract.damage import TestDamage
from tests.support.contract.dead_letters import TestDeadLetters
from tests.support.contract.delays import TestDelays
from tests.support.contract.expiry import TestExpiry
from tests.support.contract.fair import TestFair
from tests.support.contract.fifo import TestFifo, TestFifoWaking
from tests.support.contract.fifo_attempts import TestFifoAttempts
from tests.support.contract.fifo_dead_letters import TestFifoDeadLetters
from tests.support.contract.fifo_deduplication import TestFifoDeduplication
from tests.support.contract.fifo_delays import TestFifoDelay
from tests.support.contract.handles import TestHandles
from tests.support.contract.history import TestHistory
from tests.support.contract.interleaving import TestInterleaving
from tests.support.contract.jobs import TestJobs
from tests.support.contract.leases import TestLeases
from tests.support.contract.many_handles import TestManyHandles
from tests.support.contract.moves import TestMoves
from tests.support.contract.operators import TestOperators
from tests.support.contract.peek import TestPeek
from tests.support.contract.plans import TestPlans
from tests.support.contract.priority import TestPriority
from tests.support.contract.purge import TestPurge
from tests.support.contract.queues import TestQueues
from tests.support.contract.rates import TestRates
from tests.support.contract.recovery import TestRecovery
from tests.support.contract.retries import TestLastErrors, TestRetries
from tests.support.contract.sends import TestSends
from tests.support.contract.sessions import TestSessions, TestShared
from tests.support.contract.snapshots import TestSnapshots
from tests.support.contract.stage import Stage, StoreFactory, stage
from tests.support.contract.templates import TestTemplates
from tests.support.contract.topics import TestTopics
from tests.support.contract.turns import TestGroupTurns, TestTurns
from tests.support.contract.xml_bodies import TestXmlBodies

SUITE = (
    TestAccounts,
    TestAliases,
    TestBatches,
    TestClaims,
    TestClockSteps,
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
    TestJobs,
    TestLeases,
    TestManyHandles,
    TestMoves,
    TestOperators,
    TestPeek,
    TestPlans,
    TestPriority,
    TestPurge,
    TestQueues,
    TestRates,
    TestRecovery,
    TestRetries,
    TestSends,
    TestSessions,
    TestShared,
    TestSnapshots,
    TestTemplates,
    TestTopics,
    TestTurns,
    TestXmlBodies,
)

__all__ = ["SUITE", "Stage", "StoreFactory", "stage"]
