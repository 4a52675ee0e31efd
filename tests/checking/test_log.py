"""The log as lines: what is written is read, and what was cut off is left out."""

import pytest
from msgspec.structs import replace
from tests.checking.simulation import Simulation

from veilmq.checking.log import HEAD, Kind, LogInvalid, Operation, Outcome, decoded, encoded
from veilmq.checking.report import promises_in
from veilmq.testing.for_each import for_each

LOG = Simulation(1).log


def test_what_is_written_is_read() -> None:
    assert decoded(map(encoded, reversed(LOG))) == LOG


def test_the_answer_replaces_the_begin_and_a_begin_alone_is_unknown() -> None:
    begun = Operation(number=1, client="c", kind=Kind.SEND, queue="jobs", invoked=5, body="b")
    answered = replace(begun, returned=7, outcome=Outcome.OK, message="m")
    assert decoded([encoded(begun)])[0].outcome is Outcome.INFO
    assert decoded([encoded(begun), encoded(answered)]) == [answered]


def test_a_last_line_that_was_cut_off_is_left_out() -> None:
    lines = list(map(encoded, LOG))
    for cut in (lines[9][:-5], '{"client":"é'.encode()[:-1]):
        assert decoded([*lines[:9], cut]) == LOG[:9]


@for_each("fields", [b"", b'"client":"\xff"', b'"other":' + b"[" * 100_000], ids=lambda each: str(len(each)))
def test_another_broken_line_is_told(fields: bytes) -> None:
    with pytest.raises(LogInvalid, match=r"^line 2 of the log: "):
        decoded([encoded(LOG[0]), b"{" + fields + b"}\n", encoded(LOG[1])])
    with pytest.raises(LogInvalid, match=r"^line 1 of the log: "):
        promises_in(HEAD + b"{" + fields + b"\n")
