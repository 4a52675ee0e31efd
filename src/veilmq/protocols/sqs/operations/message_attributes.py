"""Message attributes: checked when sent, chosen when received, and the MD5s that SDKs verify.

Strategy: a sender's map becomes a tuple of `Attribute`s, or a refusal that names the attribute; a receiver's list of
names becomes one predicate. Source: SQS Developer Guide, "Amazon SQS message metadata".

The MD5 of attributes is one pass that appends to a hash: attributes sorted by name; of each, name, type and value, each
after its length in four bytes, big endian; a byte between type and value is 1 for text, 2 for binary. Source: Developer
Guide, "Calculating the MD5 message digest for message attributes".
"""

import re
from collections.abc import Callable, Iterable, Sequence
from hashlib import md5
from typing import Final, NamedTuple

from veilmq.model.instant import milliseconds
from veilmq.model.messages import Attribute, Delivery
from veilmq.protocols import show
from veilmq.protocols.sqs import errors, forms, limits
from veilmq.protocols.sqs.addresses import arn
from veilmq.protocols.sqs.attributes import NAMES, unknown_name
from veilmq.protocols.sqs.errors import Refusal, check_text
from veilmq.protocols.sqs.forms import AttributeValue, AttributeValueOut, ReceiveMessageInput

TRACE_HEADER: Final = "AWSTraceHeader"

_TYPES: Final = ("String", "Number", "Binary")
_NUMBER: Final = re.compile(r"[+-]?(?:([0-9]+)(?:\.([0-9]*))?|\.([0-9]+))(?:[eE]([+-]?[0-9]{1,4}))?\Z")


def _refused(text: str) -> Refusal:
    return Refusal(errors.INVALID_PARAMETER_VALUE, text)


def message_attributes(given: dict[str, AttributeValue]) -> tuple[tuple[Attribute, ...], int]:
    """The attributes, and their size in bytes. Raises Refusal naming the wrong attribute."""
    if len(given) > limits.ATTRIBUTES_MAX:
        text = f"Number of message attributes [{len(given)}] exceeds the allowed maximum [{limits.ATTRIBUTES_MAX}]."
        raise _refused(text)
    attributes = []
    for name, value in given.items():
        _check_name(name)
        attributes.append(_attribute(name, value))
    return tuple(attributes), sum(each.size_bytes for each in attributes)


def _check_name(name: str) -> None:
    if not name:
        raise _refused(errors.NO_ATTRIBUTE_NAME)
    if len(name) > limits.ATTRIBUTE_NAME_CHARACTERS_MAX:
        characters_max = limits.ATTRIBUTE_NAME_CHARACTERS_MAX
        raise _refused(f"The message attribute name '{show(name)}' is longer than {characters_max} characters.")
    if not limits.ATTRIBUTE_NAME.match(name):
        raise _refused(_wrong_name(name))
    if name.lower().startswith(limits.ATTRIBUTE_RESERVED):
        raise _refused(f"The message attribute name '{name}' must not start with a reserved prefix (AWS., Amazon.).")


def _wrong_name(name: str) -> str:
    """AWS's text for a name with a forbidden character or misplaced period; SNS has the same."""
    forbidden = limits.ATTRIBUTE_NAME_FORBIDDEN.search(name)
    if forbidden is not None:
        return (
            f"Invalid non-alphanumeric character '#x{ord(forbidden[0]):X}' was found in the message attribute name. "
            "Can only include alphanumeric characters, hyphens, underscores, or dots."
        )
    if name.startswith("."):
        return "Invalid message attribute name starting with character '.' was found."
    if name.endswith("."):
        return "Invalid message attribute name ending with character '.' was found."
    return "Message attribute name can not have successive '.' character."


