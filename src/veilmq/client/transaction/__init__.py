"""Messages that are sent if and only if a local operation succeeds (the document's TransactionQueue).

Strategy: queue.py has the steps; logbook.py the log, its entries and the times; checker.py commits, rolls back, and
finishes what a producer left open. docs/patterns/transaction-queue.md.
"""

from veilmq.client.transaction.checker import Checker
from veilmq.client.transaction.logbook import ATTRIBUTE, Form, Prepared, Times, Verdict
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
