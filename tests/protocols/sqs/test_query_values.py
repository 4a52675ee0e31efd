"""Values in the Query form: an integer is digits, and every other value is the text that it is."""

from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from veilmq.protocols import Request
from veilmq.protocols.sqs.codec import Endpoint
from veilmq.protocols.sqs.errors import INVALID_PARAMETER_VALUE, Refusal
from veilmq.protocols.sqs.forms import query_form
from veilmq.protocols.sqs.operations import OPERATIONS
from veilmq.testing.for_each import for_each

URL = "QueueUrl=http%3A%2F%2Flocalhost%3A9324%2F000000000000%2Fjobs"


def read(form: str) -> Any:
    return query_form.read(Request("POST", b"/", {}, form.encode(), "::1", False, "the-id"), Endpoint())[1]


@for_each("text", ["1e1", "1.0", "null", "NULL", "true", "", "%2B5", "+5", "5+", "0x5", "1_0", "٣", "nan"])
@for_each(
    "form",
    [
        f"Action=SendMessage&{URL}&MessageBody=x&DelaySeconds=",
        f"Action=ChangeMessageVisibility&{URL}&ReceiptHandle=h&VisibilityTimeout=",
        f"Action=ReceiveMessage&{URL}&WaitTimeSeconds=",
        f"Action=SendMessageBatch&{URL}&SendMessageBatchRequestEntry.1.Id=a&SendMessageBatchRequestEntry.1.MessageBody=x"
        "&SendMessageBatchRequestEntry.1.DelaySeconds=",
    ],
)
def test_what_is_no_integer_is_refused(form: str, text: str) -> None:
    name, shown = form.rpartition("&")[2].rstrip("="), text.replace("+", " ").replace("%2B", "+")
    with pytest.raises(Refusal) as refused:
        read(form + text)
    assert refused.value.fault is INVALID_PARAMETER_VALUE
    words = f"Value {shown} for parameter {name} is invalid. Reason: Must be an integer."
    assert refused.value.message == words


@for_each("more", ["&DelaySeconds=x", "&Entries=x", "&VisibilityTimeout="])
def test_what_the_operation_does_not_know_may_be_anything(more: str) -> None:
    assert read(f"Action=DeleteMessage&{URL}&ReceiptHandle=h{more}").receipt_handle == "h"


def test_entries_that_are_none_are_refused() -> None:
    with pytest.raises(Refusal, match="does not fit DeleteMessageBatch"):
        read(f"Action=DeleteMessageBatch&{URL}&Entries=x&DelaySeconds=x")
    # An entry alone is refused for an empty name of an attribute, as in the JSON form.
    first = "SendMessageBatchRequestEntry.1.MessageAttribute.1."
    asked = read(f"Action=SendMessageBatch&{URL}&{first}Name=&{first}Value.StringValue=x")
    assert [list(entry.message_attributes) for entry in asked.entries] == [[""]]


@for_each("member", ["MessageAttribute", "MessageAttributes"])
def test_a_map_may_be_named_as_in_the_json_form(member: str) -> None:
    """aws/aws-sdk-php #694: the SDK sent that name, and AWS looked for an attribute's name in it."""
    form = f"Action=SendMessage&{URL}&MessageBody=x&{member}.1."
    assert list(read(f"{form}Name=a&{member}.1.Value.DataType=String").message_attributes) == ["a"]
    assert list(read(f"{form}key=a&{member}.1.value.DataType=String").message_attributes) == [""]


@for_each(
    ("text", "value"), [("0", 0), ("10", 10), ("-1", -1), ("05", 5), ("-007", -7), ("00", 0), ("9" * 30, 10**30 - 1)]
)
def test_an_integer_is_read(text: str, value: int) -> None:
    assert read(f"Action=SendMessage&{URL}&MessageBody=x&DelaySeconds={text}").delay_seconds == value


def test_a_text_of_which_json_would_have_a_word_stays_a_text() -> None:
    asked = read(f"Action=SendMessage&{URL}&MessageBody=null&MessageGroupId=null&MessageDeduplicationId=10")
    assert (asked.message_body, asked.message_group_id, asked.message_deduplication_id) == ("null", "null", "10")


@given(
    st.lists(st.sampled_from(["%C3%A9", "%", "%4", "%ff", "%5C", "\\", "\\x41", "+", "a", "u0041", "é"])).map("".join)
)
def test_a_text_is_unquoted_as_the_standard_library_does_it(text: str) -> None:
    def heard() -> str | None:
        try:
            body: str = read(f"Action=SendMessage&{URL}&MessageBody={text}").message_body
        except Refusal:
            return None
        return body

    try:
        wanted = unquote_to_bytes(text.replace("+", " ")).decode()
    except UnicodeDecodeError:
        assert heard() is None
    else:
        assert heard() == wanted


def test_every_integer_of_an_input_is_known_as_one() -> None:
    for row in OPERATIONS.values():
        shape = inspect.type_info(row.input_type)
        assert isinstance(shape, inspect.StructType)
        given = {field.encode_name: 1 for field in shape.fields if _is_integer(field.type)}
        assert given.keys() <= query_form._INTEGERS, row.name


def _is_integer(kind: inspect.Type) -> bool:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return any(isinstance(each, inspect.IntType) for each in kinds)