def _attribute(name: str, value: AttributeValue) -> Attribute:
    kind = value.data_type
    if not kind:
        what = "type" if value.string_value or value.binary_value else "value"  # boto/boto #3348
        raise _refused(f"The message attribute '{name}' must contain non-empty message attribute {what}.")
    if len(kind) > limits.ATTRIBUTE_TYPE_CHARACTERS_MAX:
        characters_max = limits.ATTRIBUTE_TYPE_CHARACTERS_MAX
        raise _refused(f"The type of the message attribute '{name}' is longer than {characters_max} characters.")
    logical = kind.partition(".")[0]
    if logical not in _TYPES:
        raise _refused(
            f"The type of message (user) attribute '{name}' is invalid. You must use only the following supported type "
            "prefixes: Binary, Number, String."
        )
    check_text(kind, f"message attribute '{name}' type")
    if value.string_list_values is not None or value.binary_list_values is not None:
        raise lists_refused("SendMessage")
    content = value.binary_value if logical == "Binary" else value.string_value
    other = value.string_value if logical == "Binary" else value.binary_value
    if other and content:  # some clients also send an empty one
        raise _refused(f"Message attribute '{name}' has multiple values.")
    if other:
        field = "Binary" if logical == "Binary" else "String"
        raise _refused(f"The message attribute '{name}' with type '{kind}' must use field '{field}'.")
    if not content:
        raise _refused(f"Message (user) attribute '{name}' must contain a non-empty value of type '{kind}'.")
    if isinstance(content, str):
        check_text(content, f"message attribute '{name}' value")
        if logical == "Number":
            _check_number(name, content)
    return Attribute(name, kind, content)


def lists_refused(operation: str) -> Refusal:
    """The refusal of a list, even if it is empty (ruby-shoryuken/shoryuken #769, nulib/meadow #3349)."""
    text = f"Message attribute list values in {operation} operation are not supported."
    return Refusal(errors.UNSUPPORTED_OPERATION, text)


def _check_number(name: str, text: str) -> None:
    """Up to 38 digits of precision, from 10^-128 to 10^126."""
    found = _NUMBER.match(text) if len(text) <= 512 else None
    if found is None:
        raise _refused(f"Can't cast the value of message (user) attribute '{name}' to a number.")
    whole, fraction = (found[1] or "").lstrip("0"), found[2] or found[3] or ""
    digits = (whole + fraction).strip("0")
    exponent = int(found[4] or 0) + (len(whole) if whole else -(len(fraction) - len(fraction.lstrip("0")))) - 1
    if digits and not (
        len(digits) <= limits.NUMBER_DIGITS_MAX and limits.NUMBER_EXPONENT_MIN <= exponent <= limits.NUMBER_EXPONENT_MAX
    ):
        raise _refused(f"The number in message attribute '{name}' is out of range: 38 digits, 10^-128 to 10^126.")


def trace_header(given: dict[str, AttributeValue]) -> str | None:
    """AWSTraceHeader, the one system attribute that a sender may give."""
    header = None
    for name, value in given.items():
        if name != TRACE_HEADER:
            raise _refused(f"Message system attribute name '{show(name)}' is invalid.")
        if value.data_type != "String":
            raise _refused(f"The message system attribute '{name}' has an invalid type, it must be String.")
        if not value.string_value or value.binary_value:  # some clients also send an empty one
            raise _refused(f"The message system attribute '{name}' must contain a non-empty string value.")
        if len(value.string_value) > limits.TRACE_BYTES_MAX:
            raise _refused(f"The message system attribute '{name}' is longer than {limits.TRACE_BYTES_MAX} characters.")
        check_text(value.string_value, f"message system attribute '{name}' value")
        header = value.string_value
    return header


Filter = Callable[[str], bool]


def attribute_filter(names: Sequence[str]) -> Filter | None:
    """Which message attributes a receive asks for; None for no attribute at all.

    A name, `All`, or a prefix and `.*`: `bar.*` is every name that begins with `bar`, and `.*` every name. A bare `*`
    is undocumented, but AWS accepts it and programs use it (Particular/NServiceBus.AmazonSQS #2288).
    """
    if not names:
        return None
    if "All" in names or "*" in names:
        return lambda name: True
    exact = frozenset(names)
    prefixes = tuple(name[:-2] for name in names if name.endswith(".*"))
    if not prefixes:
        return exact.__contains__
    return lambda name: name in exact or name.startswith(prefixes)


