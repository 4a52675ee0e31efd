"""The table of errors is total, every code can be met, and every error is a whole document."""

import re
from pathlib import Path
from typing import Any

from tests.support.contract.stage import TESTER

from veilmq.model.commands import Receive
from veilmq.model.errors import (
    DiskLow,
    InFlightFull,
    Overloaded,
    ParameterInvalid,
    PurgeInProgress,
    QueueDeletedRecently,
    StoreFailed,
    StoreUnknown,
    VeilError,
    leaves,
)
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols.mns import errors
from veilmq.testing.for_each import for_each

QUEUE = "/queues/jobs"
RECEIVE = f"{QUEUE}/messages"
HERE = Path(__file__).parent


def test_the_table_is_total() -> None:
    assert set(errors._TABLE) == set(leaves())


def sample(kind: type[VeilError]) -> VeilError:
    return kind(**{name: 1 if name.endswith(("_us", "_bytes")) or name == "limit" else "x" for name in kind.fields})


@for_each("kind", list(leaves()), ids=lambda kind: kind.__name__)
def test_every_error_becomes_a_fault_of_the_table(wire: Any, kind: type[VeilError]) -> None:
    queue = wire.codec.decode(wire.request("GET", QUEUE), wire.wall, wire.wall).commands[0].queue
    refusal = errors.fault_of(sample(kind), Receive(queue=queue, origin=TESTER))
    assert errors.FAULTS[refusal.fault.code] is refusal.fault
    assert refusal.message


@for_each(("parameter", "shown"), [("delay_us", "DelaySeconds"), ("group", "MessageGroupId")])
def test_what_is_wrong_has_the_name_of_the_wire(parameter: str, shown: str) -> None:
    error = ParameterInvalid(parameter=parameter, reason="a FIFO queue has rules")
    refusal = errors.fault_of(error, Receive(queue=QueueKey("000000000000", "us-east-1", "q"), origin=TESTER))
    assert refusal.message == f"{shown}: a FIFO queue has rules."


@for_each(
    ("error", "code", "status"),
    [
        (QueueDeletedRecently(queue="q", wait_us=1), "QueueDeletedRecently", 400),
        (PurgeInProgress(queue="q", wait_us=1), "TooManyRequests", 429),
        (InFlightFull(queue="q", limit=1), "TooManyRequests", 429),
        (Overloaded(limit=1), "TooManyRequests", 429),
        (DiskLow(free_bytes=1), "InternalServerError", 500),
        (StoreFailed(reason="disk"), "InternalServerError", 500),
        (StoreUnknown(reason="disk"), "InternalError", 500),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_server_answers_when_it_cannot(wire: Any, error: VeilError, code: str, status: int) -> None:
    call = wire.codec.decode(wire.request("GET", RECEIVE), wire.wall, wire.wall)
    answer = wire.read(wire.codec.encode(call, [error]))
    assert (answer.code, answer.status) == (code, status)
    two = "<ReceiptHandles><ReceiptHandle>1-a</ReceiptHandle><ReceiptHandle>1-b</ReceiptHandle></ReceiptHandles>"
    deletes = wire.codec.decode(wire.request("DELETE", f"{QUEUE}/messages", two), wire.wall, wire.wall)
    answer = wire.read(wire.codec.encode(deletes, [error, error]))
    assert answer.status == (status if status == 500 else 404)


def test_every_code_is_met_by_a_test() -> None:
    told = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    met = set(re.findall(r'"([A-Z][A-Za-z]+)"', told))
    assert set(errors.FAULTS) <= met


@for_each(
    ("status", "code"),
    [(400, "InvalidRequestURL"), (403, "AccessDenied"), (408, "TimeExpired"), (413, "InvalidArgument"),
     (414, "InvalidRequestURL"), (429, "TooManyRequests"), (431, "InvalidArgument"), (500, "InternalServerError"),
     (501, "InternalServerError"), (503, "InternalServerError")],
)  # fmt: skip
def test_refusals_of_the_listener_are_whole_documents(wire: Any, status: int, code: str) -> None:
    for answer in (
        wire.read(wire.codec.refuse(status, "because <so>", wire.request("GET", QUEUE))),
        wire.read(wire.codec.refuse(status, "because <so>", None, "01234567-89ab-cdef-0123-456789abcdef")),
    ):
        assert (answer.status, answer.code) == (status, code)
        assert answer.text("Message") == "because <so>"


def test_a_failure_is_a_500(wire: Any) -> None:
    answer = wire.read(wire.codec.failure(wire.request("GET", QUEUE)))
    assert (answer.status, answer.code) == (500, "InternalError")


def test_errors_name_the_host_and_the_request(wire: Any) -> None:
    answer = wire.ask("GET", "/queues/none")
    assert answer.text("HostId") == "http://127.0.0.1:9326"
    assert re.fullmatch("[0-9A-F]{24}", answer.text("RequestId") or "")
    odd = wire.ask("GET", "/queues/none", headers={"host": "a<b>&\u00e9"})
    assert odd.code == "QueueNotExist"


def test_a_refused_key_is_told_what_it_lacks(wire: Any) -> None:
    answer = wire.ask("PUT", QUEUE, key="AKIDREADER")
    assert answer.code == "AccessDenied"
    assert "create-queue" in (answer.text("Message") or "")
