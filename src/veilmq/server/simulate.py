"""What `--simulate NAME=VALUE` makes a server do, for the tests of programs that use it.

disorder=N                  messages of standard queues come out up to N places out of order (1 to 1,000)
kms-fault=KEY=FAULT         a KMS key that fails: SQS's encrypted queues with that key answer so (docs/sqs.md)
push-header-case=documented header names of pushes as Alibaba's Java sample looks them up (default: lower)
"""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from veilmq.protocols.sqs.errors import KMS_FAULTS

ALLOWED: Final = (
    f"disorder=N (1 to 1,000), kms-fault=KEY=FAULT (FAULT one of {', '.join(KMS_FAULTS)}) or"
    " push-header-case=lower|documented"
)
_PATTERNS: Final = {
    "disorder": re.compile(r"[1-9][0-9]{0,2}|1000"),
    "kms-fault": re.compile(rf"[A-Za-z0-9:/_.-]{{1,256}}=(?:{'|'.join(KMS_FAULTS)})"),
    "push-header-case": re.compile(r"lower|documented"),
}


class Simulated(NamedTuple):
    """What is simulated; of a name that is given twice the last counts, but for keys, which add up."""

    disorder: int = 0
    kms_faults: tuple[tuple[str, str], ...] = ()
    """Keys, each with its fault."""
    documented_case: bool = False
    """Header names of pushes."""


def is_known(given: str) -> bool:
    """Whether it is a simulation that this server has."""
    name, _, value = given.partition("=")
    return name in _PATTERNS and _PATTERNS[name].fullmatch(value) is not None


def simulated(given: Iterable[str]) -> Simulated:
    """Those of a setting whose members `is_known`."""
    found = Simulated()
    for each in given:
        name, _, value = each.partition("=")
        if name == "disorder":
            found = found._replace(disorder=int(value))
        elif name == "kms-fault":
            key, _, fault = value.rpartition("=")
            found = found._replace(kms_faults=(*found.kms_faults, (key, fault)))
        else:
            found = found._replace(documented_case=value == "documented")
    return found
