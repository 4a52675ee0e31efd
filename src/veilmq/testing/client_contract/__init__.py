"""The client contract: an adapter is what passes these cases.

Strategy: one file a noun, one class a file, every case on queues that it makes for itself in the account of a fixture.
What a queue can do is read from its `Capabilities`; for what it cannot do there is a case that it says so before any
I/O. An adapter's tests bring a fixture `client_account` (`ClientAccount`) and import the cases:

    from veilmq.testing import client_contract
    from veilmq.testing.client_contract import stage

    for cases in client_contract.SUITE:
        globals()[cases.__name__] = cases

where an account has no FIFO queues, of `client_contract.SUITE_WITHOUT_FIFO`. Against a server without a clock to move,
`pass_time` sleeps; the suite asks for about a minute of it in all.
"""

from veilmq.testing.client_contract.accounts import TestAccounts
from veilmq.testing.client_contract.batches import TestBatches
from veilmq.testing.client_contract.bodies import TestBodies
from veilmq.testing.client_contract.capabilities import TestCapabilities
from veilmq.testing.client_contract.closing import TestClosing
from veilmq.testing.client_contract.fifo import TestFifo, TestNoFifo
from veilmq.testing.client_contract.leases import TestLeases
from veilmq.testing.client_contract.options import TestOptions
from veilmq.testing.client_contract.receives import TestReceives
from veilmq.testing.client_contract.sendable import TestSendable
from veilmq.testing.client_contract.stage import ClientAccount, Stage, stage
from veilmq.testing.client_contract.threads import TestThreads
from veilmq.testing.client_contract.values import TestValues
from veilmq.testing.client_contract.waiting import TestWaiting

SUITE = (
    TestAccounts,
    TestBatches,
    TestBodies,
    TestCapabilities,
    TestClosing,
    TestFifo,
    TestLeases,
    TestOptions,
    TestReceives,
    TestSendable,
    TestThreads,
    TestValues,
    TestWaiting,
)
SUITE_WITHOUT_FIFO = tuple(TestNoFifo if cases is TestFifo else cases for cases in SUITE)

__all__ = ["SUITE", "SUITE_WITHOUT_FIFO", "ClientAccount", "Stage", "stage"]
