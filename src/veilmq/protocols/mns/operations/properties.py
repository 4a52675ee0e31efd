"""Converts user and system properties of a message between XML and attributes.

Strategy: a user property is an attribute that every SQS client can read: STRING and NUMBER under SQS's own types,
BOOLEAN as `String.Boolean`, BINARY decoded. The system properties for tracing (traceparent ...) are attributes of the
same names, where SQS's tracing libraries look; those of a dead letter come from the store.
"""

import binascii
import re
from base64 import b64encode
from typing import Any, Final

from veilmq.model.messages.message import Attribute, Delivery, first_forbidden_character
from veilmq.protocols.mns import limits
from veilmq.protocols.mns.addresses import arn
from veilmq.protocols.mns.errors import bad, malformed, show
from veilmq.protocols.mns.parameters import boolean
from veilmq.protocols.mns.xml import members
from veilmq.protocols.xml import Element, escape

_TYPES: Final = {"STRING": "String", "NUMBER": "Number", "BOOLEAN": "String.Boolean", "BINARY": "Binary"}
_BOOLEAN: Final = _TYPES["BOOLEAN"]
_WIDE_NUMBER: Final = "String.Number"
"""A NUMBER that SQS would refuse: inf, nan, more than 38 digits."""
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]{1,38}(?:\.[0-9]{0,38})?|\.[0-9]{1,38})(?:[eE][+-]?[0-9]{1,3})?\Z")
_SOURCE: Final = "DLQSourceArn"
_ORIGIN: Final = "DLQOriginMessageId"
SYSTEM_NAMES: Final = frozenset({"traceparent", "tracestate", "baggage", "DLQMessageType", _SOURCE, _ORIGIN})


def read_properties(user: Element | None, system: Element | None) -> tuple[tuple[Attribute, ...], int]:
    """The attributes of `UserProperties` and `SystemProperties`, and their size in bytes. Raises Refusal."""
    attributes: list[Attribute] = []
    for group, name in ((user, "PropertyValue"), (system, "SystemPropertyValue")):
        for child in group.children if group is not None else ():
            if child.name == name:
                attributes.append(_read(child, group is system))
    if sum(attribute.name not in SYSTEM_NAMES for attribute in attributes) > limits.PROPERTIES_MAX:
        raise bad("UserProperties", f"a message has at most {limits.PROPERTIES_MAX} properties.")
    if len({attribute.name for attribute in attributes}) < len(attributes):
        raise bad("UserProperties", "two properties have one name.")
    return tuple(attributes), sum(map(_size_bytes, attributes))


def _size_bytes(attribute: Attribute) -> int:
    value = attribute.value
    return len(attribute.name) + len(attribute.type) + len(value.encode() if isinstance(value, str) else value)


def _read(element: Element, system: bool) -> Attribute:
    fields = members(element)
    for field in ("Name", "Value", "Type"):
        if field not in fields or fields[field].children:
            raise malformed(f"a {element.name} has a Name, a Value and a Type")
    name, kind, value = fields["Name"].text, fields["Type"].text.upper(), fields["Value"].raw
    if system:
        if name not in SYSTEM_NAMES or kind != "STRING":
            raise bad("SystemProperties", f"{show(name)} is not a system property of type STRING.")
    else:
        _check_name(name)
        if len(value) > limits.PROPERTY_VALUE_CHARACTERS_MAX:
            raise bad(name, f"a value has at most {limits.PROPERTY_VALUE_CHARACTERS_MAX} characters.")
    if not value or first_forbidden_character(value) is not None:
        raise bad(name, "the value of a property is not empty.")
    checked = _value(name, kind, value)
    wide = kind == "NUMBER" and not _NUMBER.match(value)
    return Attribute(name, _WIDE_NUMBER if wide else _TYPES.get(kind, ""), checked)


def _check_name(name: str) -> None:
    if not limits.PROPERTY_NAME.match(name) or name.lower().startswith(limits.PROPERTY_NAME_RESERVED):
        raise bad("UserProperties", f"{show(name)} is not a name: up to 256 of A-Z, a-z, 0-9, hyphen, _ and .")
    if name in SYSTEM_NAMES:
        raise bad("UserProperties", f"{name} is a system property.")


def _value(name: str, kind: str, value: str) -> Any:
    if kind == "BINARY":
        try:
            raw = binascii.a2b_base64(value.strip().encode("ascii"), strict_mode=True)
        except ValueError:
            raw = b""
        if not raw:
            raise bad(name, "a BINARY value is base64 of at least one byte.")
        return raw
    if kind not in _TYPES:
        raise bad(name, f"{show(kind)} is not a type: STRING, NUMBER, BOOLEAN or BINARY.")
    if kind == "NUMBER" and not _is_number(value):
        raise bad(name, f"{show(value)} is not a number.")
    if kind == "BOOLEAN" and boolean(value) is None:
        raise bad(name, f"{show(value)} is neither true nor false.")
    return value


def _is_number(value: str) -> bool:
    """Check a NUMBER. The service does not, but the Python SDK cannot read a message whose NUMBER is not a `float`."""
    try:
        float(value)
    except ValueError:
        return False
    return True


def write_properties(message: Delivery) -> str:
    """The elements of a message's properties; empty if it has none."""
    user: list[str] = []
    system: dict[str, str] = {}
    for attribute in message.extras.attributes:
        if attribute.name in SYSTEM_NAMES and isinstance(attribute.value, str):
            system[attribute.name] = attribute.value
        else:
            user.append(_user_property(attribute.name, *_typed(attribute)))
    source = message.extras.dead_letter_source
    if source is not None:
        origin = message.extras.published_id or message.id
        system |= {_SOURCE: arn(source), _ORIGIN: origin.hex().upper()}
    # The PHP SDK reads user properties to the end of the document and misses whatever follows them.
    text = ""
    if system:
        values = "".join(_system_property(name, value) for name, value in system.items())
        text = f"<SystemProperties>{values}</SystemProperties>"
    return f"{text}<UserProperties>{''.join(user)}</UserProperties>" if user else text


def _typed(attribute: Attribute) -> tuple[str, str]:
    value = attribute.value
    if not isinstance(value, str):
        return b64encode(value).decode(), "BINARY"
    if attribute.type == _BOOLEAN:
        return value, "BOOLEAN"
    if attribute.type == _WIDE_NUMBER:
        return value, "NUMBER" if _is_number(value) else "STRING"
    return value, "NUMBER" if attribute.type.startswith("Number") and _NUMBER.match(value) else "STRING"


def _system_property(name: str, value: str) -> str:
    """A system property with white space after it: the PHP SDK skips the node after each of the three."""
    inside = f"<Name>{escape(name)}</Name>\n<Value>{escape(value)}</Value>\n<Type>STRING</Type>\n"
    return f"<SystemPropertyValue>{inside}</SystemPropertyValue>"


def _user_property(name: str, value: str, kind: str) -> str:
    inside = f"<Name>{escape(name)}</Name><Value>{escape(value)}</Value><Type>{kind}</Type>"
    return f"<PropertyValue>{inside}</PropertyValue>"