def attributes_out(attributes: Iterable[Attribute]) -> dict[str, AttributeValueOut]:
    """The attributes as a receive returns them."""
    return {
        attribute.name: AttributeValueOut(attribute.type, string_value=attribute.value)
        if isinstance(attribute.value, str)
        else AttributeValueOut(attribute.type, binary_value=attribute.value)
        for attribute in attributes
    }


class Wanted(NamedTuple):
    """What to return of each message besides its body."""

    system: tuple[str, ...]
    attributes: Filter | None


def wanted_of(given: ReceiveMessageInput, fifo: bool) -> Wanted:
    """What a request asks for."""
    named = [*(given.attribute_names or ()), *(given.message_system_attribute_names or ())]
    if len(named) + len(given.message_attribute_names or ()) > limits.NAMES_MAX:  # they are kept while it waits
        raise Refusal(errors.INVALID_PARAMETER_VALUE, f"A receive asks for at most {limits.NAMES_MAX} attributes.")
    for name in named:
        # The old AttributeNames also accepts names of queue attributes and returns nothing for them.
        if name not in _SYSTEM and name not in NAMES:
            raise unknown_name(name)
    system = tuple(name for name in _SYSTEM if ("All" in named or name in named) and (fifo or name != "SequenceNumber"))
    return Wanted(system, attribute_filter(given.message_attribute_names or ()))


def show_more(message: forms.Message, delivery: Delivery, wanted: Wanted) -> None:
    """Add what was asked for to a message of the result."""
    if wanted.system:
        shown = {name: text for name in wanted.system if (text := _SYSTEM[name](delivery)) is not None}
        message.attributes = shown or None
    if wanted.attributes is not None and delivery.extras.attributes:
        kept = [attribute for attribute in delivery.extras.attributes if wanted.attributes(attribute.name)]
        if kept:
            message.md5_of_message_attributes = attributes_md5(kept)
            message.message_attributes = attributes_out(kept)


def _first_received(delivery: Delivery) -> str | None:
    # A dead letter keeps the value of its source queue, as on AWS (softwaremill/elasticmq #386).
    first = delivery.extras.dead_first_received or delivery.first_received
    return None if first is None else str(milliseconds(first))


def _source(delivery: Delivery) -> str | None:
    source = delivery.extras.dead_letter_source
    return None if source is None else arn(source)


_SYSTEM: Final[dict[str, Callable[[Delivery], str | None]]] = {
    "SenderId": lambda delivery: delivery.sender,
    "SentTimestamp": lambda delivery: str(milliseconds(delivery.sent)),
    # "The number of times a message has been received across all queues": a dead letter's count continues.
    "ApproximateReceiveCount": lambda delivery: str(delivery.receive_count + delivery.extras.dead_receives),
    "ApproximateFirstReceiveTimestamp": _first_received,
    "SequenceNumber": lambda delivery: f"{delivery.sequence:020d}",
    "MessageDeduplicationId": lambda delivery: delivery.extras.deduplication_id,
    "MessageGroupId": lambda delivery: delivery.extras.group,
    TRACE_HEADER: lambda delivery: delivery.extras.trace,
    "DeadLetterQueueSourceArn": _source,
}


def body_md5(body: bytes) -> bytes:
    """MD5 of a body in UTF-8, 16 bytes."""
    return md5(body, usedforsecurity=False).digest()


def attributes_md5(attributes: Sequence[Attribute]) -> str:
    """MD5OfMessageAttributes, MD5OfMessageSystemAttributes: 32 hexadecimal digits."""
    parts: list[bytes] = []
    for attribute in sorted(attributes, key=lambda attribute: attribute.name):
        name, kind = attribute.name.encode(), attribute.type.encode()
        if isinstance(attribute.value, str):
            mark, value = b"\x01", attribute.value.encode()
        else:
            mark, value = b"\x02", attribute.value
        parts += (len(name).to_bytes(4), name, len(kind).to_bytes(4), kind, mark, len(value).to_bytes(4), value)
    return md5(b"".join(parts), usedforsecurity=False).hexdigest()
