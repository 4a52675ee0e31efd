"""Messages that are sent if and only if a local operation is done (the document's TransactionQueue).

Strategy: queue.py has the steps, entry.py what the log keeps, logbook.py the log, settling.py commit and roll back,
checker.py who finishes what a producer left, parameters.py the times. docs/patterns/transaction-queue.md.
"""

from veilmq.client.transaction.checker import Checker
from veilmq.client.transaction.entry import ATTRIBUTE, Form, Prepared, Times, Verdict
from veilmq.client.transaction.queue import Outcome, Transaction, TransactionQueue

__all__ = [
    "ATTRIBUTE",
    "Checker",
    "Form",
    "Outcome",
    "Prepared",
    "Times",
    "Transaction",
    "TransactionQueue",
    "Verdict",
]
