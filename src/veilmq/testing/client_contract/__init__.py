"""The client contract: an adapter is what passes these cases.

Strategy: `cases` has one file per noun; every case creates its own queues in the account of a fixture.
`Capabilities` say what a queue can do; for what it cannot do, a case checks that it refuses before any I/O. An
adapter's tests provide a fixture `client_account` (`ClientAccount`) and import the cases:

    from veilmq.testing import client_contract
    from veilmq.testing.client_contract import stage

    for cases in client_contract.SUITE:
        globals()[cases.__name__] = cases

where an account has no FIFO queues, of `client_contract.SUITE_WITHOUT_FIFO`. Against a server without a clock to move,
`pass_time` sleeps; the suite asks for about a minute of it in all.

An adapter runs a whole suite once. Where the same code runs in another form, there is a shorter suite with what that
form can change:

- `SUITE_OF_ENCODINGS`: the adapter with another encoding of its bodies. Sends, receives and waits, bodies, batches;
  `TestSmoke` for all else.
- `SUITE_OF_SERVERS`: the adapter on another server of its protocol. `TestSmoke` for what the client decides by itself
  (`TestValues`, and which queues it cannot make).
- `SUITE_OF_WRAPPERS`: a pattern that is a `Queue` over a queue, whose adapter passes a suite. `TestSmoke` for what the
  account does (`TestAccounts`). What may be sent stays: a pattern must refuse before it stores or encrypts.

`in_forms` makes the classes of two forms in one file. One case stands for one way to fail: it tries every wrong value,
and names each that was not refused (`unrefused`, `for_each`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from veilmq.testing.client_contract.cases.leases import TestClosing, TestLeases, TestReceives, TestThreads, TestWaiting
from veilmq.testing.client_contract.cases.messages import TestBatches, TestBodies, TestOptions
from veilmq.testing.client_contract.cases.queues import TestAccounts, TestFifo, TestNoFifo
from veilmq.testing.client_contract.cases.values import TestCapabilities, TestSendable, TestSmoke, TestValues
from veilmq.testing.client_contract.stage import ClientAccount, Stage, stage, unrefused
from veilmq.testing.for_each import for_each

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
SUITE_OF_ENCODINGS = (TestBatches, TestBodies, TestReceives, TestSendable, TestSmoke, TestWaiting)
SUITE_OF_SERVERS = (
    TestAccounts,
    TestBatches,
    TestBodies,
    TestCapabilities,
    TestClosing,
    TestLeases,
    TestOptions,
    TestReceives,
    TestSendable,
    TestSmoke,
    TestThreads,
    TestWaiting,
)
SUITE_OF_WRAPPERS = tuple(TestSmoke if cases is TestAccounts else cases for cases in SUITE)

__all__ = [
    "SUITE",
    "SUITE_OF_ENCODINGS",
    "SUITE_OF_SERVERS",
    "SUITE_OF_WRAPPERS",
    "SUITE_WITHOUT_FIFO",
    "ClientAccount",
    "Stage",
    "for_each",
    "in_forms",
    "stage",
    "unrefused",
]


def in_forms(suites: Mapping[str, Sequence[type[Any]]]) -> dict[str, type[Any]]:
    """By name, the classes of all suites: each runs in the forms whose suite it is in.

    suites: by form. The fixture `client_account` finds its form in `request.param`.

        globals().update(in_forms({"plain": SUITE, "base64": SUITE_OF_ENCODINGS}))
    """
    classes = {cases: None for suite in suites.values() for cases in suite}
    return {
        cases.__name__: pytest.mark.parametrize(
            "client_account", [form for form, suite in suites.items() if cases in suite], indirect=True
        )(type(cases.__name__, (cases,), {"__doc__": cases.__doc__}))
        for cases in classes
    }
