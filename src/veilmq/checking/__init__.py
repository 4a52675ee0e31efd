"""The history checker: what clients did with a queue, and whether the queue kept its promises.

Strategy: a log (log.py) holds one operation for each call of a client, with the times before and after it. `check`
decides on the log alone, so it works for any queue of any cloud. It reports only what no correct queue could have
answered: wherever times overlap or an answer is missing, it assumes whatever excuses the queue. Each message is looked
at alone, then each group, then each deduplication id; a sort is the dearest step, so a log of n operations takes
O(n log n).
"""

from collections.abc import Sequence
from typing import Final

from veilmq.checking.groups import check_duplicates, check_groups
from veilmq.checking.lives import History
from veilmq.checking.log import Operation
from veilmq.checking.messages import check_invented, check_leases, check_message
from veilmq.checking.report import Promises, Report

_VEILMQ: Final = Promises()


def check(log: Sequence[Operation], promises: Promises = _VEILMQ) -> Report:
    """Every rule that the recorded queues broke. Raises LogInvalid for a log that contradicts itself."""
    history = History(log, promises)
    report = Report(operations=history.operations, messages=len(history.lives))
    for life in history.lives.values():
        check_leases(history, life, report)
        check_message(history, life, report)
    check_invented(history, report)
    check_groups(history, report)
    check_duplicates(history, log, report)
    return report
