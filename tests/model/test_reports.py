"""The header `x-veilmq-outcome`: what is written is read again, and what breaks the grammar means nothing."""

from hypothesis import given
from hypothesis import strategies as st

from veilmq.model.messages import (
    ERROR_CHARACTERS_MAX,
    HEADER_BYTES_MAX,
    TYPE_CHARACTERS_MAX,
    Failure,
    Report,
    Reported,
    failure_of,
    read_header,
    write_header,
)
from veilmq.testing.for_each import for_each


@for_each(
    ("header", "report"),
    [
        (b"working", Report(Reported.WORKING)),
        (b"retry", Report(Reported.RETRY)),
        (b"retry;reason=raised;type=E;error=a%20b", Report(Reported.RETRY, Failure("raised", "E", "a b"))),
        (b"retry ; error=%c5%be ;type=E", Report(Reported.RETRY, Failure("", "E", "ž"))),
        (b"retry;later=1;error=", Report(Reported.RETRY)),
        (b"working;error=x", Report(Reported.WORKING)),
    ],
)  # fmt: skip
def test_what_a_header_says(header: bytes, report: Report) -> None:
    assert read_header(header) == report


@for_each(
    "header",
    [
        None,
        b"",
        b"done",
        b"Retry",
        b"retry, retry",
        b"retry;",
        b"retry;error",
        b"retry;error=a b",
        b"retry;error=%2",
        b"retry;error=%ff",
        b"retry;error=a%0Ab",
        b"retry;error=1;error=2",
        b"retry;reason=Not%20a%20word",
        b"retry;type=" + b"x" * (TYPE_CHARACTERS_MAX + 1),
        b"retry;error=" + b"x" * (ERROR_CHARACTERS_MAX + 1),
        b"retry;more=" + b"x" * HEADER_BYTES_MAX,
    ],
)
def test_a_header_that_breaks_the_grammar_is_ignored(header: bytes | None) -> None:
    assert read_header(header) is None


@given(st.sampled_from(["", "raised", "busy-2"]), st.text(), st.text(st.characters(), max_size=2_000))
def test_whatever_is_written_is_read_again(reason: str, error_type: str, text: str) -> None:
    failure = failure_of(reason, error_type, text)
    header = write_header(Reported.RETRY, failure)
    assert len(header) <= HEADER_BYTES_MAX
    assert header.isascii()
    assert read_header(header.encode()) == Report(Reported.RETRY, failure)


def test_of_a_text_the_first_line_that_says_something_is_kept() -> None:
    text = "\n  \tcannot read row 7\x00:\nbody: secret"
    assert failure_of("raised", "ValueError", text) == Failure("raised", "ValueError", "cannot read row 7 :")
    assert len(failure_of("raised", "E" * 1_000, "x" * 1_000).error) == ERROR_CHARACTERS_MAX
